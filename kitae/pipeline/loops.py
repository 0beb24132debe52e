"""The four loops of a run. On-policy training is `max_staleness = 0` of the same loops that will run ahead.

    feed      takes a free slot, issues the next prompt of the stream             waits for: a slot
    rollouts  one task per slot: sample, score, journal, filter, perhaps refill    waits for: engine, verifier, disk
    train     takes a batch of outcomes, updates the weights                       waits for: prompts_per_step outcomes
    sync      hands the new version to the engine, saves, evaluates, frees slots   waits for: a trained version

A cancelled loop leaves no trace but journalled rollouts, which a resumed run takes up again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from kitae.algorithms.config import needs_group
from kitae.algorithms.filters import has_variance
from kitae.config import Config
from kitae.data.prompts import PromptStream
from kitae.engines.base import Engine, WeightUpdate
from kitae.envs.rollout import Runner
from kitae.errors import RequestError, VerifierError, root_cause
from kitae.observe.observer import Observer
from kitae.pipeline.buffer import Buffer, Outcome
from kitae.store.checkpoint import Frontier
from kitae.store.run import RunStore
from kitae.trainer.learner import Learner
from kitae.types import Group, Rollout

T = TypeVar("T")


class Stopped(Exception):
    """The user asked to stop; the frontier is consistent and can be saved."""


class Pipeline:
    def __init__(
        self,
        config: Config,
        store: RunStore,
        stream: PromptStream,
        runner: Runner,
        engine: Engine,
        learner: Learner,
        observer: Observer,
        frontier: Frontier,
        evaluate: Callable[[int], Any],
    ) -> None:
        self.config = config
        self.store = store
        self.stream = stream
        self.runner = runner
        self.engine = engine
        self.learner = learner
        self.observer = observer
        self.frontier = frontier
        self.evaluate = evaluate
        self.buffer = Buffer(config.training.prompts_per_step, config.pipeline.max_staleness)
        self.cursor = frontier.cursor
        self.version = frontier.step
        self._refills_left = 0
        self._finished_rollouts = 0
        self._silent_steps = 0
        self._idle_steps = 0
        self._trained: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._stop = asyncio.Event()
        threads = torch.get_num_threads()
        self._compute = ThreadPoolExecutor(1, "kitae-trainer", initializer=torch.set_num_threads, initargs=(threads,))

    async def run(self) -> None:
        """Train up to the configured number of steps, or raise what went wrong."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed_loop(tasks))
                tasks.create_task(self._train_loop())
                tasks.create_task(self._sync_loop())
        except BaseExceptionGroup as group:
            raise root_cause(group) from None
        finally:
            self._compute.shutdown(wait=False)

    def stop(self) -> None:
        """Stop at the next safe point; `run` then raises `Stopped`."""
        self._stop.set()

    def save(self) -> None:
        """Checkpoint the frontier. Call it only while no update is running."""
        self.store.checkpoints.save(self.frontier, self.learner.save_state)

    # Loop 1

    async def _feed_loop(self, tasks: asyncio.TaskGroup) -> None:
        t = self.config.training
        for slot in range((t.steps - self.frontier.step) * t.prompts_per_step):
            if slot % t.prompts_per_step == 0:
                self._refills_left = int(self.config.pipeline.max_refill * t.prompts_per_step)
                self._finished_rollouts = 0
            await self.buffer.reserve()
            tasks.create_task(self._fill_slot(self._next_group()))

    def _next_group(self) -> int:
        self.cursor += 1
        return self.cursor - 1

    # Loop 2

    async def _fill_slot(self, group_id: int) -> None:
        """Groups of prompts until one is worth training on. Refills happen at the same policy version."""
        dropped: list[tuple[Group, str]] = []
        while True:
            group = await self._run_group(group_id)
            reason = self.learner.objective.drop_reason(group)
            if reason is None:
                self.buffer.put(Outcome(group, tuple(dropped)))
                return
            dropped.append((group, reason))
            if not self.config.pipeline.refill or self._refills_left <= 0:
                self.buffer.put(Outcome(None, tuple(dropped)))
                return
            self._refills_left -= 1
            group_id = self._next_group()

    async def _run_group(self, group_id: int) -> Group:
        prompt = self.stream.at(group_id)
        journal = self.store.journal
        await journal.add_prompt(group_id, prompt, self.version)
        size = self.config.training.group_size
        try:
            greedy = self.learner.objective.wants_greedy
            group = await self.runner.group(group_id, prompt, size, journal, greedy=greedy)
        except RequestError as problem:
            # The prompt itself is impossible (longer than the context, say): its group is lost, the others go on.
            await journal.add_event("bad prompt", f"{prompt.id}: {problem}")
            self.observer.note(f"prompt {prompt.id} was skipped: {problem}")
            group = Group(group_id, prompt, ())
        self._finished_rollouts += len(group.rollouts)
        expected = self.config.training.prompts_per_step * size
        self.observer.status(f"step {self.version + 1}: {self._finished_rollouts}/{expected} rollouts")
        return group

    # Loop 3

    async def _train_loop(self) -> None:
        t = self.config.training
        for step in range(self.frontier.step + 1, t.steps + 1):
            began = time.perf_counter()
            before = self.engine.stats()
            outcomes = await self._or_stop(self.buffer.take(t.prompts_per_step))
            waited = time.perf_counter() - began
            after = self.engine.stats()
            row = self._describe(step, outcomes)
            row["generate_seconds"] = after.busy_seconds - before.busy_seconds
            row["generated_tokens"] = after.generated_tokens - before.generated_tokens
            row["generate_tokens_per_second"] = _rate(row["generated_tokens"], row["generate_seconds"])
            self._check_errors(row)
            self._watch_signal(row)
            groups = sorted((o.group for o in outcomes if o.group), key=lambda g: g.id)
            self._check_staleness(groups)
            self.observer.status(f"step {step}: training on {len(groups)} groups")
            rest = [g for o in outcomes for g, _ in o.dropped]
            row |= await self._in_trainer(partial(self.learner.learn, step, groups, rest))
            self._watch_updates(row, outcomes)
            if row.get("skipped_updates") or row.get("critic_skipped_updates"):
                self.observer.note(f"step {step}: a gradient was not finite; those weights were left as they were")
            row["train_tokens_per_second"] = _rate(row.get("train_tokens", 0.0), row.get("train_seconds", 0.0))
            dropped = [(g.id, reason) for o in outcomes for g, reason in o.dropped]
            await self.store.journal.add_fates(step, [g.id for g in groups], dropped)
            row["wait_seconds"] = waited
            row["step_seconds"] = time.perf_counter() - began
            self.version = step
            self.frontier = Frontier(step, self.cursor, self.learner.updates)
            await self._trained.put(row)
            await self._trained.join()  # at staleness 0 nothing can be in flight before the engine has the new weights

    def _check_staleness(self, groups: list[Group]) -> None:
        """The bound that the buffer guarantees, asserted on every token of every batch."""
        oldest = self.version - self.config.pipeline.max_staleness
        for group in groups:
            for r in group.valid:
                for s in r.segments:
                    if s.source == "model":
                        assert min(s.versions) >= oldest, f"rollout {r.id} has version {min(s.versions)} < {oldest}"

    def _check_errors(self, row: dict[str, Any]) -> None:
        limit = self.config.verifier.max_error_share
        if row["error_share"] > limit:
            raise VerifierError(
                f"{row['error_share']:.0%} of the answers of step {row['step']} could not be judged "
                f"(verifier.max_error_share is {limit:.0%}). First reason: {row['first_error']}"
            )

    def _watch_signal(self, row: dict[str, Any]) -> None:
        """Say it once when steps go by without anything to learn from."""
        if not needs_group(self.config.algorithm):
            return
        self._silent_steps = 0 if row["groups_with_signal"] else self._silent_steps + 1
        if self._silent_steps == _SILENT_LIMIT:
            self.observer.note(
                f"no group had differing rewards for {_SILENT_LIMIT} steps: nothing is being learnt. The mean "
                f"reward is {row['reward']}; make the task easier or harder, or look at: kitae show {self.store.folder}"
            )

    def _watch_updates(self, row: dict[str, Any], outcomes: list[Outcome]) -> None:
        """Say it once when steps go by that train on nothing."""
        self._idle_steps = 0 if row["updates"] else self._idle_steps + 1
        if self._idle_steps == _SILENT_LIMIT:
            reasons = Counter(reason for o in outcomes for _, reason in o.dropped)
            why = ", ".join(f"{count} dropped by {reason!r}" for reason, count in reasons.most_common())
            self.observer.note(f"nothing was trained on for {_SILENT_LIMIT} steps; of the last one's groups: {why}")

    def _describe(self, step: int, outcomes: list[Outcome]) -> dict[str, Any]:
        """What was sampled, dropped groups included: the reward curve must not depend on the filter."""
        groups = [o.group for o in outcomes if o.group] + [g for o in outcomes for g, _ in o.dropped]
        rollouts = [r for g in groups for r in g.rollouts]
        valid = [r for g in groups for r in g.valid]
        judged = [*rollouts, *(g.greedy for g in groups if g.greedy)]
        failed = [r for r in judged if r.score is None or not r.score.valid]
        rewards = [r.score.value for r in valid if r.score]
        lengths = [r.response_length for r in rollouts]
        return {
            "kind": "step",
            "step": step,
            "reward": float(np.mean(rewards)) if rewards else None,
            "reward_std": float(np.std(rewards)) if rewards else None,
            "length": float(np.mean(lengths)) if lengths else 0.0,
            "length_max": max(lengths, default=0),
            "truncated": float(np.mean([r.finish == "length" for r in rollouts])) if rollouts else 0.0,
            "rollouts": len(rollouts),
            "groups": sum(o.group is not None for o in outcomes),
            "groups_dropped": sum(len(o.dropped) for o in outcomes),
            "groups_with_signal": sum(has_variance(g.rewards_G) for g in groups),
            "errors": len(failed),
            "error_share": len(failed) / len(judged) if judged else 1.0,
            "first_error": _first_error(judged),
            **_component_means([r.score.components for r in valid if r.score]),
        }

    # Loop 4

    async def _sync_loop(self) -> None:
        t = self.config.training
        for _ in range(t.steps - self.frontier.step):
            row = await self._trained.get()
            step = row["step"]
            began = time.perf_counter()
            served = await self.engine.update_weights(WeightUpdate(step))
            assert served == step, f"the engine serves version {served}, expected {step}"
            row["sync_seconds"] = time.perf_counter() - began
            self.store.metrics.append(row)
            self.observer.step(row)
            if step % self.config.checkpoint.every == 0 or step == t.steps:
                self.observer.status(f"step {step}: saving a checkpoint")
                await self._in_trainer(self.save)
            every = self.config.eval.every
            if every and step % every == 0 and step < t.steps:
                await self.evaluate(step)
            self._trained.task_done()
            self.buffer.release(t.prompts_per_step)

    async def _in_trainer(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    async def _or_stop(self, work: Any) -> Any:
        """Wait for `work`, or raise `Stopped` when the user asks first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise Stopped
            return await task
        finally:
            task.cancel()
            stop.cancel()


_SILENT_LIMIT = 5


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _first_error(rollouts: list[Rollout]) -> str:
    if not rollouts:
        return "no prompt could be sampled"
    return next((r.score.detail for r in rollouts if r.score and not r.score.valid), "")


def _component_means(components: list[Any]) -> dict[str, float]:
    names = sorted({name for c in components for name in c})
    return {f"reward/{n}": float(np.mean([c[n] for c in components if n in c])) for n in names}
