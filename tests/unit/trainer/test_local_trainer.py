"""A trainer in a thread: what runs beside what."""

import asyncio
import gc
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kitae.observe.meter import Totals
from kitae.trainer.base import Batch
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.training_worker import Worker


class SlowWorker:
    """Saving and publishing take until they are let go; the rest is done at once. `log` has what has ended."""

    updates, slow_update = 0, False
    training = TrainingConfig()
    policy = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, plain=False)

    def __init__(self) -> None:
        self.log: list[str] = []
        self.reading, self.go_on = threading.Event(), threading.Event()

    def slowly(self, what: str) -> None:
        self.reading.set()
        assert self.go_on.wait(30)
        self.log.append(what)

    def save(self, folder: Path) -> None:
        self.slowly("save")

    def weights(self) -> dict[str, Any]:
        self.slowly("publish")
        return {}

    def forward_backward(self, *arguments: Any) -> Totals:
        self.log.append("forward_backward")
        return Totals()

    def optim_step(self) -> Totals:
        if self.slow_update:
            self.slowly("optim_step")
        else:
            self.log.append("optim_step")
        return Totals()

    def finish_step(self, step: int) -> None:
        self.log.append("finish_step")


class Publisher:
    def close(self) -> None: ...

    def publish(self, version: int, weights: Any, *, in_full: bool = False) -> None:
        return None


def start() -> tuple[SlowWorker, LocalTrainer]:
    worker = SlowWorker()
    trainer = LocalTrainer(cast(Worker, worker))
    trainer._publisher = cast(Any, Publisher())
    return worker, trainer


async def begun(worker: SlowWorker, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """The task, once the worker is at it."""
    task = asyncio.create_task(work)
    assert await asyncio.to_thread(worker.reading.wait, 30)
    return task


@pytest.mark.parametrize("reading", ["save", "publish"])
@pytest.mark.parametrize("changing", ["optim_step", "finish_step"])
def test_what_changes_weights_waits_for_what_reads_them_and_nothing_else_does(reading: str, changing: str) -> None:
    async def run() -> list[str]:
        worker, trainer = start()
        read = trainer.save(Path()) if reading == "save" else trainer.publish(1)
        slow = await begun(worker, read)
        await asyncio.wait_for(trainer.forward_backward(Batch(())), 30)
        change = asyncio.create_task(trainer.optim_step() if changing == "optim_step" else trainer.finish_step(1))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(trainer.forward_backward(Batch(())), 30)
        assert not change.done() and not slow.done()
        worker.go_on.set()
        await asyncio.wait_for(asyncio.gather(slow, change), 30)
        await trainer.close()
        return worker.log

    assert asyncio.run(run()) == ["forward_backward", "forward_backward", reading, changing]


def test_what_reads_weights_waits_for_a_change_that_was_asked_for_before() -> None:
    async def run() -> list[str]:
        worker, trainer = start()
        first = await begun(worker, trainer.publish(1))
        change = asyncio.create_task(trainer.optim_step())
        await asyncio.sleep(0.05)
        second = asyncio.create_task(trainer.save(Path()))
        await asyncio.sleep(0.05)
        worker.go_on.set()
        await asyncio.wait_for(asyncio.gather(first, change, second), 30)
        await trainer.close()
        return worker.log

    assert asyncio.run(run()) == ["publish", "optim_step", "save"]


def test_a_save_that_nobody_waits_for_any_more_is_still_waited_for_by_an_update() -> None:
    """Its thread goes on reading: cancelling a task does not stop it."""

    async def run() -> list[str]:
        worker, trainer = start()
        slow = await begun(worker, trainer.save(Path()))
        slow.cancel()
        change = asyncio.create_task(trainer.optim_step())
        await asyncio.sleep(0.05)
        assert slow.cancelled() and not change.done()
        worker.go_on.set()
        await asyncio.wait_for(change, 30)
        await trainer.close()
        return worker.log

    assert asyncio.run(run()) == ["save", "optim_step"]


def test_a_save_waits_for_an_update_that_nobody_waits_for_any_more() -> None:
    """It would have half of it."""

    async def run() -> list[str]:
        worker, trainer = start()
        worker.slow_update = True
        change = await begun(worker, trainer.optim_step())
        change.cancel()
        save = asyncio.create_task(trainer.save(Path()))
        await asyncio.sleep(0.05)
        assert change.cancelled() and not save.done()
        worker.go_on.set()
        await asyncio.wait_for(save, 30)
        await trainer.close()
        return worker.log

    assert asyncio.run(run()) == ["optim_step", "save"]


def test_an_update_that_is_given_up_before_it_has_begun_is_none() -> None:
    async def run() -> list[str]:
        worker, trainer = start()
        slow = await begun(worker, trainer.save(Path()))
        change = asyncio.create_task(trainer.optim_step())
        await asyncio.sleep(0.05)
        change.cancel()
        worker.go_on.set()
        await asyncio.wait_for(slow, 30)
        await asyncio.wait_for(trainer.finish_step(1), 30)
        await trainer.close()
        return worker.log

    assert asyncio.run(run()) == ["save", "finish_step"]


def test_a_save_that_fails_does_not_stop_updates() -> None:
    async def run() -> list[str]:
        worker, trainer = start()

        def fail(folder: Path) -> None:
            raise OSError("no space")

        worker.save = fail  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no space"):
            await trainer.save(Path())
        await asyncio.wait_for(trainer.optim_step(), 30)
        await trainer.close()
        return worker.log

    assert asyncio.run(run()) == ["optim_step"]


def test_a_save_that_fails_when_nobody_waits_for_it_any_more_is_no_news() -> None:
    """A run that ends takes away the folder that is being written to."""

    async def run() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        worker, trainer = start()

        def fail(folder: Path) -> None:
            worker.slowly("save")
            raise OSError("no such folder")

        worker.save = fail  # type: ignore[method-assign]
        slow = await begun(worker, trainer.save(Path()))
        slow.cancel()
        worker.go_on.set()
        await asyncio.wait_for(trainer.optim_step(), 30)
        await trainer.close()
        gc.collect()
        return complaints

    assert asyncio.run(run()) == []
