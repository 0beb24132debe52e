"""What ran when: spans of generation, verification, training and sync, and a chart of them.

A row of timeline.jsonl is `{"part": "train", "step": 3, "start": 12.1, "end": 14.0}`, in seconds since the run began.
Spans of generation and verification belong to groups, and overlap; the others do not.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kitae.clock import now
from kitae.errors import StoreError
from kitae.store.disk import explained

PARTS = ("generate", "verify", "train", "sync", "save", "evaluate")
FILE = "timeline.jsonl"
_MOST_LINES = 16  # the height of a part in the picture, in lines

Period = tuple[float, float]


class Timeline:
    """Appends to the file of a run. A resumed run continues where its clock stopped."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        past = read(folder)
        self._offset = max((row["end"] for row in past), default=0.0) - now()

    def add(self, part: str, step: int, start: float, end: float) -> None:
        """Times are those of `kitae.clock.now`."""
        times = {"start": round(start + self._offset, 4), "end": round(end + self._offset, 4)}
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"part": part, "step": step, **times}) + "\n")
        except OSError as error:
            raise explained(self._path, error) from error

    @contextmanager
    def span(self, part: str, step: int) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self.add(part, step, start, now())


def read(folder: Path) -> list[dict[str, Any]]:
    """Lines that were cut off by a crash, or damaged, are left out."""
    rows = []
    if (folder / FILE).exists():
        for line in (folder / FILE).read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
                times = math.isfinite(row["start"]) and math.isfinite(row["end"])
                if times and row["part"] in PARTS and isinstance(row["step"], int):
                    rows.append(row)
            except (ValueError, TypeError, KeyError, OverflowError):
                continue
    return rows


def busy_shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of the whole time in which each part was active; overlapping spans count once."""
    if not rows:
        return {}
    whole = max(r["end"] for r in rows) - min(r["start"] for r in rows)
    spans: dict[str, list[Period]] = {part: [] for part in PARTS}
    for row in rows:
        spans[row["part"]].append((row["start"], row["end"]))
    return {part: sum(end - start for start, end in union(found)) / whole for part, found in spans.items() if found}


def draw(folder: Path, output: Path | None = None, steps: int = 12) -> Path:
    """A Gantt chart of the last `steps` steps as a PNG; one line for each group that was being sampled."""
    rows = read(folder)
    if not rows:
        raise StoreError(f"{folder} has no timeline")
    from kitae.observe.plots import load_pyplot, save_figure

    pyplot = load_pyplot()
    last = max(row["step"] for row in rows)
    begin = min((r["start"] for r in rows if r["step"] > last - steps and r["part"] != "generate"), default=0.0)
    figure, axis = pyplot.subplots(figsize=(11, 4.5), constrained_layout=True)
    draw_on(axis, [row for row in rows if row["end"] >= begin])
    axis.set_xlabel("seconds since the run began; percentages: share of the time at work")
    axis.set_title(folder.name)
    return save_figure(figure, output or folder / "timeline.png")


def draw_on(axis: Any, rows: list[dict[str, Any]]) -> None:
    """The bars of the chart and the names of their parts."""
    lanes: dict[str, list[float]] = {part: [] for part in PARTS}
    colours = dict(zip(PARTS, ("#4c78a8", "#72b7b2", "#f58518", "#e45756", "#b279a2", "#54a24b"), strict=True))
    placed = [(row, _lane(lanes[row["part"]], row)) for row in sorted(rows, key=lambda r: r["start"])]
    base, ticks = 0.0, {}
    for part in PARTS:
        if lanes[part]:
            height = min(1.0, _MOST_LINES / len(lanes[part]))  # many groups must not hide the other parts
            ticks[part] = base + (len(lanes[part]) - 1) / 2 * height
            bars = [(row, lane) for row, lane in placed if row["part"] == part]
            axis.barh(
                [base + lane * height for _, lane in bars],
                [row["end"] - row["start"] for row, _ in bars],
                left=[row["start"] for row, _ in bars],
                height=0.8 * height,
                color=colours[part],
            )
            base += len(lanes[part]) * height + 1
    shares = busy_shares(rows)
    axis.set_yticks(list(ticks.values()), [f"{part}  {shares[part]:.0%}" for part in ticks])
    axis.invert_yaxis()


def _lane(ends: list[float], row: dict[str, Any]) -> int:
    """The first line of its part that is free at that time."""
    for lane, end in enumerate(ends):
        if end <= row["start"]:
            ends[lane] = row["end"]
            return lane
    ends.append(row["end"])
    return len(ends) - 1


def union(spans: list[Period]) -> list[Period]:
    """The same time without overlaps, in order."""
    joined: list[Period] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
