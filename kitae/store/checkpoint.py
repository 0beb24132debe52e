"""Checkpoints: the whole frontier of a run in one atomic step.

A checkpoint is a folder that is written under a temporary name, checksummed, flushed to disk and then renamed: it is
there completely or not at all. What is in flight needs no file of its own: the journal has it.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from kitae.errors import CorruptError, DiskFullError, StoreError

_MANIFEST = "manifest.json"
_FRONTIER = "frontier.json"


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where a run stands: `Frontier(step=20, cursor=160, updates=20, issued=160)`.

    step: policy versions trained; cursor: the next group id to issue; updates: optimizer steps taken; issued: slots of
    the buffer used so far. All randomness of a run is a function of its seed and these numbers, so no generator state
    is needed; what was issued and not trained is in the journal.
    """

    step: int
    cursor: int
    updates: int
    issued: int


class Checkpoints:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def names(self) -> list[str]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(p.name for p in self.folder.iterdir() if p.name.startswith("step-"))

    def save(self, frontier: Frontier, write: Callable[[Path], None]) -> Path:
        """`write` fills the folder with the trainer's state. Old checkpoints go only after the new one is safe."""
        target = self.folder / f"step-{frontier.step:06d}"
        if target.exists():
            return target
        scratch = self.folder / f".partial-{target.name}"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            scratch.mkdir(parents=True)
            write(scratch)
            (scratch / _FRONTIER).write_text(json.dumps(asdict(frontier)))
            sums = {p.name: _checksum(p) for p in sorted(scratch.iterdir())}
            (scratch / _MANIFEST).write_text(json.dumps(sums, indent=2))
            for path in (*scratch.iterdir(), scratch):
                _flush(path)
            scratch.rename(target)
            _flush(self.folder)
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
            shutil.rmtree(self.folder / name)
        return target

    def load(self, name: str | None = None) -> tuple[Frontier, Path]:
        """The newest checkpoint, or the named one, after its checksums were compared."""
        names = self.names()
        if not names:
            raise StoreError(f"{self.folder} holds no checkpoint")
        chosen = name or names[-1]
        if chosen not in names:
            raise StoreError(f"no checkpoint {chosen!r} in {self.folder}; there are {', '.join(names)}")
        folder = self.folder / chosen
        problem = _verify(folder)
        if problem:
            older = [n for n in names if n < chosen]
            way_out = f" Go on from an older one with --from {older[-1]}." if older else ""
            raise CorruptError(f"checkpoint {folder} is damaged: {problem}. Nothing was changed.{way_out}")
        return Frontier(**json.loads((folder / _FRONTIER).read_text())), folder

    def forget_after(self, step: int) -> None:
        """Remove checkpoints of a future that a resume from an older one gives up."""
        for name in self.names():
            if int(name.removeprefix("step-")) > step:
                shutil.rmtree(self.folder / name)


def _verify(folder: Path) -> str | None:
    try:
        sums = dict(json.loads((folder / _MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    if _FRONTIER not in sums:
        return f"its manifest does not list {_FRONTIER}"
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (got := _checksum(path)) != expected:
            return f"{name} has checksum {got[:12]}…, expected {expected[:12]}…"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Disk full, quota or file-size limit, also when a library wraps the system's error in its own."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = str(error).lower()
    return any(phrase in text for phrase in ("no space left", "disk quota", "file too large"))
