"""The run folder: everything about a run, in one place.

config.json      the resolved settings
journal.sqlite   prompts, rollouts, scores, fates, events
metrics.jsonl    one line per step; evaluations have "kind": "eval"
timeline.jsonl   who worked when
console.log      what was on the screen
checkpoints/     the last few frontiers
model/           the trained model, loadable by transformers
plot.png         reward, length, entropy over steps
"""

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

from kitae.config import Config, parse_config
from kitae.errors import ConfigChangedError, DiskFullError, StoreError
from kitae.store.checkpoint import Checkpoints, is_full
from kitae.store.journal import Journal


class RunStore:
    """A run open for writing. One process at a time: the folder is locked."""

    def __init__(self, folder: Path, config: Config, journal: Journal | None = None) -> None:
        self.folder = folder
        self.config = config
        self._lock = lock(folder)
        try:
            self.journal = journal or Journal(folder / "journal.sqlite")
        except StoreError:
            self._lock.close()
            raise
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        self.metrics = Metrics(folder / "metrics.jsonl")

    @staticmethod
    def create(config: Config) -> "RunStore":
        """A new folder: the run's name and the first free number."""
        parent = Path(config.run.dir)
        for number in range(1, 100_000):
            folder = parent / f"{config.run.name}-{number:03d}"
            try:
                folder.mkdir(parents=True)
                (folder / "config.json").write_text(config.to_json())
            except FileExistsError:
                continue
            except OSError as error:
                raise StoreError(f"cannot make the run folder {folder}: {error}") from error
            return RunStore(folder, config)
        raise StoreError(f"no free run number for {config.run.name!r} in {parent}")

    @staticmethod
    def open(folder: Path) -> "RunStore":
        """An existing run. Refuses a config.json that differs from what the run was started with."""
        config = read_config(folder)
        store = RunStore(folder, config)
        try:
            original = store.journal.meta("config")
            changed = _differences(parse_config(json.loads(original)), config) if original is not None else []
            if changed:
                raise ConfigChangedError(
                    f"{folder / 'config.json'} was changed since the run began:\n  "
                    + "\n  ".join(changed)
                    + "\nPut the old values back, or start a new run with the new ones."
                )
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        self.journal.close()
        self._lock.close()


class Metrics:
    """Append-only lines of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({k: _finite(v) for k, v in row.items()}, allow_nan=False) + "\n")
        except OSError as error:
            kind = DiskFullError if is_full(error) else StoreError
            raise kind(f"cannot write {self.path}: {error}; the steps before are safe") from error

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All complete lines, or those of one kind: "step" or "eval"."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # a line cut off by a crash
        return [r for r in rows if kind is None or r["kind"] == kind]

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after a checkpoint; they will be written again."""
        kept = [r for r in self.rows() if r["step"] <= step]
        scratch = self.path.with_suffix(".partial")
        scratch.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(scratch, self.path)


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not a number is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "journal.sqlite").is_file()


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        return parse_config(json.loads(path.read_text()))
    except FileNotFoundError:
        raise StoreError(f"{folder} is not a run folder: it has no config.json") from None
    except ValueError as error:
        raise StoreError(f"{path} is not valid JSON: {error}") from None


def _differences(before: Config, now: Config) -> list[str]:
    old, new = before.flat(), now.flat()
    return [f"{key}: was {old[key]!r}, is {new[key]!r}" for key in old if old[key] != new[key]]


def lock(folder: Path) -> Any:
    """An open file; closing it gives the run free for another process."""
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise StoreError(f"cannot write to the run folder {folder}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StoreError(f"another process is working in {folder}; wait for it or stop it first") from None
    return file
