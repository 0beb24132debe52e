"""Progress on the screen: a live table on a terminal, plain lines anywhere else.

Both are as wide as the screen, or 80 columns if it has no width. The most important columns are shown first, and others
if there is room; the log has all of them.
"""

import resource
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from kitae.config.root import DistilConfig, RLConfig, Root
from kitae.observe.observer import Reported
from kitae.observe.plain_output import terminal_of, visible
from kitae.store.run_folder import Metrics, TimeLimit

_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("length", "length", "{:.1f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("gap", "logp_gap", "{:.4f}"),
    ("signal", "groups_with_signal", "{:.0f}"),
    ("gen tok/s", "generate_tokens_per_second", "{:,.0f}"),
    ("train tok/s", "train_tokens_per_second", "{:,.0f}"),
    ("s/step", "step_seconds", "{:.1f}"),
)

_KL = ("kl", "kl_k3", "{:.4f}")
_TEACHER_KL = ("teacher kl", "teacher_kl", "{:.4f}")
_DIVERGENCE = ("divergence", "teacher_divergence", "{:.4f}")

_OFFLINE = (
    ("step", "step", "{:.0f}"),
    ("loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("margin", "margin", "{:.3f}"),
    ("grad norm", "grad_norm", "{:.3f}"),
    ("train tok/s", "train_tokens_per_second", "{:,.0f}"),
    ("s/step", "step_seconds", "{:.2f}"),
)


_MATTERS = (
    *("reward", "loss", "accuracy", "step_seconds", "entropy", "length", "kl_k3", "teacher_kl", "teacher_divergence"),
    *("groups_with_signal", "margin", "logp_gap", "grad_norm", "generate_tokens_per_second", "train_tokens_per_second"),
)
"""The order in which columns are chosen if not all fit. The first of them, the step and the ETA always are."""

_GAP = 2  # between columns


def fitting(widths: Mapping[str, int], room: int) -> list[str]:
    """The columns that fit, in their order: by importance, each one that still has room."""
    chosen: set[str] = set()
    for key in sorted(widths, key=_MATTERS.index):
        if not chosen or widths[key] + _GAP <= room:
            chosen.add(key)
            room -= widths[key] + _GAP
    return [key for key in widths if key in chosen]


def _columns(config: Root) -> tuple[tuple[str, str, str], ...]:
    """The columns for a run. KLs to a reference and to a teacher, where there are any, follow the entropy."""
    if not isinstance(config, RLConfig):
        return tuple(c for c in _OFFLINE if config.measure == "accuracy" or c[0] not in ("accuracy", "margin"))
    others = [_KL] if config.algorithm.kl.coef else []
    if isinstance(config, DistilConfig):
        others.append(_DIVERGENCE if config.method.divergence else _TEACHER_KL)
    return (*_COLUMNS[:4], *others, *_COLUMNS[4:])


Log = Callable[[str], None]


def make_progress(config: Root, folder: Path, log: Log) -> "Progress":
    return (LiveProgress if sys.stdout.isatty() else Progress)(config, folder, log)


def peak_memory_gb(status: Path = Path("/proc/self/status")) -> float:
    """The largest resident memory of this process so far.

    If the system does not record it, it is taken from `getrusage`, which may count memory of the program that started
    this one.
    """
    try:
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _nowhere(text: str) -> None:
    pass


class Progress:
    """Plain lines, one for each step. log: receives everything that stays on the screen."""

    def __init__(self, config: Root, folder: Path, log: Log = _nowhere) -> None:
        self.config = config
        self.folder = folder
        self.log = log
        self.columns = _columns(config)
        self._seconds: deque[float] = deque(maxlen=10)
        self._limit = TimeLimit(config.training.minutes, Metrics(folder / "metrics.jsonl").seconds())
        self._reasons: set[str] = set()

    def __enter__(self) -> Self:
        self.note(f"{self.config.title}; run folder {self.folder}")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        self.show(text)
        self.log(text)

    def show(self, text: str) -> None:
        print(text, flush=True)

    def step(self, report: Reported) -> None:
        row = report.row()
        eta = self._eta(row)
        cells = [f"{title} {_cell(row, key, form)}" for title, key, form in self.columns[1:]]
        first, end = f"step {row['step']}/{self.config.training.steps}", f"ETA {eta}"
        self.log("  ".join([first, *cells, end, *remarks(row)]))
        self.show_step(row, eta, first, cells, end)
        self._explain_errors(row)

    def show_step(self, row: dict[str, Any], eta: str, first: str, cells: list[str], end: str) -> None:
        """Print a line, and the remarks on a second one if they do not fit."""
        width, remarked = shutil.get_terminal_size().columns, "  ".join(remarks(row))
        keyed = dict(zip((key for _, key, _ in self.columns[1:]), cells, strict=True))
        room = width - len(first) - len(end) - _GAP
        beside = not remarked or len(remarked) + _GAP + min(map(len, cells)) + _GAP <= room
        room -= len(remarked) + _GAP if remarked and beside else 0
        shown = [keyed[key] for key in fitting({key: len(cell) for key, cell in keyed.items()}, room)]
        self.show("  ".join([first, *shown, end, *([remarked] if remarked and beside else [])]))
        if not beside:
            self.show(textwrap.fill(remarked, width, initial_indent="  ", subsequent_indent="  "))

    def _explain_errors(self, row: dict[str, Any]) -> None:
        """Print why answers could not be judged, each reason once."""
        reason = next(iter(str(row.get("first_error") or "").splitlines()), "")
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            self.note(f"not judged: {reason} (kitae show {self.folder} --errors)")

    def evaluated(self, row: dict[str, Any]) -> None:
        judged = row["avg"] == row["avg"]  # NaN: no answer could be judged
        found = (
            f"{row['avg']:.3f} [{row['avg_low']:.3f}, {row['avg_high']:.3f}]" if judged else "not known: all errors,"
        )
        what = "score" if row.get("partial") else self.config.measure
        where = row.get("suite") or "held-out"
        of, count = ("prompts", row["prompts"]) if "prompts" in row else ("examples", row["examples"])
        self.note(f"{where} {what} at step {row['step']}: {found} on {count:.0f} {of}")

    def finished(self, folder: Path) -> None:
        pass

    def _eta(self, row: dict[str, Any]) -> str:
        self._seconds.append(row["step_seconds"])
        self._limit.spend(row["step_seconds"])
        left = (self.config.training.steps - row["step"]) * sum(self._seconds) / len(self._seconds)
        left = max(0.0, min(left, self._limit.left))
        return f"{left / 60:.0f} min" if left >= 100 else f"{left:.0f} s"


class LiveProgress(Progress):
    """A table of the last steps and a status line, updated in place."""

    def __init__(self, config: Root, folder: Path, log: Log = _nowhere) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(config, folder, log)
        self.console = Console(file=terminal_of(sys.stdout))
        self._rows: deque[dict[str, str]] = deque(maxlen=12)
        self._status = "starting"
        self._began = time.perf_counter()
        self._live = Live(console=self.console, get_renderable=self._draw, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        super().__enter__()
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._status = "done" if error[0] is None else "stopped"
        self._live.__exit__(None, None, None)

    def status(self, text: str) -> None:
        self._status = text

    def show(self, text: str) -> None:
        self.console.print(visible(text), markup=False, highlight=False)

    def show_step(self, row: dict[str, Any], eta: str, first: str, cells: list[str], end: str) -> None:
        found = {key: _cell(row, key, form) for _, key, form in self.columns}
        self._rows.append({**found, "eta": eta, "remarks": ", ".join(remarks(row))})

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        rows = list(self._rows)  # rich draws in a thread of its own, while steps are added
        titles = {**{key: title for title, key, _ in self.columns}, "eta": "ETA", "remarks": "remarks"}
        wide = {key: max([len(title), *(len(row[key]) for row in rows)]) for key, title in titles.items()}
        room = self.console.width - wide["step"] - wide["eta"] - _GAP
        others = {key: wide[key] for _, key, _ in self.columns[1:]}
        said = any(row["remarks"] for row in rows)
        beside = said and wide["remarks"] + _GAP + min(others.values()) + _GAP <= room
        room -= wide["remarks"] + _GAP if beside else 0
        table = Table(box=None, pad_edge=False)
        shown = ["step", *fitting(others, room), "eta", *(["remarks"] if beside else [])]
        for key in shown:
            table.add_column(titles[key], justify="left" if key == "remarks" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[key]) for key in shown))
        below = [] if beside else [Text(f"step {r['step']}: {r['remarks']}") for r in rows[-3:] if r["remarks"]]
        elapsed = time.perf_counter() - self._began
        status = Text(f"{elapsed:5.0f} s  {self._status}", style="dim", no_wrap=True, overflow="ellipsis")
        return Group(table, *below, status)


def remarks(row: dict[str, Any]) -> list[str]:
    """What is unusual about a step: `["errors 3 of 64", "no update", "staleness 0.50 (at most 1)"]`."""
    found = []
    if errors := row.get("errors"):
        found.append(f"errors {errors} of {round(errors / row['error_share'])}")
    if row.get("updates") == 0:
        found.append("no update")
    if skipped := (row.get("skipped_updates") or 0) + (row.get("critic_skipped_updates") or 0):
        found.append(f"updates skipped {skipped:.0f}")
    if row.get("staleness_max"):
        found.append(f"staleness {row['staleness']:.2f} (at most {row['staleness_max']})")
    for key in ("overdue", "engine_restarts", "teacher_restarts"):
        if row.get(key):
            found.append(f"{key.replace('_', ' ')} {row[key]:.0f}")
    return found


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    nothing = value is None or (key.endswith("_per_second") and value == 0)  # nothing was done, so there is no speed
    return "–" if nothing else form.format(value)
