"""Weights by HTTP: the publisher serves the buckets, receivers pull them over several connections.

The image is in the host memory of the publisher's process. A bucket that is being sent is never changed: a new version
of it is a new piece of memory, so no receiver sees half of one.
"""

import secrets
from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor

from kitae.weights.base import Address, Mode
from kitae.weights.bucket_server import ChunkServer, Shop
from kitae.weights.downloads import Downloads, Haste
from kitae.weights.layout import LIMIT
from kitae.weights.publisher import BucketPublisher
from kitae.weights.receiver import PullReceiver
from kitae.weights.stores import HeapStore, NamedBuckets


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
