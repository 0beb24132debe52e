"""The relays of a run: processes at posts between the publisher and engines, replaced when they are lost.

Engines ask them first, and the origin where they do not answer; so a lost relay costs a delay. Its successor has the
same folder and, on the same machine, the same port: engines that know it find it again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kitae.errors import EngineError, KitaeError
from kitae.weights.base import Address, Manifest
from kitae.weights.published_version import Board
from kitae.workers.background_tasks import Chores
from kitae.workers.base import Cluster, Duty, Post
from kitae.workers.connection import Deadlines, Link, PostLost

_RETRY = 1.0  # seconds until a relay that did not come up is tried again

log = logging.getLogger("kitae")


class RelayedBoard:
    """Implements `kitae.weights.published_version.Board` over another one, with relays before it. `close` it after
    the engines.

    folder: where relays on this machine keep what they have. pool: of the cluster, in which they are. restarts: how
    often one was replaced.
    """

    def __init__(self, board: Board, cluster: Cluster, count: int, folder: Path, pool: str) -> None:
        self._board = board
        self._cluster = cluster
        self._folder = folder
        self._pool = pool
        self._urls: dict[int, str] = {}
        self._links: dict[int, _RelayLink] = {}
        self._count = count
        self._chores = Chores()
        self._closed = False
        self.restarts = 0

    @property
    def address(self) -> Address:
        own = self._board.address
        return Address("relay", {**own.settings, "relays": list(self._urls.values())})

    @property
    def pids(self) -> list[int]:
        """Of the relays."""
        return [link.pid for link in self._links.values()]

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Manifest | None]:
        async with self._board.hold() as manifest:
            yield manifest

    async def start(self) -> None:
        """All of them; `EngineError` if one does not come up."""
        try:
            await asyncio.gather(*(self._start(number) for number in range(self._count)))
        except PostLost as lost:
            await self.close()
            raise EngineError(f"a relay could not start: {lost}") from None

    async def close(self) -> None:
        self._closed = True
        await self._chores.end()
        await asyncio.gather(*(link.end() for link in self._links.values()))

    async def _start(self, number: int) -> None:
        link = await _RelayLink.start(
            self._cluster, self._duty(number), Deadlines(start=60.0), EngineError, relays=self, number=number
        )
        self._links[number], self._urls[number] = link, link.greeting["url"]

    def _duty(self, number: int) -> Duty:
        own: Mapping[str, Any] = self._board.address.settings
        setup = {
            "parents": list(own["sources"]),
            "secret": own["secret"],
            "haste": own["haste"],
            "folder": str(self._folder / f"relay-{number}"),
        }
        if number in self._urls and not self._cluster.remote:
            setup["port"] = urlsplit(self._urls[number]).port
        return Duty(f"relay {number}", "kitae.weights.relay_server", setup, self._pool)

    def lost(self, link: "_RelayLink", number: int) -> None:
        if not self._closed:
            log.warning("relay %d is replaced: %s", number, link.obituary)
            self._chores.have(self._replace(link, number))

    async def _replace(self, link: "_RelayLink", number: int) -> None:
        await link.end()
        while True:
            self.restarts += 1
            try:
                await self._start(number)
                return
            except (PostLost, KitaeError) as error:
                log.warning("relay %d does not come up: %s", number, error)
                await asyncio.sleep(_RETRY)


class _RelayLink(Link):
    def __init__(
        self, post: Post, limits: Deadlines, error: type[KitaeError], relays: RelayedBoard, number: int
    ) -> None:
        super().__init__(post, limits, error)
        self._relays = relays
        self._number = number

    def _on_loss(self) -> None:
        self._relays.lost(self, self._number)
