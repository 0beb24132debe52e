"""Runs as a whole: the list of runs, the details of one, and several compared."""

import json
import math
import sqlite3
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.errors import KitaeError
from kitae.observe.step_report import PARTS
from kitae.store.journal import Journal
from kitae.store.run_summary import RunView
from kitae.ui import prompt_history
from kitae.ui.library import file_of, raw_settings, settings_of
from kitae.ui.notes import read_notes
from kitae.ui.records import (
    ConsoleEnd,
    Diagnosed,
    Diagnosis,
    Event,
    HeldOutPairing,
    Pairing,
    RunComparison,
    RunDetail,
    RunSummary,
    SettingDifference,
)
from kitae.ui.tables import Tables

if TYPE_CHECKING:
    from kitae.evaluation.held_out import PairedRuns

_CONSOLE_END = 200_000  # bytes
_CERTAIN = 1.96  # standard errors to each side: 95 %


def summary(key: str, run: Path, tables: Tables) -> RunSummary:
    """A line of the list. A run that cannot be read has a line too, with the problem."""
    view, settings, problem = RunView(run), dict[str, Any](), ""
    try:
        settings = raw_settings(run)
        status = str(view.status)
    except (KitaeError, OSError, ValueError) as error:
        status, problem = "unreadable", str(error)
    glance, notes = tables.glance(run), read_notes(run)
    steps = settings.get("training.steps")
    total = steps if isinstance(steps, int) else None
    left = total - glance.step if total is not None and status == "running" else None
    return RunSummary(
        key=key,
        name=run.name,
        folder=str(run),
        title=_title(settings),
        status=status,
        step=glance.step,
        steps=total,
        metric=glance.metric,
        value=glance.recent[-1] if glance.recent else None,
        recent=glance.recent,
        before=glance.points[0] if glance.points else None,
        after=glance.points[-1] if len(glance.points) > 1 else None,
        step_seconds=glance.step_seconds,
        speed=glance.speed,
        eta=left * glance.step_seconds if left is not None and glance.step_seconds is not None else None,
        changed=view.changed,
        size=view.size,
        problem=problem,
        alike=_alike(settings),
        tags=notes.tags,
        note=notes.note,
    )


def _alike(settings: dict[str, Any]) -> str:
    """A name for all settings but those of one run: its seed, name and folder."""
    rest = {key: value for key, value in settings.items() if key not in ("run.seed", "run.name", "run.dir")}
    return sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _title(settings: dict[str, Any]) -> str:
    """The algorithm, the data and the model: `"grpo · reverse · smollm2-135m"`."""
    how = settings.get("algorithm.preset") or settings.get("method.kind") or settings.get("method.name")
    data = (settings.get(f"data.{source}") for source in ("task", "gym", "path", "hub"))
    parts = (how, next(filter(None, data), None), settings.get("model.path"))
    return " · ".join(str(part) for part in parts if part)


def detail(key: str, run: Path, tables: Tables) -> RunDetail:
    steps, evaluations = tables.names(run)
    return RunDetail(
        summary=summary(key, run, tables),
        metrics=steps,
        evaluations=evaluations,
        phases=[name for part in (*PARTS, "other") if (name := f"{part}_seconds") in steps],
        settings=settings_of(run),
        events=_events(run),
        rollouts=prompt_history.count_rollouts(run),
    )


def _events(run: Path) -> list[Event]:
    try:
        journal = Journal(run / "journal.sqlite", read_only=True)
        try:
            return [Event(*event) for event in journal.events()]
        finally:
            journal.close()
    except (KitaeError, sqlite3.Error):
        return []


def console(run: Path) -> ConsoleEnd:
    path = file_of(run, "console.log")
    if path is None:
        return ConsoleEnd("", True)
    with path.open("rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - _CONSOLE_END))
        return ConsoleEnd(file.read().decode("utf-8", "replace"), size <= _CONSOLE_END)


def diagnosis(run: Path) -> Diagnosis:
    from kitae.observe.diagnosis import RULES, diagnose  # only here: the rules import settings and algorithms

    found = [Diagnosed(f.rule, f.severity, f.title, f.evidence, f.advice) for f in diagnose(run)]
    return Diagnosis(found, len(RULES))


def compare(found: Sequence[tuple[str, Path]], tables: Tables) -> RunComparison:
    """The first run against the others."""
    settings = [raw_settings(run) for _, run in found]
    keys = dict.fromkeys(key for flat in settings for key in flat if key not in ("run.name", "run.dir"))
    differing = [key for key in keys if any(flat.get(key) != settings[0].get(key) for flat in settings)]
    names = [tables.names(run)[0] for _, run in found]
    rates = [prompt_history.last_rates(run) for _, run in found]
    return RunComparison(
        runs=[summary(key, run, tables) for key, run in found],
        metrics=list(dict.fromkeys(name for columns in names for name in columns)),
        settings=[SettingDifference(key, [flat.get(key) for flat in settings]) for key in differing],
        pairings=[
            pairing
            for (key, _), others in zip(found[1:], rates[1:], strict=True)
            if (pairing := pair(key, rates[0], others)) is not None
        ],
        held_out=[_held_out(found[0][1], key, run) for key, run in found[1:]],
    )


def _held_out(first: Path, key: str, second: Path) -> HeldOutPairing:
    from kitae.evaluation import held_out  # only here: it knows suites and verifiers, which take a while to import

    return paired_record(key, held_out.pair(first, second))


def paired_record(key: str, paired: "PairedRuns") -> HeldOutPairing:
    found = paired.difference
    if found is None:
        return HeldOutPairing(key, 0, None, None, None, None, None, None, paired.reason)
    interval = found.interval
    return HeldOutPairing(
        key, found.problems, paired.first, paired.second, interval.mean, interval.low, interval.high, found.p, ""
    )


def pair(key: str, first: dict[str, float], second: dict[str, float]) -> Pairing | None:
    """The comparison of two runs on the prompts of both; None where they have fewer than two prompts in common."""
    common = first.keys() & second.keys()
    n = len(common)
    if n < 2:
        return None
    differences = [second[prompt] - first[prompt] for prompt in common]
    mean = sum(differences) / n
    variance = sum((difference - mean) ** 2 for difference in differences) / (n - 1)
    reach = _CERTAIN * math.sqrt(variance / n)
    before, after = (sum(rates[prompt] for prompt in common) / n for rates in (first, second))
    return Pairing(key, n, before, after, mean, mean - reach, mean + reach)
