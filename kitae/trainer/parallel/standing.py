"""Where ranks stand: which one holds the others up, and which one is slow.

Each rank looks at its own computing thread with every sign of life. It says how long the thread has stood at one place,
computing and reading nothing, and whether that is inside a collective operation, where it waits for others. A rank that
stands still outside of one, while others wait inside, hangs. Looks in a step that found it at work are its time.

Operations of NCCL return before they are carried out: what hangs on a GPU is seen only where the host stands still too.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import FrameType
from typing import Any

from kitae.workers.serve import bytes_read

HANGS = 45.0  # seconds at one place, while others wait
_IDLE = 0.1  # seconds of the processor that waiting may take
_SLOW = 1.5  # times the median of all ranks
_WORTH_TELLING = 10  # looks at a rank in a step: with fewer, chance decides
_MEETING = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


@dataclass
class Standing:
    """Of one thread. `look` now and then."""

    thread: int = 0  # 0: it computes nothing
    _place: tuple[int, ...] = ()
    _since: float = field(default_factory=time.monotonic)
    _used: float = 0.0  # seconds of the processor, and bytes from disks, when it last moved
    _read: int = 0
    _at_work: int = 0

    def look(self) -> dict[str, Any]:
        """For JSON: seconds without progress, whether in a collective operation, where; how often it was at work."""
        frame = sys._current_frames().get(self.thread)
        if frame is None:
            self._place = ()
            return {"work": self._at_work}
        frames = _frames(frame)
        place = tuple(number for each in frames for number in (id(each.f_code), each.f_lasti))
        # A loop around one long call is found at one place again and again: so what was computed and read counts too.
        used, read = time.clock_gettime(time.pthread_getcpuclockid(self.thread)), bytes_read()
        if place != self._place or used - self._used > _IDLE or read > self._read:
            self._place, self._since, self._used, self._read = place, time.monotonic(), used, read
        meets = any(each.f_code.co_filename.endswith(_MEETING) for each in frames)
        self._at_work += not meets
        own = next((each for each in frames if "kitae" in each.f_code.co_filename), frame)
        where = f"{own.f_code.co_filename}:{own.f_lineno} ({own.f_code.co_name})"
        return {"still": time.monotonic() - self._since, "meets": meets, "at": where, "work": self._at_work}


def _frames(innermost: FrameType) -> list[FrameType]:
    found: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def hung(number: int, states: Sequence[Mapping[str, Any]]) -> str:
    """Why a rank is to be given up; "": it is not. states: what each rank said last."""
    own = states[number]
    waiting = [n for n, s in enumerate(states) if s.get("meets") and s["still"] >= HANGS]
    if not waiting or own.get("meets", True) or own["still"] < HANGS:
        return ""
    return f"it has stood still for {own['still']:.0f} s at {own['at']}, while {len(waiting)} others wait for it"


def stragglers(before: Sequence[int], after: Sequence[int]) -> dict[int, float]:
    """Ranks that work much longer than most, and how many times as long. Counts of looks, before and after a step."""
    worked = [last - first for first, last in zip(before, after, strict=True)]
    usual = max(1.0, median(worked))
    return {n: each / usual for n, each in enumerate(worked) if each >= _WORTH_TELLING and each > _SLOW * usual}
