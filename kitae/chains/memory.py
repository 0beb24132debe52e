"""The most memory that this process had since a moment that can be chosen."""

from contextlib import suppress
from pathlib import Path

from kitae.observe.progress import peak_memory_gb

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def forget_peak() -> None:
    """Count from here; where the system cannot, `peak_gb` is that of the whole process."""
    with suppress(OSError):
        _RESET.write_text("5")


def peak_gb() -> float:
    try:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
    except (OSError, StopIteration):
        return peak_memory_gb()
