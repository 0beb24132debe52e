"""The buffer between generation and training: what bounds staleness.

There are `(max_staleness + 1) × prompts_per_step` slots. Issuing a prompt takes a slot, and the slot comes back only
after the engine serves the version that was trained from it. So while version v is being trained, no prompt can be in
flight that was issued before version v - max_staleness was served.
"""

import asyncio
from dataclasses import dataclass

from kitae.types import Group


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one slot: a group to train on, or nothing (every group tried was dropped)."""

    group: Group | None
    dropped: tuple[tuple[Group, str], ...]


class Buffer:
    def __init__(self, prompts_per_step: int, max_staleness: int) -> None:
        self.slots = (max_staleness + 1) * prompts_per_step
        self._free = asyncio.Semaphore(self.slots)
        self._ready: asyncio.Queue[Outcome] = asyncio.Queue()
        self.taken = 0

    async def reserve(self) -> None:
        """Wait for a free slot; unblocked by `release`."""
        await self._free.acquire()
        self.taken += 1
        assert self.taken <= self.slots

    def put(self, outcome: Outcome) -> None:
        self._ready.put_nowait(outcome)

    async def take(self, count: int) -> list[Outcome]:
        """Wait for `count` outcomes; unblocked by `put`."""
        return [await self._ready.get() for _ in range(count)]

    def release(self, count: int) -> None:
        """Give slots back, after the engine serves the new version."""
        self.taken -= count
        for _ in range(count):
            self._free.release()
