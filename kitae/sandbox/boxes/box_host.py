"""Boxes for other machines: what `kitae sandbox-host` serves, and what `remote_box` asks.

    POST /boxes          {"limits": {…}, "world": "tar" or ""} + the world     {"id": "…"}
    POST /boxes/ID       {"do": "run", "command": …} + a file                  {"status": 0, "ended": "exited"} + output
    GET  /health                                                               {"kind", "open", "most"} as JSON

Bodies are frames: the length of the JSON (8 bytes), the JSON, then data. {"refused"} and {"lost"} say what `BoxRefused`
and `BoxLost` say. Every request but the last needs the key. A box that nobody uses for a while is closed: its client
is gone.
"""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import Box, Boxes, BoxLimits, BoxLost, BoxRefused, BoxWorld

_LONGEST = 2**30  # bytes of a body
_LOOK = 1.0  # seconds


class BoxHost:
    """Serves the boxes of a kind, `most` at a time. idle: seconds after which an unused one is closed."""

    def __init__(self, boxes: Boxes, key: str, most: int = 64, idle: float = 900.0) -> None:
        self._boxes, self._key, self._most, self._idle = boxes, key, most, idle
        self._open: dict[str, Box] = {}
        self._used: dict[str, float] = {}
        self._busy = dict[str, int]()
        self._opening = 0

    def app(self) -> Starlette:
        return Starlette(routes=[
            Route("/health", self._health, methods=["GET"]),
            Route("/boxes", self._make, methods=["POST"]),
            Route("/boxes/{id}", self._do, methods=["POST"]),
        ])  # fmt: skip

    async def sweep(self) -> None:
        """Close what nobody uses, until it is cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK, self._idle))
            for id, used in list(self._used.items()):
                if not self._busy[id] and time.monotonic() - used > self._idle:
                    await self._drop(id)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"kind": self._boxes.name, "open": len(self._open) + self._opening, "most": self._most})

    async def _make(self, request: Request) -> Response:
        order, data = await self._read(request)
        if len(self._open) + self._opening >= self._most:
            return Response(status_code=503)
        self._opening += 1
        try:
            box = await self._boxes.open(limits_of(order["limits"]), BoxWorld(order["world"], data) if data else None)
        except (BoxLost, BoxRefused, ConfigError) as problem:
            return framed({"lost" if isinstance(problem, BoxLost) else "refused": str(problem)})
        finally:
            self._opening -= 1
        id = uuid.uuid4().hex
        self._open[id], self._used[id], self._busy[id] = box, time.monotonic(), 0
        return framed({"id": id})

    async def _do(self, request: Request) -> Response:
        order, data = await self._read(request)
        id = request.path_params["id"]
        if id not in self._open:
            return framed({"lost": "the host has no such box"})
        self._busy[id] += 1
        try:
            return await self._done(id, order, data)
        except BoxLost as loss:
            await self._drop(id)
            return framed({"lost": str(loss)})
        except BoxRefused as refusal:
            return framed({"refused": str(refusal)})
        except asyncio.CancelledError:
            await self._drop(id)
            raise
        finally:
            if id in self._busy:
                self._busy[id] -= 1
                self._used[id] = time.monotonic()

    async def _done(self, id: str, order: dict[str, Any], data: bytes) -> Response:
        box, what = self._open[id], order.pop("do")
        if what == "run":
            ran = await box.run(**order)
            return framed({"status": ran.status, "ended": ran.ended}, ran.output.encode(errors="surrogatepass"))
        if what == "read":
            return framed({}, await box.read(**order))
        if what == "write":
            await box.write(data=data, **order)
        elif what == "snapshot":
            world = await box.snapshot(**order)
            return framed({"world": world.kind}, world.data)
        elif what == "close":
            await self._drop(id)
        return framed({})

    async def _drop(self, id: str) -> None:
        box = self._open.pop(id, None)
        self._used.pop(id, None)
        self._busy.pop(id, None)
        if box is not None:
            await box.close()

    async def _read(self, request: Request) -> tuple[dict[str, Any], bytes]:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise HTTPException(401)
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > _LONGEST:
                    raise HTTPException(413)
        except ClientDisconnect:
            raise HTTPException(400) from None
        try:
            return unframed(bytes(body))
        except ValueError:
            raise HTTPException(400) from None


def frame(head: Mapping[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def unframed(body: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(body[:8], "little")
    head = json.loads(body[8 : 8 + size])
    if not isinstance(head, dict):
        raise ValueError("a frame begins with an object")
    return head, body[8 + size :]


def framed(head: Mapping[str, Any], data: bytes = b"") -> Response:
    return Response(frame(head, data), media_type="application/octet-stream")


def limits_of(told: Mapping[str, Any]) -> BoxLimits:
    network = told["network"]
    return BoxLimits(**{**told, "network": network if isinstance(network, str) else tuple(network)})
