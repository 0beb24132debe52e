"""Who comes in, and who does not."""

import asyncio
import socket

from kitae.workers.listener import Listener


def test_the_secret_lets_one_in() -> None:
    async def body() -> None:
        listener = Listener()
        await listener.open("127.0.0.1")
        async with listener.expect() as (where, arrival):
            with socket.create_connection((where["host"], where["port"])) as first:
                first.sendall(where["secret"].encode() + b"hello")
                reader, writer = await arrival
                assert await reader.read(5) == b"hello"
            with socket.create_connection((where["host"], where["port"])) as second:
                second.sendall(where["secret"].encode())
                async with asyncio.timeout(10):
                    while not listener.refused:
                        await asyncio.sleep(0.01)
        writer.close()
        listener.close()

    asyncio.run(body())
