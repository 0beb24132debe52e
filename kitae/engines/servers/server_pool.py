"""Servers come and go: who serves, what becomes of one that is lost, and of its seat.

A server is lost at the first sign that it is not well. It is ended and never used again. A seat that lasts gets another
server, `_MAX_RESTARTS` times in ten minutes; any other stays empty.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kitae.engines.servers.server import Peer, Seat
from kitae.engines.servers.server_client import LineLost, Refusal
from kitae.errors import EngineError
from kitae.workers.background_tasks import Chores
from kitae.workers.connection import Deadlines
from kitae.workers.deadlines import within

T = TypeVar("T")

_MAX_RESTARTS = 3  # of one seat, within
_WINDOW = 600.0  # seconds
_SLICES = 10  # of the longest silence

log = logging.getLogger("kitae")


class Roster:
    """peers: the servers that serve. closed: no other comes, and nobody is lost any more.

    admit: have a server that was opened serve, and `enlist` it; `LineLost` or `Refusal`: it cannot be used. on_loss:
    called once for a server that served and is lost. on_failure: called when none is left and none will come; from then
    on `check_open` raises that.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        limits: Deadlines,
        *,
        admit: Callable[[Peer], Awaitable[None]],
        on_loss: Callable[[Peer], None],
        on_failure: Callable[[EngineError], None],
    ) -> None:
        self.seats = tuple(seats)
        self.peers: list[Peer] = []
        self.closed = False
        self._limits = limits
        self._admit = admit
        self._on_loss = on_loss
        self._on_failure = on_failure
        self._failure: EngineError | None = None
        self._filling = Chores()  # seats that wait for a server
        self._chores = Chores()
        self._restarts: dict[Seat, list[float]] = {seat: [] for seat in self.seats}
        self._gone: list[str] = []  # servers that were not replaced, and why
        self._changed = asyncio.Event()  # servers come and go

    @property
    def restarts(self) -> int:
        """Servers that were lost."""
        return sum(map(len, self._restarts.values())) + len(self._gone)

    def check_open(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine is closed: {self._failure}") from self._failure
        if self.closed:
            raise EngineError("the engine is closed")

    async def present(self) -> None:
        """Wait until there is a server."""
        while not self.peers:
            self.check_open()
            self._changed.clear()
            await self._changed.wait()

    def keep(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Have it done, whoever waits for it."""
        task = self._chores.have(work)
        task.add_done_callback(_see)
        return task

    # They come.

    async def fill(self) -> None:
        """Every seat, at the start; an exception group if one cannot be."""
        async with asyncio.TaskGroup() as tasks:
            for seat in self.seats:
                tasks.create_task(self._fill(seat))

    async def _fill(self, seat: Seat) -> None:
        """A server for a seat, which serves what was published last."""
        peer = await seat.open()
        try:
            await self._admit(peer)
        except BaseException as error:
            words = peer.program.words if peer.program is not None else ""
            await peer.end()
            if isinstance(error, LineLost | Refusal):
                raise EngineError(f"the server at {peer.name} cannot be used: {error}{words}") from None
            raise
        self._changed.set()

    def enlist(self, peer: Peer) -> None:
        """It serves from now on, and is watched."""
        self.peers.append(peer)
        peer.have(self._watch(peer))
        if peer.program is not None:
            peer.have(self._mourn(peer))

    async def _watch(self, peer: Peer) -> None:
        """Whether it is well: it answers, and makes progress if it has work.

        Time is counted in slices: an event loop that was blocked is late for one of them.
        """
        pause, idle = self._limits.silence / _SLICES, 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                await self._look(peer)
            except (LineLost, Refusal) as error:
                self.keep(self._lose_soon(peer, str(error)))
                return
            works = peer.sharing.total() > 0 and not peer.paused
            idle = idle + pause if works and not peer.heard else 0.0
            peer.heard = False
            if idle >= self._limits.stall:
                self.keep(self._lose_soon(peer, f"it had work and told nothing for {self._limits.stall:g} s"))
                return

    async def _look(self, peer: Peer) -> None:
        """Twice, before a server that says nothing else is given up."""
        with suppress(LineLost):
            await peer.line.get(peer.seat.dialect.alive, self._limits.silence)
            return
        await peer.line.get(peer.seat.dialect.alive, self._limits.silence)

    async def _mourn(self, peer: Peer) -> None:
        assert peer.program is not None
        self.keep(self._lose_soon(peer, await peer.program.wait()))

    # They go.

    async def or_lose(self, peer: Peer, work: Awaitable[T]) -> T | None:
        """What a server was asked for; None if it is lost over it."""
        try:
            return await work
        except (LineLost, Refusal) as error:
            self.lose(peer, str(error))
            return None

    async def _lose_soon(self, peer: Peer, why: str) -> None:
        """From a task of the server's own, which ends with it."""
        self.lose(peer, why)

    def lose(self, peer: Peer, why: str) -> None:
        """Give it up: its requests go to others, its seat to another server."""
        if peer.lost is not None or self.closed:
            return
        peer.lost = why
        if peer in self.peers:
            self.peers.remove(peer)
        self._filling.have(self._replace(peer))
        self._on_loss(peer)

    async def _replace(self, peer: Peer) -> None:
        seat, words = peer.seat, peer.program.words if peer.program is not None else ""
        await peer.end()
        why = f"{peer.lost}{words}"
        try:
            while seat.lasting:
                self._count_restart(seat, why)
                try:
                    await self._fill(seat)
                    return
                except EngineError as error:
                    why = str(error)
        except EngineError as error:
            why = str(error)
        self._take_out(seat, why)

    def _count_restart(self, seat: Seat, why: str) -> None:
        now = time.monotonic()
        self._restarts[seat].append(now)
        recent = sum(now - then < _WINDOW for then in self._restarts[seat])
        if recent > _MAX_RESTARTS:
            raise EngineError(f"it was lost {recent} times within {_WINDOW:g} s, the last time: {why}")
        log.warning("the server %s is replaced: %s", seat.name, why)

    def _take_out(self, seat: Seat, why: str) -> None:
        """By the task that tried to fill it."""
        self._gone.append(f"{seat.name}: {why}")
        log.warning("the server %s is taken out: %s", seat.name, why)
        others = [t for t in self._filling.tasks if t is not asyncio.current_task() and not t.done()]
        if not self.peers and not others:
            self._failure = self._failure or EngineError(f"no server is left; {'; '.join(self._gone)}")
            self._on_failure(self._failure)
        self._changed.set()

    # The end of all.

    async def settle(self) -> None:
        """Nothing goes on but the servers; `closed` must be set before."""
        await asyncio.gather(self._filling.end(), self._chores.end())

    async def part(self, left: Mapping[Peer, Iterable[str]]) -> None:
        """From all servers. left: names of the requests that each still has."""
        partings = (self._part(peer, left.get(peer, ())) for peer in self.peers)
        await asyncio.gather(*partings, return_exceptions=True)

    async def _part(self, peer: Peer, names: Iterable[str]) -> None:
        """From a server that others may go on using, with nothing of ours left on it."""
        if peer.program is None:
            with suppress(LineLost, Refusal, TimeoutError):
                await within(self._limits.close, asyncio.create_task(_tidy(peer, names)))
        await peer.end()


async def _tidy(peer: Peer, names: Iterable[str]) -> None:
    for name in names:
        await peer.seat.dialect.abort(peer.line, name)
    if peer.paused and not peer.broken:
        await peer.seat.dialect.resume(peer.line)


def _see(task: "asyncio.Task[Any]") -> None:
    """Its error, if nobody else does: then it is no news."""
    if not task.cancelled():
        task.exception()
