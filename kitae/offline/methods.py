"""The kinds of offline run, by the root of their settings."""

from collections.abc import Callable, Iterable
from typing import Any

from kitae.config.root import DistilFileConfig, DPOConfig, KTOConfig, RewardConfig, SFTConfig, StageConfig
from kitae.data.examples import Example, Shape
from kitae.offline.base import Method
from kitae.offline.distil import FileDistillation
from kitae.offline.dpo import DPO
from kitae.offline.kto import KTO
from kitae.offline.reward_model import RewardModelling, check_margins
from kitae.offline.sft import SFT

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
