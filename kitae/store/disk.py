"""What the disk must have before something else may rely on it, and what it says when it is full."""

import errno
import os
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
        raise (DiskFullError if is_full(error) else StoreError)(f"cannot write {path}: {error}") from error


def is_full(error: BaseException) -> bool:
    """Disk full, quota or file-size limit, also when a library wraps the system's error in its own."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = str(error).lower()
    return any(phrase in text for phrase in ("no space left", "disk quota", "file too large"))
