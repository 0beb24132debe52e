"""Weights by HTTP: the publisher serves the buckets, receivers pull them over several connections.

The image is in the host memory of the publisher's process. A bucket that is being sent is never changed: a new version
of it is a new piece of memory, so no receiver sees half of one.

Every bucket is checked before it is used. Where a connection breaks off, the download goes on in the middle of the
bucket. A bucket that cannot be had is left out, with a warning: the receiver reports it as damaged.
"""

import json
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from kitae.weights.base import Address, Manifest, Mode
from kitae.weights.bucket_server import ChunkServer, Shop
from kitae.weights.layout import LIMIT, Chunk, delta_chunks, image_chunks
from kitae.weights.publisher import BucketPublisher
from kitae.weights.receiver import PullReceiver
from kitae.weights.stores import HeapStore, NamedBuckets

_RESUMED = 3  # times that the download of one bucket goes on after a broken connection
_READ = 2**20  # bytes at a time
_QUIET = 60.0  # seconds after a warning in which further ones are left out

log = logging.getLogger("kitae")


@dataclass(frozen=True, slots=True)
class Haste:
    """`Haste(silence=10.0, connections=4)`: how many buckets come at once, and after how many seconds without a byte
    the server is given up."""

    silence: float = 10.0
    connections: int = 4


class _Bad(Exception):
    """The message says what is wrong with the server."""


@dataclass
class _Part:
    """The first `have` bytes of a bucket."""

    data: Tensor
    have: int = 0


class Downloads:
    """Implements `kitae.weights.receiver.Reader`. source: the URL of the server. failed: buckets that did not come."""

    def __init__(self, source: str, secret: str, haste: Haste | None = None) -> None:
        self.failed = 0
        self._source = source.rstrip("/")
        self._secret = secret
        self._haste = haste or Haste()
        self._closed = False
        self._quiet_until = 0.0
        self._pool = ThreadPoolExecutor(self._haste.connections, "download")
        self._local = threading.local()
        self._open: set[HTTPConnection] = set()

    def image(self, manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        chunks = image_chunks(manifest)
        return self.get_all(manifest.version, [chunks[number] for number in wanted])

    def delta(self, manifest: Manifest) -> Iterator[tuple[int, Tensor]]:
        return self.get_all(manifest.version, delta_chunks(manifest))

    def get(self, version: int, chunk: Chunk) -> Tensor | None:
        """The bytes of one bucket, checked; None where they cannot be had."""
        try:
            return self._download(version, chunk)
        except _Bad as error:
            self._complain(f"{self._source} does not give {chunk.name}: {error}")
            return None

    def post(self, path: str, body: Any) -> Any:
        """The JSON that the server answers; None where it has nothing, or does not answer."""
        for _ in range(2):  # a connection that was kept open may have ended meanwhile
            try:
                response = self._request("POST", path, {}, json.dumps(body))
                text = response.read()
                return json.loads(text) if text and response.status == 200 else None
            except (OSError, HTTPException):
                self._drop()
        return None

    def close(self) -> None:
        """Break off whatever is being downloaded, in any thread. Nothing can be downloaded any more."""
        self._closed = True
        for connection in list(self._open):
            with suppress(OSError, AttributeError):  # it has no socket, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)
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

    def _complain(self, text: str) -> None:
        now = time.monotonic()
        self.failed += 1
        if self._quiet_until < now and not self._closed:
            self._quiet_until = now + _QUIET
            log.warning("%s", text)

    def _download(self, version: int, chunk: Chunk) -> Tensor:
        part = _Part(torch.empty(chunk.bucket.bytes, dtype=torch.uint8))
        for again in range(_RESUMED + 1):
            try:
                self._continue(part, f"/chunk/{version}/{chunk.name}")
                break
            except (OSError, HTTPException) as error:
                self._drop()
                if again == _RESUMED or isinstance(error, (TimeoutError, ConnectionRefusedError)):
                    raise _Bad(f"{type(error).__name__}: {error}") from None
        if not chunk.is_whole(part.data):
            raise _Bad("its bytes are not those that were published")
        return part.data

    def _continue(self, part: _Part, path: str) -> None:
        """Read what is missing of a bucket."""
        missing = len(part.data) - part.have
        response = self._request("GET", path, {"Range": f"bytes={part.have}-"} if part.have else {})
        if response.status not in (200, 206):
            response.read()
            raise _Bad(f"it answers {response.status}")
        if response.length != missing or (response.status == 206) != (part.have > 0):
            self._drop()
            raise _Bad(f"it has {response.length} bytes in place of {missing}")
        view = part.data.numpy().data
        while part.have < len(view):
            count = response.readinto(view[part.have : part.have + _READ])
            if not count:
                raise ConnectionResetError(f"the connection ended after {part.have} of {len(view)} bytes")
            part.have += count
        response.read()  # the end, so that the connection can be used again

    def _request(self, method: str, path: str, headers: dict[str, str], body: str | None = None) -> HTTPResponse:
        if self._closed:
            raise ConnectionRefusedError("this end is closed")
        connection = self._connection()
        connection.request(method, path, body, headers | {"Authorization": f"Bearer {self._secret}"})
        return connection.getresponse()

    def _connection(self) -> HTTPConnection:
        """This thread's own, kept open from bucket to bucket."""
        if not hasattr(self._local, "connection"):
            url = urlsplit(self._source)
            make = HTTPSConnection if url.scheme == "https" else HTTPConnection
            self._local.connection = make(url.hostname or "", url.port, timeout=self._haste.silence)
            self._open.add(self._local.connection)
        connection: HTTPConnection = self._local.connection
        return connection

    def _drop(self) -> None:
        connection: HTTPConnection | None = self._local.__dict__.pop("connection", None)
        if connection is not None:
            self._open.discard(connection)
            connection.close()


class HttpPublisher(BucketPublisher, Shop):
    """A `BucketPublisher` that serves what it has published.

    host: the address of this machine under which receivers reach it, and the only one at which it listens. secret: that
    they must know; "": a new one. haste: of receivers.
    """

    def __init__(
        self,
        mode: Mode = "full",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str = "",
        haste: Haste | None = None,
        dense: float = 0.5,
        limit: int = LIMIT,
    ) -> None:
        self.store = HeapStore()
        super().__init__(NamedBuckets(self.store), mode, dense=dense, limit=limit)
        self.secret = secret or secrets.token_urlsafe(32)
        self.haste = haste or Haste()
        self._server = ChunkServer(self, self.secret, host=host, port=port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    @property
    def address(self) -> Address:
        return Address("http", {"source": self.url, "secret": self.secret, "haste": asdict(self.haste)})

    def close(self) -> None:
        super().close()
        self._server.close()

    def chunk(self, version: int, name: str) -> Tensor | None:
        return self.store.get(name)


class HttpReceiver(PullReceiver):
    """From the server of an address."""

    @classmethod
    def at(cls, address: Address, parameters: Mapping[str, Tensor]) -> "HttpReceiver":
        settings = address.settings
        downloads = Downloads(settings["source"], settings["secret"], Haste(**settings["haste"]))
        return cls(downloads, parameters)
