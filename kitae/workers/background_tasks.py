"""Tasks that run beside what their owner does. asyncio itself keeps only weak references to tasks."""

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
