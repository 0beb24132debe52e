"""A candidate's use of resources: time on the clock, and processor time, memory and files of all its processes
together.
"""

from __future__ import annotations

import os
import time

SCRATCH = ("/tmp", "/dev/shm", "/box")  # the folders that a candidate can write to
_GLIMPSE = 0.25  # seconds between two readings that count, at most
_UTIME, _CSTIME, _START, _RSS = 11, 14, 19, 21  # fields of /proc/PID/stat, counted after the name


class Clock:
    """Wall-clock seconds since it was made. Each interval between two readings counts `_GLIMPSE` at most, so the time
    in which this process was stopped does not count."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, _GLIMPSE)
        self._last = now
        return self._seconds


class Usage:
    """The candidate's processes, which are all in the sandbox except this one.

    `seconds`: processor time since `restart`, including children, whether their parent waits for them or not. The use
    of a child between two looks is missed if its parent ignores its end. Without a sandbox, only the process `pid` can
    be identified, with the children that it has waited for.
    """

    def __init__(self, pid: int, memory_mb: int, files: int) -> None:
        self._pids = None if os.getpid() == 1 else [pid]
        self._memory, self._files = memory_mb * 2**20, files
        self._own: dict[tuple[int, bytes], int] = {}  # ticks of each process
        self._ticks = self._began = 0
        self.restart()

    def restart(self) -> None:
        self.look()
        self._began = self._ticks

    @property
    def seconds(self) -> float:
        return (self._ticks - self._began) / os.sysconf("SC_CLK_TCK")

    def look(self) -> str:
        """Read the current use. Returns which limit is broken, or ""."""
        whole = resident = 0
        for pid, fields in self._processes():
            times = [int(field) for field in fields[_UTIME : _CSTIME + 1]]
            whole += sum(times)
            self._own[pid, fields[_START]] = times[0] + times[1]
            resident += int(fields[_RSS]) * os.sysconf("SC_PAGE_SIZE")
        self._ticks = max(self._ticks, whole, sum(self._own.values()))
        if resident > self._memory:
            return f"more than {self._memory >> 20} MiB of memory in all its processes"
        if self._pids is None and sum(map(_files_in, SCRATCH)) > self._files:
            return f"more than {self._files} files"
        return ""

    def _processes(self) -> list[tuple[int, list[bytes]]]:
        """The id of each process, and the fields of /proc/PID/stat after its name."""
        pids = self._pids if self._pids is not None else [int(n) for n in os.listdir("/proc") if n.isdigit()]
        found = []
        for pid in pids:
            try:
                fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
            except OSError:
                continue
            try:
                fields = os.read(fd, 1024).rpartition(b")")[2].split()
            except OSError:
                continue
            finally:
                os.close(fd)
            if len(fields) > _RSS and pid != os.getpid():
                found.append((pid, fields))
        return found


def _files_in(path: str) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_files - found.f_ffree
