"""Which curves a report has, and the numbers of them: what `kitae plot` draws, and what else a run may have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kitae.observe.plots import CURVES, main_metric, values_of
from kitae.ui.report.charts import Curve, bars, chart, thinned
from kitae.ui.report.markup import Markup

_OTHERS = {
    "loss": "loss",
    "accuracy": "accuracy",
    "margin": "margin",
}
_UNLESS_ZERO = {
    "truncated": "share of answers cut off",
    "error_share": "share of answers not judged",
    "staleness": "age of tokens (versions)",
    "ess": "effective sample size (share of tokens)",
    "clip_high": "share of tokens clipped above",
    "clip_low": "share of tokens clipped below",
    "value_loss": "loss of the critic",
    "device_memory_share": "share of the GPU's memory in use",
    "lr": "learning rate",
}
_MOST_PARTS = 8
_SMALL = 0.005  # share of the time below which a phase is not drawn

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DrawnCurves:
    """titles, rows: the numbers of all curves as a table over steps. every: of so many steps, one is shown."""

    charts: list[Markup]
    titles: list[str]
    rows: list[list[str]]
    every: int


def drawn(steps: Sequence[Row], evaluations: Sequence[Row], measure: str, phases: Sequence[str]) -> DrawnCurves:
    shown = set(thinned([row["step"] for row in steps]))
    rows = [row for row in steps if row["step"] in shown]
    main = main_metric(rows)
    first = Curve(f"training {main}", _at(rows), [_number(row.get(main)) for row in rows])
    single = {key: title for key, title in {**_OTHERS, **CURVES, **_UNLESS_ZERO}.items() if key != main}
    found: dict[str, Curve] = {}
    for key, title in single.items():
        values = [None if math.isnan(value) else value for value in values_of(key, rows)]
        if values and not (key in _UNLESS_ZERO and (not any(values) or (key == "lr" and len({*values}) == 1))):
            found[title] = Curve(key, _at(rows), values)
    parts = _parts(rows)
    seconds = [Curve(name.removesuffix("_seconds"), _at(rows), [row.get(name) for row in rows]) for name in phases]
    whole = sum(map(_sum, seconds))
    held_out = _held_out(evaluations)
    at = [step for curve in (first, *held_out) for step in curve.steps]
    span = min(at), max(at)
    both = f"{main}, in training and held out" if main == measure else f"{main}, and {measure} on what is held out"
    title = both if held_out else main
    charts = [chart(title, [first, *held_out], span)]
    charts += [chart(title, [curve], span) for title, curve in found.items()]
    charts += [chart("parts of the reward", parts, span)] if len(parts) > 1 else []
    charts += [bars("seconds of a step, by phase", [curve for curve in seconds if _sum(curve) > _SMALL * whole])]
    columns = [first, *found.values(), *parts]
    return DrawnCurves(
        [each for each in charts if each],
        ["step", *(curve.name for curve in columns)],
        [[str(row["step"]), *(_cell(curve.values[i]) for curve in columns)] for i, row in enumerate(rows)],
        max(1, round(len(steps) / len(rows))),
    )


def _sum(curve: Curve) -> float:
    return sum(value or 0.0 for value in curve.values)


def _at(rows: Sequence[Row]) -> list[int]:
    return [row["step"] for row in rows]


def _held_out(evaluations: Sequence[Row]) -> list[Curve]:
    """Of the run's own task, and of each other suite."""
    judged = [row for row in evaluations if row.get("avg") is not None]
    curves = []
    for suite in dict.fromkeys(row.get("suite", "") for row in judged):
        found = [row for row in judged if row.get("suite", "") == suite]
        keep = set(thinned(_at(found)))
        found = [row for row in found if row["step"] in keep]
        columns = ([row.get(key) for row in found] for key in ("avg", "avg_low", "avg_high"))
        curves.append(Curve(suite or "held out", _at(found), *columns))
    return curves


def _parts(rows: Sequence[Row]) -> list[Curve]:
    """The components of the reward, as means."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("reward/"))
    return [
        Curve(name.removeprefix("reward/"), _at(rows), [_number(row.get(name)) for row in rows])
        for name in list(names)[:_MOST_PARTS]
    ]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
