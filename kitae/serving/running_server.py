"""A server that is started, says where it is, and ends with Ctrl-C: requests under way have some seconds to end.

Connections are bounded, so that clients that open them without end do not take all descriptors of the process: where
there are too many, the one is closed that has had nothing to do for longest. Clients that are well open another.

Every second, all connections are looked at. Those are closed that began a request and do not end it, and those that do
not read what was written to them.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kitae.errors import Interrupted
from kitae.workers.process_status import descriptors

_LAST_WORDS = 10  # seconds for requests that are under way when the server is stopped
_SHARE = 4  # of the descriptors, one in so many may be a connection; as many may be taken up at once
_BACKLOG = 1024
_KEEP_ALIVE = 75  # seconds
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long clients may take: `Patience(head=10)`, in seconds.

    head: from the first byte of a request to the end of its headers. body: from there to its end, whether or not it is
    read here. reading: in which a client must take `progress` bytes of what was written to it, or all of it. unread:
    bytes that may wait for all clients together; beyond, who has most of them is given up.
    """

    head: float = 10
    body: float = 90
    reading: float = 30
    progress: int = 16 * 2**10
    unread: int = 256 * 2**20


PATIENCE = Patience()


class PatientServer(uvicorn.Server):
    """A server of `bounded` connections that does not wait for ever."""

    def __init__(self, config: uvicorn.Config, patience: Patience = PATIENCE) -> None:
        super().__init__(config)
        self._patience = patience

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            give_up_slow(cast(Iterable[Connection], self.server_state.connections), self._patience)
        return await super().on_tick(counter)


class _CountingTransport:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Server(PatientServer):
    """Signals are the caller's affair. It may answer on more sockets than those that it began with."""

    async def also(self, taken: socket.socket) -> asyncio.Server:
        while not self.started:
            await asyncio.sleep(0.01)

        def connection() -> asyncio.Protocol:
            kind = cast(type[Connection], self.config.http_protocol_class)
            return kind(self.config, self.server_state, self.lifespan.state)

        return await asyncio.get_running_loop().create_server(connection, sock=taken)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connection(H11Protocol):
    """A connection of which is known since when its client owes something."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counting = _CountingTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._counting))
        self._since = self._waited = self.loop.time()
        self._phase: tuple[str, object] = "", None
        self._taken = 0

    @property
    def unread(self) -> int:
        """Bytes that were written to it and that its client has not taken yet."""
        return self.transport.get_write_buffer_size()

    def overdue(self, patience: Patience) -> str:
        """What the client owes for too long: a request, the rest of one, or to read; "": nothing."""
        now, owing = self.loop.time(), self._owing()
        if self._phase != (owing, self.cycle):
            self._phase, self._since = (owing, self.cycle), now
        limits = {"request": _KEEP_ALIVE, "head": patience.head, "body": patience.body}
        if owing and now - self._since > limits[owing]:
            return owing
        taken = self._counting.written - self.unread
        if not self.unread or taken - self._taken >= patience.progress:
            self._taken, self._waited = taken, now
        return "reading" if now - self._waited > patience.reading else ""

    def _owing(self) -> str:
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.conn.their_state is not h11.IDLE:
            return ""
        if self.conn.trailing_data[0]:
            return "head"
        return "request" if self.cycle is None else ""


def give_up_slow(connections: Iterable[Connection], patience: Patience) -> None:
    """Close connections whose clients owe something for too long, and of too many unread bytes those with most."""
    left = []
    for connection in list(connections):
        owing = connection.overdue(patience)
        if owing == "head" and connection.conn.our_state is h11.IDLE:
            connection.send_400_response(f"The headers of a request must have come after {patience.head:g} s.")
        elif owing:
            connection.transport.abort()
        else:
            left.append(connection)
    unread = sum(connection.unread for connection in left)
    for connection in sorted(left, key=lambda c: -c.unread):
        if unread <= patience.unread:
            break
        unread -= connection.unread
        connection.transport.abort()


def bounded(most: int) -> type[Connection]:
    """The connections of one server, so many at a time."""
    known: dict[Connection, None] = {}  # the one that was longest without a request first

    class Bounded(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            known[self] = None
            if len(known) > most:
                _longest_idle(known).transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            known.pop(self, None)
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            if known.pop(self, self) is None:
                known[self] = None
            super().on_response_complete()

    return Bounded


def _longest_idle(known: dict[Connection, None]) -> Connection:
    """Taken out of those that are known; where all have a request, the newest."""
    for connection in known:
        if connection.cycle is None or connection.cycle.response_complete:
            break
    del known[connection]
    return connection


def _make(app: ASGIApp, last_words: int, log: str = "warning", patience: Patience = PATIENCE) -> _Server:
    room = descriptors()
    config = uvicorn.Config(
        app,
        http=bounded(room // _SHARE),
        backlog=min(_BACKLOG, room // _SHARE),
        log_level=log,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=last_words,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    return _Server(config, patience)


@asynccontextmanager
async def serving(
    app: ASGIApp, taken: socket.socket, patience: Patience = PATIENCE
) -> AsyncIterator[Callable[[socket.socket], Awaitable[asyncio.Server]]]:
    """A server beside other work, in the event loop of that; its end waits for nobody.

    What it yields lets the server answer on a further socket.
    """
    server = _make(app, 1, "error", patience)  # whoever sends nonsense does not write on the screen of others
    running = asyncio.create_task(server.serve(sockets=[taken]))
    try:
        yield server.also
    finally:
        server.should_exit = server.force_exit = True
        await running


async def run_server(app: ASGIApp, taken: socket.socket) -> None:
    """Until it is stopped: raises `Interrupted`. A second signal does not wait for requests."""
    server = _make(app, _LAST_WORDS)
    stopped_by: list[int] = []
    loop = asyncio.get_running_loop()

    def stop(number: int, frame: FrameType | None = None) -> None:
        stopped_by.append(number)
        server.handle_exit(signal.SIGINT, frame)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await server.serve(sockets=[taken])
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    raise Interrupted("stopped", stopped_by[0] if stopped_by else signal.SIGINT)
