"""Problems of a run, found by rules on what it has written, with evidence and with the setting to change.

    diagnose(Path("runs/quickstart-001"))      [Finding("lr-too-high", "bad", …), …]

This works on runs that are running, finished, stopped or crashed; it reads only. While a run goes on, `LiveDiagnosis`
checks the rules that need only metrics.
"""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kitae.errors import KitaeError, StoreError
from kitae.observe.diagnosis import answer_rules, learning_rules, machinery_rules
from kitae.observe.diagnosis.base import Finding, Reply, Row, Rule, Seen
from kitae.observe.observer import Reported, Silent
from kitae.observe.run_log import FILE
from kitae.observe.timeline import read as read_timeline
from kitae.store.journal import Journal
from kitae.store.run_summary import RunView, look
from kitae.types import Group, Rollout

RULES: tuple[Rule, ...] = (
    *machinery_rules.RULES[:1],
    *learning_rules.RULES,
    *answer_rules.RULES,
    *machinery_rules.RULES[1:],
)
"""In the order in which findings are listed, after those that are bad."""

LIVE = tuple(rule for rule in RULES if rule.live)
"""The rules that need only metrics, which are checked after each step of a run."""

OnFindings = Callable[[int, Sequence[Finding]], None]


def diagnose(run: Path) -> list[Finding]:
    """The findings on a run, with its folder in the commands of their advice."""
    return [replace(found, advice=found.advice.replace("RUN", str(run))) for found in findings(see(run), RULES)]


def findings(seen: Seen, rules: tuple[Rule, ...]) -> list[Finding]:
    found = [finding for rule in rules if (finding := rule.find(seen)) is not None]
    return sorted(found, key=lambda finding: finding.severity != "bad")


def see(run: Path) -> Seen:
    """Read everything that rules use."""
    view = look(run)
    return Seen(
        steps=view.steps,
        evaluations=view.evaluations,
        settings=_settings(view),
        status=view.status,
        console=_console(run),
        timeline=read_timeline(run),
        answers=_answers(run),
    )


def _settings(view: RunView) -> dict[str, object]:
    try:
        return view.config.flat()
    except KitaeError:  # written by another version, so rules do without
        return {}


def _console(run: Path) -> list[str]:
    """The console's lines since the run was last started."""
    try:
        lines = (run / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if "  $ kitae " in line]
    return lines[starts[-1] :] if starts else lines


def _answers(run: Path) -> list[Reply]:
    """The answers of the first two and the last two steps, from the journal."""
    try:
        journal = Journal(run / "journal.sqlite", read_only=True)
    except KitaeError:  # damaged, or just being created
        return []
    try:
        groups = [(step, group) for group, step, fate, _ in journal.groups() if fate != "skipped"]
        steps = sorted({step for step, _ in groups})
        wanted = {*steps[:2], *steps[-2:]}
        found = [(step, journal.group(group)) for step, group in groups if step in wanted]
    except sqlite3.Error:
        return []
    finally:
        journal.close()
    replies = (_reply(step, group, rollout) for step, group in found for rollout in group.rollouts)
    return [reply for reply in replies if reply is not None]


def _reply(step: int, group: Group, rollout: Rollout) -> Reply | None:
    """The answer of a rollout; None if its text lies in a file that cannot be read."""
    try:
        return Reply(step, group.id, str(rollout.text), str(group.prompt.reference))
    except StoreError:
        return None


class LiveDiagnosis(Silent):
    """Reports new findings. rows: metrics of a resumed run. report: receives a step and its new findings."""

    def __init__(self, settings: dict[str, Any], rows: Sequence[Row], report: OnFindings) -> None:
        self._settings = settings
        self._steps = [row for row in rows if row["kind"] == "step"]
        self._evaluations = [row for row in rows if row["kind"] == "eval"]
        self._reported: set[str] = set()
        self._report = report

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
        new = [finding for finding in new if finding.rule not in self._reported]
        if new:
            self._reported |= {finding.rule for finding in new}
            self._report(step, new)
