"""A process at a place of a Ray cluster, as the controller knows it: by what its keeper tells."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from kitae.workers.base import LaunchError
from kitae.workers.listener import Streams
from kitae.workers.ray.actor import Begun, Bulletin
from kitae.workers.ray.ray_session import first_line

T = TypeVar("T")

_ARRIVAL = 60.0  # seconds from the start of a process to its connection
_UNAVAILABLE = 3  # times, a second apart, that a keeper may be out of reach before it is given up
_FAREWELL = 10.0  # seconds for a killed process to be gone


class RayProcess:
    """Implements `kitae.workers.base.WorkerProcess`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, ray: Any, keeper: Any, begun: Begun) -> None:
        self.keeper = keeper
        self.pid = begun.pid
        self.where = f"node {begun.host} [{begun.node[:8]}]"
        self._ray = ray
        self._node = begun.node
        self._news = Bulletin(0, "", None)
        self._killing: asyncio.Task[None] | None = None
        self.ended = asyncio.create_task(self._follow())

    @property
    def words(self) -> str:
        return self._news.words

    def kill(self) -> None:
        if not self.ended.done() and self._killing is None:
            self._killing = asyncio.create_task(self._kill())

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def _kill(self) -> None:
        """By its keeper, who ends all that it has started; and the keeper too, if that does not help."""
        with suppress(Exception):  # whatever is wrong with the keeper, it is ended next
            await answer_within(_FAREWELL, self.keeper.kill.remote())
        await asyncio.wait({self.ended}, timeout=_FAREWELL)
        if not self.ended.done():
            self._ray.kill(self.keeper)

    async def _follow(self) -> str:
        """How it ended, or that nobody can say."""
        missed = 0
        while self._news.ended is None:
            try:
                self._news = await _result(self.keeper.news.remote(self._news.heard))
                missed = 0
            except self._ray.exceptions.ActorUnavailableError:
                missed += 1
                if missed > _UNAVAILABLE or not self._node_lives():
                    return f"its {self.where} is gone or out of reach"
                await asyncio.sleep(1)
            except self._ray.exceptions.RayError as error:
                return self._obituary(error)
        return self._news.ended

    def _obituary(self, error: Exception) -> str:
        if not self._node_lives():
            return f"its {self.where} is gone or out of reach"
        return f"its keeper on {self.where} is gone: {first_line(error)}"

    def _node_lives(self) -> bool:
        return any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes())


async def await_arrival(arrival: "asyncio.Future[Streams]", process: RayProcess, name: str) -> Streams:
    """The connection of a process; `LaunchError` if it ends before, or takes too long."""
    awaited: set[asyncio.Future[Any]] = {arrival, process.ended}
    await asyncio.wait(awaited, timeout=_ARRIVAL, return_when=asyncio.FIRST_COMPLETED)
    if arrival.done():
        return arrival.result()
    words = f"; it wrote:\n{process.words}" if process.words else ""
    if process.ended.done():
        raise LaunchError(f"{name} could not start on {process.where}: {process.ended.result()}{words}")
    raise LaunchError(f"{name} on {process.where} did not connect with the controller within {_ARRIVAL:g} s{words}")


async def _result(reference: Awaitable[T]) -> T:
    return await reference


async def answer_within(seconds: float, reference: Awaitable[T]) -> T:
    return await asyncio.wait_for(_result(reference), seconds)
