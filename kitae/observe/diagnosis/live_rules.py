"""The rules that need only metrics, checked after each step of a run. Each finding is reported once."""

from collections.abc import Callable, Sequence
from typing import Any

from kitae.observe.diagnosis import RULES, findings
from kitae.observe.diagnosis.base import Finding, Row, Seen
from kitae.observe.observer import Reported, Silent

LIVE = tuple(rule for rule in RULES if rule.live)

Tell = Callable[[int, Sequence[Finding]], None]


class LiveDiagnosis(Silent):
    """An observer that reports new findings. rows: the metrics so far, if the run is resumed. tell: receives the step
    and its new findings."""

    def __init__(self, settings: dict[str, Any], rows: Sequence[Row], tell: Tell) -> None:
        self._settings = settings
        self._steps = [row for row in rows if row["kind"] == "step"]
        self._evaluations = [row for row in rows if row["kind"] == "eval"]
        self._told: set[str] = set()
        self._tell = tell

    def step(self, report: Reported) -> None:
        self._steps = [row for row in self._steps if row["step"] < report.step]  # without steps that were discarded
        self._evaluations = [row for row in self._evaluations if row["step"] < report.step]
        self._steps.append(report.row())
        self._check(report.step)

    def evaluated(self, row: dict[str, Any]) -> None:
        self._evaluations.append(row)
        self._check(int(row["step"]))

    def _check(self, step: int) -> None:
        if not self._steps:
            return
        new = findings(Seen(self._steps, self._evaluations, self._settings), LIVE)
        new = [finding for finding in new if finding.rule not in self._told]
        if new:
            self._told |= {finding.rule for finding in new}
            self._tell(step, new)
