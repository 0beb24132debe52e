"""Buckets by HTTP, from an ordered list of servers that have them: relays, and last the publisher itself.

Every bucket is checked before it is used. A server that is dead, slow or gives wrong bytes is bypassed: the bucket is
had from the next, and for a while nobody asks the bad one before the others. Where a connection breaks off, the bucket
is taken up again in the middle.
"""

import json
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Manifest
from kitae.weights.chunks import Chunk, delta_chunks, image_chunks

_RESUMED = 3  # times that a bucket is taken up again at one server
_READ = 2**20  # bytes at a time
_PENALTY = 60.0  # seconds that a bad server is asked last

log = logging.getLogger("kitae")


@dataclass(frozen=True, slots=True)
class Haste:
    """`Haste(silence=10.0, rate=1e6, connections=4)`: when a server is too slow, and how many buckets come at once.

    silence: seconds without a byte after which it is given up. rate: bytes per second of a bucket, beyond the first
    `silence` seconds, that it must reach while there is another to ask.
    """

    silence: float = 10.0
    rate: float = 1e6
    connections: int = 4


class _Bad(Exception):
    """The message says what is wrong with a server."""


class _Absent(_Bad):
    """It does not have the bucket, which may be no fault of its own."""


@dataclass
class _Part:
    """The first `have` bytes of a bucket."""

    data: Tensor
    have: int = 0


