"""The data that rules use, and what they find.

A rule is a function from `Seen` to its evidence, a sentence with steps and numbers, or None if nothing is wrong.
Metrics may be missing, because a kind of run or a step does not have them; a rule that lacks a metric returns None.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from statistics import fmean, variance
from typing import Any, Literal

Row = Mapping[str, Any]
Severity = Literal["bad", "warning"]
"""bad: the run wastes its time, or is over; warning: it may go well, but should be looked at."""

WINDOW = 5
"""How many steps are averaged at the beginning and at the end, so that one unusual step is no finding."""

LOSSES = {"sft": "loss", "distil-file": "divergence"}
"""Kinds of run whose held-out `avg` improves by falling, with the name of that number."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`Finding("all-wrong", "bad", "No answer is ever right", "steps 1 to 8: …", "make the task easier: …")`."""

    rule: str
    severity: Severity
    title: str
    evidence: str
    advice: str

    @property
    def line(self) -> str:
        return f"{self.title} ({self.rule}): {self.evidence}"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a prompt at a step: `Reply(step=3, group=17, text="56, 34, 12", reference="56, 34, 12")`."""

    step: int
    group: int
    text: str
    reference: str


@dataclass(frozen=True)
class Seen:
    """A run as rules see it. While it runs, only steps, evaluations and settings are given.

    settings: flat, `{"training.lr": 1e-5, …}`; answers: those of the first and of the last steps; console: the lines
    since the run was last started.
    """

    steps: Sequence[Row]
    evaluations: Sequence[Row] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: str = "running"
    console: Sequence[str] = ()
    timeline: Sequence[Row] = ()
    answers: Sequence[Reply] = ()

    def all(self, key: str) -> list[float]:
        """The values of a metric, for the steps that have it."""
        return values(self.steps, key)

    def last(self, key: str, count: int = WINDOW) -> float | None:
        """The mean over the last `count` steps; None if one of them lacks the metric."""
        found = values(self.steps[-count:], key)
        return fmean(found) if len(found) == count else None

    def ends(self, key: str, count: int = WINDOW) -> tuple[float, float] | None:
        """The means over the first and over the last values; None if there are too few for both."""
        found = self.all(key)
        return (fmean(found[:count]), fmean(found[-count:])) if len(found) >= 2 * count else None

    def thirds(self, key: str) -> tuple[float, float] | None:
        """The means over the first and the last third of the values; None if a third has fewer than `WINDOW`."""
        found = self.all(key)
        return self.ends(key, max(WINDOW, len(found) // 3))

    def noise(self, key: str) -> float:
        """The standard error of the difference between the thirds, from the variation among steps."""
        found = self.all(key)
        count = max(WINDOW, len(found) // 3)
        return sqrt((variance(found[:count]) + variance(found[-count:])) / count)

    def held_out(self) -> tuple[Row, Row] | None:
        """The first and the last judged evaluation of the run's own task; None if there are fewer than two."""
        judged = [row for row in self.evaluations if row.get("avg") is not None and "suite" not in row]
        return (judged[0], judged[-1]) if len(judged) > 1 else None

    def held_out_rose(self) -> bool:
        """Whether the rise is significant: the interval of each of the two evaluations excludes the other's mean."""
        found = self.held_out()
        if found is None:
            return False
        first, last = found
        return bool(last["avg_low"] > first["avg"] and first["avg_high"] < last["avg"])

    def held_out_worse(self) -> bool:
        """Whether the change for the worse is significant: the last interval is on the wrong side of the first one."""
        found = self.held_out()
        if found is None:
            return False
        first, last = found
        if self.settings.get("method.kind") in LOSSES:
            return bool(last["avg_low"] > first["avg_high"])
        return bool(last["avg_high"] < first["avg_low"])

    @property
    def measure(self) -> str:
        """The name of an evaluation's `avg`: `accuracy`, or one of `LOSSES`."""
        return LOSSES.get(self.settings.get("method.kind", ""), "accuracy")

    def setting(self, key: str) -> str:
        """For sentences: `training.lr is 1e-05`; "" if the run has no such setting."""
        value = self.settings.get(key)
        return "" if value is None else f"{key} is {value:g}" if isinstance(value, float) else f"{key} is {value}"

    def span(self, count: int = WINDOW) -> str:
        """The numbers of the last steps: `steps 11 to 15`."""
        return f"steps {self.steps[-count:][0]['step']} to {self.steps[-1]['step']}"


Check = Callable[[Seen], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. looks_at: metrics and files; when: the condition in words; advice: what to change.

    live: whether it is also checked after each step of a run. Other rules need more than metrics, or a run that is
    over.
    """

    name: str
    severity: Severity
    title: str
    looks_at: str
    when: str
    advice: str
    live: bool
    check: Check

    def find(self, seen: Seen) -> Finding | None:
        evidence = self.check(seen)
        return None if evidence is None else Finding(self.name, self.severity, self.title, evidence, self.advice)


def rule(
    name: str, severity: Severity, *, title: str, looks_at: str, when: str, advice: str, live: bool = True
) -> Callable[[Check], Rule]:
    return lambda check: Rule(name, severity, title, looks_at, when, advice, live, check)


def values(rows: Iterable[Row], key: str) -> list[float]:
    found = (row.get(key) for row in rows)
    return [float(value) for value in found if isinstance(value, int | float) and isfinite(value)]


def sentence(*parts: str) -> str:
    """The parts that are not empty, with semicolons between them."""
    return "; ".join(part for part in parts if part)
