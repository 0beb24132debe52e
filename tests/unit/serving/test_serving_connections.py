"""How many connections a server has, and which of them it gives up."""

import asyncio

import uvicorn
from uvicorn.server import ServerState

from kitae.serving.running_server import bounded


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
