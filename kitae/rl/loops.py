"""The loops of a run. On-policy training is `max_staleness = 0` of the same loops that run ahead with more.

    feed, rollouts  see `issue`
    train           takes a batch of slots, updates the weights                waits for: a batch (see `buffer`)
    settle          hands the new version to the engine, frees its slots,      waits for: the engine, the disk
                    reports, saves, evaluates; one task for each step

Before the first update of a batch, the train loop waits until the step before has settled. An engine that samples from
the trainer's own weights is paused from then until it is given the new version, so no token is sampled from weights
that have no version. With `max_staleness = 0` the train loop waits for settling right after its step; with more, the
next batch is annotated and its gradient computed while the step before settles. An evaluation is of one version: while
it runs, the engine gets no other.

A run that goes on after a crash first trains the journalled steps again that are newer than its checkpoint
(`_train_journalled_steps`), and then starts its loops. A cancelled loop leaves nothing behind but journalled rollouts,
which a resumed run takes up again. A watchdog knows what each loop waits for (`watch`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from kitae.clock import now
from kitae.config.root import RLConfig
from kitae.data.prompt_stream import PromptStream
from kitae.engines.base import AnswerCheck, Engine, Provable
from kitae.envs.rollouts import Episodes
from kitae.errors import Stopped, root_cause
from kitae.evaluation.held_out import evaluation_due
from kitae.observe.observer import Observer
from kitae.observe.step_report import BatchStats, Generation, Lap, StepReport
from kitae.observe.timeline import Timeline
from kitae.observe.token_numbers import TOKENS_MB, TokenFiles
from kitae.rl import reporting
from kitae.rl.buffer import Buffer, SlotResult
from kitae.rl.issue import Curriculum, GivenUp, Issuing
from kitae.rl.spot_check import SpotCheck
from kitae.rl.watchdog import Watch, whereabouts
from kitae.rl.weight_sync import WeightSync
from kitae.store.checkpoints import Frontier
from kitae.store.run_folder import RunStore
from kitae.trainer.base import THREADS
from kitae.trainer.learner import Learner, Learnt

T = TypeVar("T")


@dataclass(frozen=True)
class _StepWork:
    """The batch of a step. new: False where the step is trained again after a crash. logged: whether the metrics have
    the step already."""

    step: int
    slot_results: Sequence[SlotResult]
    waited: float = 0.0
    given_up: GivenUp = field(default_factory=GivenUp)
    new: bool = True
    logged: bool = False

    @cached_property
    def sampled(self) -> BatchStats:
        return reporting.sampled(self.slot_results)

    @property
    def trained(self) -> list[int]:
        return [result.group.id for result in self.slot_results if result.group]

    @property
    def dropped(self) -> list[tuple[int, str]]:
        return [(group.id, reason) for result in self.slot_results for group, reason in result.dropped]


class Evaluations(Protocol):
    """The evaluations of a run, each of which is made once."""

    async def at(self, step: int) -> dict[str, Any]:
        """Evaluate the weights of this step, unless the metrics have it already."""

    def found(self, step: int) -> dict[str, Any] | None:
        """What an evaluation found, if it was made."""


class NoEvaluations:
    """Of a run that holds nothing out."""

    async def at(self, step: int) -> dict[str, Any]:
        raise AssertionError(f"nothing is held out, so nothing is due after step {step}")

    def found(self, step: int) -> None:
        return None


class Pipeline:
    """The loops of a run and what they share. `run` trains to the last step; `stop` ends it at a safe point.

    last_step: `training.steps`, or the step that reached `training.minutes`, once it has.
    """

    safe_point = "at the next safe point"

    def __init__(
        self,
        config: RLConfig,
        store: RunStore,
        stream: PromptStream,
        episodes: Episodes,
        engine: Engine,
        learner: Learner,
        weights: WeightSync,
        observer: Observer,
        frontier: Frontier,
        evaluations: Evaluations,
        proofs: AnswerCheck | None = None,
    ) -> None:
        t, p = config.training, config.pipeline
        self.config = config
        self.store = store
        self.engine = engine
        self.learner = learner
        self.weights = weights
        self.observer = observer
        self._limit = store.time_limit()
        trained = max(frontier.step, store.journal.last_step())
        self.last_step = trained if self._limit.is_reached else t.steps
        self._updates = frontier.updates  # at the end of the last step, like the state
        self._state = learner.state()
        self.evaluations = evaluations
        self.spot_check = SpotCheck.of(config, learner, engine, weights.tolerance, self._record_refusal)
        self.timeline = Timeline(store.folder)
        self.tokens = TokenFiles(store.folder, TOKENS_MB, observer.note)
        self.tokens.forget_after(trained)
        self.watch = Watch(p.stall_limit, self._pulse, store.folder / "stalled.txt")
        self.buffer = Buffer(t.prompts_per_step, p.max_staleness, frontier.step)
        rates = store.journal.pass_rates() if Curriculum.active(p) else {}
        self.issuing = Issuing(
            config,
            store.journal,
            stream,
            replace(
                episodes,
                span=lambda part, start, end: self.timeline.add(part, self.buffer.served, start, end),
                waiting=lambda what, which: self.watch.waits("a rollout", what, lambda: which),
                note=observer.note,
            ),
            self.buffer,
            Curriculum(p, config.run.seed, rates),
            observer,
            self.watch,
            drop_reason=learner.groups.drop_reason,
            wants_greedy=learner.groups.wants_greedy,
        )
        self.proofs = proofs
        self._training: frozenset[int] = frozenset()  # the groups of the step that is trained
        if proofs is not None:
            assert isinstance(engine, Provable), "a pool of processes has engines that send proofs"
            self.issuing.proved = engine
            proofs.begin(engine, lambda: (self.buffer.version, self._updates), self._withdraw, self._record_refusal)
        if p.overdue == "drop":
            self.buffer.on_overdue = self.issuing.give_up
        # Whether training overlaps with sampling. Where the trainer needs the memory of the cache, they take turns.
        self._overlaps = p.max_staleness > 0 and config.engine.keep_cache
        self._feeding: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._after: dict[str, float] = {}  # seconds after the last report that training waited for, by part
        self._stop = asyncio.Event()
        self.between: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def run(self) -> dict[str, Any] | None:
        """Train up to the last step, and return the evaluation after it, if one is due. Raises what went wrong, or
        `Stopped` after `stop`."""
        if self._evaluation_due(self.frontier.step):  # a run that was killed may have lost it
            await self.or_stop(self.evaluations.at(self.frontier.step))
        await self._run_loops()
        last = self.last_step
        for left in self.store.journal.pending():  # of a run that was made shorter, or had no more time
            await self.store.journal.skip_slot(last, left.number, "the run ended")
        return await self.or_stop(self.evaluations.at(last)) if self._evaluation_due(last) else None

    def _evaluation_due(self, step: int) -> bool:
        return evaluation_due(self.config, step, self.last_step)

    async def _run_loops(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                endless = [tasks.create_task(self.watch.guard(), name="watch")]
                laps = reporting.Laps(self.engine)
                await self._train_journalled_steps(tasks, laps)
                self._feeding = tasks.create_task(self.issuing.feed(tasks, self.last_step), name="feed")
                endless += [self._feeding, tasks.create_task(self.issuing.snapshots(), name="snapshots")]
                await tasks.create_task(self._train_loop(tasks, laps), name="train")
                for task in endless:
                    task.cancel()
                self.issuing.cancel()  # of a run that was made shorter, or had no more time, some slots are left
        except BaseExceptionGroup as group:
            raise root_cause(group) from None

    @property
    def frontier(self) -> Frontier:
        """Where the run stands: what a checkpoint that is saved now would hold."""
        return Frontier(self.buffer.version, self._updates)

    def stop(self) -> None:
        """Stop at the next safe point; `run` then raises `Stopped`."""
        self._stop.set()

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """What an evaluation found, if it was made."""
        return self.evaluations.found(step)

    async def evaluate_now(self) -> dict[str, Any] | None:
        """Of the weights of the last step; None where nothing is held out. Between two steps alone."""
        if not self.config.eval.prompts:
            return None
        await self._settled()
        await self._evaluated()
        return await self.evaluations.at(self.frontier.step)

    async def save(self) -> None:
        """Checkpoint the frontier, once the disk has the journal of it. No update is made meanwhile."""
        frontier, state = self.frontier, self._state
        frontier = replace(frontier, claim=self.store.journal.claim(frontier.step))
        await self.store.sync()
        await self.store.checkpoints.save(frontier, lambda folder: self.learner.save(folder, state))

    def _pulse(self) -> object:
        """Changes while the engine or the trainer works."""
        stats = self.engine.stats()
        return stats.generated_tokens, stats.prompt_tokens, stats.restarts, whereabouts(THREADS)

    # Train.

    async def _train_journalled_steps(self, tasks: asyncio.TaskGroup, laps: reporting.Laps) -> None:
        """Train the steps again that the journal has and the checkpoint has not, on the same groups, to the same
        weights. Nothing is sampled or verified for them, and what was sampled by those weights keeps its version."""
        last = self.store.journal.last_step()
        if last > self.frontier.step:
            self.observer.note(
                f"training steps {self.frontier.step + 1} to {last} again, on what the journal has of them"
            )
        logged = {row["step"] for row in self.store.metrics.rows("step")}
        for step in range(self.frontier.step + 1, last + 1):
            if self._stop.is_set():
                raise Stopped
            groups, dropped = self.store.journal.batch(step)
            slot_results = [SlotResult(g, ()) for g in groups] + [SlotResult(None, (each,)) for each in dropped]
            await self._train_step(tasks, laps, _StepWork(step, slot_results, new=False, logged=step in logged))
            await self._settled()

    async def _train_loop(self, tasks: asyncio.TaskGroup, laps: reporting.Laps) -> None:
        first = self.frontier.step + 1
        while (step := self.frontier.step + 1) <= self.last_step:
            if step > first and self.between is not None:
                with self.watch.waits("train", "whoever takes the steps", paused=True):
                    await self.or_stop(self.between())
            began = now()
            with self.watch.waits("train", "a batch", self._what_is_missing):
                slots = await self.or_stop(self.buffer.take())
                results = [slot.result for slot in slots if slot.result]
                if self.proofs is not None:
                    results = await self.or_stop(self._cleaned(results))
            work = _StepWork(step, results, waited=now() - began)
            work = replace(work, given_up=self.issuing.taken(work.sampled.rollouts))
            reporting.check_errors(step, work.sampled, self.config.verifier.max_error_share)
            await self._train_step(tasks, laps, work)
        await self._settled()
        await self._evaluated()

    async def _cleaned(self, results: list[SlotResult]) -> list[SlotResult]:
        """The results of a batch, without answers of engines that are out by now. From here on they are trained on."""
        before = list[SlotResult]()
        while list(map(id, results)) != list(map(id, before)):  # another engine may be out meanwhile
            before, results = results, [await self.issuing.cleaned(each) for each in results]
        self._training = frozenset(result.group.id for result in results if result.group)
        return results

    async def _withdraw(self, rollouts: Sequence[tuple[int, int]]) -> int:
        """Give up rollouts of engines that are out, but for those of the step that is trained. How many that were."""
        return await self.store.journal.forget_rollouts([r for r in rollouts if r[0] not in self._training])

    async def _train_step(self, tasks: asyncio.TaskGroup, laps: reporting.Laps, work: "_StepWork") -> None:
        """One step, from a batch to a new version whose settling has begun."""
        step = work.step
        ages = reporting.staleness(work.slot_results, self.buffer.version, self.buffer.bound)
        learnt = await self._learn(work)
        await asyncio.to_thread(self.tokens.write, step, learnt.tokens)
        if work.new:
            if learnt.skipped:
                self.observer.note(f"step {step}: a gradient was not finite; those weights were left as they were")
            with self.watch.waits("train", "the journal"):
                await self.store.journal.add_fates(step, work.trained, work.dropped)
        self._updates, self._state = self.learner.updates, self.learner.state()
        self.buffer.train(step)
        parts, self._after = {**self._after, "wait": work.waited, **learnt.seconds}, {}
        lap = self._lap(laps, parts, work) if self._overlaps else None

        def describe(sync: Mapping[str, float]) -> StepReport:
            """Called when the version is served; the lap ends then, unless training has gone on meanwhile."""
            timed = lap or self._lap(laps, {**parts, "sync": sync["sync_seconds"]}, work)
            return reporting.step_report(step, work.sampled, ages, learnt, timed, work.given_up, sync)

        self._settling = tasks.create_task(self._settle(tasks, step, describe, work.logged), name="settle")
        if not self._overlaps:
            with self.watch.waits("train", f"the sync of version {step}"):
                await self._settled()  # the next batch is taken by the version that the engine serves
                await self._evaluated()

    def _lap(self, laps: reporting.Laps, parts: Mapping[str, float], work: "_StepWork") -> tuple[Lap, Generation]:
        """The time of a step. If none is left after it, it is the last one, and no more prompts are issued."""
        found = laps.lap(parts)
        if not work.logged:
            self._limit.spend(found[0].step)
            if self._limit.is_reached:
                self.last_step = self.store.journal.last_step()
                if self._feeding is not None:
                    self._feeding.cancel()
        return found

    async def _learn(self, work: "_StepWork") -> Learnt:
        """The updates of a step. Its groups are sorted by id, so that their order of arrival does not matter."""
        step = work.step
        groups = sorted((result.group for result in work.slot_results if result.group), key=lambda g: g.id)
        rest = sorted((group for result in work.slot_results for group, _ in result.dropped), key=lambda g: g.id)
        self.observer.status(f"step {step}: training on {len(groups)} groups")
        if not self._overlaps and self.engine.capabilities.shares_weights:
            await self.engine.pause()  # its memory is free for all of the step, not only for the update
        with self.timeline.span("train", step), self.watch.waits("train", f"the trainer to learn step {step}"):
            checked: Mapping[str, float] = {}
            if self.spot_check is not None and work.new:
                groups, checked = await self.spot_check.examine(step, self.buffer.version, groups)
            learnt = await self.learner.learn(step, groups, rest, self._before_update)
            if self.proofs is not None:
                checked = {**checked, **self.proofs.taken()}
            return replace(learnt, numbers={**learnt.numbers, **checked})

    async def _record_refusal(self, sentence: str) -> None:
        """Record that an engine, or a rollout, was refused."""
        self.observer.note(sentence)
        await self.store.journal.add_event("engine refused", sentence)

    async def _before_update(self) -> None:
        """Return when weights may change: the step before has settled, and an engine that samples from them is
        paused."""
        await self._settled()
        if self.engine.capabilities.shares_weights:
            await self._evaluated()
            await self.engine.pause()

    def _what_is_missing(self) -> str:
        """Which groups a batch waits for: for the watchdog."""
        awaited = sorted(slot.number for slot in self.buffer.awaited)
        shown = ", ".join(map(str, awaited[:8])) + (" …" if len(awaited) > 8 else "")
        ready = sum(slot.result is not None for slot in self.buffer.open)
        return f"{ready} groups are ready, {self.buffer.size} are needed; slots {shown or 'none'} are awaited"

    async def or_stop(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, or raise `Stopped` when the user asks first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                task.cancel()
                await asyncio.wait({task})  # verdicts that arrive from here on must not make a batch: it may drop slots
                await self._settled()
                await self._cancel_evaluation()
                await self.issuing.suspend()
                raise Stopped
            return await task
        finally:
            task.cancel()
            stop.cancel()

    # Settle.

    async def _settle(
        self,
        tasks: asyncio.TaskGroup,
        step: int,
        describe: Callable[[Mapping[str, float]], StepReport],
        logged: bool,
    ) -> None:
        """What follows the updates of a step, up to the evaluation, which gets a task of its own."""
        await self._evaluated()
        with self.timeline.span("sync", step), self.watch.waits("settle", f"the engine to serve version {step}"):
            sync = await self.weights.hand_over(step)
        made = describe(sync)
        self.buffer.release(step)
        if not logged:
            self.store.metrics.append(made.row())
            self.observer.step(made)
        if step % self.config.checkpoint.every == 0 or step == self.last_step:
            self.observer.status(f"step {step}: saving a checkpoint")
            with self._following("save", step), self.watch.waits("settle", "the checkpoint"):
                await self.save()
        if self._evaluation_due(step) and step < self.last_step:
            self._evaluating = tasks.create_task(self._evaluate(step), name="evaluate")

    async def _evaluate(self, step: int) -> None:
        with self._following("evaluate", step), self.watch.waits("settle", "the evaluation"):
            await self.evaluations.at(step)

    @contextmanager
    def _following(self, part: str, step: int) -> Iterator[None]:
        """Time what follows a report. Where training waits for it, it is a part of the next lap."""
        began = now()
        with self.timeline.span(part, step):
            yield
        if not self._overlaps:
            self._after[part] = now() - began

    async def _settled(self) -> None:
        """Wait until the last step has settled. What went wrong there ends the run, and is not raised here too."""
        if self._settling is not None:
            await asyncio.wait({self._settling})

    async def _evaluated(self) -> None:
        if self._evaluating is not None:
            await asyncio.wait({self._evaluating})

    async def _cancel_evaluation(self) -> None:
        """A resumed run makes it again: answers that are suspended halfway would be of no use to it."""
        if self._evaluating is not None:
            self._evaluating.cancel()
            await self._evaluated()
