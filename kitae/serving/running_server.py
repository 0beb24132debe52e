"""A server that is started, says where it is, and ends with Ctrl-C: requests under way have some seconds to end.

Connections are bounded, so that clients that open them without end do not take all descriptors of the process: where
there are too many, the one is closed that has had nothing to do for longest. Clients that are well open another.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kitae.errors import Interrupted
from kitae.workers.descriptors import descriptors

_LAST_WORDS = 10  # seconds for requests that are under way when the server is stopped
_SHARE = 4  # of the descriptors, one in so many may be a connection; as many may be taken up at once
_BACKLOG = 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """Signals are the caller's affair."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bounded(most: int) -> type[H11Protocol]:
    """The connections of one server, so many at a time."""
    known: dict[H11Protocol, None] = {}  # the one that was longest without a request first

    class Connection(H11Protocol):
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

    return Connection


def _longest_idle(known: dict[H11Protocol, None]) -> H11Protocol:
    """Taken out of those that are known; where all have a request, the newest."""
    for connection in known:
        if connection.cycle is None or connection.cycle.response_complete:
            break
    del known[connection]
    return connection


def _make(app: ASGIApp, last_words: int, log: str = "warning") -> _Server:
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
        timeout_keep_alive=75,
    )
    return _Server(config)


@asynccontextmanager
async def serving(app: ASGIApp, taken: socket.socket) -> AsyncIterator[None]:
    """A server beside other work, in the event loop of that; its end waits for nobody."""
    server = _make(app, 1, log="error")  # whoever sends nonsense does not write on the screen of others
    running = asyncio.create_task(server.serve(sockets=[taken]))
    try:
        yield
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
