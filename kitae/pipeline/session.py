"""Put a run together from its config, run it, and leave everything consistent whatever happens."""

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from kitae.cluster.start import open_cluster
from kitae.config.root import reinforcement
from kitae.engines.start import EngineOrder, start_engine
from kitae.envs.registry import open_world
from kitae.errors import ConfigError
from kitae.evaluation.held_out import forget_after
from kitae.models.facts import ModelFacts
from kitae.observe.observer import Observer
from kitae.pipeline.again import until_done
from kitae.pipeline.boards import opened_board
from kitae.pipeline.elastic import kept_at
from kitae.pipeline.evaluate import RunEvaluations, evaluation_due
from kitae.pipeline.interrupts import Interrupts
from kitae.pipeline.loops import Pipeline, Stopped
from kitae.pipeline.prepare import Sources, make_episodes, place_pool
from kitae.pipeline.weight_sync import WeightSync
from kitae.store.checkpoint import START, Frontier
from kitae.store.disk import flush
from kitae.store.provenance import check_data, record_data
from kitae.store.run import LEARNING, Result, RunStore, changes_of_learning
from kitae.trainer.start import make_learner, start_trainer
from kitae.weights.probe import probe_tolerance

_NO_ENGINE = 10  # times `cluster.patience`: how long a run that has lost all engines waits for one


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
        check_data(
            store.journal,
            data,
            f"the prompts must be those that the run began with, but {config.data.path or config.data.hub}",
            f"ask the new ones from the start with --from {START} --forget, or in a new run from a model of your "
            "choice",
        )
    async with AsyncExitStack() as stack:
        if (cluster := await open_cluster(config.cluster)) is not None:
            stack.push_async_callback(cluster.close)
        pool = await stack.enter_async_context(place_pool(config, cluster, observer.note))
        world = await stack.enter_async_context(open_world(config.env))
        observer.note(f"loading {config.model.path}")
        policy, trainer = start_trainer(config, cluster, observer.note)
        stack.push_async_callback(trainer.close)
        await trainer.start()
        facts = ModelFacts.read(config.model) if policy is None else ModelFacts.of(policy)
        learner = make_learner(config, trainer)
        if state is not None:
            await learner.load(state)
        for change in store.changes.values():
            observer.note(f"changed for this run from here on: {change}")
        await store.begin(frontier.step, forget)  # nothing of the run was touched so far
        await record_data(store.journal, data)
        forget_after(store.folder, max(frontier.step, store.journal.last_step()))
        board = None
        if config.engine.kind != "native":
            board = await stack.enter_async_context(opened_board(config, trainer, cluster, store.folder / "weights"))
        patience = _NO_ENGINE * config.cluster.patience
        order = EngineOrder(config.model, config.engine, frontier.step, policy, board, cluster, patience)
        engine = await start_engine(order)
        stack.push_async_callback(engine.close)
        await trainer.use_threads(torch.get_num_threads())  # an engine may have got some of the cores
        weights = WeightSync(
            trainer,
            engine,
            recompute=config.pipeline.in_flight == "recompute",
            tolerance=probe_tolerance(facts.dtype),
        )
        episodes = make_episodes(config, engine, pool, world, facts)
        evaluations = RunEvaluations(config, store.folder, store.metrics, observer, episodes, pool, world, sources)
        pipeline = Pipeline(
            config, store, sources.stream, episodes, engine, learner, weights, observer, frontier, evaluations.at
        )
        if not engine.capabilities.shares_weights:
            await weights.hand_over(frontier.step)
        kept = kept_at(config.engine.count, engine, order, weights, store.folder, observer.note)
        await stack.enter_async_context(kept)

        def stop() -> None:
            observer.note("stopping at the next safe point; press Ctrl-C again to stop at once")
            pipeline.stop()

        after = None
        with Interrupts(stop) as interrupts:
            try:
                if evaluation_due(config, frontier.step):  # of a resumed run, it may have been lost
                    await pipeline.or_stop(evaluations.at(frontier.step))
                await pipeline.run()
                for left in store.journal.pending():  # of a run that was made shorter
                    await store.journal.skip_slot(config.training.steps, left.number, "the run ended")
                if sources.held_out:
                    after = await pipeline.or_stop(evaluations.at(config.training.steps))
            except Stopped:
                if pipeline.frontier.step:
                    observer.status("saving a checkpoint")
                    await pipeline.save()
                await store.journal.add_event("stopped", f"step {pipeline.frontier.step}")
                stopped_by = interrupts.received or signal.SIGINT
                return Result(store.folder, stopped_by, pipeline.frontier.step, evaluations.found(0), None)
        observer.status("exporting the model")
        await trainer.export(store.folder / "model")
        for path in (store.folder / "model").iterdir():
            flush(path)
        await store.journal.add_event("finished", json.dumps(after))
        await store.sync()
        observer.finished(store.folder)
        return Result(store.folder, None, config.training.steps, evaluations.found(0), after)


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
