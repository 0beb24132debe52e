"""How much of the machine's memory is in use: what the kernel looks at before it kills somebody."""

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def memory_share(machine: Path = Path("/proc/meminfo"), group: Path = _GROUP) -> float | None:
    """Of the machine, or of the container, whichever is fuller: `0.63`. All processes count; caches that can go do not.
    None: this system does not say."""
    found = [share for share in (_of_machine(machine), _of_group(group)) if share is not None]
    return max(found, default=None)


def _of_machine(path: Path) -> float | None:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        sizes = {parts[0].rstrip(":"): int(parts[1]) for parts in lines if len(parts) > 1}
        return 1 - sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        return None


def _of_group(folder: Path) -> float | None:
    """Version 2 of control groups."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max" where there is none
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, used - int(counts.get("inactive_file", 0))) / limit
    except (OSError, ValueError, ZeroDivisionError):
        return None
