"""One rank without a driver: workers on tiny models, and what they say of samples."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.control import Coefficients
from kitae.algorithms.group_stages import Candidate, GroupStages
from kitae.kernels.adamw import Rest, whole
from kitae.models.policy import Policy
from kitae.observe.meter import Totals
from kitae.trainer.base import Column, Conditions, Role
from kitae.trainer.build_worker import reinforced
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.optim import Optimizer
from kitae.trainer.training_worker import Worker
from kitae.types import FloatArray, Sample


def make_worker(
    policy: Policy,
    training: TrainingConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
    *,
    temperature: float = 1.0,
    **settings: Any,
) -> Worker:
    return reinforced(
        policy,
        training or TrainingConfig(),
        algorithm or AlgorithmConfig(),
        max_tokens=64,
        temperature=temperature,
        **settings,
    )


def weighted(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> tuple[Sample, ...]:
    """As one optimizer step trains on them, each a rollout of its own."""
    candidates = [Candidate((s,), score=0.0, reward=0.0, baseline=None, kept=True) for s in samples]
    return GroupStages(algorithm, 64).weighted(candidates)


def forward_backward(
    worker: Worker,
    samples: Sequence[Sample],
    version: int = 0,
    roles: Collection[Role] = (Role.POLICY,),
    coefficients: Coefficients | None = None,
) -> Totals:
    _, rows = pack_rows(
        samples, worker.training, worker.policy.device, worker.policy.dtype, share_prompts=not worker.policy.plain
    )
    return worker.forward_backward(rows, Conditions(version, coefficients or Coefficients()), roles)


def master_of(optimizer: Optimizer, number: int = 0) -> Tensor:
    """In fp32, however it is kept."""
    master = optimizer.masters[number]
    return whole(optimizer.parameters[number], master.bits) if isinstance(master, Rest) else master.detach()


def column_of(worker: Worker, samples: Sequence[Sample], column: Column = Column.OLD) -> list[FloatArray]:
    """What the worker says of each token, zero where it says nothing: `[T]` per sample."""
    annotated = asyncio.run(LocalTrainer(worker).annotate(samples, [column]))
    return [s.columns[column.value] for s in annotated]
