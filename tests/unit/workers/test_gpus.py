"""Who computes on which GPU of a machine."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_posts import greeting, opened

from kitae.workers.base import LaunchSpec
from kitae.workers.config import ClusterConfig
from kitae.workers.gpus import GpuShares, visible_gpus
from kitae.workers.subprocesses import LocalCluster

SHOWN = "CUDA_VISIBLE_DEVICES"


def taken(gpus: Sequence[str], count: int, **settings: Any) -> list[str]:
    shares = GpuShares(gpus, **settings)
    return [shares.take() for _ in range(count)]


def test_each_process_gets_a_gpu_and_they_share_where_there_are_too_few() -> None:
    assert taken(["0", "1", "2"], 4) == ["0", "1", "2", "0"]
    assert taken(["0", "1", "2"], 4, led=True) == ["1", "2", "0", "1"]
    assert taken(["0"], 2, led=True) == ["0", "0"]
    assert taken([], 2) == taken(["0", "1"], 2, device="cpu") == taken(["0", "1"], 2, device="cuda:1") == ["", ""]


def test_the_gpu_of_a_process_that_ended_goes_to_the_next() -> None:
    shares = GpuShares(["0", "1"])
    shares.take(), shares.take()
    shares.give_back("1")
    assert shares.take() == "1"


def test_its_own_gpu_comes_first_and_the_others_stay_visible() -> None:
    shares = GpuShares(["4", "5", "6"])
    assert shares.environment("5") == {SHOWN: "5,4,6"} and shares.environment("") == {}


def test_visible_gpus_have_the_names_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(SHOWN, raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv(SHOWN, "GPU-7f,3")
    assert visible_gpus() == ["GPU-7f", "3"]


def test_local_processes_see_their_own_first() -> None:
    async def shown() -> list[tuple[str, str]]:
        cluster, found = LocalCluster(GpuShares(["0", "1"])), []
        try:
            for pool in ("trainer", "trainer", "engines", "engines", "verifiers"):
                process = await cluster.start(LaunchSpec("a process", "posted", {}, pool=pool))
                found.append((pool, (await greeting(process))["shown"][SHOWN]))
        finally:
            await cluster.close()
        return found

    *computing, (_, verifier) = asyncio.run(shown())
    both = ["0,1", "1,0"]
    assert [gpus for _, gpus in computing] == both * 2 and verifier not in both


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("engines", [2, 4])
def test_on_ray_engines_have_one_each_or_share(monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
    """Ray believes what it is told of its machine: it has two GPUs. Four engines share them, two and two."""
    if find_spec("ray") is None:  # importing it here would leave its habits on
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    from kitae.workers.ray import ray_session

    monkeypatch.setattr(ray_session, "_gpus", lambda: 2)
    pools = {"engines": {"cpus": 0.1}}
    config = ClusterConfig.model_validate({"backend": "ray", "pools": pools})

    async def shown() -> list[str]:
        async with opened(config, engines) as cluster:
            started = [await cluster.start(LaunchSpec("e", "posted", {}, pool="engines")) for _ in range(engines)]
            return [(await greeting(process))["shown"][SHOWN] for process in started]

    assert Counter(asyncio.run(shown())) == {"0": engines // 2, "1": engines // 2}
