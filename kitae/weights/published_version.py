"""Where an engine's owner reads what was published last: the notice board between a publisher and those who fetch.

Nobody may fetch while the next version is written over the last. So whoever tells a receiver to fetch does so inside
`hold`, and a version is published while the board is `closed`, which waits until nobody holds it.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

from kitae.weights.base import Address, Manifest

_POLL = 0.005  # seconds


class Board(Protocol):
    """`hold` gives what can be fetched, which stays so meanwhile; None: nothing was published yet."""

    @property
    def address(self) -> Address: ...
    def hold(self) -> AbstractAsyncContextManager[Manifest | None]: ...


class EmptyBoard:
    """Of weights that never change: nothing is published."""

    address = Address("none", {})

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        yield None


class Gate:
    """Many may be inside, or one has closed it. Closing waits until all have left, and nobody new enters meanwhile.

    Tasks enter it; a thread closes it with `closed`, a task with `closing`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        while not self._enter():  # the other side of the gate may be a thread
            await asyncio.sleep(_POLL)
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            self._open()

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        while not self._close():
            await asyncio.sleep(_POLL)
        try:
            while self._inside:
                await asyncio.sleep(_POLL)
            yield
        finally:
            self._open()

    def _enter(self) -> bool:
        """Whether it was open; does not wait."""
        with self._changed:
            self._inside += not self._closed
            return not self._closed

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def _close(self) -> bool:
        """Whether nobody else had."""
        with self._changed:
            free = not self._closed
            self._closed = True
            return free

    def _open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()
