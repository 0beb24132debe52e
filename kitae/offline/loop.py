"""The loop of an offline run: a batch of examples, an update, a report; now and then a checkpoint and an evaluation.

Which examples a step trains on depends on its number alone. So a run that goes on from a checkpoint repeats the steps
after it exactly, and needs no journal for that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from kitae.clock import now
from kitae.config.root import StageConfig
from kitae.errors import Stopped
from kitae.evaluation.held_out import evaluation_due, keep_examples
from kitae.evaluation.statistics import interval_of
from kitae.observe.observer import Observer
from kitae.observe.step_report import Lap, StageReport
from kitae.observe.timeline import Timeline
from kitae.offline.base import Item, Method
from kitae.offline.example_batches import ExampleBatches
from kitae.store.checkpoints import Frontier
from kitae.store.run_folder import RunStore
from kitae.trainer.base import Mark, Trainer


class OfflineLoop:
    """Trains from the frontier to the last step; `stop` ends it between two of them."""

    safe_point = "after this step"

    def __init__(
        self,
        config: StageConfig,
        store: RunStore,
        method: Method,
        trainer: Trainer,
        data: ExampleBatches,
        observer: Observer,
        frontier: Frontier,
    ) -> None:
        self.config = config
        self.store = store
        self.method = method
        self.trainer = trainer
        self.data = data
        self.observer = observer
        self.frontier = frontier
        self.timeline = Timeline(store.folder)
        self._seconds: dict[str, float] = {}  # of the lap
        self._limit = store.time_limit()
        self.last_step = frontier.step if self._limit.is_reached else config.training.steps
        self._stopping = False
        self.between: Callable[[], Coroutine[Any, Any, None]] | None = None

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> dict[str, Any] | None:
        """Train up to the last step, and return the evaluation after it, if anything is held out. Raises `Stopped`
        after `stop`."""
        if evaluation_due(self.config, self.frontier.step, self.last_step):  # a run that was killed may have lost it
            await self.evaluate(self.frontier.step)
        await self._train_steps()
        after = await self.evaluate(self.last_step)
        if self._stopping:
            raise Stopped
        return after

    async def _train_steps(self) -> None:
        began, coming, first = now(), self._coming(self.frontier.step + 1), self.frontier.step + 1
        while (step := self.frontier.step + 1) <= self.last_step:
            if step > first and self.between is not None and not self._stopping:
                await self.between()
            if self._stopping:
                raise Stopped
            assert coming is not None
            items = await self._timed("wait", coming)
            coming = self._coming(step + 1)
            with self.timeline.span("train", step):
                report = await self._learn(step, items)
            end = now()
            report = report.timed(Lap(end - began, self._seconds))
            began, self._seconds = end, {}
            self.store.metrics.append(report.row())
            self.observer.step(report)
            self._limit.spend(report.times.step)
            if self._limit.is_reached:
                self.last_step = step
            if step % self.config.checkpoint.every == 0 or step == self.last_step:
                self.observer.status(f"step {step}: saving a checkpoint")
                with self.timeline.span("save", step):
                    await self._timed("save", self.save())
            if evaluation_due(self.config, step, self.last_step) and step < self.last_step:
                with self.timeline.span("evaluate", step):
                    await self._timed("evaluate", self.evaluate(step))
        if coming is not None:  # the limit of time was reached first
            coming.cancel()

    def _coming(self, step: int) -> "asyncio.Task[list[Item]] | None":
        """The batch of a step, made while the one before it is trained."""
        if step > self.last_step:
            return None
        return asyncio.create_task(asyncio.to_thread(self.data.batch, step))

    async def save(self) -> None:
        await self.store.sync()
        frontier = replace(self.frontier, claim=self.store.journal.claim())
        await self.store.checkpoints.save(frontier, self.trainer.save)

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """What an evaluation found, if it was made."""
        return next((row for row in self.store.metrics.rows("eval") if row["step"] == step), None)

    async def evaluate_now(self) -> dict[str, Any] | None:
        """Of the weights of the last step; None where nothing is held out."""
        return await self.evaluate(self.frontier.step)

    async def evaluate(self, step: int) -> dict[str, Any] | None:
        """Once per step: a resumed run finds what is in the metrics already."""
        if not self.data.held_out:
            return None
        if (known := self.evaluation(step)) is not None:
            return known
        self.observer.status(f"evaluating on {len(self.data.held_out)} held-out examples")
        values = await self.method.evaluate(self.trainer, self.data.held_out)
        digests = [item.digest for item in self.data.held_out]
        keep_examples(self.store.folder, step, dict(zip(digests, values.tolist(), strict=True)))
        found = interval_of(values)
        row = {"kind": "eval", "step": step, "avg": found.mean, "avg_low": found.low, "avg_high": found.high}
        row["examples"] = len(self.data.held_out)
        self.store.metrics.append(row)
        self.observer.evaluated(row)
        return row

    async def _learn(self, step: int, items: list[Item]) -> StageReport:
        batch = await self._timed("annotate", self.method.batch(self.trainer, items))
        totals = await self._timed("train", self.trainer.forward_backward(batch))
        totals += await self._timed("update", self.trainer.optim_step())
        await self.trainer.finish_step(step)
        self.frontier = Frontier(step, self.trainer.updates)
        if totals[Mark.SKIPPED]:
            self.observer.note(f"step {step}: a gradient was not finite; the weights were left as they were")
        return StageReport(step, self.data.epoch(step), len(items), batch.loss_tokens, totals.numbers())

    async def _timed(self, part: str, work: Awaitable[Any]) -> Any:
        began = now()
        try:
            return await work
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + now() - began
