"""The run folder: everything about a run, in one place.

config.json      the resolved settings
journal.sqlite   prompts, rollouts, scores, fates, events
columns/         what engines on a cluster sampled; the journal says where in there
metrics.jsonl    one line per step; evaluations have "kind": "eval", and "suite" where it is not the run's own task
metrics.seals    checksums of these lines
timeline.jsonl   who worked when
tokens/          numbers of single tokens, of a share of the samples
evaluations/     answers to held-out prompts, of each evaluation
console.log      what was on the screen
machine.json     the machine that last worked on it, and the versions
checkpoints/     the last few frontiers
model/           the trained model, loadable by transformers
plot.png         reward, length, entropy over steps
"""

import fcntl
import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.errors import ConfigChangedError, ConfigError, CorruptError, StoreError
from kitae.store.checkpoints import START, Checkpoints
from kitae.store.disk import explained, flush, write_whole
from kitae.store.journal import Journal
from kitae.store.sealed import seal

if TYPE_CHECKING:
    from kitae.config.root import Root
    from kitae.store.config import RunConfig

# What makes settings of files is imported where that is done: who only looks at runs, as the window's first page does,
# would wait for it longer than for anything else.

LEARNING = (
    "training.lr",
    "training.schedule",
    "training.warmup_steps",
    "training.weight_decay",
    "training.clip_norm",
    "training.moments",
)
"""Settings without which a past step cannot be trained again as it was."""

CHANGEABLE = (
    *LEARNING,
    "model.device",
    "training.steps",
    "training.minutes",
    "training.token_budget",
    "training.checkpoint_activations",
    "method.teacher.place",
    "method.teacher.device",
    "method.teacher.threads",
    "verifier.workers",
    "verifier.timeout",
    "verifier.max_error_share",
    "verifier.check_gold",
    "pipeline.in_flight",
    "pipeline.stall_limit",
    "pipeline.refill.most",
    "pipeline.refill.oversample",
    "engine.*",
    "cluster.*",
    "checkpoint.*",
    "eval.every",
    "eval.suites",
    "eval.data",
    "observe.*",
)
"""Settings that a resumed run may change: what its journal says does not depend on them. Not among them is what decides
which prompts are asked, how answers are sampled and scored, what a step is made of, or how old a sample may be."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended: `Result(folder, stopped_by=None, step=15, before={"avg": 0.48, …}, after={"avg": 1.0, …})`.

    stopped_by: the signal that ended it before its last step, or None. before, after: its evaluations on what is held
    out, or None where nothing is.
    """

    folder: Path
    stopped_by: int | None
    step: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    @property
    def model(self) -> Path:
        """The folder of the trained model, once the run is finished."""
        return self.folder / "model"

    @property
    def metrics(self) -> "list[dict[str, Any]]":
        """The lines of metrics.jsonl: one for each step, with "kind": "step", and one for each evaluation, "eval"."""
        return Metrics(self.folder / "metrics.jsonl").rows()


class TimeLimit:
    """What is left of the time for steps. seconds: what those before have taken, whichever process trained them."""

    def __init__(self, minutes: float, seconds: float = 0.0) -> None:
        self.left = 60 * minutes - seconds if minutes else inf

    def spend(self, seconds: float) -> None:
        self.left -= seconds

    @property
    def is_reached(self) -> bool:
        return self.left <= 0


