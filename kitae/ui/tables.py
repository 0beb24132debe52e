"""metrics.jsonl as columns. Of a file that has grown, only the new lines are read."""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitae.ui.library import file_of
from kitae.ui.records import HeldOut, Series

_MOST_TABLES = 64

Column = list[float | None]


class LineReader:
    """The complete lines of a file that were added since the last call."""

    def __init__(self) -> None:
        self._inode = -1
        self._offset = 0

    def read(self, path: Path) -> tuple[bool, list[Any]]:
        """Whether the file was replaced, as a resumed run does, and the values of its new lines."""
        with path.open("rb") as file:
            stat = path.stat()
            anew = stat.st_ino != self._inode or stat.st_size < self._offset
            if anew:
                self._inode, self._offset = stat.st_ino, 0
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return anew, list(_values(whole.splitlines()))


def _values(lines: Iterable[bytes]) -> Iterable[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # a crash cut the line off, and the resumed run wrote on behind it


class MetricTable:
    """The steps of a run and its evaluations, as columns by name. All lines of one step are one row."""

    def __init__(self) -> None:
        self._reader = LineReader()
        self._clear()

    def _clear(self) -> None:
        self.steps = _Columns()
        self.evaluations = _Columns()

    def refresh(self, run: Path) -> None:
        path = file_of(run, "metrics.jsonl")
        if path is None:
            self._clear()
            return
        anew, rows = self._reader.read(path)
        if anew:
            self._clear()
        for row in rows:
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                (self.evaluations if row.get("kind") == "eval" else self.steps).add(_own_names(row))

    def series(self, names: Iterable[str]) -> Series:
        """Some columns of the steps, and all columns of the evaluations."""
        known = {name: self.steps.columns[name] for name in names if name in self.steps.columns}
        return Series(self.steps.at, known, self.evaluations.at, self.evaluations.columns)

    def points(self) -> list[HeldOut]:
        """The evaluations that have a mean."""
        columns = self.evaluations.columns
        low, high = columns.get("avg_low"), columns.get("avg_high")
        return [
            HeldOut(step, mean, low[i] if low else None, high[i] if high else None)
            for i, (step, mean) in enumerate(zip(self.evaluations.at, columns.get("avg", ()), strict=False))
            if mean is not None
        ]

    def last(self, name: str) -> float | None:
        column = self.steps.columns.get(name, ())
        return next((value for value in reversed(column) if value is not None), None)


def _own_names(row: dict[str, Any]) -> dict[str, Any]:
    """The row; the names of numbers of another suite than the run's own task begin with that suite: `"gsm8k/avg"`."""
    suite = row.get("suite")
    return row if suite is None else {"step": row["step"], **{f"{suite}/{name}": row[name] for name in row}}


class _Columns:
    def __init__(self) -> None:
        self.at: list[int] = []
        self.columns: dict[str, Column] = {}

    def add(self, row: dict[str, Any]) -> None:
        if not self.at or self.at[-1] != row["step"]:
            self.at.append(row["step"])
            for column in self.columns.values():
                column.append(None)
        for name, value in row.items():
            if name != "step" and (number := _number(value)) is not _NO_NUMBER:
                self.columns.setdefault(name, [None] * len(self.at))[-1] = number


_NO_NUMBER = object()


def _number(value: Any) -> Any:
    """A finite number, None for null or NaN, and `_NO_NUMBER` for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        return _NO_NUMBER
    return None if value is None or not math.isfinite(value) else value


class Tables:
    """The tables of the runs that were requested last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[Path, MetricTable] = OrderedDict()

    def series(self, run: Path, names: Sequence[str]) -> Series:
        with self._lock:
            found = self._fresh(run).series(names)
            return Series(  # copies: another request may add to the columns while this one is written out
                list(found.steps),
                {name: list(column) for name, column in found.columns.items()},
                list(found.evaluation_steps),
                {name: list(column) for name, column in found.evaluations.items()},
            )

    def names(self, run: Path) -> tuple[list[str], list[str]]:
        """The names of the columns of steps and of evaluations that have at least one value."""
        with self._lock:
            table = self._fresh(run)
            steps, evaluations = (
                [name for name, column in part.columns.items() if any(value is not None for value in column)]
                for part in (table.steps, table.evaluations)
            )
            return steps, evaluations

    def glance(self, run: Path) -> "Glance":
        with self._lock:
            return Glance.of(self._fresh(run))

    def _fresh(self, run: Path) -> MetricTable:
        table = self._tables.setdefault(run, MetricTable())
        self._tables.move_to_end(run)
        while len(self._tables) > _MOST_TABLES:
            self._tables.popitem(last=False)
        table.refresh(run)
        return table


_RECENT = 40  # points of the small curve in the list
_USUAL = 9  # steps whose median is the usual time of one


@dataclass(frozen=True, slots=True)
class Glance:
    """The metrics of a run in the list of runs: `Glance(15, "reward", [0.3, …, 0.9], points, 3.1, 654.0)`."""

    step: int
    metric: str
    recent: Column
    points: list[HeldOut]
    step_seconds: float | None
    speed: float | None

    @staticmethod
    def of(table: MetricTable) -> "Glance":
        columns = table.steps.columns
        metric = next((name for name in ("reward", "loss") if name in columns), "")
        seconds = sorted(value for value in columns.get("step_seconds", [])[-_USUAL:] if value is not None)
        return Glance(
            table.steps.at[-1] if table.steps.at else 0,
            metric,
            _thinned(columns.get(metric, [])),
            table.points(),
            seconds[len(seconds) // 2] if seconds else None,
            table.last("generate_tokens_per_second") or table.last("train_tokens_per_second"),
        )


def _thinned(column: Column) -> Column:
    """At most `_RECENT` values, evenly spaced, with the last one."""
    every = -(-len(column) // _RECENT)
    return column[::-1][::every][::-1] if column else []
