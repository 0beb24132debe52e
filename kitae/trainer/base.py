"""The trainer seam: what a run asks of whatever holds the weights, in one process or spread over ranks.

The driver passes samples; the trainer packs them into rows, which ranks compute. Every call is awaited, and nothing
calls back: before `optim_step`, the driver stops whatever must not read the weights while they change.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kitae.algorithms.control import Coefficients
from kitae.observe.meter import Totals
from kitae.types import FloatArray, Sample, SampleKey
from kitae.weights.base import Manifest, Mode
from kitae.weights.published_version import WeightStore

if TYPE_CHECKING:
    import torch

THREADS = "kitae-trainer"
"""Prefix of the names of a trainer's threads, if it has any. The watchdog checks that they make progress."""


class Column(Enum):
    """What a trainer can compute for each loss token, by the name of the column that holds it; EXPERTS is computed for
    each position, and only together with OLD."""

    OLD = "logp_old"  # log-prob under the policy as it is now
    REFERENCE = "logp_ref"  # log-prob under the reference
    TEACHER = "logp_teacher"  # log-prob under the teacher
    VALUE = "value"  # the critic's prediction
    EXPERTS = "experts"  # the experts that the policy chooses now
    PROOF = "proof"  # what an engine's proof is compared with, see `kitae.engines.proof`; several columns


def annotated(s: Sample, column: Column, values_N: FloatArray) -> Sample:
    """The sample with the numbers of its loss tokens as a column, or as columns `proof0`, `proof1`, … if each token has
    several."""
    if values_N.ndim == 1:
        return s.with_columns(**{column.value: s.spread(values_N)})
    return s.with_columns(**{f"{column.value}{i}": s.spread(each_N) for i, each_N in enumerate(values_N.T)})


class OutsideTeacher(Protocol):
    """A teacher that the trainer queries: behind a server, or in a process of its own.

    `start` comes first, and raises whatever is wrong with the teacher. `score` returns the log-probs of the loss tokens
    of each sample. restarts: how often it was lost and replaced so far. takes_turns: whether it computes on the
    trainer's processors, so that running both at once would be slower than one after the other. `use_threads`: sets how
    many threads the trainer computes with from now on.
    """

    @property
    def restarts(self) -> int: ...

    @property
    def takes_turns(self) -> bool: ...

    def use_threads(self, count: int) -> None: ...
    async def start(self) -> None: ...
    async def score(self, samples: Sequence[Sample]) -> list[FloatArray]: ...
    async def close(self) -> None: ...


Annotate = Callable[[Sequence[Sample], Collection[Column]], Awaitable[list[Sample]]]


async def annotate_with(
    teacher: OutsideTeacher | None, annotate: Annotate, samples: Sequence[Sample], columns: Collection[Column]
) -> list[Sample]:
    """What `annotate` gives, and of these columns the teacher's by a teacher that is elsewhere, if there is one."""
    if teacher is None or Column.TEACHER not in columns:
        return await annotate(samples, columns)
    computing = annotate(samples, [column for column in columns if column is not Column.TEACHER])
    if teacher.takes_turns:
        known, taught = await computing, await teacher.score(samples)
    else:
        known, taught = await asyncio.gather(computing, teacher.score(samples))
    return [annotated(s, Column.TEACHER, logp_N) for s, logp_N in zip(known, taught, strict=True)]


class Role(Enum):
    """The models that learn."""

    POLICY = "policy"
    CRITIC = "critic"


class Mark(Enum):
    """Keys of metrics that the code itself reads; see `kitae.observe.meter`."""

    SKIPPED = "updates that left the weights alone, because a gradient was not finite"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What holds for a whole batch: `Conditions(version=3, coefficients=Coefficients(kl=0.05))`.

    version: the policy version that is being trained.
    """

    version: int = 0
    coefficients: Coefficients = field(default_factory=Coefficients)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on; the weights of its samples add up over the whole batch.

    `Batch((Sample(…), …), Conditions(version=3), roles=(Role.POLICY,))`; observed: the samples whose numbers of single
    tokens are returned with the totals.
    """

    samples: tuple[Sample, ...]
    conditions: Conditions = field(default_factory=Conditions)
    roles: tuple[Role, ...] = (Role.POLICY,)
    observed: frozenset[SampleKey] = frozenset()

    @property
    def loss_tokens(self) -> int:
        return sum(s.loss_tokens for s in self.samples)


class Trainer(Protocol):
    """Async. `forward_backward` adds the gradients of a batch, `optim_step` applies and clears them.

    A batch's gradient does not depend on how the batch is cut into rows, nor on which rank computes them. `annotate`
    returns the samples, in order, with columns added. `publish` makes the current weights available as a version: the
    manifest for engines with weights of their own, None if there are none. `probe` returns the log-probs of a fixed
    sequence under the current weights (`kitae.weights.probe`). `publish`, `probe`, `save` and `export` may run beside
    everything but `optim_step` and `finish_step`, which wait for them. `updates` counts the policy's optimizer steps;
    `dtype` is what it computes in.
    """

    @property
    def updates(self) -> int: ...
    @property
    def dtype(self) -> "torch.dtype": ...

    async def start(self) -> None:
        """Comes first. Waits until everything that runs elsewhere is ready, or raises."""

    async def annotate(self, samples: Sequence[Sample], columns: Collection[Column]) -> list[Sample]: ...
    async def forward_backward(self, batch: Batch) -> Totals: ...
    async def optim_step(self) -> Totals: ...
    async def finish_step(self, step: int) -> None:
        """Comes after all updates of a step. A reference that moves is refreshed here."""

    async def open_weight_store(self, transport: str, mode: Mode, settings: Mapping[str, Any]) -> WeightStore:
        """Comes before the first `publish`. Returns where engines with weights of their own find the last version.

        settings: of the transport (`kitae.weights.transports`); a host among them is that of the publishing process.
        """

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None: ...
    async def probe(self) -> tuple[float, ...]: ...
    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def export(self, folder: Path) -> None:
        """Write the policy as a folder that other programs load."""

    async def use_threads(self, count: int) -> None:
        """Set the compute threads of this process, if the trainer computes here."""

    async def close(self) -> None: ...
