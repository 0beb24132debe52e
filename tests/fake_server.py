"""A real HTTP server on loopback that does what a test wants: slow, broken or hostile."""

import asyncio
import gc
import json
import socket
import struct
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

from kitae.clients import http_client
from kitae.clients.http_client import close_clients

KEY = "sk-Zr8-very-secret/0123456789+abc"


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """What the server does with a request; a reset tears the connection, half of the body sent or none."""

    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drip: float = 0.0
    reset: bool = False
    half: bool = False
    reason: str = "Reason"


Handler = Callable[[Request], Reply | Awaitable[Reply]]


class FakeServer:
    """`async with FakeServer(lambda request: Reply({"n": 1})) as server: … server.url, server.requests, server.peak`"""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[Request] = []
        self.times: list[float] = []
        self.busy = self.peak = self.lost = 0
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await close_clients()
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.lost += 1
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        request = Request(head[0].split()[1], headers, body)
        self.requests.append(request)
        self.times.append(time.monotonic())
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        try:
            made = self.handler(request)
            reply = made if isinstance(made, Reply) else await made
            await asyncio.sleep(reply.delay)
        finally:
            self.busy -= 1
        return await self._send(reply, writer)

    async def _send(self, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        lines = [f"HTTP/1.1 {reply.status} {reply.reason}", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        if not reply.reset:
            writer.write("\r\n".join([*lines, "", ""]).encode())
        if reply.drip:
            for byte in content:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(reply.drip)
            return True
        if reply.reset or reply.half:
            if reply.half:
                writer.write(content[: len(content) // 2])
                await writer.drain()
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        writer.write(content)
        await writer.drain()
        return True


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(body)


def run_tidily(body: Coroutine[Any, Any, Any]) -> None:
    """`asyncio.run` that also fails on anything left open."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(body)
        gc.collect()
    assert [str(w.message) for w in caught] == []
    assert http_client._LIFETIMES == {}


def script(*replies: Reply) -> Handler:
    """The replies one after the other, the last of them for ever."""
    left = list(replies)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]
