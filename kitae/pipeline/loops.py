"""The four loops of a run. On-policy training is `max_staleness = 0` of the same loops that run ahead with more.

    feed      takes a free slot, issues the next prompt of the stream              waits for: a slot
    rollouts  one task per slot: sample, score, journal, filter, perhaps refill    waits for: engine, verifier, disk
    train     takes a batch of slots, updates the weights                          waits for: a batch (see `buffer`)
    sync      hands the new version to the engine, saves, evaluates, frees slots   waits for: a trained version

Where the engine uses the trainer's own weights, it stands still from the first optimizer step of a batch until it is
told the new version: no token is sampled from weights that have no version. A cancelled loop leaves no trace but
journalled rollouts, which a resumed run takes up again; a stopped one also journals what was sampled in part.

Beside them, one task copies unfinished responses into the journal now and then, and a watchdog knows what each loop
waits for (`watch`).
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch

from kitae.clock import now
from kitae.config.root import RLConfig
from kitae.data.prompts import PromptStream
from kitae.engines.base import Engine, WeightUpdate
from kitae.engines.fleet import members
from kitae.engines.probe import ProbedEngine, check_engine
from kitae.envs.episode import Episodes, Parked
from kitae.errors import DataError, RequestError, root_cause
from kitae.observe.observer import Observer
from kitae.observe.timeline import Timeline
from kitae.pipeline import report
from kitae.pipeline.buffer import Buffer, Outcome, Slot
from kitae.pipeline.evaluate import evaluation_due
from kitae.pipeline.watch import Watch, whereabouts
from kitae.store.checkpoint import Frontier
from kitae.store.journal import PendingSlot
from kitae.store.run import RunStore
from kitae.trainer.learner import Learner
from kitae.types import Group, Prompt

T = TypeVar("T")


class Stopped(Exception):
    """The user asked to stop; the frontier is consistent and can be saved."""


class Pipeline:
    def __init__(
        self,
        config: RLConfig,
        store: RunStore,
        stream: PromptStream,
        runner: Episodes,
        engine: Engine,
        learner: Learner,
        observer: Observer,
        frontier: Frontier,
        evaluate: Callable[[int], Any],
    ) -> None:
        t, p = config.training, config.pipeline
        self.config = config
        self.store = store
        self.stream = stream
        self.timeline = Timeline(store.folder)
        self.watch = Watch(p.stall_limit, self._pulse, store.folder / "stalled.txt")
        self.runner = replace(
            runner,
            span=lambda part, start, end: self.timeline.add(part, self.version, start, end),
            waiting=lambda what, which: self.watch.waits("a rollout", what, lambda: which),
        )
        self.engine = engine
        self.learner = learner
        self.observer = observer
        self.frontier = frontier
        self.evaluate = evaluate
        given_up = self._give_up if p.overdue == "drop" else None
        self.buffer = Buffer(t.prompts_per_step, p.max_staleness, frontier.step, given_up)
        self.cursor, self.issued = store.journal.issued()
        self.version = frontier.step
        self._wanted = asyncio.Semaphore(0)  # slots that are to be issued
        self._overdue: set[Slot] = set()  # given up, and not in the journal yet
        self._given_up = 0  # since the last batch
        self._pass_rates = store.journal.pass_rates() if p.mastered_visits < 1 else {}
        self._issuing = asyncio.Lock()
        self._holding: Future[None] | None = None
        self._fills: dict[Slot, asyncio.Task[None]] = {}
        self._refills_left = self._refill_limit
        self._finished_rollouts = 0
        self._complaints = report.Complaints(config, observer, store.folder)
        self._trained: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._stop = asyncio.Event()
        threads = torch.get_num_threads()
        self._compute = ThreadPoolExecutor(1, _TRAINER, initializer=torch.set_num_threads, initargs=(threads,))

    async def _catch_up(self) -> None:
        """Train the steps again that the journal has and the checkpoint has not: same groups, same weights.

        So what was sampled by those weights is as old as it says, and verdicts are not asked for again.
        """
        last = self.store.journal.last_step()
        if last > self.frontier.step:
            self.observer.note(
                f"training steps {self.frontier.step + 1} to {last} again, on what the journal has of them"
            )
        logged = {row["step"] for row in self.store.metrics.rows("step")}
        for step in range(self.frontier.step + 1, last + 1):
            if self._stop.is_set():
                raise Stopped
            began, stats = now(), self.engine.stats()
            groups, dropped = self.store.journal.batch(step)
            outcomes = [Outcome(g, ()) for g in groups] + [Outcome(None, (each,)) for each in dropped]
            row = report.describe(step, outcomes) | report.staleness(outcomes, self.version, self.buffer.bound)
            row |= report.generation(stats, stats) | {"overdue": 0} | await self._learn(step, outcomes)
            row |= report.times(row, 0.0, now() - began)
            self._advance(step)
            await self._finish_step(row, step in logged)
            self.buffer.release(step)

    async def run(self) -> None:
        """Train up to the configured number of steps, or raise what went wrong."""
        try:
            async with asyncio.TaskGroup() as tasks:
                endless = [tasks.create_task(self.watch.guard(), name="watch")]
                await self._catch_up()
                endless.append(tasks.create_task(self._feed_loop(tasks), name="feed"))
                endless.append(tasks.create_task(self._snapshot_loop(), name="snapshots"))
                training = tasks.create_task(self._train_loop(), name="train")
                await tasks.create_task(self._sync_loop(), name="sync")
                await training
                for task in (*endless, *self._fills.values()):  # of a run that was made shorter, some are left
                    task.cancel()
        except BaseExceptionGroup as group:
            raise root_cause(group) from None
        finally:
            if self._holding:
                self._holding.cancel()  # or the trainer's thread would wait for a loop that is gone

    def close(self) -> None:
        self._compute.shutdown(wait=False)

    def _pulse(self) -> object:
        """Changes while the engine or the trainer works."""
        stats = self.engine.stats()
        return stats.generated_tokens, stats.prompt_tokens, stats.restarts, whereabouts(_TRAINER)

    @property
    def _refill_limit(self) -> int:
        return int(self.config.pipeline.max_refill * self.config.training.prompts_per_step)

    def stop(self) -> None:
        """Stop at the next safe point; `run` then raises `Stopped`."""
        self._stop.set()

    async def save(self) -> None:
        """Checkpoint the frontier, once the disk has the journal of it. Call it only while no update is running."""
        await self.store.sync()
        await self._in_trainer(partial(self.store.checkpoints.save, self.frontier, self.learner.save_state))

    # Loop 1

    async def _feed_loop(self, tasks: asyncio.TaskGroup) -> None:
        """First the slots that an interrupted run had issued and not trained, then new ones, as many as are wanted."""
        needed = (self.config.training.steps - self.version) * self.buffer.size
        resumed = await self._resumed(needed)
        for _ in range(needed - len(resumed)):
            self._wanted.release()
        for pending in resumed:
            with self.watch.waits("feed", "a free slot"):
                slot = await self.buffer.reserve(pending.number, pending.oldest)
            self._refills_left -= len(pending.groups) - 1
            self._fill(tasks, slot, list(pending.groups))
        while True:
            with self.watch.waits("feed", "nothing: all prompts are issued"):
                await self._wanted.acquire()
            with self.watch.waits("feed", "a free slot"):
                slot = await self.buffer.reserve(self.issued)
            self.issued += 1
            self._fill(tasks, slot, [])

    async def _resumed(self, needed: int) -> list[PendingSlot]:
        """The slots to take up again, at most as many as are needed. One that cannot be trained in time is skipped: a
        batch had given it up, and the journal did not hear of it any more."""
        kept: list[PendingSlot] = []
        found = self.store.journal.pending()
        for slot in sorted(found, key=lambda s: self.version if s.oldest is None else s.oldest):
            trained_at = self.version + len(kept) // self.buffer.size
            if slot.oldest is not None and slot.oldest + self.buffer.bound < trained_at:
                await self.store.journal.skip_slot(self.version + 1, slot.number, "overdue")
            elif len(kept) < needed:
                kept.append(slot)
        return sorted(kept, key=lambda s: s.number)

    async def _issue(self, slot: Slot) -> int:
        """A new group for the slot, in the journal before it counts. A slot that is given up meanwhile gets it all the
        same: halfway, the journal might have a group that nobody knows of."""
        issuing = asyncio.ensure_future(self._issue_next(slot))
        try:
            return await asyncio.shield(issuing)
        except asyncio.CancelledError:
            if slot in self._overdue:
                await asyncio.wait({issuing})
            issuing.cancel()
            raise

    async def _issue_next(self, slot: Slot) -> int:
        async with self._issuing:
            while True:
                group_id = self.cursor
                prompt = self.stream.at(group_id)
                skipped = "mastered" if self._is_mastered(group_id, prompt) else ""
                with self.watch.waits("feed", "the journal"):
                    await self.store.journal.add_prompt(group_id, prompt, slot.version, slot.number, skipped)
                self.cursor += 1
                if not skipped:
                    return group_id

    def _is_mastered(self, group_id: int, prompt: Prompt) -> bool:
        """Whether this visit to a prompt is left out, by a coin that knows only the seed and the visit."""
        p = self.config.pipeline
        _, rate = self._pass_rates.get(prompt.id, (-1, float("-inf")))
        return rate >= p.mastered and random.Random(f"{self.config.run.seed}/{group_id}").random() >= p.mastered_visits

    # Loop 2

    def _fill(self, tasks: asyncio.TaskGroup, slot: Slot, group_ids: list[int]) -> None:
        task = self._fills[slot] = tasks.create_task(self._fill_slot(slot, group_ids))
        task.add_done_callback(lambda _: self._fills.pop(slot))

    async def _fill_slot(self, slot: Slot, group_ids: list[int]) -> None:
        """Groups of prompts until one is worth training on; `group_ids` are those that it had before an interruption.

        Where an interrupted run had replaced a group that is worth it now (its verifier works again, say), those that
        had taken its place are spare.
        """
        dropped: list[tuple[Group, str]] = []
        try:
            while True:
                if not group_ids:
                    group_ids.append(await self._issue(slot))
                group = await self._run_group(group_ids.pop(0))
                reason = self.learner.objective.drop_reason(group)
                if reason is None:
                    if group_ids:
                        await self.store.journal.skip(self.version + 1, group_ids, "spare")
                    self.buffer.put(slot, Outcome(group, tuple(dropped)))
                    return
                dropped.append((group, reason))
                if not group_ids:
                    if not self.config.pipeline.refill or self._refills_left <= 0:
                        self.buffer.put(slot, Outcome(None, tuple(dropped)))
                        return
                    self._refills_left -= 1
        except Parked:  # the run is stopping; the journal has all of it
            return
        except asyncio.CancelledError:
            if slot not in self._overdue:
                raise
            await self.store.journal.skip_slot(self.version + 1, slot.number, "overdue")
            self._overdue.remove(slot)
            self._wanted.release()

    def _give_up(self, slot: Slot) -> None:
        """A batch goes without this slot; another takes its place, once the journal knows."""
        self._overdue.add(slot)
        self._given_up += 1
        self._fills[slot].cancel()

    async def _run_group(self, group_id: int) -> Group:
        prompt = self.stream.at(group_id)
        journal = self.store.journal
        size = self.config.training.group_size
        try:
            greedy = self.learner.objective.wants_greedy
            group = await self.runner.group(group_id, prompt, size, journal, greedy=greedy)
        except (RequestError, DataError) as problem:
            # The prompt itself is impossible (longer than the context, say, or one that the chat template refuses): its
            # group is lost, the others go on.
            await journal.add_event("bad prompt", f"{prompt.id}: {problem}")
            self.observer.note(f"prompt {prompt.id} was skipped: {problem}")
            group = Group(group_id, prompt, ())
        self._finished_rollouts += len(group.rollouts)
        if self.config.pipeline.mastered_visits < 1 and group.valid:
            last, _ = self._pass_rates.get(prompt.id, (-1, 0.0))
            if group_id >= last:
                self._pass_rates[prompt.id] = (group_id, fmean(r.score.value for r in group.valid if r.score))
        expected = self.buffer.slots * size
        self.observer.status(f"step {self.version + 1}: {self._finished_rollouts}/{expected} rollouts")
        return group

    async def _snapshot_loop(self) -> None:
        """Copy what grows into the journal: a killed run loses no more of a response than it sampled since."""
        while True:
            await asyncio.sleep(self.config.pipeline.snapshot_seconds)
            if grown := self.runner.grown(_WORTH_A_COPY):
                await self.store.journal.extend_parked(*grown)

    # Loop 3

    async def _train_loop(self) -> None:
        t = self.config.training
        after = self.engine.stats()
        for step in range(self.frontier.step + 1, t.steps + 1):
            began, before = now(), after  # what was generated while the last batch was trained on counts too
            with self.watch.waits("train", "a batch", self._what_is_missing):
                slots = await self._or_stop(self.buffer.take())
            outcomes = [slot.outcome for slot in slots]
            waited = now() - began
            after = self.engine.stats()
            row = report.describe(step, outcomes) | report.staleness(outcomes, self.version, self.buffer.bound)
            self._finished_rollouts -= row["rollouts"]
            self._refills_left = self._refill_limit
            row |= report.generation(before, after) | {"overdue": self._given_up}
            self._given_up = 0
            report.check_errors(row, self.config.verifier.max_error_share)
            self._complaints.about_rewards(row)
            row |= await self._learn(step, outcomes)
            self._complaints.about_updates(row, outcomes)
            trained = [o.group.id for o in outcomes if o.group]
            dropped = [(g.id, reason) for o in outcomes for g, reason in o.dropped]
            with self.watch.waits("train", "the journal"):
                await self.store.journal.add_fates(step, trained, dropped)
            row |= report.times(row, waited, now() - began)
            self._advance(step)
            await self._trained.put(row)
            with self.watch.waits("train", f"the sync of version {step}"):
                await self._trained.join()  # the next batch is taken by the version that the engine serves

    async def _learn(self, step: int, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """The updates of a step. By id, so that the order of arrival does not matter."""
        groups = sorted((o.group for o in outcomes if o.group), key=lambda g: g.id)
        rest = sorted((g for o in outcomes for g, _ in o.dropped), key=lambda g: g.id)
        self.observer.status(f"step {step}: training on {len(groups)} groups")
        shared = self.engine.shares_weights
        hold = partial(self._hold_engine, asyncio.get_running_loop()) if shared else lambda: None
        if not self.config.engine.keep_cache:
            await self.engine.pause()  # its memory is free for all of the step, not only for the update
        with self.timeline.span("train", step), self.watch.waits("train", f"the trainer to learn step {step}"):
            return await self._in_trainer(partial(self.learner.learn, step, groups, rest, hold))

    def _advance(self, step: int) -> None:
        self.version = step
        self.frontier = Frontier(step, self.learner.updates)

    def _what_is_missing(self) -> str:
        """For the watchdog: which groups a batch waits for."""
        awaited = sorted(slot.number for slot in self.buffer.awaited)
        shown = ", ".join(map(str, awaited[:8])) + (" …" if len(awaited) > 8 else "")
        ready = sum(slot.outcome is not None for slot in self.buffer.open)
        return f"{ready} groups are ready, {self.buffer.size} are needed; slots {shown or 'none'} are awaited"

    def _hold_engine(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called by the trainer before it touches the weights; the sync loop lets the engine go on."""
        self._holding = asyncio.run_coroutine_threadsafe(self.engine.pause(), loop)
        self._holding.result()

    # Loop 4

    async def hand_over(self, version: int) -> dict[str, float]:
        """Let the engine serve the trainer's weights under this version, and go on.

        One with weights of its own stands still meanwhile: no token is sampled before the probe has agreed.
        """
        recompute = self.config.pipeline.in_flight == "recompute"
        tensors = None
        if not self.engine.shares_weights:
            tensors = self.learner.trainer.export_weights()
            await self.engine.pause()
        served = await self.engine.update_weights(WeightUpdate(version, tensors, recompute))
        assert served == version, f"the engine serves version {served}, expected {version}"
        metrics = self.engine.sync_metrics()
        for engine in members(self.engine):
            if isinstance(engine, ProbedEngine):
                gap = await check_engine(engine, self.learner.trainer.policy, version=version)
                metrics["probe_gap"] = max(gap, metrics.get("probe_gap", 0.0))
        await self.engine.resume()
        return metrics

    async def _sync_loop(self) -> None:
        t = self.config.training
        for _ in range(t.steps - self.frontier.step):
            with self.watch.waits("sync", "a trained version"):
                row = await self._trained.get()
            await self._finish_step(row)
            self.buffer.release(row["step"])
            self._trained.task_done()

    async def _finish_step(self, row: dict[str, Any], logged: bool = False) -> None:
        """What follows the updates of a step. logged: the metrics have it already."""
        step, began = row["step"], now()
        with self.timeline.span("sync", step), self.watch.waits("sync", f"the engine to serve version {step}"):
            row |= await self.hand_over(step)
        row["sync_seconds"] = now() - began
        if not logged:
            self.store.metrics.append(row)
            self.observer.step(row)
        if step % self.config.checkpoint.every == 0 or step == self.config.training.steps:
            self.observer.status(f"step {step}: saving a checkpoint")
            with self.timeline.span("save", step), self.watch.waits("sync", "the checkpoint"):
                await self.save()
        if evaluation_due(self.config, step) and step < self.config.training.steps:
            with self.timeline.span("evaluate", step), self.watch.waits("sync", "the evaluation"):
                await self.evaluate(step)

    async def _park(self) -> None:
        """Journal what is being sampled. What is complete is there already; verdicts that are still out after a while
        are asked for again on resume."""
        await self.runner.park()
        if self._fills:
            await asyncio.wait(self._fills.values(), timeout=_PARK_LIMIT)

    async def _in_trainer(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    async def _or_stop(self, work: Any) -> Any:
        """Wait for `work`, or raise `Stopped` when the user asks first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                task.cancel()
                await asyncio.wait({task})  # verdicts that come in now must not make a batch, which may give up slots
                await self._park()
                raise Stopped
            return await task
        finally:
            task.cancel()
            stop.cancel()


_TRAINER = "kitae-trainer"  # the name of its thread
_PARK_LIMIT = 10.0  # seconds
_WORTH_A_COPY = 32  # tokens that a response must have grown by
