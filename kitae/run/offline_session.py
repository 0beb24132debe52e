"""Put a run of a stage together, run it, and leave everything consistent whatever happens."""

import asyncio
import signal
from contextlib import AsyncExitStack

from kitae.config.root import StageConfig
from kitae.errors import ConfigError
from kitae.evaluation.held_out import forget_after
from kitae.kernels.allocation import gc_frozen
from kitae.observe.observer import Observer
from kitae.offline.base import Method
from kitae.offline.example_batches import StageData
from kitae.offline.loop import StageLoop
from kitae.offline.methods import make_method
from kitae.rl.loops import Stopped
from kitae.run.interrupts import Interrupts
from kitae.run.milestones import begin, finish, save_stopped
from kitae.run.trainer_recovery import until_done
from kitae.store.checkpoints import START, Frontier
from kitae.store.provenance import check_data
from kitae.store.run_folder import Result, RunStore
from kitae.trainer.base import Trainer
from kitae.trainer.start_trainer import ranked_stage, supervised
from kitae.workers.backends import open_cluster
from kitae.workers.base import Cluster


def train(store: RunStore, data: StageData, observer: Observer, checkpoint: str | None = None) -> Result:
    """Train a new run, or go on with one from its last checkpoint, or the one named. Steps after it are trained again:
    on the same examples, to the same numbers. Returns when it is finished or stopped by Ctrl-C."""
    try:
        return asyncio.run(
            until_done(lambda where, _: _train(store, data, observer, where), store, observer, checkpoint)
        )
    finally:
        store.close()


async def _train(store: RunStore, data: StageData, observer: Observer, checkpoint: str | None) -> Result:
    config = store.config
    assert isinstance(config, StageConfig)
    frontier, state = Frontier(0, 0), None
    if checkpoint != START and (checkpoint or store.checkpoints.names()):
        frontier, state = store.checkpoints.load(checkpoint)
    if config.training.steps == 0:  # only a new run takes as many as its epochs need
        raise ConfigError("training.steps must be at least 1 for a run that goes on, got 0")
    if config.training.steps < frontier.step:
        raise ConfigError(
            f"training.steps must be at least {frontier.step}, the steps that the run has trained, got "
            f"{config.training.steps}; --from CHECKPOINT goes back to an older one"
        )
    if frontier.step:
        check_data(
            store.journal,
            data.fingerprint,
            f"the examples must be those that the run began with, but {config.data.source}",
            f"train on the new ones from the start with --from {START}, or in a new run from a model of your choice",
        )
    async with AsyncExitStack() as stack:
        observer.note(f"loading {config.model.path}")
        method = make_method(config)
        if (cluster := await open_cluster(config.cluster)) is not None:
            stack.push_async_callback(cluster.close)
        trainer = _trainer(config, method, cluster)
        stack.push_async_callback(trainer.close)
        await trainer.start()
        observer.status("preparing")
        await method.prepare(trainer, data.trained(config.training.steps), data.held_out, store.folder, observer)
        if state is not None:
            await trainer.load(state)
        await begin(store, observer, data.fingerprint, frontier.step)
        forget_after(store.folder, frontier.step)
        loop = StageLoop(config, store, method, trainer, data, observer, frontier)

        def stop() -> None:
            observer.note("stopping after this step; press Ctrl-C again to stop at once")
            loop.stop()

        with gc_frozen(), Interrupts(stop) as interrupts:
            before = await loop.evaluate(0) if frontier.step == 0 else None
            if loop.evaluation_due(frontier.step):  # a run that was killed may have lost it
                await loop.evaluate(frontier.step)
            try:
                await loop.run()
            except Stopped:
                await save_stopped(store, observer, loop)
                return Result(store.folder, interrupts.received or signal.SIGINT, loop.frontier.step, before, None)
        before = before or next((row for row in store.metrics.rows("eval") if row["step"] == 0), None)
        after = await loop.evaluate(config.training.steps)
        await finish(store, observer, trainer, after)
        return Result(store.folder, None, config.training.steps, before, after)


def _trainer(config: StageConfig, method: Method, cluster: Cluster | None) -> Trainer:
    """In this process, or in ranks of their own; on other machines there is always one."""
    if cluster is not None and (cluster.remote or config.cluster.ranks > 1):
        return ranked_stage(config, "kitae.offline.offline_rank", cluster)
    return supervised(method.make_objective(), config.training)
