"""A process is lost when its connection is, whether or not anybody can say what became of it."""

import asyncio
import socket
import time
from typing import Any

import pytest

from kitae.errors import EngineError, WorkerLost
from kitae.workers.base import LaunchSpec
from kitae.workers.connection import Deadlines, RemoteWorker
from kitae.workers.frames import pack_frame
from kitae.workers.subprocesses import LocalCluster


class Silent:
    """A process on a machine without power: nobody says how it ended for a long time."""

    where, pid, words = "node 10.0.0.3", 1, ""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.gone = reader, writer, asyncio.Event()

    def kill(self) -> None:
        pass

    async def wait(self) -> str:
        await self.gone.wait()
        return "its node is gone"


class Far:
    remote, host = True, ""

    async def start(self, spec: LaunchSpec) -> Any:
        ours, self.theirs = socket.socketpair()
        self.theirs.sendall(pack_frame({"ready": True}))
        self.process = Silent(*await asyncio.open_connection(sock=ours))
        return self.process

    async def close(self) -> None:
        pass


def test_it_is_lost_before_anybody_knows_why() -> None:
    async def body() -> float:
        far = Far()
        remote = await RemoteWorker.start(far, LaunchSpec("x", "x", {}), Deadlines(), EngineError)
        began = time.monotonic()
        far.theirs.close()
        assert await remote.lost == "it broke off the connection, and node 10.0.0.3 does not answer"
        far.process.gone.set()
        await remote.end()
        return time.monotonic() - began

    assert asyncio.run(body()) < 10


@pytest.mark.parametrize("busy", [True, False])
def test_a_start_may_take_as_long_as_it_works(busy: bool) -> None:
    async def start() -> None:
        cluster = LocalCluster()
        spec = LaunchSpec("a worker", "slow_start", {"seconds": 5, "busy": busy})
        try:
            worker = await RemoteWorker.start(cluster, spec, Deadlines(start=2.0), EngineError)
            await worker.close()
        finally:
            await cluster.close()

    if busy:
        asyncio.run(start())
    else:
        with pytest.raises(WorkerLost, match="was not ready, and did nothing for 2 s"):
            asyncio.run(start())
