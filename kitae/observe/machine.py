"""The machine that a run is on: machine.json in its folder, with the versions of its packages, and its use of memory.

machine.json is written each time a run starts or resumes, so it describes the last machine. Nothing here imports torch
or queries a driver: the names of GPUs come from the kernel's files.
"""

import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kitae.store.disk import write_whole

FILE = "machine.json"
_PACKAGES = ("kitae", "torch", "transformers", "numpy")
_GPUS = Path("/proc/driver/nvidia/gpus")
_MEMORY, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMachine:
    """`HostMachine("Intel Xeon …", 2, 7.8, ("NVIDIA H200",), "Linux x86_64", {"kitae": "0.1.0", "torch": "2.13.0"})`.

    cores: those that this process may use; memory_gb: of the machine.
    """

    processor: str
    cores: int
    memory_gb: float
    gpus: tuple[str, ...]
    system: str
    versions: dict[str, str]

    @property
    def hardware(self) -> str:
        """`"NVIDIA H200 · Intel Xeon …, 2 cores · 8 GB"`."""
        counted = {name: self.gpus.count(name) for name in self.gpus}
        gpus = [name if count == 1 else f"{count} × {name}" for name, count in counted.items()]
        return " · ".join([*gpus, f"{self.processor}, {self.cores} cores", f"{self.memory_gb:.0f} GB"])


def this_machine() -> HostMachine:
    return HostMachine(
        processor_name(),
        len(os.sched_getaffinity(0)),
        round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        tuple(map(_gpu_name, sorted(_GPUS.glob("*/information")))),
        f"{platform.system()} {platform.machine()}",
        {"python": platform.python_version(), **_versions()},
    )


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
    return f"{name}, AMX" if any("amx_bf16" in line for line in lines) else name


def note_machine(run: Path) -> None:
    """Write machine.json. Raises `StoreError` if that fails."""
    write_whole(run / FILE, json.dumps(asdict(this_machine()), indent=1))


def machine_of(run: Path) -> HostMachine | None:
    """The machine that last worked on a run; None if it is not recorded, or not readable by this version."""
    try:
        values = json.loads((run / FILE).read_text("utf-8"))
        return HostMachine(**{**values, "gpus": tuple(values["gpus"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gpu_name(information: Path) -> str:
    found = re.search(r"Model:\s*(.+)", information.read_text())
    return found[1].strip() if found else "GPU"


def memory_share(machine: Path = _MEMORY, group: Path = _GROUP) -> float | None:
    """The share of memory in use, of the machine or of the container, whichever is fuller: `0.63`. All processes count;
    caches that can be freed do not. None if the system does not report it."""
    return max((used / total for used, total in _found(machine, group)), default=None)


def free_memory(machine: Path = _MEMORY, group: Path = _GROUP) -> float | None:
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
