"""A tree of relays between the publisher and engines that are many or far away.

    publisher (origin) ──► relay ──► relay ──► engines
                                └──► engines

A relay is a process that serves what its parent has, by the same HTTP as the publisher. It takes a new version as soon
as it hears of it, bucket by bucket, checks each and passes it on at once: a tree is as fast as its slowest link, not as
the sum of them. What it has is in a folder: one that is started again goes on with what is whole there. It has several
parents if need be, in order, and bypasses a bad one as engines bypass a bad relay.

    python -m kitae.weights.relay_server < setup.json      {"parents": ["http://…"], "secret": "…", "folder": "…",
                                                     "host": "10.0.0.7", "port": 8700}
"""

import json
import logging
import random
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Address, Manifest
from kitae.weights.bucket_server import ChunkServer, Shop
from kitae.weights.chunks import Chunk, chunks_by_name, delta_chunks, image_chunks
from kitae.weights.downloads import Downloads, Haste
from kitae.weights.http_transport import HttpPublisher, HttpReceiver
from kitae.weights.stores import FolderStore
from kitae.workers.frames import pack_frame

_WAIT = 20.0  # seconds that the parent may think about whether there is anything new
_RETRY = 1.0  # seconds after which a parent that did not answer is asked again
_TICK = 0.25  # seconds
_VERSIONS = 2  # that a relay has

log = logging.getLogger("kitae")


class RelayPublisher(HttpPublisher):
    """The origin of a tree. Engines ask its `relays`, in an order of their own each, and then the origin."""

    relays: tuple[str, ...] = ()

    @property
    def address(self) -> Address:
        own = super().address
        return Address("relay", {**own.settings, "relays": list(self.relays)})


def relay_receiver(address: Address, parameters: Mapping[str, Tensor]) -> HttpReceiver:
    """Receivers begin with different relays, so that these share the work."""
    relays = list(address.settings["relays"])
    random.SystemRandom().shuffle(relays)
    settings = {**address.settings, "sources": [*relays, *address.settings["sources"]]}
    return HttpReceiver.at(Address("http", settings), parameters)


class Relay(Shop):
    """Serves what its parents have, from when it is made until `close`.

    parents: in the order they are asked, the origin last. folder: it has this to itself.
    """

    def __init__(
        self,
        parents: Sequence[str],
        secret: str,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        haste: Haste | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.store = FolderStore(folder)
        self.store.sweep()
        self.downloads = Downloads(parents, secret, haste)
        self._changed = threading.Condition()
        self._manifests: dict[str, Manifest] = {}  # by their tags, the newest last
        self._chunks: dict[str, Chunk] = {}  # of these
        self._checked: set[str] = set()  # what is in the store and whole
        self._coming: dict[str, threading.Lock] = {}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor((haste or Haste()).connections, "relay")
        self._server = ChunkServer(self, secret, host=host, port=port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"
        self._thread = threading.Thread(target=self._follow, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What is in the folder stays."""
        self._closed.set()
        self._server.close()
        self.downloads.hang_up()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        self.downloads.close()

    # What it serves.

    def newest(self, after: str, wait: float) -> Manifest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest_tag not in ("", after), wait)
            tag = self._newest_tag
            return None if tag in ("", after) else self._manifests[tag]

    def manifest(self, version: int) -> Manifest | None:
        found = next((m for m in reversed(self._manifests.values()) if m.version == version), None)
        return found or self._ask_for(version)

    def chunk(self, version: int, name: str) -> Tensor | None:
        """From the folder, or from the parent, once for all who want it."""
        if name not in self._chunks and (self._ask_for(version) is None or name not in self._chunks):
            return None
        with self._coming.setdefault(name, threading.Lock()):
            if (data := self._stored(name)) is not None:
                return data
            data = self.downloads.get(version, self._chunks[name])
            if data is not None:
                try:
                    self.store.put(name, data)
                    self._checked.add(name)
                except EngineError as error:  # it is passed on all the same
                    log.warning("%s", error)
            return data

    # What it takes.

    @property
    def _newest_tag(self) -> str:
        return next(reversed(self._manifests), "")

    def _ask_for(self, version: int) -> Manifest | None:
        """A manifest that it has not heard of yet."""
        record = self.downloads.ask(f"/manifest/{version}")
        if record is None:
            return None
        self._learn(found := Manifest.of(record))
        return found

    def _stored(self, name: str) -> Tensor | None:
        data = self.store.get(name)
        if data is None or name in self._checked:
            return data
        if not self._chunks[name].is_whole(data):  # of an earlier life
            return None
        self._checked.add(name)
        return data

    def _learn(self, manifest: Manifest) -> None:
        with self._changed:
            self._manifests.pop(manifest.tag, None)
            self._manifests[manifest.tag] = manifest
            for tag in list(self._manifests)[:-_VERSIONS]:
                del self._manifests[tag]
            self._chunks = {n: c for found in self._manifests.values() for n, c in chunks_by_name(found).items()}
            self._checked &= self._chunks.keys()
            self._coming = {name: lock for name, lock in self._coming.items() if name in self._chunks}
            self._changed.notify_all()
        self.store.keep(self._chunks)

    def _follow(self) -> None:
        """Take what is new: the delta, or all of it where there is none. The rest comes when somebody asks."""
        known = ""
        while not self._closed.is_set():
            began = time.monotonic()
            record = self.downloads.ask(f"/manifest?wait={_WAIT}&after={known}", silence=_WAIT + 10)
            if record is None:
                if time.monotonic() - began < _RETRY:
                    self._closed.wait(_RETRY)
                continue
            manifest = Manifest.of(record)
            known = manifest.tag
            self._learn(manifest)
            for chunk in delta_chunks(manifest) or image_chunks(manifest):
                self._pool.submit(self._take, manifest, chunk.name)

    def _take(self, manifest: Manifest, name: str) -> None:
        if self._newest_tag == manifest.tag:
            self.chunk(manifest.version, name)


def main(setup: Mapping[str, Any], stream: socket.socket) -> None:
    """At a post: says where it serves, gives signs of life, and ends with the connection."""
    own = stream.getsockname()
    relay = make_relay({"host": own[0], **setup} if isinstance(own, tuple) else setup)
    stream.sendall(pack_frame({"ready": True, "url": relay.url}))
    stream.settimeout(_TICK)
    with suppress(ConnectionError):
        while True:
            try:
                if not stream.recv(4096):
                    break
            except TimeoutError:
                stream.sendall(pack_frame({"tick": True}))
    relay.close()


def make_relay(setup: Mapping[str, Any]) -> Relay:
    haste = Haste(**setup.get("haste", asdict(Haste())))
    where = {name: setup[name] for name in ("host", "port") if name in setup}
    return Relay(setup["parents"], setup["secret"], Path(setup["folder"]), haste=haste, **where)


if __name__ == "__main__":
    alone = make_relay(json.load(sys.stdin))
    print(alone.url, flush=True)
    threading.Event().wait()
