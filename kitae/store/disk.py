"""What the disk must have before something else may rely on it, who may read it, and what it says when it is full."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kitae.errors import DiskFullError, StoreError


def flush(path: Path) -> None:
    """Return when a file, or the entries of a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    scratch = path.with_name(f".{path.name}.scratch")
    try:
        scratch.write_text(text, encoding="utf-8")
        flush(scratch)
        os.replace(scratch, path)
        flush(path.parent)
    except OSError as error:
        raise explained(path, error) from error


def is_full(error: BaseException) -> bool:
    """Disk full, quota or file-size limit, also when a library wraps the system's error in its own."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = str(error).lower()
    return any(phrase in text for phrase in ("no space left", "disk quota", "file too large"))


def explained(path: Path, error: OSError) -> StoreError:
    return (DiskFullError if is_full(error) else StoreError)(
        f"cannot write {path}: {error}; what was written before is safe"
    )


_OF_DISKS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ESTALE,
)  # fmt: skip


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """What a disk may refuse at any time, below a folder or without a name, is an error of the user's machine."""
    try:
        yield
    except OSError as error:
        path = Path(str(error.filename)) if error.filename is not None else folder
        if error.errno not in _OF_DISKS or not path.absolute().is_relative_to(folder.absolute()):
            raise
        raise explained(path, error) from error


_PRIVATE = 0o077


@contextmanager
def private(shared: bool) -> Iterator[None]:
    """Files and folders that this process, and those that it starts, make in here are for their user alone, unless
    shared.

    It holds for all threads. Where it is nested, the outermost ends it.
    """
    before = os.umask(_PRIVATE)
    if shared:
        os.umask(before)
    try:
        yield
    finally:
        os.umask(before)
