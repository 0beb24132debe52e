"""Every kind of engine starts from its settings, on the cores that are left for it."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process.process_engine import ProcessEngine
from kitae.engines.start_engine import KINDS, EngineOrder, share_cores, start_engine
from kitae.errors import EngineError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.weights.shared_memory import MemoryPublisher
from kitae.workers import remote_process


@pytest.mark.parametrize(
    ("cores", "engines", "trainer", "shares"),
    [
        (8, 1, [0, 1, 2, 3], [[4, 5, 6, 7]]),
        (8, 2, [0, 1, 2, 3], [[4, 5], [6, 7]]),
        (8, 3, [0, 1, 2, 3, 4], [[5], [6], [7]]),
        (2, 1, [0], [[1]]),
        (2, 2, [0], [[1], [1]]),
        (4, 5, [0], [[1], [2], [3], [1], [2]]),
        (1, 2, [], [[], []]),
        (0, 1, [], [[]]),
    ],
)
def test_share_cores(cores: int, engines: int, trainer: list[int], shares: list[list[int]]) -> None:
    assert share_cores(range(cores), engines) == (trainer, shares)


@pytest.fixture
def model(tiny_folder: Callable[[str], Path]) -> ModelConfig:
    return ModelConfig(path=str(tiny_folder("llama")), dtype="float32", device="cpu")


def test_every_kind_of_the_settings_can_be_started() -> None:
    assert set(KINDS) == set(get_args(EngineConfig.model_fields["kind"].annotation))


def test_the_native_engine_samples_from_the_policy(model: ModelConfig) -> None:
    async def body() -> None:
        policy = load_policy(model)
        engine = await start_engine(EngineOrder(model, EngineConfig(memory_gb=0.02), 3, policy))
        assert isinstance(engine, NativeEngine) and engine.policy is policy
        assert engine.stats().version == 3
        await engine.close()

    asyncio.run(body())


@pytest.mark.usefixtures("warm_posts")
def test_processes_share_one_board(model: ModelConfig) -> None:
    config = EngineConfig(kind="process", count=2, memory_gb=0.02)

    async def body() -> None:
        publisher = MemoryPublisher()
        engine = await start_engine(EngineOrder(model, config, 3, weight_store=publisher))
        assert isinstance(engine, EnginePool)
        for each in engine.members:
            assert isinstance(each, ProcessEngine) and each._weight_store is publisher
        assert [probe.version for probe in await engine.probe()] == [3, 3]
        await engine.close()
        publisher.close()

    threads = torch.get_num_threads()
    asyncio.run(asyncio.wait_for(body(), 100))
    torch.set_num_threads(threads)


def test_an_engine_that_does_not_start_leaves_nothing_behind(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_process, "BOOT", "import sys; sys.exit('boom')")
    threads = torch.get_num_threads()
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineError, match="could not start: exit status 1"):
        asyncio.run(start_engine(EngineOrder(model, EngineConfig(kind="process", count=2))))
    assert len(os.listdir("/proc/self/fd")) == files
    torch.set_num_threads(threads)
