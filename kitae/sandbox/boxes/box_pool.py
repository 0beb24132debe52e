"""Boxes for the episodes of a run: so many at a time, some of them opened beforehand, and worlds made once.

pool = BoxPool(boxes, limits, most=64, warm=4)
world = await pool.world("task 17", make)      made by the first episode that asks, shared by the others
box = await pool.take(world)                   waits while `most` boxes are open
await pool.give_back(box)                      closes it: a used box is nobody else's
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from kitae.sandbox.boxes.base import Box, Boxes, BoxLimits, BoxLost, BoxWorld

_TRIES = 3  # to open a box: what a machine does wrong once, it may do right the next time
_PAUSE = 0.5  # seconds between them
_WORLDS = 256  # that are kept


class BoxPool:
    """warm: boxes without a world that wait to be taken. lost: how often a box could not be opened, or had died."""

    def __init__(self, boxes: Boxes, limits: BoxLimits, most: int = 64, warm: int = 0) -> None:
        self.boxes, self.limits = boxes, limits
        self.lost = 0
        self._room, self._wanted = asyncio.Semaphore(most), min(warm, most)
        self._warm: list[Box] = []
        self._warming: asyncio.Task[None] | None = None
        self._worlds: OrderedDict[str, asyncio.Future[BoxWorld]] = OrderedDict()

    async def world(
        self, name: str, make: Callable[[Box], Awaitable[BoxWorld]], limits: BoxLimits | None = None
    ) -> BoxWorld:
        """The world of this name; `make` gets a box to make it in. If that fails, who asks next tries again."""
        known = self._worlds.get(name)
        if known is not None:
            self._worlds.move_to_end(name)
            found: BoxWorld = await asyncio.shield(known)
            return found
        made: asyncio.Future[BoxWorld] = asyncio.get_running_loop().create_future()
        self._worlds[name] = made
        made.add_done_callback(lambda made: made.cancelled() or made.exception())  # perhaps nobody else waits
        while len(self._worlds) > _WORLDS:
            self._worlds.popitem(last=False)
        try:
            box = await self.take(limits=limits)
            try:
                made.set_result(await make(box))
            finally:
                await self.give_back(box)
        except BaseException as error:
            self._worlds.pop(name, None)
            if not made.done():
                made.set_exception(error if isinstance(error, Exception) else BoxLost("it was called off"))
            raise
        return made.result()

    async def take(self, world: BoxWorld | None = None, limits: BoxLimits | None = None) -> Box:
        limits = limits or self.limits
        await self._room.acquire()
        try:
            box = await self._warm_one() if world is None and limits == self.limits else None
            return box or await self._opened(world, limits)
        except BaseException:
            self._room.release()
            raise

    async def give_back(self, box: Box) -> None:
        try:
            await box.close()
        finally:
            self._room.release()
            self.warm_up()

    def warm_up(self) -> None:
        if self._wanted and (self._warming is None or self._warming.done()):
            self._warming = asyncio.create_task(self._fill())

    async def close(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self.boxes.close()

    async def _warm_one(self) -> Box | None:
        """One of the boxes that wait and is well."""
        while self._warm:
            box = self._warm.pop()
            try:
                await box.run("true", seconds=10)
                return box
            except BoxLost:
                self.lost += 1
                await box.close()
        return None

    async def _opened(self, world: BoxWorld | None, limits: BoxLimits) -> Box:
        for attempt in range(_TRIES):
            try:
                return await self.boxes.open(limits, world)
            except BoxLost:
                self.lost += 1
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(_PAUSE * 2**attempt)
        raise AssertionError

    async def _fill(self) -> None:
        while len(self._warm) < self._wanted:
            try:
                self._warm.append(await self.boxes.open(self.limits))
            except BoxLost:
                self.lost += 1
                return
