"""Who worked when, in some steps of a run: timeline.jsonl as bars in lanes."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kitae.observe.timeline import FILE, PARTS, busy_shares
from kitae.ui.library import file_of
from kitae.ui.records import Schedule, Span

STEPS = 8
_MOST_SPANS = 4000


def schedule(run: Path, last: int | None = None, steps: int = STEPS) -> Schedule:
    """The `steps` steps that end with `last`; default: the last ones of the run."""
    lines = _lines(run)
    of = max(lines, default=0)
    end_step = of if last is None else max(1, min(last, of))
    first = max(0, end_step - steps + 1)
    chosen = [row for step in range(first, end_step + 1) for row in _rows(lines.get(step, ()))]
    if not chosen:
        return Schedule(first, end_step, of, 0.0, 0.0, {}, {}, [], 0)
    chosen.sort(key=lambda row: row["start"])
    shown = chosen[:_MOST_SPANS]
    lanes: dict[str, list[float]] = {}
    spans = [_placed(row, lanes.setdefault(row["part"], [])) for row in shown]
    start, end = min(row["start"] for row in shown), max(row["end"] for row in shown)
    known = [part for part in PARTS if part in lanes]
    order = [*known, *(part for part in lanes if part not in PARTS)]
    busy = busy_shares([row for row in shown if row["part"] in PARTS])
    heights = {part: len(lanes[part]) for part in order}
    return Schedule(first, end_step, of, start, end, heights, busy, spans, len(chosen) - len(shown))


def _lines(run: Path) -> dict[int, list[bytes]]:
    """The lines of each step: only those that are shown are worth reading in full."""
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


def _placed(row: dict[str, Any], ends: list[float]) -> Span:
    """In the first lane of its part that is free at that time."""
    lane = next((i for i, end in enumerate(ends) if end <= row["start"]), len(ends))
    ends[lane:] = [row["end"], *ends[lane + 1 :]]
    return Span(row["part"], row["step"], lane, row["start"], row["end"])
