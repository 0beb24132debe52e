"""Keep a fleet at the number of engines that is wanted, while the run goes on.

    wanted: as the recipe says, or `kitae scale RUN ENGINES`
    too few   an engine is started, loads what was handed over last, is probed, and joins
    too many  the last to join leaves: what it samples goes on elsewhere
    no place  the run goes on with those it has; another is tried every so often

Engines that are lost are too few: they are replaced in the same way, never brought back.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import Self

from kitae.clock import now
from kitae.engines.base import Engine
from kitae.engines.fleet import Fleet
from kitae.engines.start_engine import EngineOrder, start_one
from kitae.errors import KitaeError
from kitae.rl.weight_sync import WeightSync
from kitae.store.engine_count import asked_for

_LOOK = 1.0  # seconds between two looks

log = logging.getLogger("kitae")


class Elastic:
    """`async with Elastic(fleet, weights, start, folder, wanted=2, note=observer.note): …`.

    start: gives a new engine, started; it gets a number that no other had. folder: of the run. retry: seconds from an
    engine that could not be started to the next try. refused: how many those were.
    """

    def __init__(
        self,
        fleet: Fleet,
        weights: WeightSync,
        start: Callable[[int], Awaitable[Engine]],
        folder: Path,
        wanted: int,
        note: Callable[[str], None],
        retry: float = 30.0,
    ) -> None:
        self.refused = 0
        self._fleet = fleet
        self._weights = weights
        self._start = start
        self._folder = folder
        self._usual = wanted
        self._note = note
        self._retry = retry
        self._not_before = 0.0
        self._complained = False
        self._seen_lost = 0
        self._numbers = itertools.count(len(fleet.engines))
        self._starting: set[asyncio.Task[None]] = set()

    @property
    def wanted(self) -> int:
        return asked_for(self._folder) or self._usual

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch(), name="elastic")
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._watching, *self._starting):
            task.cancel()
        await asyncio.gather(self._watching, *self._starting, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self._tell_losses()
            wanted = self.wanted
            while len(self._fleet.engines) + len(self._starting) > wanted:
                await self._shrink()
            if now() >= self._not_before:
                for _ in range(wanted - len(self._fleet.engines) - len(self._starting)):
                    self._grow()

    def _tell_losses(self) -> None:
        if self._fleet.lost > self._seen_lost:
            self._seen_lost = self._fleet.lost
            left = len(self._fleet.engines)
            self._note(f"an engine was lost: the run goes on with {left} of {self.wanted}, and starts another")

    def _grow(self) -> None:
        task = asyncio.create_task(self._add(next(self._numbers)))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _add(self, number: int) -> None:
        engine: Engine | None = None
        try:
            engine = await self._start(number)
            await self._weights.admit(engine, self._fleet.join)
        except BaseException as error:
            if engine is not None:
                await engine.close()
            if not isinstance(error, KitaeError):
                raise
            self._complain(error)
        else:
            self._complained = False
            self._note(f"engine {number} has joined: {len(self._fleet.engines)} of {self.wanted} serve")

    def _complain(self, error: KitaeError) -> None:
        """Once, until an engine joins."""
        self.refused += 1
        self._not_before = now() + self._retry
        if not self._complained:
            self._complained = True
            self._note(
                f"no further engine could be started: the run goes on with {len(self._fleet.engines)} of "
                f"{self.wanted}, and tries again every {self._retry:g} s: {error}"
            )

    async def _shrink(self) -> None:
        """By one: of those that are being started, or of those that serve."""
        if self._starting:
            task = self._starting.pop()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
            return
        await self._fleet.leave(self._fleet.engines[-1])
        self._note(f"an engine has left: {len(self._fleet.engines)} of {self.wanted} serve")


def kept_at(
    wanted: int, engine: Engine, order: EngineOrder, weights: WeightSync, folder: Path, note: Callable[[str], None]
) -> AbstractAsyncContextManager[object]:
    """Keep the engine of a run at `wanted` engines, or what is asked for later; one that is no fleet on a cluster stays
    as it is. order: what it was started from."""
    if order.cluster is None or not isinstance(engine, Fleet):
        return nullcontext()
    return Elastic(engine, weights, lambda number: start_one(order, number), folder, wanted, note)
