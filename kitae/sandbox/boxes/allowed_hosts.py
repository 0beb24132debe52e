"""A network in which nothing can be reached but the hosts of a list, by HTTP and HTTPS.

The box has a network of its own (`kitae.sandbox.own_network`), in which a proxy listens that this process answers. It
connects to hosts of the list, and to names that end with one of them, and refuses all others. What ignores
`http_proxy` and `https_proxy` reaches nothing.
"""

import asyncio
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

from kitae.errors import ConfigError
from kitae.sandbox.own_network import Doorway

_PORT = 3128
_BOOT = "import sys; sys.path[:] = {!r}; from kitae.sandbox.own_network import main; main()"
_HEAD, _PART = 2**16, 2**16  # bytes
_PATIENCE = 30.0  # seconds


class AllowedHosts:
    """`await AllowedHosts.of(["pypi.org"])`: for one box, until `close`."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(host.lower() for host in hosts)
        self._token = secrets.token_hex(16)
        self._door = Doorway(self._serve)
        self._door.expect(self._token)

    @classmethod
    async def of(cls, hosts: Sequence[str]) -> Self:
        for host in hosts:
            if not host or "/" in host or ":" in host:
                raise ConfigError(f"network must list hosts by their names, got {host!r}")
        return cls(hosts)

    @property
    def variables(self) -> dict[str, str]:
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        return dict.fromkeys(names, f"http://127.0.0.1:{_PORT}")

    def around(self, command: Sequence[str]) -> list[str]:
        """The command line that enters the network and then is the command."""
        boot = _BOOT.format(list(sys.path))
        return [sys.executable, "-c", boot, str(_PORT), self._door.path, self._token, *command]

    def close(self) -> None:
        self._door.end()

    async def _serve(self, taken: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(self._answer, sock=taken, limit=_HEAD)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, EOFError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                head = await reader.readuntil(b"\r\n\r\n")
            method, target, version = head.split(b"\r\n", 1)[0].decode().split(" ")
            url = urlsplit(f"//{target}" if method == "CONNECT" else target)
            if not self._allows(url.hostname or ""):
                writer.write(b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\n\r\nthis host is not on the list\n")
            else:
                port = url.port or (443 if method == "CONNECT" else 80)
                async with asyncio.timeout(_PATIENCE):
                    there = await asyncio.open_connection(url.hostname, port)
                if method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                else:
                    path = f"{url.path or '/'}{'?' + url.query if url.query else ''}"
                    fields = [line for line in head.split(b"\r\n")[1:-2] if not line.lower().startswith(b"connection:")]
                    first = f"{method} {path} {version}".encode()
                    there[1].write(b"\r\n".join([first, *fields, b"connection: close", b"", b""]))
                await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        with suppress(OSError):
            writer.close()

    def _allows(self, name: str) -> bool:
        return any(name == host or name.endswith(f".{host}") for host in self._hosts)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while part := await source.read(_PART):
            target.write(part)
            await target.drain()
    finally:
        target.close()
