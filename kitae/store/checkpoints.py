"""Checkpoints: the whole frontier of a run in one atomic step.

A checkpoint is a folder that is written under a temporary name, checksummed, flushed to disk and then renamed: it is
there completely or not at all. What was issued and not trained needs no file of its own: the journal has it. So the
journal must be on the disk first (`Journal.sync`).
"""

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kitae.errors import CorruptError, DiskFullError, StoreError
from kitae.store.disk import flush, is_full
from kitae.store.sealed import file_seal, take_seals

_MANIFEST = "manifest.json"
_FRONTIER = "frontier.json"
_SCRATCH = ".partial-"
_AT_ONCE = 8  # files that are verified beside each other

_NAME = re.compile(r"step-\d{6,}")  # what else lies there, copies by hand say, is let be

START = "start"
"""The name that stands for no checkpoint: the model as it was before the first step."""


def step_of(name: str) -> int:
    """`step_of("step-000010") == 10`. Names are sorted by it: from a million steps on, the texts would not be."""
    return int(name.removeprefix("step-"))


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where a run stands: `Frontier(step=20, updates=20, claim="9f3c0a1e…")`.

    step: policy versions trained; updates: optimizer steps taken; claim: what the journal must have of that
    (`Journal.claim`). All randomness of a run is a function of its seed and
    of positions, so no generator state is needed; what was issued is in the journal.
    """

    step: int
    updates: int
    claim: str = ""


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def names(self) -> list[str]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted((p.name for p in self.folder.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)), key=step_of)

    async def save(self, frontier: Frontier, write: Callable[[Path], Awaitable[None]]) -> Path:
        """`write` fills the folder with the trainer's state; what it leaves seals of is not read again. Old checkpoints
        go only after the new one is safe."""
        target = self.folder / f"step-{frontier.step:06d}"
        if target.exists():
            return target
        scratch = self.folder / f"{_SCRATCH}{target.name}"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
            await write(scratch)
            await _to_its_end(partial(self._commit, frontier, scratch, target))
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if is_full(error):
                last = self.names()[-1] if self.names() else "none yet"
                raise DiskFullError(
                    f"no space left to write checkpoint {target.name} in {self.folder} ({error}). The last good "
                    f"checkpoint is untouched: {last}. Free some space and resume."
                ) from error
            raise
        for name in self.names()[: -self.keep]:
            self._remove(name)
        return target

    def _commit(self, frontier: Frontier, scratch: Path, target: Path) -> None:
        (scratch / _FRONTIER).write_text(json.dumps(asdict(frontier)))
        sums = {str(path.relative_to(scratch)): seal for path, seal in take_seals(scratch).items()}
        (scratch / _MANIFEST).write_text(json.dumps(sums, indent=2))
        for path in (*scratch.rglob("*"), scratch):
            flush(path)
        scratch.rename(target)
        flush(self.folder)

    def load(self, name: str | None = None) -> tuple[Frontier, Path]:
        """The newest checkpoint, or the named one, after its checksums were compared."""
        names = self.names()
        if not names:
            raise StoreError(f"{self.folder} holds no checkpoint")
        chosen = name or names[-1]
        if chosen not in names:
            raise StoreError(f"no checkpoint {chosen!r} in {self.folder}; there are {', '.join(names)}")
        folder = self.folder / chosen
        problem = _verify(folder) or self._misplaced(folder)
        if problem:
            older = [START, *(n for n in names if step_of(n) < step_of(chosen))][-1]
            way_out = f"Go on from an older one with --from {older}."
            if older == START:
                way_out = f"There is no older one; --from {START} trains all steps again, on the journalled rollouts."
            raise CorruptError(f"checkpoint {folder} is damaged: {problem}. Nothing was changed. {way_out}")
        return _frontier(folder), folder

    def _misplaced(self, folder: Path) -> str | None:
        step = _frontier(folder).step
        return None if step == step_of(folder.name) else f"it is of step {step}"

    def that_fits(self, meets: Callable[[str, int], bool], before: int) -> str:
        """The name of the last checkpoint before a step that is whole, and whose claim is met; or `START`."""
        for name in reversed(self.names()):
            if step_of(name) < before and not _verify(self.folder / name):
                found = _frontier(self.folder / name)
                if meets(found.claim, found.step):
                    return name
        return START

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of a future that a resume from an older one gives up."""
        for name in self.names():
            if step_of(name) > step:
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Its name goes first: who is killed between two files leaves nothing that looks like a checkpoint."""
        scratch = self.folder / f"{_SCRATCH}{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        (self.folder / name).rename(scratch)
        shutil.rmtree(scratch)

    def clear_leftovers(self) -> None:
        """Remove what a killed process had begun to write. The folder must be locked: nobody else is writing."""
        for scratch in self.folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(scratch)


async def _to_its_end(work: Callable[[], None]) -> None:
    """In a thread. Who is cancelled meanwhile, once or again, leaves only after it: what it works on must stay.

    Not a task: those that are left are all cancelled when a loop is closed.
    """
    working = asyncio.get_running_loop().run_in_executor(None, work)
    stopped: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError as error:
            stopped = error
    working.result()
    if stopped is not None:
        raise stopped


def _frontier(folder: Path) -> Frontier:
    return Frontier(**json.loads((folder / _FRONTIER).read_text()))


def _verify(folder: Path) -> str | None:
    try:
        sums = dict(json.loads((folder / _MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    if _FRONTIER not in sums:
        return f"its manifest does not list {_FRONTIER}"
    if missing := [name for name in sums if not (folder / name).is_file()]:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(_AT_ONCE, "verify") as threads:
        found = [*threads.map(lambda name: file_seal(folder / name), sums)]
    for (name, expected), got in zip(sums.items(), found, strict=True):
        if got != expected:
            return f"{name} has checksum {got[:12]}…, expected {expected[:12]}…"
    return None
