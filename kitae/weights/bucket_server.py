"""A small server of a publisher's buckets by HTTP.

    GET /chunk/4/image-00003-…   the bytes of a bucket of version 4, also from the middle (Range: bytes=1000-)
    POST /…                      what the owner answers (`Shop.call`), from JSON to JSON

Every request must have the secret, as `Authorization: Bearer …`. Whoever has it is trusted; nothing is encrypted.
"""

import hmac
import json
import logging
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

_STALL = 60.0  # seconds that a client may take to receive a piece of a bucket
_LONGEST_CALL = 2**20  # bytes
_SEND = 2**22  # bytes at a time

log = logging.getLogger("kitae")


class Shop:
    """What a server has to offer; nothing, unless its owner overrides a method. Many threads call it; all may wait."""

    def chunk(self, version: int, name: str) -> Tensor | None:
        return None

    def call(self, member: str, what: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a POST. member: the same for all calls over one connection."""
        return None

    def gone(self, member: str) -> None:
        """That connection has ended."""


class ChunkServer:
    """`ChunkServer(shop, secret, host="0.0.0.0")`, then `port`, and `close`. Serves from when it is made.

    host: the address to listen at. port: 0: any that is free.
    """

    def __init__(self, shop: Shop, secret: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = _Server((host, port), _Handler, shop, secret)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="chunks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """At once: what is being sent is broken off."""
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type["_Handler"], shop: Shop, secret: str) -> None:
        self.shop = shop
        self.secret = secret
        self.connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def hang_up(self) -> None:
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection of %s broke off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the bytes would wait for the acknowledgement of the headers

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the other machine may be gone
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        self.server.shop.gone(self._member)
        super().finish()

    def do_GET(self) -> None:
        if not self._is_known():
            return
        match urlsplit(self.path).path.strip("/").split("/"):
            case ["chunk", version, name]:
                self._send_chunk(self.server.shop.chunk(int(version), name))
            case _:
                self._send_json(404, None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if not self._is_known() or length > _LONGEST_CALL:
            self.close_connection = True
            return
        body = json.loads(self.rfile.read(length) or b"{}")
        answer = self.server.shop.call(self._member, urlsplit(self.path).path.strip("/"), body)
        self._send_json(404 if answer is None else 200, answer)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.client_address[0], format % args)

    @property
    def _member(self) -> str:
        return ":".join(map(str, self.client_address[:2]))

    def _is_known(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        known = hmac.compare_digest(given, f"Bearer {self.server.secret}".encode())
        if not known:
            self._send_json(401, None)
        return known

    def _send_chunk(self, data: Tensor | None) -> None:
        if data is None:
            self._send_json(404, None)
            return
        start = _first_byte(self.headers.get("Range", ""))
        if start > len(data):
            self._send_json(416, None)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        view = data.numpy().data[start:]
        self.connection.settimeout(_STALL)
        for begin in range(0, len(view), _SEND):
            self.wfile.write(view[begin : begin + _SEND])
        self.connection.settimeout(None)

    def _send_json(self, status: int, body: Any) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(text)))
            self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text)


def _first_byte(header: str) -> int:
    """Of `bytes=1000-`; 0 for any other kind of range, which the server need not know."""
    start = header.removeprefix("bytes=").removesuffix("-")
    return int(start) if header.startswith("bytes=") and start.isdecimal() else 0
