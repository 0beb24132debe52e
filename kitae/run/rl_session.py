"""Put a run together from its config, run it, and leave everything consistent whatever happens."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kitae.config.root import RLConfig, reinforcement
from kitae.envs.environment_registry import open_world
from kitae.errors import ConfigError
from kitae.evaluation.held_out import forget_after
from kitae.kernels.allocation import gc_frozen
from kitae.observe.observer import Observer
from kitae.rl.elastic import kept_at
from kitae.rl.evaluations import RunEvaluations, evaluation_due
from kitae.rl.loops import Pipeline, Stopped
from kitae.run.assembly import Serving, start_learning, start_serving
from kitae.run.interrupts import Interrupts
from kitae.run.milestones import begin, finish, save_stopped
from kitae.run.prepare import Sources, make_episodes, place_pool
from kitae.run.trainer_recovery import until_done
from kitae.store.checkpoints import START, Frontier
from kitae.store.provenance import check_data
from kitae.store.run_folder import LEARNING, Result, RunStore, changes_of_learning
from kitae.trainer.base import Trainer
from kitae.workers.backends import open_cluster


def train(
    store: RunStore, sources: Sources, observer: Observer, checkpoint: str | None = None, *, forget: bool = False
) -> Result:
    """Train a new run, or go on with one from its last checkpoint, or the one named. Steps that the journal has after
    it are trained again as they were, or given up with `forget`. Returns when it is finished or stopped by Ctrl-C."""
    try:
        return asyncio.run(
            until_done(
                lambda where, drop: _attempt(store, sources, observer, where, drop), store, observer, checkpoint, forget
            )
        )
    finally:
        store.close()


async def _attempt(
    store: RunStore, sources: Sources, observer: Observer, checkpoint: str | None, forget: bool
) -> Result:
    config = reinforcement(store.config, "this loop")
    frontier, state = _where_it_stands(store, checkpoint, forget)
    data = sources.fingerprint()
    if frontier.step or not forget:
        _check_prompts(config, store, data)
    async with AsyncExitStack() as stack:
        if (cluster := await open_cluster(config.cluster)) is not None:
            stack.push_async_callback(cluster.close)
        pool = await stack.enter_async_context(place_pool(config, cluster, observer.note))
        world = await stack.enter_async_context(open_world(config.env))
        learning = await start_learning(stack, config, cluster, state, observer)
        await begin(store, observer, data, frontier.step, forget=forget)
        forget_after(store.folder, max(frontier.step, store.journal.last_step()))
        serving = await start_serving(stack, config, cluster, learning, frontier.step, store.folder)
        episodes = make_episodes(config, serving.engine, pool, world, learning.facts)
        evaluations = RunEvaluations(config, store.folder, store.metrics, observer, episodes, pool, world, sources)
        pipeline = Pipeline(
            config, store, sources.stream, episodes, serving.engine, learning.learner, serving.weights, observer,
            frontier, evaluations.at,
        )  # fmt: skip
        await _hand_over(stack, pipeline, serving)
        stack.enter_context(gc_frozen())
        return await _train(pipeline, evaluations, learning.trainer)


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
    if not forget:
        store.journal.check_answers(frontier.step)
    return frontier, state


def _check_prompts(config: RLConfig, store: RunStore, data: str) -> None:
    check_data(
        store.journal,
        data,
        f"the prompts must be those that the run began with, but {config.data.path or config.data.hub}",
        f"ask the new ones from the start with --from {START} --forget, or in a new run from a model of your choice",
    )


async def _hand_over(stack: AsyncExitStack, pipeline: Pipeline, serving: Serving) -> None:
    """The weights of the start, to an engine that has its own; from then on there are as many engines as are wanted."""
    if not serving.engine.capabilities.shares_weights:
        await serving.weights.hand_over(pipeline.frontier.step)
    count, folder, note = pipeline.config.engine.count, pipeline.store.folder, pipeline.observer.note
    await stack.enter_async_context(kept_at(count, serving.engine, serving.order, serving.weights, folder, note))


async def _train(pipeline: Pipeline, evaluations: RunEvaluations, trainer: Trainer) -> Result:
    """To the end, or until Ctrl-C."""
    store, observer = pipeline.store, pipeline.observer

    def stop() -> None:
        observer.note("stopping at the next safe point; press Ctrl-C again to stop at once")
        pipeline.stop()

    with Interrupts(stop) as interrupts:
        try:
            after = await _run_through(pipeline, evaluations)
        except Stopped:
            await save_stopped(store, observer, pipeline)
            stopped_by = interrupts.received or signal.SIGINT
            return Result(store.folder, stopped_by, pipeline.frontier.step, evaluations.found(0), None)
    await finish(store, observer, trainer, after)
    return Result(store.folder, None, pipeline.config.training.steps, evaluations.found(0), after)


async def _run_through(pipeline: Pipeline, evaluations: RunEvaluations) -> dict[str, Any] | None:
    """All steps; the evaluation after the last, if something is held out."""
    steps, journal = pipeline.config.training.steps, pipeline.store.journal
    if evaluation_due(pipeline.config, pipeline.frontier.step):  # of a resumed run, it may have been lost
        await pipeline.or_stop(evaluations.at(pipeline.frontier.step))
    await pipeline.run()
    for left in journal.pending():  # of a run that was made shorter
        await journal.skip_slot(steps, left.number, "the run ended")
    return await pipeline.or_stop(evaluations.at(steps)) if evaluations.sources.held_out else None
