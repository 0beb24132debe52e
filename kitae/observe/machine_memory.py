"""How much of the machine's memory is in use: what the kernel looks at before it kills somebody."""

from pathlib import Path

_MACHINE, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def memory_share(machine: Path = _MACHINE, group: Path = _GROUP) -> float | None:
    """Of the machine, or of the container, whichever is fuller: `0.63`. All processes count; caches that can go do not.
    None: this system does not say."""
    return max((used / total for used, total in _found(machine, group)), default=None)


def free_memory(machine: Path = _MACHINE, group: Path = _GROUP) -> float | None:
    """Bytes that are left of it."""
    return min((total - used for used, total in _found(machine, group)), default=None)


def _found(machine: Path, group: Path) -> list[tuple[float, float]]:
    """Bytes in use, and all."""
    return [sizes for sizes in (_of_machine(machine), _of_group(group)) if sizes is not None and sizes[1] > 0]


def _of_machine(path: Path) -> tuple[float, float] | None:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        sizes = {parts[0].rstrip(":"): 1024.0 * int(parts[1]) for parts in lines if len(parts) > 1}
        return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, ValueError, KeyError):
        return None


def _of_group(folder: Path) -> tuple[float, float] | None:
    """Version 2 of control groups."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max" where there is none
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return float(max(0, used - int(counts.get("inactive_file", 0)))), float(limit)
    except (OSError, ValueError):
        return None
