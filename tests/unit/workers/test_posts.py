"""One suite for all back-ends: processes start, speak, end and are ended in the same way."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from warm_starts import POSTS, Server

from kitae.workers.backends import open_cluster
from kitae.workers.base import Cluster, LaunchSpec, WorkerProcess
from kitae.workers.config import ClusterConfig
from kitae.workers.frames import read_frame
from kitae.workers.process_status import children_of
from kitae.workers.subprocesses import LocalCluster

Body = Callable[[Cluster], Awaitable[None]]


@pytest.fixture(params=["local", "warm", "ray"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    """warm: local ones as other tests start them, with their imports done."""
    if request.param == "warm":
        server: Server = request.getfixturevalue("warm_server")
        warm = server.instead_of(asyncio.create_subprocess_exec, POSTS)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", warm)
    if request.param != "ray":
        return ClusterConfig(backend="local")
    return ClusterConfig(backend="ray", address=request.getfixturevalue("nodes").address)


@asynccontextmanager
async def opened(config: ClusterConfig, engines: int = 2) -> AsyncIterator[Any]:
    cluster = await open_cluster(config, {"engines": engines})
    assert cluster is not None
    started, start = [], cluster.start

    async def remember(spec: LaunchSpec) -> WorkerProcess:
        started.append(await start(spec))
        return started[-1]

    cluster.start = remember  # type: ignore[method-assign]
    try:
        yield cluster
    finally:
        await cluster.close()
        for process in started:
            process.writer.transport.abort()


def carry_out(config: ClusterConfig, body: Body) -> None:
    async def work() -> None:
        async with opened(config) as cluster:
            await body(cluster)

    asyncio.run(work())


def spec(name: str = "a process", **setup: Any) -> LaunchSpec:
    return LaunchSpec(name, "posted", setup, pool="engines")


async def greeting(process: WorkerProcess) -> dict[str, Any]:
    frame = await asyncio.wait_for(read_frame(process.reader), 60)
    assert frame is not None
    return dict(frame.header)


def alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while alive(pid):
            await asyncio.sleep(0.1)


def test_a_life(config: ClusterConfig) -> None:
    """It gets its setup however long, speaks, and ends by itself when the connection does; its place is free again."""

    async def body(cluster: Cluster) -> None:
        given = LaunchSpec(
            "a process", "posted", {"say": "good day", "ballast": "x" * 300_000}, "engines", 3, environment={"OWN": "1"}
        )
        process = await cluster.start(given)
        told = await greeting(process)
        assert told["pid"] == process.pid and told["setup"] == 300_000 and told["threads"] == "3"
        assert told["shown"] == {
            "CUDA_VISIBLE_DEVICES": "" if config.backend == "ray" else os.environ.get("CUDA_VISIBLE_DEVICES"),
            "OWN": "1",
            "RAY_JOB_ID": None,
        }
        process.writer.close()
        assert await process.wait() == "exit status 0"
        assert process.words == "good day"
        again = await cluster.start(spec())
        await greeting(again)

    carry_out(config, body)


def test_words_are_heard_before_the_end(config: ClusterConfig) -> None:
    async def body(cluster: Cluster) -> None:
        process = await cluster.start(spec(say="I am here"))
        await greeting(process)
        async with asyncio.timeout(10):
            while process.words != "I am here":
                await asyncio.sleep(0.1)

    carry_out(config, body)


def test_a_kill_takes_all_that_it_started(config: ClusterConfig) -> None:
    async def body(cluster: Cluster) -> None:
        process = await cluster.start(spec(child=True, linger=True))
        told = await greeting(process)
        process.kill()
        process.kill()
        assert "killed by signal 9" in await asyncio.wait_for(process.wait(), 20)
        await gone(told["child"])
        assert await read_frame(process.reader) is None
        process.kill()

    carry_out(config, body)


def test_a_process_that_dies(config: ClusterConfig) -> None:
    async def body(cluster: Cluster) -> None:
        process = await cluster.start(spec(linger=True))
        os.kill((await greeting(process))["pid"], 11)
        assert "killed by signal 11" in await asyncio.wait_for(process.wait(), 20)

    carry_out(config, body)


def test_a_setup_that_is_refused_and_a_module_that_is_not_there(config: ClusterConfig) -> None:
    async def body(cluster: Cluster) -> None:
        process = await cluster.start(spec(refuse="no such model"))
        assert (await greeting(process))["refused"] == "no such model"
        assert await process.wait() == "exit status 0"
        process = await cluster.start(spec(die="out of memory"))
        assert await asyncio.wait_for(read_frame(process.reader), 60) is None
        assert await process.wait() == "exit status 1" and process.words == "out of memory"
        process = await cluster.start(LaunchSpec("a process", "not_there", {}, "engines"))
        assert await process.wait() == "exit status 1" and "No module named 'not_there'" in process.words

    carry_out(config, body)


def test_nothing_is_left(config: ClusterConfig) -> None:
    async def body() -> int:
        async with opened(config) as cluster:
            return int((await greeting(await cluster.start(spec(linger=True))))["pid"])

    files = len(os.listdir("/proc/self/fd"))
    asyncio.run(gone(asyncio.run(body())))
    if config.backend == "local":  # Ray keeps some of its own
        assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.thorough
def test_a_start_that_is_given_up_leaves_nothing() -> None:
    """After every number of steps of the loop that a start takes."""

    async def give_up(steps: int) -> bool:
        cluster = LocalCluster()
        starting = asyncio.create_task(cluster.start(spec()))
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        await cluster.close()
        return not starting.cancelled()

    for steps in range(100):
        was = {*children_of(os.getpid())}
        came_up = asyncio.run(give_up(steps))
        gc.collect()  # what was left open warns when it goes, and a warning fails
        assert {*children_of(os.getpid())} <= was, f"after {steps} steps"
        if came_up:
            return
    raise AssertionError("it never came up")
