"""Where processes on other machines come in: one listener, and a secret for each that is expected."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

_LETTERS = 64  # of a secret
_MOMENT = 10.0  # seconds in which who connects must say it

log = logging.getLogger("kitae")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Listener:
    """`async with listener.expect() as (where, arrival): …` gives the process `where`, then `reader, writer = await
    arrival`. Each secret lets one connection in, and only while it is expected; all others are closed unanswered.

    refused: how many those were.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._host = ""
        self._server: asyncio.Server | None = None
        self._expected: dict[str, asyncio.Future[Streams]] = {}

    async def open(self, host: str) -> None:
        """host: an address of this machine that the others can reach; nobody comes in by another."""
        self._host = host
        self._server = await asyncio.start_server(self._enter, host, 0)

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None, "the listener must be open"
        return self._host, self._server.sockets[0].getsockname()[1]

    @asynccontextmanager
    async def expect(self) -> AsyncIterator[tuple[dict[str, Any], asyncio.Future[Streams]]]:
        secret, arrival = secrets.token_hex(_LETTERS // 2), asyncio.get_running_loop().create_future()
        self._expected[secret] = arrival
        host, port = self.address
        try:
            yield {"host": host, "port": port, "secret": secret}, arrival
        finally:
            self._expected.pop(secret, None)

    def close(self) -> None:
        """Those who are inside stay."""
        if self._server is not None:
            self._server.close()

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = b""
        with suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            async with asyncio.timeout(_MOMENT):
                said = await reader.readexactly(_LETTERS)
        arrival = self._take(said)
        if arrival is None or arrival.done():
            self.refused += 1
            log.warning("a connection from %s was refused: it did not say a secret that is expected", _peer(writer))
            writer.transport.abort()
            return
        arrival.set_result((reader, writer))

    def _take(self, said: bytes) -> asyncio.Future[Streams] | None:
        """The arrival that was given this secret. All are compared, so that the time it takes reveals none."""
        found = [secret for secret in self._expected if hmac.compare_digest(secret.encode(), said)]
        return self._expected.pop(found[0]) if found else None


def _peer(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if peer else "somewhere"
