"""The trainer seam: what a run asks of whoever holds the weights, in one process or spread over ranks.

The driver speaks to it in samples; it packs them into rows, and ranks compute rows. Every call is awaited, and nothing
calls back: who must stand still while weights change is stopped by the driver before `optim_step`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from kitae.algorithms.control import Coefficients
from kitae.observe.meter import Totals
from kitae.types import FloatArray, Sample, SampleKey
from kitae.weights.base import Manifest, Mode
from kitae.weights.published_version import Board

THREADS = "kitae-trainer"
"""How the names of a trainer's threads begin, where it has any: the watchdog looks whether they move."""


class Column(Enum):
    """What a trainer can say about each loss token, by the name of the column it becomes; and EXPERTS about each
    position, which is asked for together with OLD."""

    OLD = "logp_old"  # log-prob under the policy as it is now
    REFERENCE = "logp_ref"  # under the reference
    TEACHER = "logp_teacher"  # under a teacher
    VALUE = "value"  # of the critic
    EXPERTS = "experts"  # that the policy chooses now


class OutsideTeacher(Protocol):
    """A teacher that the trainer asks: behind a server, or in a process of its own.

    `start` comes first: whatever is wrong with it is said there. `score` gives the log-probs of the loss tokens of each
    sample. restarts: how often it was lost and replaced so far. takes_turns: whether it computes with the processors
    that the trainer has too, so that both at once would be slower than one after the other. `use_threads`: how many the
    trainer computes with from now on.
    """

    @property
    def restarts(self) -> int: ...

    @property
    def takes_turns(self) -> bool: ...

    def use_threads(self, count: int) -> None: ...
    async def start(self) -> None: ...
    async def score(self, samples: Sequence[Sample]) -> list[FloatArray]: ...
    async def close(self) -> None: ...


class Role(Enum):
    """The models that learn."""

    POLICY = "policy"
    CRITIC = "critic"


class Mark(Enum):
    """Keys of numbers that somebody acts on; see `kitae.observe.meter`."""

    SKIPPED = "updates that left the weights alone, because a gradient was not finite"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What holds for a whole batch: `Conditions(version=3, coefficients=Coefficients(kl=0.05))`.

    version: the one being trained.
    """

    version: int = 0
    coefficients: Coefficients = field(default_factory=Coefficients)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on; the weights of its samples add up over the whole batch.

    `Batch((Sample(…), …), Conditions(version=3), roles=(Role.POLICY,))`; observed: the samples whose numbers of single
    tokens come back with the totals.
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

    A batch's gradient does not depend on how it is cut into rows, nor on how these are shared out. `annotate` returns
    the samples, in order, with columns added. `publish` makes the current weights available as a version: the manifest
    for engines with weights of their own, None where there are none. `probe` gives log-probs of a fixed sequence under
    them (`kitae.weights.probe`). `publish`, `probe`, `save` and `export` may run beside everything but `optim_step` and
    `finish_step`, which wait for them. `updates` counts the optimizer steps of the policy.
    """

    @property
    def updates(self) -> int: ...

    async def start(self) -> None:
        """Before anything else: whatever is elsewhere says whether it is ready."""

    async def annotate(self, samples: Sequence[Sample], columns: Collection[Column]) -> list[Sample]: ...
    async def forward_backward(self, batch: Batch) -> Totals: ...
    async def optim_step(self) -> Totals: ...
    async def finish_step(self, step: int) -> None:
        """After all updates of a step: a reference that moves does so now."""

    async def open_board(self, transport: str, mode: Mode, settings: Mapping[str, Any]) -> Board:
        """Before the first `publish`: engines with weights of their own find there what was published last.

        settings: of the transport (`kitae.weights.transports`); a host is that of whoever publishes, if it has one."""

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None: ...
    async def probe(self) -> tuple[float, ...]: ...
    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def export(self, folder: Path) -> None:
        """The policy as a folder that other programs load."""

    async def use_threads(self, count: int) -> None:
        """Of this process, where it computes here."""

    async def close(self) -> None: ...
