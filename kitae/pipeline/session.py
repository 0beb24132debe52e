"""Put a run together from its config, run it, and leave everything consistent whatever happens."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kitae.algorithms.objective import Objective
from kitae.config.root import RLConfig
from kitae.data.chat import Chat
from kitae.data.prompts import PromptStream, eval_prompts, open_stream
from kitae.engines.base import Engine, SamplingParams
from kitae.engines.fleet import Fleet
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process import ProcessEngine
from kitae.envs.base import Limits
from kitae.envs.episode import Episodes, Running
from kitae.envs.single_turn import SingleTurn
from kitae.errors import ConfigError, VerifierError, root_cause
from kitae.models.load import export_policy, load_policy
from kitae.models.policy import Policy
from kitae.observe.observer import Observer
from kitae.pipeline.evaluate import Evaluation, evaluate, evaluation_due
from kitae.pipeline.loops import Pipeline, Stopped
from kitae.store.checkpoint import START, Frontier
from kitae.store.disk import flush
from kitae.store.run import LEARNING, RunStore, changes_of_learning
from kitae.trainer.critic import Critic
from kitae.trainer.learner import Learner
from kitae.trainer.reference import Reference
from kitae.trainer.trainer import Trainer
from kitae.types import Prompt
from kitae.verifiers.pool import VerifierPool, validate

_GOLD_CHECKS = 16
_GRACE = 3.0  # seconds for an interrupted run to say goodbye


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended: `Result(folder, stopped_by=None, step=15, before={"avg": 0.48, …}, after={"avg": 1.0, …})`.

    stopped_by: the signal that ended it before its last step, or None.
    """

    folder: Path
    stopped_by: int | None
    step: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run reads: its prompts, and those held out."""

    stream: PromptStream
    held_out: list[Prompt]


def prepare(config: RLConfig, note: Callable[[str], None]) -> Sources:
    """Open the data, try the verifier on reference answers, load stages: all that can fail before a model loads."""
    Objective(config.algorithm, config.sampling.max_tokens)  # finds a user's own stages and checks their signatures
    a, stale = config.algorithm, config.pipeline.max_staleness
    if stale and a.correction == "none" and a.anchor != "behaviour":
        note(
            f"pipeline.max_staleness is {stale} and algorithm.correction is 'none': stale samples are trained on as if "
            "the policy had just sampled them"
        )
    held_out = eval_prompts(config.data, config.run.seed, config.eval.prompts) if config.eval.prompts else []
    sources = Sources(open_stream(config.data, config.run.seed), held_out)
    if sources.stream.skipped:
        note(sources.stream.skipped)

    async def try_verifier() -> None:
        async with _pool(config, note, workers=1) as pool:
            if config.verifier.check_gold:
                await _check_gold(pool, [sources.stream.at(i) for i in range(_GOLD_CHECKS)], note)

    asyncio.run(try_verifier())
    return sources


def train(
    store: RunStore, sources: Sources, observer: Observer, checkpoint: str | None = None, *, forget: bool = False
) -> Result:
    """Train a new run, or go on with one from its last checkpoint, or the one named. Steps that the journal has after
    it are trained again as they were, or given up with `forget`. Returns when it is finished or stopped by Ctrl-C."""
    try:
        return asyncio.run(_train(store, sources, observer, checkpoint, forget))
    finally:
        store.close()


async def _train(store: RunStore, sources: Sources, observer: Observer, checkpoint: str | None, forget: bool) -> Result:
    config, held_out = store.config, sources.held_out
    frontier, state = _where_it_stands(store, checkpoint, forget)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(_pool(config, observer.note))
        observer.note(f"loading {config.model.path}")
        policy = load_policy(config.model, config.run.seed)
        learner = make_learner(config, policy)
        if state is not None:
            learner.load_state(state, frontier.updates)
        for change in store.changes.values():
            observer.note(f"changed for this run from here on: {change}")
        await store.begin(frontier.step, forget)  # nothing of the run was touched so far
        engine = await _start_engine(config, policy, frontier.step)
        stack.push_async_callback(engine.close)
        chat = Chat(policy.tokenizer, policy.base.generation_config)
        runner = _runner(config, engine, chat, pool, policy)

        async def evaluate_at(step: int) -> dict[str, Any]:
            """Evaluate once per step: a resumed run finds what is in the metrics already."""
            for row in store.metrics.rows("eval"):
                if row["step"] == step:
                    return row
            observer.note(f"evaluating on {len(held_out)} held-out prompts")
            found = await evaluate(_evaluation_runner(config, runner), held_out, config.eval.samples)
            row = {"kind": "eval", "step": step, **found.row()}
            store.metrics.append(row)
            observer.evaluated(row)
            return row

        pipeline = Pipeline(config, store, sources.stream, runner, engine, learner, observer, frontier, evaluate_at)
        stack.callback(pipeline.close)
        if not engine.shares_weights:
            await pipeline.hand_over(frontier.step)
        if evaluation_due(config, frontier.step):  # of a resumed run, it may have been lost
            await evaluate_at(frontier.step)
        before = _eval_row(store, 0)
        with _interrupts(pipeline) as interrupts:
            try:
                await pipeline.run()
            except Stopped:
                if pipeline.frontier.step:
                    observer.status("saving a checkpoint")
                    await pipeline.save()
                await store.journal.add_event("stopped", f"step {pipeline.frontier.step}")
                return Result(store.folder, interrupts.received or signal.SIGINT, pipeline.frontier.step, before, None)
        for left in store.journal.pending():  # of a run that was made shorter
            await store.journal.skip_slot(config.training.steps, left.number, "the run ended")
        after = await evaluate_at(config.training.steps) if held_out else None
        observer.status("exporting the model")
        export_policy(policy, store.folder / "model")
        for path in (store.folder / "model").iterdir():
            flush(path)
        await store.journal.add_event("finished", json.dumps(after))
        await store.sync()
        observer.finished(store.folder)
        return Result(store.folder, None, config.training.steps, before, after)


def _where_it_stands(store: RunStore, checkpoint: str | None, forget: bool) -> tuple[Frontier, Path | None]:
    """The named checkpoint, or the newest; without any, the model as it is before the first step."""
    frontier, state = Frontier(0, 0), None
    if checkpoint != START and (checkpoint or store.checkpoints.names()):
        frontier, state = store.checkpoints.load(checkpoint)
    t, trained = store.config.training, frontier.step if forget else max(frontier.step, store.journal.last_step())
    way_out = "--from CHECKPOINT --forget goes back to an older one"
    if t.steps < trained:
        raise ConfigError(
            f"training.steps must be at least {trained}, the steps that the run has trained, got {t.steps}; {way_out}"
        )
    needed = LEARNING if t.schedule == "constant" else (*LEARNING, "training.steps")
    refused = [text for key, text in store.changes.items() if key in needed]
    refused += changes_of_learning(store.journal, frontier.step)
    if trained > frontier.step and refused:
        raise ConfigError(
            f"steps {frontier.step + 1} to {trained} come after the checkpoint and are trained again as they were, so "
            f"this must not have changed:\n  {'; '.join(refused)}\nGo on from the last checkpoint without a change, "
            f"and make it after a Ctrl-C, which saves a checkpoint; or give those steps up: {way_out}"
        )
    return frontier, state


async def _start_engine(config: RLConfig, policy: Policy, version: int) -> Engine:
    """In this process, on the policy's own weights; or in processes of their own, on cores that the trainer leaves."""
    e = config.engine
    if e.kind == "native":
        return NativeEngine(policy, config.engine, version)
    available = sorted(os.sched_getaffinity(0)) if policy.device.type == "cpu" else []
    rest, shares = share_cores(available, e.count, e.threads)
    if rest:
        torch.set_num_threads(len(rest))
    engines = [
        ProcessEngine(
            config.model,
            config.engine,
            threads=len(cores) or None,
            cores=cores or None,
            version=version,
            sync=e.sync,
        )
        for cores in shares
    ]
    fleet = engines[0] if e.count == 1 else Fleet(engines)
    try:
        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(engine.start())
    except BaseExceptionGroup as group:
        await fleet.close()
        raise root_cause(group) from None
    return fleet


