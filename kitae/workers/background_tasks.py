"""Tasks beside what their owner does, remembered while they run: asyncio itself does not keep them alive."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Chores:
    """tasks: those that run."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    def have(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Done, unless `end` comes first."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def end(self) -> None:
        """Cancel them, and wait until they have ended."""
        left = list(self.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
