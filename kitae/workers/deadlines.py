"""Waiting, but not for ever."""

import asyncio
from typing import TypeVar

T = TypeVar("T")

SLICES = 10  # of a deadline


async def within(seconds: float, task: asyncio.Task[T]) -> T:
    """The result of a task; `TimeoutError` if it takes longer, in which case it is cancelled.

    The deadline is counted in slices, so that an event loop that was blocked (by a training step, say) is late for one
    slice of it and does not take its own delay for that of a process.
    """
    try:
        for _ in range(SLICES):
            await asyncio.wait({task}, timeout=seconds / SLICES)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
