"""Threads of OpenMP, which compute in parallel on a CPU.

Each thread of ours that computes gets a team of its own, and keeps it. While there are more of them than cores, those
of all teams sleep between any two kernels, also where only one team works: waking them up took a seventh of a training
step on two cores. So who is going to wait for others dismisses its team first; the next kernel makes another.
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
    """Of the runtime that torch has loaded, which our own kernels use too; older ones cannot do it."""
    library = ctypes.CDLL(torch._C.__file__)
    return getattr(library, "omp_pause_resource_all", lambda _: None)
