"""The report of a step: frozen records, and the row of metrics.jsonl that they make together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What was sampled for a step, including dropped groups, so that the reward curve does not depend on the filter."""

    reward: float | None
    reward_std: float | None
    length: float
    length_max: int
    truncated: float
    rollouts: int
    groups: int
    groups_dropped: int
    groups_with_signal: int
    errors: int
    error_share: float
    first_error: str
    components: Mapping[str, float] = field(default_factory=dict)
    talks: "Talks | None" = None

    def row(self) -> Row:
        numbers = {name: getattr(self, name) for name in self.__slots__ if name not in ("components", "talks")}
        parts = {f"reward/{name}": value for name, value in self.components.items()}
        return numbers | parts | (self.talks.row() if self.talks else {})


@dataclass(frozen=True, slots=True)
class Talks:
    """Means over episodes of several turns: `Talks(turns=2.1, chains=1.0, calls=1.0, bad_calls=0.1)`.

    calls: tool calls that could be parsed; bad_calls: those that could not.
    """

    turns: float
    chains: float
    calls: float
    bad_calls: float

    def row(self) -> Row:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Staleness:
    """The age of a batch's tokens, in versions: `Staleness(mean=0.3, oldest=1, shares={1: 0.3})`."""

    mean: float
    oldest: int
    shares: Mapping[int, float]

    def row(self) -> Row:
        shares = {f"staleness/{age}": share for age, share in self.shares.items()}
        return {"staleness": self.mean, "staleness_max": self.oldest, **shares}


@dataclass(frozen=True, slots=True)
class Generation:
    """The engine's work during a step: `Generation(seconds=2.1, tokens=4096, restarts=0)`; engines: how many serve
    now."""

    seconds: float
    tokens: int
    restarts: int
    engines: int = 1

    def row(self) -> Row:
        several = {} if self.engines == 1 else {"engines": self.engines}
        return several | {
            "generate_seconds": self.seconds,
            "generated_tokens": self.tokens,
            "generate_tokens_per_second": rate(self.tokens, self.seconds),
            "engine_restarts": self.restarts,
        }


PARTS = ("wait", "annotate", "train", "hold", "update", "sync", "save", "evaluate")
"""Parts of the time of a step, in their order."""


@dataclass(frozen=True, slots=True)
class Lap:
    """How the time between two steps was spent: `Lap(step=3.0, parts={"wait": 1.1, "train": 1.4, …})`.

    Parts add up to `step`; the remainder is `other`. wait: for a batch. annotate, train, update: the trainer's work.
    hold: until the engine stood still, and for what must end before an update. sync: until the engine served the new
    version. save, evaluate: those of the step before. The last three count only where training waits for them.
    """

    step: float
    parts: Mapping[str, float]

    @property
    def trainer_busy(self) -> float:
        return sum(self.parts.get(part, 0.0) for part in ("annotate", "train", "update"))

    def row(self) -> Row:
        other = max(0.0, self.step - sum(self.parts.values()))
        seconds = {f"{part}_seconds": self.parts.get(part, 0.0) for part in PARTS}
        idle = max(0.0, 1 - rate(self.trainer_busy, self.step))
        return {"step_seconds": self.step, **seconds, "other_seconds": other, "trainer_idle": idle}


@dataclass(frozen=True, slots=True)
class StepReport:
    """The whole report. numbers: the trainer's metrics; sync: of the weight update; memory: the share in use at the
    end."""

    step: int
    sampled: BatchStats
    staleness: Staleness
    generation: Generation
    times: Lap
    overdue: int
    spare: int
    updates: int
    samples: int
    skipped: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    sync: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None

    def row(self) -> Row:
        return {
            "kind": "step",
            "step": self.step,
            **self.sampled.row(),
            **self.staleness.row(),
            **self.generation.row(),
            "overdue": self.overdue,
            "groups_spare": self.spare,
            **self.numbers,
            "updates": float(self.updates),
            "samples_trained": float(self.samples),
            **self.times.row(),
            **self.sync,
            "engine_idle": max(0.0, 1 - rate(self.generation.seconds, self.times.step)),
            "train_tokens_per_second": rate(self.numbers.get("train_tokens", 0.0), self.times.parts.get("train", 0.0)),
            "memory_share": self.memory,
        }


@dataclass(frozen=True, slots=True)
class StageReport:
    """A step of an offline stage: `StageReport(step=12, epoch=0.4, examples=32, loss_tokens=4096, numbers={…})`."""

    step: int
    epoch: float
    examples: int
    loss_tokens: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    times: Lap = Lap(0.0, {})

    def timed(self, times: Lap) -> "StageReport":
        return replace(self, times=times)

    def row(self) -> Row:
        tokens, seconds = self.numbers.get("train_tokens", 0.0), self.times.parts.get("train", 0.0)
        return {
            "kind": "step",
            "step": self.step,
            "epoch": self.epoch,
            "examples": self.examples,
            "loss_tokens": self.loss_tokens,
            **self.numbers,
            **self.times.row(),
            "train_tokens_per_second": rate(tokens, seconds),
        }


def rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
