"""Who comes in, and who does not."""

import asyncio
import socket

from kitae.workers.listener import Doorway


def test_the_secret_lets_one_in() -> None:
    async def body() -> None:
        doorway = Doorway()
        await doorway.open("127.0.0.1")
        async with doorway.expect() as (where, arrival):
            with socket.create_connection((where["host"], where["port"])) as first:
                first.sendall(where["secret"].encode() + b"hello")
                reader, writer = await arrival
                assert await reader.read(5) == b"hello"
            with socket.create_connection((where["host"], where["port"])) as second:
                second.sendall(where["secret"].encode())
                async with asyncio.timeout(10):
                    while not doorway.refused:
                        await asyncio.sleep(0.01)
        writer.close()
        doorway.close()

    asyncio.run(body())
