"""A server that is started, says where it is, and ends with Ctrl-C: requests under way have some seconds to end."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from kitae.errors import Interrupted

_LAST_WORDS = 10  # seconds for requests that are under way when the server is stopped
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """Signals are the caller's affair."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _make(app: ASGIApp, last_words: int) -> _Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
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
    server = _make(app, 1)
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
