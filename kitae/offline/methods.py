"""The kinds of offline run, by the root of their settings, and the worker process of a rank that trains one."""

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kitae.config.root import DistilFileConfig, DPOConfig, KTOConfig, RewardConfig, Root, SFTConfig, StageConfig
from kitae.data.examples import Example, Shape
from kitae.offline.base import Method
from kitae.offline.dpo import DPO
from kitae.offline.kto import KTO
from kitae.offline.reward_model import RewardModelling, check_margins
from kitae.offline.sft import SFT, FileDistillation
from kitae.trainer.parallel.rank_process import run_rank

if TYPE_CHECKING:
    from kitae.trainer.parallel.mesh import Mesh
    from kitae.trainer.training_worker import Worker


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


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """In a worker process (`kitae.workers.worker_main`)."""
    run_rank(setup, stream, _make)


def _make(config: Root, mesh: "Mesh") -> "Worker":
    from kitae.models.load_in_shards import empty_policy
    from kitae.trainer.build_worker import spread_worker

    assert isinstance(config, StageConfig)
    return spread_worker(make_method(config).make_objective(empty_policy), config.training, mesh)
