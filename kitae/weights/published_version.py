"""The version of the weights that was published last, for the owners of engines that fetch it.

A receiver must not fetch while the next version is written over the last one. So the owner of an engine lets it fetch
inside `hold`, and a publisher publishes inside `write` of the lock, which waits until nobody holds the version.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

from kitae.errors import EngineError
from kitae.weights.base import Address, Manifest

_POLL = 0.005  # seconds


class WeightStore(Protocol):
    """`hold` gives the manifest of the version that can be fetched, which stays unchanged until `hold` is left; None:
    nothing was published yet."""

    @property
    def address(self) -> Address: ...
    def hold(self) -> AbstractAsyncContextManager[Manifest | None]: ...


class EmptyWeightStore:
    """The store of weights that never change: nothing is published."""

    address = Address("none", {})

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        yield None


@asynccontextmanager
async def hold_update(weight_store: WeightStore, version: int, manifest: Manifest | None) -> AsyncIterator[Manifest]:
    """Hold what a weight update is to load. `EngineError` unless that is what was published last: anything older is
    written over."""
    if manifest is None:
        raise EngineError(
            f"weight update {version} must have a manifest: the engine does not share the trainer's weights"
        )
    async with weight_store.hold() as current:
        if manifest != current:
            raise EngineError(
                f"weight update {version} must be what was published last, got the manifest of version "
                f"{manifest.version}"
            )
        yield manifest


class ReadWriteLock:
    """Many readers or one writer. A writer waits until all readers have left, and no reader enters meanwhile.

    Readers are tasks; a writer is a thread (`write`) or a task (`write_async`).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        while not self._begin_read():  # the writer may be a thread
            await asyncio.sleep(_POLL)
        try:
            yield
        finally:
            self._end_read()

    @contextmanager
    def write(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
            self._writing = True
            self._changed.wait_for(lambda: not self._readers)
        try:
            yield
        finally:
            self._end_write()

    @asynccontextmanager
    async def write_async(self) -> AsyncIterator[None]:
        while not self._begin_write():
            await asyncio.sleep(_POLL)
        try:
            while self._readers:
                await asyncio.sleep(_POLL)
            yield
        finally:
            self._end_write()

    def _begin_read(self) -> bool:
        """Whether there was no writer; does not wait."""
        with self._changed:
            self._readers += not self._writing
            return not self._writing

    def _end_read(self) -> None:
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def _begin_write(self) -> bool:
        """Whether there was no other writer."""
        with self._changed:
            free = not self._writing
            self._writing = True
            return free

    def _end_write(self) -> None:
        with self._changed:
            self._writing = False
            self._changed.notify_all()
