"""Posts of a Ray cluster: nobody comes in without a secret, and what happens when something is lost."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import ray_config
from test_posts import alive, gone, greeting, opened, spec

from kitae.workers.ray.ray_session import OwnNodes


def test_nobody_comes_in_without_the_secret(nodes: Any) -> None:
    async def knock(host: str, port: int, said: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(said)
        if len(said) < 64:
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 10)
        except ConnectionResetError:
            return b"reset"
        finally:
            writer.close()

    async def body() -> None:
        async with opened(ray_config(nodes), 1) as cluster:
            process = await cluster.start(spec())
            host, port = cluster.listener.address
            async with cluster.listener.expect() as (where, arrival):
                for said in (b"x" * 64, b"", where["secret"][:63].encode() + b"x", where["secret"][:10].encode()):
                    assert await knock(host, port, said) in (b"", b"reset")
                assert cluster.listener.refused == 4 and not arrival.done()
            assert await knock(host, port, where["secret"].encode()) in (b"", b"reset")  # too late
            assert cluster.listener.refused == 5 and not arrival.done()
            assert (await greeting(process))["ready"]

    asyncio.run(body())


def test_an_actor_that_dies_takes_its_process_along(nodes: Any) -> None:
    async def body() -> None:
        async with opened(ray_config(nodes), 1) as cluster:
            process = await cluster.start(spec(linger=True))
            actor = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(actor, 9)
            assert "its actor on node 127.0.0.2" in await asyncio.wait_for(process.wait(), 30)
            await gone(process.pid)
            again = await cluster.start(spec())
            assert (await greeting(again))["ready"]

    asyncio.run(body())


@pytest.fixture
def few(nodes: Any) -> Iterator[OwnNodes]:
    """Nodes of its own, beside those of all, for a test that takes some away."""
    own = OwnNodes.start(1)
    yield own
    own.close()


@pytest.mark.thorough
def test_a_node_that_is_removed(few: OwnNodes) -> None:
    """It is noticed within seconds, and what was there finds a place on another node."""
    added = few.add(9, num_cpus=64)

    async def body() -> None:
        async with opened(ray_config(few, cpus=20, place="strict-pack")) as cluster:
            process = await cluster.start(spec(linger=True))
            few.add(10, num_cpus=64)
            began = time.monotonic()
            few.remove(added)
            assert await asyncio.wait_for(process.wait(), 30) == f"its {process.where} is gone or out of reach"
            noticed = time.monotonic() - began
            await gone(process.pid)
            again = await cluster.start(spec())
            assert (await greeting(again))["ready"] and again.where != process.where
            print(f"noticed after {noticed:.1f} s, elsewhere after {time.monotonic() - began:.1f} s")

    asyncio.run(body())


def test_a_controller_that_is_killed_leaves_nothing(nodes: Any) -> None:
    program = (
        "import asyncio, sys; sys.path[:0] = sys.argv[2:]; from test_posts import *\n"
        "async def body():\n"
        "    async with opened(ClusterConfig(backend='ray', address=sys.argv[1]), 1) as cluster:\n"
        "        print((await cluster.start(spec(linger=True))).pid, flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(body())"
    )
    here = Path(__file__)
    command = [sys.executable, "-c", program, nodes.address, str(here.parent), str(here.parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        pid = next(int(line) for line in controller.stdout if line.strip().isdigit())  # Ray speaks there too
        assert alive(pid)
        controller.kill()
    asyncio.run(gone(pid))