def share_cores(cores: Sequence[int], engines: int, threads: int) -> tuple[list[int], list[list[int]]]:
    """The cores of the trainer and of each engine: `threads` for an engine (0: half of all for all of them), from the
    end; at least one is left for the trainer, and where there are too few, engines share theirs.

    Nothing is assigned (empty lists) where there are not two cores.
    """
    if len(cores) < 2:
        return [], [[]] * engines
    each = threads or max(1, len(cores) // 2 // engines)
    used = min(each * engines, len(cores) - 1)
    rest, own = list(cores[: len(cores) - used]), cores[len(cores) - used :]
    each = min(each, used)
    return rest, [sorted(own[(i * each + j) % used] for j in range(each)) for i in range(engines)]


def make_learner(config: RLConfig, policy: Policy) -> Learner:
    """The trainer and what else the algorithm needs: a reference and a critic are made only if it reads them."""
    a, t, temperature = config.algorithm, config.training, config.sampling.temperature
    objective = Objective(a, config.sampling.max_tokens)
    reference = Reference(policy, a, t, temperature) if objective.wants_reference else None
    critic = None
    if objective.wants_values:
        assert a.critic_lr is not None and a.critic_clip is not None and a.critic_warmup is not None
        model = load_policy(config.model.model_copy(update={"lora_rank": 0, "exact": False}), config.run.seed)
        critic = Critic(model, t, lr=a.critic_lr, clip=a.critic_clip, warmup=a.critic_warmup)
    trainer = Trainer(
        policy,
        t,
        temperature=temperature,
        entropy_grad=objective.wants_entropy_gradient,
        idle_steps=critic.warmup if critic else 0,
    )
    return Learner(trainer, objective, config.run.seed, reference, critic)


def evaluate_model(config: RLConfig, policy: Policy | None = None) -> Evaluation:
    """Evaluate `config.model` on the held-out prompts of `config.data`."""

    async def run() -> Evaluation:
        prompts = eval_prompts(config.data, config.run.seed, config.eval.prompts)
        async with _pool(config) as pool:
            loaded = policy or load_policy(config.model, config.run.seed)
            engine = NativeEngine(loaded, config.engine)
            try:
                chat = Chat(loaded.tokenizer, loaded.base.generation_config)
                runner = _evaluation_runner(config, _runner(config, engine, chat, pool, loaded))
                return await evaluate(runner, prompts, config.eval.samples)
            finally:
                await engine.close()

    return asyncio.run(run())


def _pool(config: RLConfig, note: Callable[[str], None] | None = None, workers: int | None = None) -> VerifierPool:
    v = config.verifier
    return VerifierPool(v.name, v.params, workers or v.workers, v.timeout, note)


def _runner(config: RLConfig, engine: Engine, chat: Chat, pool: VerifierPool, policy: Policy) -> Episodes:
    sampling = SamplingParams(
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
        stop_tokens=chat.stop_tokens,
        stop_strings=config.sampling.stop,
    )
    limits = Limits(context=policy.max_context)
    return Episodes(engine, chat, pool, SingleTurn, sampling, config.run.seed, limits=limits)


def _evaluation_runner(config: RLConfig, runner: Episodes) -> Episodes:
    e = config.eval
    sampling = replace(runner.sampling, temperature=e.temperature, top_p=e.top_p, top_k=e.top_k, min_p=e.min_p)
    return replace(runner, sampling=sampling, label="eval", running=Running())


async def _check_gold(pool: VerifierPool, prompts: list[Prompt], note: Callable[[str], None]) -> None:
    """The gold answers must score 1, and references must be readable: anything else would teach nonsense."""
    bad = await validate(pool, prompts)
    if not bad:
        return
    prompt, score = bad[0]
    verdict = f"{score.value:g} {score.detail}".strip() if score.valid else f"not judged: {score.detail}"
    message = (
        f"{len(bad)} of {len(prompts)} reference answers do not score 1 under this verifier; the first: "
        f"{prompt.id} with reference {str(prompt.reference)[:80]!r} → {verdict}"
    )
    if len(bad) == len(prompts):
        raise VerifierError(f"{message}. If references are no answers, set verifier.check_gold=false")
    note(message)


def _eval_row(store: RunStore, step: int) -> dict[str, Any] | None:
    return next((r for r in store.metrics.rows("eval") if r["step"] == step), None)


class _interrupts:
    """The first Ctrl-C (or SIGTERM) stops at the next safe point; the second ends the process, whatever it is doing."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.loop = asyncio.get_running_loop()
        self.received: int | None = None  # the first signal

    def __enter__(self) -> "_interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.loop.add_signal_handler(number, self._interrupt, number)
            except (ValueError, NotImplementedError, RuntimeError):  # not the main thread
                break
        return self

    def _interrupt(self, number: signal.Signals) -> None:
        if self.received is not None:
            # The trainer's thread cannot be interrupted and would be waited for. The journal survives a killed process.
            end = threading.Timer(_GRACE, os._exit, (128 + number,))
            end.daemon = True
            end.start()
            raise KeyboardInterrupt
        self.received = number
        self.pipeline.observer.note("stopping at the next safe point; press Ctrl-C again to stop at once")
        self.pipeline.stop()

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.loop.remove_signal_handler(number)
            except (ValueError, NotImplementedError, RuntimeError):
                return
