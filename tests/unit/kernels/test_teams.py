"""Who waits for others keeps no threads that would make those of the others sleep."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.kernels.allocation import dismiss_team
from kitae.models.policy import Policy
from kitae.trainer.local_trainer import LocalTrainer

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
X = torch.ones(2**20)


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    dismiss_team()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.usefixtures("_three_threads")
def test_a_team_ends_and_the_next_one_has_as_many() -> None:
    def compute() -> None:
        torch.set_num_threads(3)
        assert torch.equal(X + X, 2 * X)
        found.append(threads())
        dismiss_team()
        found.append(threads())
        assert torch.get_num_threads() == 3 and torch.equal(X + X, 2 * X)
        found.append(threads())
        dismiss_team()

    dismiss_team()
    found: list[int] = []
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found[1] == found[0] - 2 and found[2] == found[0]


@pytest.mark.usefixtures("_three_threads")
def test_an_engine_that_waits_has_none(tiny_policy: Callable[..., Policy]) -> None:
    async def run() -> None:
        engine = NativeEngine(tiny_policy(), EngineConfig(memory_gb=0.01))
        alone = threads()
        _ = X + X  # this thread has a team again
        await engine.generate(Request("0", (1, 2, 3), SamplingParams(max_tokens=4), seed=0))
        await engine.pause()
        await asyncio.sleep(0.2)
        assert threads() == alone + 2
        await engine.close()

    asyncio.run(run())


@pytest.mark.usefixtures("_three_threads")
def test_a_trainer_that_waits_has_none() -> None:
    class Worker:
        def optim_step(self) -> int:
            assert torch.equal(X + X, 2 * X)
            busy.append(threads())
            return 0

    async def run() -> None:
        trainer = LocalTrainer(Worker())  # type: ignore[arg-type]
        _ = X + X
        await trainer.start()
        before = threads()
        assert await trainer.optim_step() == 0
        assert threads() == before + 1 and busy == [before + 3]  # its own thread, and two that helped
        await trainer.close()

    busy: list[int] = []
    asyncio.run(run())
