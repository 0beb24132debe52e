"""How much of the machine's memory is in use, by the measure on which the kernel kills processes."""

from pathlib import Path

_MACHINE, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def memory_share(machine: Path = _MACHINE, group: Path = _GROUP) -> float | None:
    """The share of memory in use, of the machine or of the container, whichever is fuller: `0.63`. All processes count;
    caches that can be freed do not. None if the system does not report it."""
    return max((used / total for used, total in _found(machine, group)), default=None)


def free_memory(machine: Path = _MACHINE, group: Path = _GROUP) -> float | None:
    """Bytes of memory that are left."""
    return min((total - used for used, total in _found(machine, group)), default=None)


def _found(machine: Path, group: Path) -> list[tuple[float, float]]:
    """Bytes in use and in total, of the machine and of the container."""
    return [sizes for sizes in (_of_machine(machine), _of_group(group)) if sizes is not None and sizes[1] > 0]


def _of_machine(path: Path) -> tuple[float, float] | None:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        sizes = {parts[0].rstrip(":"): 1024.0 * int(parts[1]) for parts in lines if len(parts) > 1}
        return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, ValueError, KeyError):
        return None


def _of_group(folder: Path) -> tuple[float, float] | None:
    """The memory of the container, from version 2 of control groups."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max" means that there is no limit
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return float(max(0, used - int(counts.get("inactive_file", 0)))), float(limit)
    except (OSError, ValueError):
        return None
