"""Tasks that run beside what their owner does, of which asyncio itself keeps only weak references; waiting with a
deadline.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """tasks: those that are running."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run it until it is done, or until `cancel`."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that goes on to its end even if the caller is cancelled. Nobody sees its error then."""
        task = self.start(work)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio would complain
        return await asyncio.shield(task)

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        for task in list(self.tasks):
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Wait until all tasks have ended by themselves."""
        await asyncio.gather(*self.tasks, return_exceptions=True)


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
