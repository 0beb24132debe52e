"""A trainer in this process: one worker, which computes in its own thread."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from kitae.data.packing import with_experts
from kitae.kernels.allocation import dismiss_team
from kitae.observe.meter import Kind, Totals
from kitae.trainer.base import THREADS, Batch, Column, OutsideTeacher, annotate_with, annotated
from kitae.trainer.forward import pack_rows, split_rows
from kitae.trainer.training_worker import Worker
from kitae.types import Sample
from kitae.weights.base import Manifest, Mode
from kitae.weights.probe import score_probe
from kitae.weights.published_version import WeightStore
from kitae.weights.transports import OwnPublisher, make_publisher

T = TypeVar("T")


class LocalTrainer:
    """Implements `kitae.trainer.base.Trainer`. teacher: one outside this process, which scores in parallel."""

    def __init__(self, worker: Worker, teacher: OutsideTeacher | None = None) -> None:
        self.worker = worker
        self._teacher = teacher
        self._restarts = 0  # of the teacher, as last reported
        self._publisher: OwnPublisher | None = None  # for engines with weights of their own
        threads = torch.get_num_threads()  # by default, a new thread would use all cores
        self._compute = ThreadPoolExecutor(1, THREADS, initializer=torch.set_num_threads, initargs=(threads,))
        self._look = ThreadPoolExecutor(2, f"{THREADS}-reads", torch.set_num_threads, (threads,))
        self._reading: set[asyncio.Future[Any]] = set()
        self._changing = asyncio.Lock()

    @property
    def updates(self) -> int:
        return self.worker.updates

    @property
    def dtype(self) -> torch.dtype:
        return self.worker.policy.dtype

    async def start(self) -> None:
        dismiss_team()  # the OpenMP team of the thread that made the model
        if self._teacher is not None:
            await self._teacher.start()

    async def annotate(self, samples: Sequence[Sample], columns: Collection[Column]) -> list[Sample]:
        return await annotate_with(self._teacher, self._annotate, samples, columns)

    async def _annotate(self, samples: Sequence[Sample], columns: Collection[Column]) -> list[Sample]:
        return await self._run(self._compute, lambda: self._compute_columns(samples, columns))

    def _compute_columns(self, samples: Sequence[Sample], columns: Collection[Column]) -> list[Sample]:
        policy, share = self.worker.policy, not self.worker.policy.plain
        parts, rows = pack_rows(samples, self.worker.training, policy.device, policy.dtype, share_prompts=share)
        found = self.worker.annotate(rows, columns)
        found_of = {s.key: s for s in samples}
        for part, experts_TLK in zip(parts, found.pop(Column.EXPERTS, []), strict=False):
            routed = with_experts(part, experts_TLK, share)
            found_of |= {s.key: s for s in routed}
        for column, values in found.items():
            for key, own_N in split_rows(parts, values).items():
                found_of[key] = annotated(found_of[key], column, own_N)
        return [found_of[s.key] for s in samples]

    async def forward_backward(self, batch: Batch) -> Totals:
        totals = await self._run(self._compute, lambda: self._forward_backward(batch))
        return totals + self._lost_teachers()

    def _forward_backward(self, batch: Batch) -> Totals:
        worker = self.worker
        policy = worker.policy
        _, rows = pack_rows(
            batch.samples, worker.training, policy.device, policy.dtype, batch.observed, share_prompts=not policy.plain
        )
        return worker.forward_backward(rows, batch.conditions, batch.roles)

    def _lost_teachers(self) -> Totals:
        """How often the teacher was restarted since the last batch."""
        if self._teacher is None:
            return Totals()
        before, self._restarts = self._restarts, self._teacher.restarts
        return Totals.of(Kind.COUNT, teacher_restarts=self._restarts - before)

    async def optim_step(self) -> Totals:
        return await self._change(self.worker.optim_step)

    async def finish_step(self, step: int) -> None:
        await self._change(lambda: self.worker.finish_step(step))

    async def save(self, folder: Path) -> None:
        await self._read(lambda: self.worker.save(folder))

    async def export(self, folder: Path) -> None:
        await self._read(lambda: self.worker.export(folder))

    async def load(self, folder: Path) -> None:
        await self._run(self._compute, lambda: self.worker.load(folder))

    async def open_weight_store(self, transport: str, mode: Mode, settings: Mapping[str, Any]) -> WeightStore:
        self._publisher = await asyncio.to_thread(make_publisher, transport, mode, **settings)
        return self._publisher

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None:
        publisher = self._publisher
        if publisher is None:
            return None
        return await self._read(lambda: publisher.publish(version, self.worker.weights(), in_full=in_full))

    async def probe(self) -> tuple[float, ...]:
        return await self._read(lambda: score_probe(self.worker.policy))

    async def close(self) -> None:
        if self._teacher is not None:
            await self._teacher.close()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        self._compute.shutdown(wait=False)
        self._look.shutdown(wait=False)

    async def use_threads(self, count: int) -> None:
        """Set the number of compute threads. Sums then round differently, because they are added in another order."""
        if self._teacher is not None:
            self._teacher.use_threads(count)
        await self._run(self._compute, lambda: torch.set_num_threads(count))

    async def _change(self, work: Callable[[], T]) -> T:
        """Run an update of the state, after the reads in progress have ended.

        An update that has begun is completed even if the caller is cancelled: half an update must never be saved.
        """
        await self._changing.acquire()
        try:
            while self._reading:
                await asyncio.wait(self._reading)
        except asyncio.CancelledError:
            self._changing.release()
            raise
        changing = _begun(self._run(self._compute, work))
        changing.add_done_callback(lambda _: self._changing.release())
        return await asyncio.shield(changing)

    async def _read(self, work: Callable[[], T]) -> T:
        """Run a read of the state: in parallel with everything but an update."""
        async with self._changing:
            reading = _begun(self._run(self._look, work))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
        return await asyncio.shield(reading)

    async def _run(self, executor: Executor, work: Callable[[], T]) -> T:
        def alone() -> T:
            try:
                return work()
            finally:
                dismiss_team()

        return await asyncio.get_running_loop().run_in_executor(executor, alone)


def _begun(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task whose error counts as seen even if nobody awaits it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
