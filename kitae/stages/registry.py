"""The kinds of offline run, by the root of their settings."""

from collections.abc import Callable, Iterable
from typing import Any

from kitae.config.root import DistilFileConfig, DPOConfig, KTOConfig, RewardConfig, SFTConfig, StageConfig
from kitae.data.examples import Example, Shape
from kitae.stages.base import Method
from kitae.stages.distil import FileDistillation
from kitae.stages.dpo import DPO
from kitae.stages.kto import KTO
from kitae.stages.reward import RewardModelling, check_margins
from kitae.stages.sft import SFT

METHODS: dict[type[StageConfig], Callable[[Any], Method]] = {
    SFTConfig: SFT,
    DPOConfig: DPO,
    KTOConfig: KTO,
    RewardConfig: RewardModelling,
    DistilFileConfig: FileDistillation,
}

SHAPES: dict[type[StageConfig], Shape] = {
    SFTConfig: SFT.shape,
    DPOConfig: DPO.shape,
    KTOConfig: KTO.shape,
    RewardConfig: RewardModelling.shape,
    DistilFileConfig: FileDistillation.shape,
}


def make_method(config: StageConfig) -> Method:
    return METHODS[type(config)](config)


def shape_of(config: StageConfig) -> Shape:
    """What the examples of its data must be."""
    return SHAPES[type(config)]


def check_examples(config: StageConfig, examples: Iterable[Example]) -> None:
    """What a kind of run needs of its examples beside their shape; before a model is loaded."""
    if isinstance(config, RewardConfig):
        check_margins(config, examples)
