"""How many connections a server has, and which of them it gives up."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from kitae.clients.addresses import listen
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.serving.model_app import app_of
from kitae.serving.running_server import Patience, bounded, serving
from kitae.serving.server_settings import ServerSettings
from kitae.serving.text_scoring import TextScorer


async def _slow(scope: object, receive: object, send: object) -> None:
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]


def test_the_one_that_is_idle_longest_is_closed() -> None:
    async def body() -> None:
        config = uvicorn.Config(_slow, lifespan="off", ws="none", log_level="error")
        kind, state = bounded(3), ServerState()
        server = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            made = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.02)
            return made

        async def is_open(reader: asyncio.StreamReader) -> bool:
            try:
                return await asyncio.wait_for(reader.read(1), 0.1) != b""
            except TimeoutError:
                return True
            except ConnectionError:
                return False

        busy = await connect()
        busy[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        idle = [await connect() for _ in range(4)]
        assert len(state.connections) == 3
        assert [await is_open(reader) for reader, _ in idle] == [False, False, True, True]
        answer = await asyncio.wait_for(busy[0].readuntil(b"ok"), 5)
        assert answer.startswith(b"HTTP/1.1 200"), "one with a request is not given up"
        last = await connect()
        assert [await is_open(reader) for reader, _ in (idle[2], idle[3], busy, last)] == [False, True, True, True]
        for _, writer in (busy, last, *idle):
            writer.close()
        server.close()
        await asyncio.sleep(0.05)
        assert not state.connections

    asyncio.run(body())


async def _flooding(scope: Any, receive: Any, send: Any) -> None:
    """Answers with 8 MB in pieces, after the body has come."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (8 << 20))]})
    for i in range(128):
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": i < 127})


PATIENCE = Patience(head=0.5, body=1.5, reading=1.5, progress=1 << 14)


async def _open(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.write(sent)
    return reader, writer


async def _end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 8)
    except ConnectionError:
        return b""


def test_clients_that_owe_something_for_too_long_are_given_up() -> None:
    async def body() -> None:
        taken = listen("127.0.0.1", 0)
        port = taken.getsockname()[1]
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        async with serving(_flooding, taken, PATIENCE):
            half_head = [await _open(port, head[:n]) for n in (1, 20, len(head) - 1)]
            half_body = [await _open(port, head + b"x" * n) for n in (0, 99)]
            trickle = await _open(port, head)
            deaf = await _open(port, head + b"x" * 100)
            slow = await _open(port, head + b"x" * 100)
            began = time.monotonic()

            async def drop_by_drop() -> None:
                for _ in range(90):
                    trickle[1].write(b"x")
                    await asyncio.sleep(0.1)

            async def read_slowly() -> int:
                got = 0
                while part := await asyncio.wait_for(slow[0].read(1 << 16), 8):
                    got += len(part)
                    await asyncio.sleep(0.01)
                    if got >= 8 << 20:
                        break
                return got

            dropping = asyncio.create_task(drop_by_drop())
            reading = asyncio.create_task(read_slowly())
            for reader, _ in half_head:
                assert b"400" in (said := await _end(reader)) and b"must have come after 0.5 s" in said
            assert time.monotonic() - began < 4
            assert [await _end(reader) for reader, _ in half_body] == [b"", b""]
            assert await _end(trickle[0]) == b"", "drops do not extend the time for a body"
            dropping.cancel()
            await asyncio.sleep(max(0.0, 4 - (time.monotonic() - began)))
            assert len(await _end(deaf[0])) < 8 << 20, "what was in flight may still be read, but not all"
            assert await reading >= 8 << 20, "who reads slowly, but reads, gets all"
            for _, writer in (*half_head, *half_body, trickle, deaf, slow):
                writer.close()

    asyncio.run(body())


def test_what_waits_for_clients_is_bounded_in_all() -> None:
    async def body() -> None:
        taken = listen("127.0.0.1", 0)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        async with serving(_flooding, taken, Patience(unread=1 << 16)):
            deaf = [await _open(taken.getsockname()[1], head) for _ in range(4)]
            await asyncio.sleep(2.5)
            got = [len(await _end(reader)) for reader, _ in deaf]
            assert sum(size < 8 << 20 for size in got) >= 3
            for _, writer in deaf:
                writer.close()

    asyncio.run(body())


LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "n": 3}
REQUESTS: dict[str, tuple[Any, float]] = {  # a body, and after how many seconds its client goes; 0: it waits
    "whole": ({"prompt": "a", "max_tokens": 4, "n": 2}, 0),
    "stream": ({"prompt": "a", "max_tokens": 4, "stream": True}, 0),
    "response": ({"input": "a", "max_output_tokens": 16, "stream": True}, 0),
    "message": ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "model": "tiny"}, 0),
    "scored": ({"prompt": "a", "max_tokens": 2, "logprobs": 2}, 0),
    "gone": (LONG, 0.2),
    "gone from a stream": ({**LONG, "stream": True}, 0.2),
    "unknown field": ({"prompt": "a", "x": 1}, 0),
    "out of bounds": ({"prompt": "a", "n": 129}, 0),
    "no json": (b"{", 0),
    "too long": ({"prompt": "word " * 40_000}, 0),
    "too many": ({"prompt": ["x"] * 40_000}, 0),
    "half a body": (b'{"prompt": "' + b"x" * 40_000, 0.2),
}


def test_nothing_of_a_request_waits_for_the_collector_of_garbage(tiny_policy: Callable[..., Policy]) -> None:
    """A full collection is rare: what only it can free are megabytes for each refused body."""

    paths = {"response": "/v1/responses", "message": "/v1/messages"}

    async def ask(port: int, kind: str) -> None:
        content, leaves = REQUESTS[kind]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body, missing = (content, 1) if isinstance(content, bytes) else (json.dumps(content).encode(), 0)
        path = paths.get(kind, "/v1/completions")
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
        writer.write(f"{head}\r\nContent-Length: {len(body) + missing * bool(leaves)}\r\n\r\n".encode() + body)
        if leaves:
            await asyncio.sleep(leaves)
        else:
            assert (await reader.read()).startswith(b"HTTP/1.1 ")
        writer.close()
        await asyncio.sleep(0.1)

    async def left_by(port: int, kind: str) -> list[str]:
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await ask(port, kind)
            gc.collect()
            found = [o for o in gc.garbage if isinstance(o, FrameType | asyncio.Future | BaseException)]
            found += [o for o in gc.garbage if type(o).__module__.startswith("kitae")]
            return [type(o).__qualname__ for o in found]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    async def run() -> dict[str, list[str]]:
        policy = tiny_policy()
        engine, scorer = NativeEngine(policy, EngineConfig(memory_gb=0.01)), TextScorer(policy)
        taken = listen("127.0.0.1", 0)
        gc.disable()
        try:
            async with serving(app_of(policy, engine, scorer, ServerSettings("tiny")), taken):
                for kind in REQUESTS:
                    await ask(taken.getsockname()[1], kind)  # what is kept for good is made now
                gc.collect()
                gc.freeze()
                return {kind: await left_by(taken.getsockname()[1], kind) for kind in REQUESTS}
        finally:
            gc.unfreeze()
            gc.enable()
            await scorer.close()
            await engine.close()

    assert asyncio.run(asyncio.wait_for(run(), 60)) == {kind: [] for kind in REQUESTS}