class Downloads:
    """Implements `kitae.weights.receiver.Reader`. bypassed: how often each server was, by its URL."""

    def __init__(self, sources: Sequence[str], secret: str, haste: Haste | None = None) -> None:
        if not sources:
            raise EngineError("weights by HTTP must have at least one server, got none")
        self.bypassed: Counter[str] = Counter()
        self._sources = tuple(source.rstrip("/") for source in sources)
        self._secret = secret
        self._haste = haste or Haste()
        self._closed = False
        self._bad_until: dict[str, float] = {}
        self._quiet_until: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(self._haste.connections, "download")
        self._local = threading.local()
        self._open: set[HTTPConnection] = set()

    def image(self, manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        chunks = image_chunks(manifest)
        return self.get_all(manifest.version, [chunks[number] for number in wanted])

    def delta(self, manifest: Manifest) -> Iterator[tuple[int, Tensor]]:
        return self.get_all(manifest.version, delta_chunks(manifest))

    def get(self, version: int, chunk: Chunk) -> Tensor | None:
        """The bytes of one bucket, checked; None where no server has it."""
        for final in (False, True):  # a slow server is better than none
            for number, source in enumerate(ordered := self._ordered()):
                try:
                    return self._from(source, version, chunk, patient=final or number == len(ordered) - 1)
                except _Bad as error:
                    self._bypass(source, chunk, error)
        return None

    def ask(self, path: str, body: Any = None, *, silence: float | None = None) -> Any:
        """The JSON that the first server to answer has at a path; None where it has nothing, or none answers.

        body: POSTed. silence: seconds, in place of the usual.
        """
        for source in self._ordered():
            with suppress(_Bad):
                return self._ask(source, path, body, silence or self._haste.silence)
        return None

    def hang_up(self) -> None:
        """Break off whatever is asked now, in any thread; nothing can be asked any more."""
        self._closed = True
        for connection in list(self._open):
            with suppress(OSError, AttributeError):  # it has none, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When nobody asks any more."""
        self.hang_up()
        self._pool.shutdown(cancel_futures=True)
        for connection in list(self._open):
            connection.close()

    def get_all(self, version: int, chunks: Sequence[Chunk]) -> Iterator[tuple[int, Tensor]]:
        """Those that can be had, in order, a few ahead of whoever takes them."""
        left, coming = deque(chunks), deque[tuple[Chunk, Future[Tensor | None]]]()
        try:
            while left or coming:
                while left and len(coming) < 2 * self._haste.connections:
                    chunk = left.popleft()
                    coming.append((chunk, self._pool.submit(self.get, version, chunk)))
                chunk, future = coming.popleft()
                if (data := future.result()) is not None:
                    yield chunk.number, data
        finally:
            for _, future in coming:
                future.cancel()

    def _ordered(self) -> list[str]:
        """Those that are bad last."""
        now = time.monotonic()
        return sorted(self._sources, key=lambda source: self._bad_until.get(source, 0.0) > now)

    def _bypass(self, source: str, chunk: Chunk, why: Exception) -> None:
        now = time.monotonic()
        self.bypassed[source] += 1
        if self._quiet_until.get(source, 0.0) < now and not self._closed:
            self._quiet_until[source] = now + _PENALTY
            log.warning("%s is bypassed for %s: %s", source, chunk.name, why)
        if not isinstance(why, _Absent):
            self._bad_until[source] = now + _PENALTY

    def _from(self, source: str, version: int, chunk: Chunk, *, patient: bool) -> Tensor:
        """From one server alone, so that wrong bytes are its own."""
        size = chunk.bucket.bytes
        limit = float("inf") if patient else self._haste.silence + size / self._haste.rate
        part, deadline = _Part(torch.empty(size, dtype=torch.uint8)), time.monotonic() + limit
        for again in range(_RESUMED + 1):
            try:
                self._continue(part, source, f"/chunk/{version}/{chunk.name}", deadline)
                break
            except (OSError, HTTPException) as error:
                self._drop(source)
                if again == _RESUMED or isinstance(error, (TimeoutError, ConnectionRefusedError)):
                    raise _Bad(f"{type(error).__name__}: {error}") from None
        if not chunk.is_whole(part.data):
            raise _Bad("its bytes are not those that were published")
        return part.data

    def _continue(self, part: "_Part", source: str, path: str, deadline: float) -> None:
        """Read what is missing of a bucket."""
        missing = len(part.data) - part.have
        response = self._request(source, path, {"Range": f"bytes={part.have}-"} if part.have else {})
        if response.status not in (200, 206):
            response.read()
            raise (_Absent if response.status == 404 else _Bad)(f"it answers {response.status}")
        if response.length != missing or (response.status == 206) != (part.have > 0):
            self._drop(source)
            raise _Bad(f"it has {response.length} bytes in place of {missing}")
        view = part.data.numpy().data
        while part.have < len(view):
            count = response.readinto(view[part.have : part.have + _READ])
            if not count:
                raise ConnectionResetError(f"the connection ended after {part.have} of {len(view)} bytes")
            part.have += count
            if time.monotonic() > deadline:
                self._drop(source)
                raise _Bad(f"it is slow: {part.have} of {len(view)} bytes in time")
        response.read()  # the end, so that the connection can be used again

    def _ask(self, source: str, path: str, body: Any, silence: float) -> Any:
        for again in (True, False):  # a connection that was kept open may have ended meanwhile
            try:
                response = self._request(source, path, {}, None if body is None else json.dumps(body), silence)
                text = response.read()
                break
            except (OSError, HTTPException) as error:
                self._drop(source)
                if not again:
                    raise _Bad(f"{type(error).__name__}: {error}") from None
        if response.status not in (200, 204):
            raise _Bad(f"it answers {response.status}")
        return json.loads(text) if text else None

    def _request(
        self, source: str, path: str, headers: dict[str, str], body: str | None = None, silence: float | None = None
    ) -> HTTPResponse:
        if self._closed:
            raise ConnectionRefusedError("this end is closed")
        connection = self._connection(source, silence or self._haste.silence)
        headers |= {"Authorization": f"Bearer {self._secret}"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        return connection.getresponse()

    def _connection(self, source: str, silence: float) -> HTTPConnection:
        """This thread's own, kept open from bucket to bucket."""
        mine: dict[str, HTTPConnection] = self._local.__dict__.setdefault("connections", {})
        if source not in mine:
            url = urlsplit(source)
            make = HTTPSConnection if url.scheme == "https" else HTTPConnection
            mine[source] = make(url.hostname or "", url.port, timeout=silence)
            self._open.add(mine[source])
        connection = mine[source]
        connection.timeout = silence
        if connection.sock is not None:
            connection.sock.settimeout(silence)
        return connection

    def _drop(self, source: str) -> None:
        mine: dict[str, HTTPConnection] = self._local.__dict__.setdefault("connections", {})
        if (connection := mine.pop(source, None)) is not None:
            self._open.discard(connection)
            connection.close()
