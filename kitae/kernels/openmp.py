"""Threads of OpenMP, which compute in parallel on a CPU.

Each thread that computes gets a team of OpenMP threads and keeps it. While there are more of them than cores, the
threads of all teams sleep between any two kernels, even if only one team works: waking them up took a seventh of a
training step on two cores. So a thread that is going to wait dismisses its team first; its next kernel makes another.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

_HARD = 2  # omp_pause_hard of omp.h


def dismiss_team() -> None:
    """End the threads that help the calling one; nothing happens where there are none."""
    _pause()(_HARD)


@functools.cache
def _pause() -> Callable[[int], Any]:
    """The function of the runtime that torch has loaded, which Kitae's kernels use too; older runtimes lack it."""
    library = ctypes.CDLL(torch._C.__file__)
    return getattr(library, "omp_pause_resource_all", lambda _: None)