class RunStore:
    """A run open for writing. One process at a time: the folder is locked."""

    def __init__(self, folder: Path, config: "Root", journal: Journal | None = None) -> None:
        self.folder = folder
        self.config = config
        self.changes: dict[str, str] = {}  # settings that are not as the run had them, by key
        self.damage: list[str] = []  # what was found and mended when it was opened
        self._lock = lock(folder)
        try:
            self.journal = journal or Journal(folder / "journal.sqlite")
        except StoreError:
            self._lock.close()
            raise
        self.checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
        self.checkpoints.clear_leftovers()
        shutil.rmtree(folder / ".model.partial", ignore_errors=True)  # of a killed export
        self.metrics = Metrics(folder / "metrics.jsonl", folder / "metrics.seals")

    @staticmethod
    def create(config: "Root", folder: Path | None = None) -> "RunStore":
        """A run in a new folder, or in one that was `reserved` for it."""
        folder = folder or reserve(config.run)
        try:
            write_whole(folder / "config.json", config.to_json())
        except (OSError, StoreError) as error:
            raise StoreError(f"cannot make the run folder {folder}: {error}") from error
        return RunStore(folder, config)

    @staticmethod
    def open(folder: Path, overrides: Iterable[str] = (), *, anew: bool = False) -> "RunStore":
        """An existing run, with some settings changed if they may be (`CHANGEABLE`), by `overrides` or in config.json.
        Where that is damaged, its settings are those of the journal. anew: a damaged journal is set aside.

        Nothing else is written before `begin`.
        """
        from kitae.config.recipe import override_config, parse_config

        config, damage = _settings(folder)
        if wanted := list(overrides):
            config = override_config(config, wanted)
        if anew and (problem := _journal_problem(folder)):
            damage.append(f"{problem}. It was set aside as {_set_aside(folder)}, and the run begins anew")
        store = RunStore(folder, config)
        store.damage = damage
        try:
            with _way_out():
                store.journal.check()
            original = store.journal.meta("config")
            store.changes = _differences(parse_config(json.loads(original)), config) if original is not None else {}
            if refused := [text for key, text in store.changes.items() if not _is_changeable(key)]:
                raise ConfigChangedError(
                    "a run keeps most of its settings; these were changed and cannot be:\n  "
                    + "\n  ".join(refused)
                    + f"\nThese can: {', '.join(CHANGEABLE)}. For the others start a new run, from this one's model if "
                    f"you like: kitae train … model.path={folder}. Remove config.json to go on with what they were"
                )
        except BaseException:
            store.close()
            raise
        return store

    async def begin(self, step: int, forget: bool = False) -> None:
        """The run goes on from this step; changed settings are recorded. forget: what came after it is given up.

        A process that is killed in here leaves settings that count as changed again, or fewer checkpoints; never a
        checkpoint of what is forgotten.
        """
        write_whole(self.folder / "config.json", self.config.to_json())
        self.checkpoints.forget_after(step)
        events = [("start", f"step {step}"), *([("forgot", f"after step {step}")] if forget else [])]
        events += [("changed", f"after step {step}: {text}") for text in self.changes.values()]
        await self.journal.begin(self.config.to_json(), events, step if forget else None)
        self.metrics.rewind(max(step, self.journal.last_step()))

    def time_limit(self) -> TimeLimit:
        return TimeLimit(self.config.training.minutes, self.metrics.seconds())

    async def sync(self) -> None:
        """Return when journal and metrics would survive a loss of power."""
        await self.journal.sync()
        self.metrics.sync()

    def close(self) -> None:
        self.journal.close()
        self._lock.close()


def reserve(run: "RunConfig") -> Path:
    """A new folder: the run's name and the first free number."""
    parent = Path(run.dir)
    for number in range(1, 100_000):
        folder = parent / f"{run.name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise StoreError(f"cannot make the run folder {folder}: {error}") from error
        return folder
    raise StoreError(f"no free run number for {run.name!r} in {parent}")


@contextmanager
def reserved(run: "RunConfig") -> Iterator[Path]:
    """A folder for a run that is to find its data there. It is removed again if no run came of it."""
    folder = reserve(run)
    try:
        yield folder
    finally:
        if not is_run(folder):
            shutil.rmtree(folder, ignore_errors=True)


class Metrics:
    """Append-only lines of JSON. seals: a file for the checksum of each, which is written first; None: who only looks
    at them compares nothing."""

    def __init__(self, path: Path, seals: Path | None = None) -> None:
        self.path = path
        self._seals = seals

    def append(self, row: dict[str, Any]) -> None:
        line = json.dumps({k: _finite(v) for k, v in row.items()}, allow_nan=False)
        for path, text in ((self._seals, _line_seal(line)), (self.path, line)):
            if path is None:
                continue
            try:
                with path.open("a") as file:
                    file.write(text + "\n")
            except OSError as error:
                raise explained(path, error) from error

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All whole lines, or those of one kind: "step" or "eval"."""
        return [row for row in self._read()[0] if kind is None or row["kind"] == kind]

    def damaged(self) -> int:
        """How many lines are not what was written, or not there. The last one may have been cut off by a crash."""
        return self._read()[1]

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        lines = _lines_of(self.path)
        seals, sealed = _lines_of(self._seals), {_line_seal(line) for line in lines}
        lost = [each for each in seals[:-1] if each not in sealed]
        if lost:  # then a line without a checksum is one of these; else a loss of power took its checksum
            lines = [line for line in lines if _line_seal(line) in seals]
        return [row for line in lines if (row := _row_of(line)) is not None], len(lost)

    def seconds(self) -> float:
        """What all steps have taken."""
        return sum(float(row["step_seconds"]) for row in self.rows("step"))

    def sync(self) -> None:
        for path in (self.path, self._seals):
            if path is not None and path.exists():
                flush(path)

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after a checkpoint; they will be written again."""
        kept = [json.dumps(row) for row in self.rows() if row["step"] <= step]
        write_whole(self.path, "".join(f"{line}\n" for line in kept))
        if self._seals is not None:
            write_whole(self._seals, "".join(f"{_line_seal(line)}\n" for line in kept))


