"""A run seen from outside: how it stands, what it holds, what could go. Reads; locks and loads nothing.

look(Path("runs/quickstart-001")).status      "finished"

What is asked of a run from outside is written beside it: how many engines it shall have.
"""

import fcntl
import os
import sqlite3
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kitae.errors import KitaeError, StoreError
from kitae.store.checkpoints import Checkpoints
from kitae.store.columns import FOLDER
from kitae.store.disk import write_whole
from kitae.store.journal import Journal
from kitae.store.run_folder import Metrics, is_run, read_config

if TYPE_CHECKING:
    from kitae.config.root import Root

_WRITTEN = ("config.json", "journal.sqlite", "metrics.jsonl", "timeline.jsonl", "console.log", "checkpoints", "model")

Status = Literal["running", "finished", "stopped", "crashed"]


def find_runs(folder: Path) -> list["RunView"]:
    """The run that a folder is, or those in it, the one that changed last at the end."""
    if is_run(folder):
        return [look(folder)]
    if not folder.is_dir():
        raise StoreError(f"there is no folder {folder}; kitae runs DIR looks into another one")
    found = [look(child) for child in folder.iterdir() if is_run(child)]
    return sorted(found, key=lambda run: (run.changed, run.folder.name))


def look(folder: Path) -> "RunView":
    if not is_run(folder):
        what = "there is no such folder" if not folder.exists() else "it has no config.json and journal.sqlite"
        raise StoreError(f"{folder} is not a run folder: {what}")
    return RunView(folder)


@dataclass(frozen=True)
class RunView:
    folder: Path

    @cached_property
    def config(self) -> "Root":
        return read_config(self.folder)

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step."""
        return Metrics(self.folder / "metrics.jsonl").rows("step")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Those on the run's own task whose answers could be judged."""
        return [row for row in self._judged if "suite" not in row]

    @cached_property
    def suites(self) -> dict[str, list[dict[str, Any]]]:
        """The same of each other suite that the run is evaluated on, by its name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self._judged:
            if "suite" in row:
                found.setdefault(row["suite"], []).append(row)
        return found

    @cached_property
    def _judged(self) -> list[dict[str, Any]]:
        return [r for r in Metrics(self.folder / "metrics.jsonl").rows("eval") if r["avg"] is not None]

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def status(self) -> Status:
        """crashed: it was killed or ended by an error; nobody has gone on with it."""
        if _is_locked(self.folder):
            return "running"
        return "finished" if self.is_finished else "stopped" if self._last_event == "stopped" else "crashed"

    @property
    def is_finished(self) -> bool:
        return self._last_event == "finished"

    @property
    def checkpoints(self) -> list[str]:
        return Checkpoints(self.folder / "checkpoints", keep=1).names()

    @property
    def has_model(self) -> bool:
        return (self.folder / "model" / "config.json").is_file()

    @cached_property
    def changed(self) -> float:
        """When something was last written, in seconds since 1970; who only looks on touches neither of these."""
        return max((self.folder / name).stat().st_mtime for name in _WRITTEN if (self.folder / name).exists())

    @cached_property
    def size(self) -> int:
        return size_of(self.folder)

    def leftovers(self) -> list[Path]:
        """What writes that were cut off have left behind, and files of answers of which the journal has none."""
        patterns = ("checkpoints/.partial-*", "tokens/.*.partial", ".*.partial")
        return [*(path for pattern in patterns for path in self.folder.glob(pattern)), *self._idle_columns()]

    def _idle_columns(self) -> list[Path]:
        there = sorted((self.folder / FOLDER).glob("*"))
        if not there:
            return []
        try:
            journal = Journal(self.folder / "journal.sqlite", read_only=True)
            try:
                used = journal.files()
            finally:
                journal.close()
        except (KitaeError, sqlite3.Error):  # damaged: who knows what it refers to
            return []
        return [path for path in there if path.name not in used]

    @cached_property
    def _last_event(self) -> str | None:
        try:
            journal = Journal(self.folder / "journal.sqlite", read_only=True)
            try:
                kinds = [kind for _, kind, _ in journal.events() if kind in ("start", "stopped", "finished")]
            finally:
                journal.close()
        except (KitaeError, sqlite3.Error):  # damaged, or being made
            return None
        return kinds[-1] if kinds else None


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


_FILE = "engines.txt"
MOST = 4096


def ask_for(folder: Path, engines: int) -> None:
    """The run looks at it every second; one that does not go on now will when it does."""
    if not 1 <= engines <= MOST:
        raise StoreError(f"a run must have from 1 to {MOST} engines, got {engines}")
    write_whole(folder / _FILE, f"{engines}\n")


def asked_for(folder: Path) -> int | None:
    """None: nobody has asked, or what is there is no number of engines."""
    try:
        engines = int((folder / _FILE).read_text())
    except (OSError, ValueError):
        return None
    return engines if 1 <= engines <= MOST else None
