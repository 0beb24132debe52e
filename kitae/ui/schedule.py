"""The timeline of some steps of a run: the rows of timeline.jsonl as bars in lanes."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kitae.observe.timeline import FILE, PARTS, busy_shares
from kitae.ui.library import file_of
from kitae.ui.records import LaneSpan, LaneView

STEPS = 8
_MOST_SPANS = 4000
_AHEAD = 16  # steps before and after whose samples may have been generated in the same time
_OF_GROUPS = ("generate", "verify")


def schedule(run: Path, last: int | None = None, steps: int = STEPS) -> LaneView:
    """The `steps` steps that end with `last` (default: the last steps of the run), and all spans of that time."""
    lines = _lines(run)
    of = max(lines, default=0)
    end_step = of if last is None else max(1, min(last, of))
    first = max(0, end_step - steps + 1)
    around = range(max(0, first - _AHEAD), end_step + _AHEAD + 1)
    rows = [row for step in around for row in _rows(lines.get(step, ()))]
    own = [row for row in rows if first <= row["step"] <= end_step]
    core = [row for row in own if row["part"] not in _OF_GROUPS] or own
    if not core:
        return LaneView(first, end_step, of, 0.0, 0.0, {}, {}, [], 0)
    start, end = min(row["start"] for row in core), max(row["end"] for row in core)
    chosen = sorted((row for row in rows if row["end"] > start and row["start"] < end), key=lambda row: row["start"])
    shown = chosen[:_MOST_SPANS]
    lanes: dict[str, list[float]] = {}
    spans = [_placed(row, lanes.setdefault(row["part"], [])) for row in shown]
    known = [part for part in PARTS if part in lanes]
    order = [*known, *(part for part in lanes if part not in PARTS)]
    busy = _busy(shown, start, end)
    heights = {part: len(lanes[part]) for part in order}
    return LaneView(first, end_step, of, start, end, heights, busy, spans, len(chosen) - len(shown))


def _busy(rows: list[dict[str, Any]], start: float, end: float) -> dict[str, float]:
    """The share of this time in which each part worked. Spans that reach beyond the time are cut."""
    cut = [
        {**row, "start": max(start, row["start"]), "end": min(end, row["end"])} for row in rows if row["part"] in PARTS
    ]
    frame = {"part": PARTS[0], "start": start, "end": start}, {"part": PARTS[0], "start": end, "end": end}
    shares = busy_shares([*cut, *frame]) if end > start else {}
    return {part: share for part, share in shares.items() if any(row["part"] == part for row in cut)}


def _lines(run: Path) -> dict[int, list[bytes]]:
    """The lines of each step, not parsed: only the steps that are shown are."""
    path = file_of(run, FILE)
    found: dict[int, list[bytes]] = {}
    for line in path.read_bytes().splitlines() if path else ():
        if (step := _STEP.search(line)) is not None:
            found.setdefault(int(step[1]), []).append(line)
    return found


_STEP = re.compile(rb'"step": ?(\d+)')


def _rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        if all(key in row for key in ("part", "step", "start", "end")):
            yield row


def _placed(row: dict[str, Any], ends: list[float]) -> LaneSpan:
    """The span in the first lane of its part that is free at that time."""
    lane = next((i for i, end in enumerate(ends) if end <= row["start"]), len(ends))
    ends[lane:] = [row["end"], *ends[lane + 1 :]]
    return LaneSpan(row["part"], row["step"], lane, row["start"], row["end"])
