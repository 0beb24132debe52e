"""What ranks and one process both do: load, shard if there are ranks, train, and say what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from short_settings import algorithm_of
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_workers import make_worker, weighted

from kitae.data.packing import Row, lay_out, pack
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.load_in_shards import empty_policy
from kitae.models.scalar import ScalarModel
from kitae.models.whole import gathered
from kitae.observe.meter import Totals
from kitae.trainer.base import Column, Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import token_budget
from kitae.trainer.optim import Optimizer
from kitae.trainer.parallel.mesh import Mesh, Parallel
from kitae.trainer.parallel.sharding import shard
from kitae.trainer.training_worker import Worker
from kitae.types import FloatArray, Sample, SampleKey

CPU = torch.device("cpu")
TRAINING = TrainingConfig(lr=1e-3, token_budget=30, clip_norm=0.5)
GRPO: dict[str, Any] = {"preset": "grpo"}
PPO: dict[str, Any] = {"preset": "ppo", "kl_coef": 0.0, "critic_lr": 1e-3}
BOTH = (Role.CRITIC, Role.POLICY)
SHAPES = [(0, 5, 3), (0, 5, 9), (1, 12, 1), (1, 12, 7), (2, 30, 20), (3, 1, 4), (3, 1, 9), (4, 3, 20)]


@dataclass(frozen=True)
class Case:
    """Updates on these rows, again and again. parallel: None with one process."""

    rows: Sequence[Row]
    parallel: Parallel | None
    choices: dict[str, Any] = field(default_factory=lambda: GRPO)
    roles: tuple[Role, ...] = (Role.POLICY,)
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    updates: int = 2
    reference: bool = False

    def __str__(self) -> str:
        return f"{self.parallel} {self.choices} {self.model}"

    @property
    def alone(self) -> "Case":
        """The same in one process; split layers are not fused, so those of that one are not either."""
        split = self.parallel is not None and self.parallel.tensor > 1
        rows = [row for row in self.rows if row.loss_tokens]
        return replace(self, parallel=None, rows=rows, model={"plain": split, **self.model})


@dataclass(frozen=True)
class Result:
    """What rank 0 saw: the gradient of the first update, whole; the numbers of all; all weights after them.

    tokens: what the first update says of single tokens of observed samples. annotated: log-probs under the policy and
    the reference, of this rank's rows, after the updates. probe: of the policy, likewise.
    """

    gradient: list[Tensor]
    numbers: list[dict[str, float]]
    weights: list[Tensor]
    tokens: Mapping[SampleKey, Mapping[str, FloatArray]]
    annotated: dict[Column, list[FloatArray]]
    probe: list[float]


@dataclass(frozen=True)
class Crew:
    """A worker and the rows that are its own."""

    worker: Worker
    rows: Sequence[Row]
    case: Case

    @classmethod
    def of(cls, folder: str, case: Case) -> "Crew":
        algorithm = algorithm_of(case.choices)
        settings = ModelConfig.model_validate({"path": folder, "dtype": "float32", "device": "cpu", **case.model})
        load = load_policy if case.parallel is None else empty_policy
        policy = load(settings)
        critic = ScalarModel(load(settings)) if algorithm.advantage.name == "gae" else None
        mesh = None if case.parallel is None else Mesh(case.parallel, policy.device)
        if mesh is not None:
            shard(policy, mesh)
            if critic is not None:
                shard(critic, mesh)
        training = TRAINING.model_copy(update=case.training)
        ranks = None if mesh is None else mesh.ranks
        worker = make_worker(policy, training, algorithm, critic=critic, reference=case.reference, ranks=ranks)
        return cls(worker, case.rows if mesh is None else case.rows[mesh.data_rank :: mesh.data_size], case)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.worker.trained[role].optimizer for role in self.case.roles]

    def forward_backward(self, version: int) -> Totals:
        return self.worker.forward_backward(self.rows, Conditions(version), self.case.roles)

    def update(self, version: int) -> dict[str, float]:
        numbers = (self.forward_backward(version) + self.worker.optim_step()).numbers()
        self.worker.finish_step(version)
        return numbers

    def gradient(self) -> list[Tensor]:
        return [g for o in self.optimizers for g in map(_gradient, o.parameters, o.masters)]

    def weights(self) -> list[Tensor]:
        return [whole(p.detach()) for o in self.optimizers for p in o.parameters]

    def state(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in self.worker._state().items()}


def train(folder: str, case: Case) -> Result:
    """With the rows of this rank, or all of them where there is one process."""
    crew = Crew.of(folder, case)
    first = crew.forward_backward(1)
    gradient = crew.gradient()
    numbers = [(first + crew.worker.optim_step()).numbers()]
    crew.worker.finish_step(1)
    numbers += [crew.update(version) for version in range(2, case.updates + 1)]
    columns = (Column.OLD, Column.REFERENCE) if case.reference else (Column.OLD,)
    annotated = crew.worker.annotate(crew.rows, columns)
    policy = crew.worker.policy
    probe = policy.score(torch.arange(12, device=policy.device) * 7).tolist()
    return Result(gradient, numbers, crew.weights(), first.tokens, annotated, probe)


def _gradient(parameter: Tensor, master: Tensor) -> Tensor:
    """Whole, wherever it is kept."""
    if parameter.grad is not None:
        return whole(parameter.grad)
    assert master.grad is not None
    if isinstance(parameter, DTensor):
        return whole(DTensor(master.grad, parameter._spec, requires_grad=False))  # type: ignore[no-untyped-call]
    return master.grad.clone()


def whole(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.int16:  # which gloo does not know
        tensor = tensor.to(torch.int32)
    return gathered(tensor).detach().clone()


def rows_of(samples: Sequence[Sample], choices: dict[str, Any], multiple: int = 4) -> list[Row]:
    """So many that every rank has as many. Every second sample is observed."""
    samples = weighted(samples, algorithm_of(choices))
    observed = {s.key for s in samples[::2]}
    parts = pack(samples, token_budget(TRAINING, CPU, torch.float32), multiple=multiple)
    return [lay_out(part, observed=observed) for part in parts]


def one_sided(rows: Sequence[Row], ranks: int = 2) -> list[Row]:
    """All of them for rank 0; the others have as many empty ones."""
    return [each for row in rows if row.loss_tokens for each in (row, *[Row.empty()] * (ranks - 1))]


def with_values(samples: Sequence[Sample]) -> list[Sample]:
    weight = 1 / sum(s.loss_tokens for s in samples)
    columns = [{"value": 0.0, "return": 0.2 * s.index - 0.5, "value_weight": weight} for s in samples]
    return [
        s.with_columns(**{name: s.spread(np.float32(x)) for name, x in own.items()})
        for s, own in zip(samples, columns, strict=True)
    ]


def check(case: Case, found: Result, folder: str, tolerance: float = 1e-6) -> Result:
    """Gradient and losses equal those of one process, relative to the largest; returns what that one found."""
    alone = train(folder, case.alone)
    assert gap(found.gradient, alone.gradient) < tolerance, str(case)
    for name in ("loss", "value_loss", "grad_norm", "critic_grad_norm"):
        mine, expected = (np.array([n.get(name, 0.0) for n in r.numbers]) for r in (found, alone))
        worst = np.abs(mine - expected).max() / max(np.abs(expected).max(), 1e-3)
        assert np.isnan(expected).any() or worst < tolerance * (1 if "loss" in name else 10), f"{case} {name} {worst}"
    for a, b in zip(map(_computed, found.numbers), map(_computed, alone.numbers), strict=True):
        assert a == pytest.approx(b, rel=200 * tolerance, abs=tolerance, nan_ok=True), str(case)
    assert gap(found.weights, alone.weights) < 1e-3, str(case)  # Adam divides what is left of small gradients by itself
    np.testing.assert_allclose(found.probe, alone.probe, rtol=1e-3)
    return alone


def _computed(numbers: Mapping[str, float]) -> dict[str, float]:
    """Without what a process takes of its GPU, and what routers do with a rank's rows, of which the mean is told."""
    own = ("device_memory_share", "router_entropy", "expert_load", "experts_idle")
    return {name: value for name, value in numbers.items() if name not in own}


def gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    largest = max(b.abs().max().item() for b in expected)
    assert largest > 1e-4
    return max((a.cpu() - b.cpu()).abs().max().item() for a, b in zip(found, expected, strict=True)) / largest


@contextmanager
def one_rank(folder: Path, backend: str = "gloo") -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group(backend, f"file://{folder / 'alone'}", world_size=1, rank=0)
    try:
        yield
    finally:
        dist.destroy_process_group()
