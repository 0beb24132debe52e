"""Places on a Ray cluster: found, refused where they cannot be, given back."""

import asyncio
import os
import time
from typing import Any

import pytest
from ray_nodes import ray_config
from test_posts import opened, spec

from kitae.errors import ConfigError
from kitae.workers.backends import open_cluster
from kitae.workers.base import LaunchError
from kitae.workers.ray.ray_session import NODE_LABEL


@pytest.mark.parametrize(
    ("engines", "pool", "why"),
    [
        (1, {"cpus": 500}, "no machine has 500 CPUs"),
        (1, {"gpus": 1}, "no machine has 1 CPUs, 1 GPUs"),
        (1, {"labels": {"accelerator": "b200"}}, "no machine has the labels accelerator=b200"),
        (4, {"place": "strict-spread", "cpus": 0.1}, "asks for 4 machines, 3 of 3"),
    ],
)
def test_what_cannot_be_met_is_refused_in_time(nodes: Any, engines: int, pool: dict[str, Any], why: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="the cluster cannot give what is asked for") as caught:
        asyncio.run(open_cluster(ray_config(nodes, 2.0, **pool), {"engines": engines}))
    assert time.monotonic() - began < 60
    assert why in str(caught.value) and f"labels {NODE_LABEL}=2" in str(caught.value)


def test_what_is_taken_already_is_refused_too(nodes: Any) -> None:
    """By those who ask for their places first, and for one more process than was foreseen."""
    cores = len(os.sched_getaffinity(0))

    async def body() -> None:
        async with opened(ray_config(nodes, 8.0, cpus=cores), 3) as cluster:
            with pytest.raises(LaunchError, match=r"too little of it is free, within 8 s(.|\n)*\(free: 0 CPUs"):
                await asyncio.gather(*(cluster.start(spec()) for _ in range(4)))

    asyncio.run(body())


def test_labels_and_spreading(nodes: Any) -> None:
    async def spread() -> set[str]:
        async with opened(ray_config(nodes, place="strict-spread"), 3) as cluster:
            return {process.where for process in await asyncio.gather(*(cluster.start(spec()) for _ in range(3)))}

    async def labelled() -> list[str]:
        async with opened(ray_config(nodes, cpus=0.5, labels={NODE_LABEL: "1"})) as cluster:
            return [process.where for process in [await cluster.start(spec()) for _ in range(2)]]

    assert len(asyncio.run(spread())) == 3
    assert len(set(asyncio.run(labelled()))) == 1


def test_who_gives_up_a_start_after_the_end_starts_no_cluster(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody has imported Ray with its habits, it starts one for whoever asks it anything."""
    from ray._private import auto_init_hook

    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)

    async def body() -> None:
        async with opened(ray_config(nodes, 1, cpus=0.1)) as cluster:
            starting = asyncio.create_task(cluster.start(spec()))
            await asyncio.sleep(0.1)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        import ray

        assert not ray.is_initialized()

    asyncio.run(body())


@pytest.mark.thorough
def test_one_more_than_was_foreseen(nodes: Any) -> None:
    """It finds a place of its own, which is given back with it."""

    async def body() -> None:
        async with opened(ray_config(nodes, cpus=1), 1) as cluster:
            processes = [await cluster.start(spec()) for _ in range(3)]
            free = sum(machine.free.cpus for machine in cluster.machines())
            for process in processes[1:]:
                process.kill()
                await process.wait()
            async with asyncio.timeout(10):
                while sum(machine.free.cpus for machine in cluster.machines()) < free + 2:
                    await asyncio.sleep(0.2)

    asyncio.run(body())
