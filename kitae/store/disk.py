"""What the disk must have before something else may rely on it, and what it says when it is full."""

import errno
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Return when a file, or the entries of a folder, would survive a loss of power."""
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