def _lines_of(path: Path | None) -> list[str]:
    """Those that are complete."""
    content = path.read_bytes() if path is not None and path.exists() else b""
    return [line.decode("utf-8", "replace") for line in content.split(b"\n")[:-1]]


def _line_seal(line: str) -> str:
    return seal("metrics", line).hex()


def _row_of(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        return row if isinstance(row["kind"], str) and isinstance(row["step"], int) else None
    except (ValueError, TypeError, KeyError):
        return None


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not a number is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "journal.sqlite").is_file()


def read_config(folder: Path) -> "Root":
    from kitae.config.recipe import parse_config

    path = folder / "config.json"
    try:
        return parse_config(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder} is not a run folder: it has no config.json") from None
    except ValueError as error:
        raise StoreError(f"{path} is not valid JSON: {error}") from None


def _settings(folder: Path) -> "tuple[Root, list[str]]":
    """Those of config.json; or, where it is missing or no JSON, those that the journal has, and what is to be said."""
    from kitae.config.recipe import parse_config

    try:
        return read_config(folder), []
    except ConfigError as error:
        raise type(error)(
            f"{folder / 'config.json'}: {error}\nMend it, or remove it: the run then goes on with the settings that "
            "its journal has"
        ) from error
    except StoreError as error:
        text = _journalled(folder)
        if text is None:
            raise
        if not (folder / "config.json").exists():  # by which a run is known
            write_whole(folder / "config.json", text)
        said = f"{error}: the run goes on with the settings that its journal has"
        return parse_config(json.loads(text)), [said]


def _journalled(folder: Path) -> str | None:
    """The settings that the journal has, if it can be read."""
    try:
        journal = Journal(folder / "journal.sqlite", read_only=True)
    except StoreError:
        return None
    try:
        return journal.meta("config")
    except StoreError:
        return None
    finally:
        journal.close()


@contextmanager
def _way_out() -> Iterator[None]:
    try:
        yield
    except CorruptError as error:
        raise CorruptError(
            f"{error}. Nothing was changed. Put a copy of the journal in its place, or begin anew with --from {START} "
            "--forget, which sets it aside"
        ) from error


def _journal_problem(folder: Path) -> str:
    """Why the journal cannot be used; an empty text: it can."""
    try:
        journal = Journal(folder / "journal.sqlite")
    except StoreError as error:
        return str(error)
    try:
        journal.check()
    except StoreError as error:
        return str(error)
    finally:
        journal.close()
    return ""


def _set_aside(folder: Path) -> Path:
    """Give the journal another name; that name."""
    names = (folder / f"journal.damaged-{number}.sqlite" for number in itertools.count(1))
    name = next(path for path in names if not path.exists())
    for ending in ("", "-wal", "-shm"):
        part = folder / f"journal.sqlite{ending}"
        if part.exists():
            part.rename(f"{name}{ending}")
    return name


def _differences(before: "Root", now: "Root") -> dict[str, str]:
    """`{"training.lr": "training.lr: was 1e-05, is 1e-06"}`"""
    old, new = before.flat(), now.flat()
    return {key: f"{key}: was {old[key]!r}, is {new[key]!r}" for key in old if old[key] != new.get(key)}


def needed_again(config: "Root") -> tuple[str, ...]:
    """Settings without which a past step of this run cannot be trained again as it was."""
    return LEARNING if config.training.schedule == "constant" else (*LEARNING, "training.steps")


def changes_of_learning(journal: Journal, step: int, keys: Collection[str]) -> list[str]:
    """What was recorded about changes after this step, without which the steps from there on were trained otherwise:
    `["after step 20: training.lr: was 1e-05, is 1e-06"]`."""
    found: list[tuple[int, str]] = []
    for _, kind, detail in journal.events():
        if kind == "forgot":
            found = [(after, text) for after, text in found if after <= int(detail.rpartition(" ")[2])]
        elif kind == "changed" and (change := _CHANGE.match(detail)) is not None and change[2] in keys:
            found.append((int(change[1]), detail))
    return [text for after, text in found if after > step]


_CHANGE = re.compile(r"after step (\d+): ([\w.]+):")


def _is_changeable(key: str) -> bool:
    return key in CHANGEABLE or f"{key.partition('.')[0]}.*" in CHANGEABLE


def lock(folder: Path) -> Any:
    """An open file; closing it gives the run free for another process."""
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise StoreError(f"cannot write to the run folder {folder}: {error}") from error
    for _ in range(_LOCK_TRIES):  # who only looks whether a run is locked holds the lock for an instant
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            time.sleep(_LOCK_PAUSE)
    file.close()
    raise StoreError(f"another process is working in {folder}; wait for it or stop it first")


_LOCK_TRIES, _LOCK_PAUSE = 5, 0.02
