"""An attempt: from a checkpoint to the end of a run, to Ctrl-C, or to the loss of its trainer.

It puts trainer, engine and loop together (`kitae.run.assembly`), and closes what it started, whatever happens. The
loops are `kitae.rl.loops` and `kitae.offline.loop`.
"""

import json
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from kitae.data.pictures import FOLDER as PICTURES
from kitae.data.pictures import SHELF
from kitae.envs.rollouts import episodes_of
from kitae.errors import Stopped
from kitae.kernels.allocation import gc_frozen
from kitae.observe.observer import Observer
from kitae.offline.loop import OfflineLoop
from kitae.offline.methods import make_method
from kitae.rl.evaluations import RunEvaluations
from kitae.rl.loops import Pipeline
from kitae.run.assembly import serve_first_version, start_learning, start_offline_trainer, start_serving
from kitae.run.hand_over import Ask, HandOver, Live, asker
from kitae.run.interrupts import Interrupts
from kitae.run.plan import OfflinePlan, RLPlan
from kitae.run.resume_point import ResumePoint, begin_at, resume_point
from kitae.run.services import RunServices
from kitae.store.checkpoints import Frontier
from kitae.store.disk import flush
from kitae.store.run_folder import Result, RunStore
from kitae.trainer.base import Trainer
from kitae.workers.backends import counts_of, open_cluster
from kitae.workers.base import Cluster

Row = dict[str, Any]


class Loop(Protocol):
    """What trains. safe_point: where it stops, in words. last_step: the one that the run ends with, as far as is known
    yet. between: awaited before each step but the first."""

    safe_point: str
    last_step: int
    between: Callable[[], Coroutine[Any, Any, None]] | None

    @property
    def frontier(self) -> Frontier: ...
    async def run(self) -> Row | None:
        """Train to the last step, and return the evaluation after it. Raises `Stopped` after `stop`."""

    def stop(self) -> None: ...
    async def save(self) -> None: ...
    def evaluation(self, step: int) -> Row | None:
        """What an evaluation found, if it was made."""

    async def evaluate_now(self) -> Row | None:
        """Of the weights of the last step, on what is held out; None where nothing is."""


async def attempt(
    services: RunServices,
    store: RunStore,
    observer: Observer,
    checkpoint: str | None,
    forget: bool,
    hands: HandOver,
) -> Result:
    """From a checkpoint to the end of the run, or to Ctrl-C; what is started here is closed, whatever happens."""
    plan = services.plan
    point = resume_point(store, plan.fingerprint(), checkpoint, forget)
    SHELF.keep_in(store.folder.absolute() / PICTURES)
    async with AsyncExitStack() as stack:
        config = plan.config
        counts = counts_of(config.cluster, config.engine_processes)
        if (cluster := await open_cluster(config.cluster, counts, config.model.device)) is not None:
            stack.push_async_callback(cluster.close)
        start = _Start(stack, services, store, observer, cluster, point)
        if isinstance(plan, RLPlan):
            loop, trainer, ask = await _start_rl(start, plan)
        else:
            loop, trainer, ask = await _start_offline(start, plan)

        def stop() -> None:
            observer.note(f"stopping {loop.safe_point}; press Ctrl-C again to stop at once")
            loop.stop()

        stack.enter_context(gc_frozen())
        with Interrupts(stop) as interrupts:
            loop.between = hands.between
            hands.begun(Live(store.folder, lambda: interrupts.request(signal.SIGINT), loop.evaluate_now, ask))
            try:
                after = await loop.run()
                await hands.between()  # who takes the last step may ask the model of it
            except Stopped:
                await _save_stopped(store, observer, loop)
                stopped_by = interrupts.received or signal.SIGINT
                return Result(store.folder, stopped_by, loop.frontier.step, loop.evaluation(0), None)
        if loop.last_step < plan.config.training.steps:
            observer.note(f"the run ends: {plan.config.training.ended_at(loop.last_step)}")
        await _finish(store, observer, trainer, after)
        return Result(store.folder, None, loop.last_step, loop.evaluation(0), after)


@dataclass(frozen=True, slots=True)
class _Start:
    """What an attempt has before its trainer. stack: closes what is started, when the attempt ends."""

    stack: AsyncExitStack
    services: RunServices
    store: RunStore
    observer: Observer
    cluster: Cluster | None
    point: ResumePoint


async def _start_rl(start: _Start, plan: RLPlan) -> tuple[Loop, Trainer, Ask | None]:
    """The trainer with what it has learnt, then the engine with its weights, then the loops that connect them."""
    stack, services, store, observer, cluster, point = (
        start.stack, start.services, start.store, start.observer, start.cluster, start.point,
    )  # fmt: skip
    config, step = plan.config, point.frontier.step
    verifier = await services.verifier(stack, cluster)
    learning = await start_learning(stack, config, cluster, point.state, observer)
    await begin_at(point, store, observer)
    serving = await start_serving(stack, config, cluster, learning, step, store.folder)
    engine, world = serving.engine, services.world
    episodes = episodes_of(config, engine, verifier, world, learning.facts)
    evaluations = RunEvaluations(
        config, store.folder, store.metrics, observer, episodes, verifier, world, plan.held_out, plan.suites
    )
    pipeline = Pipeline(
        config, store, plan.prompts, episodes, engine, learning.learner, serving.weights, observer, point.frontier,
        evaluations, serving.proofs,
    )  # fmt: skip
    await serve_first_version(stack, serving, step, store.folder, observer.note)
    return pipeline, learning.trainer, asker(episodes)


async def _start_offline(start: _Start, plan: OfflinePlan) -> tuple[Loop, Trainer, Ask | None]:
    config, store, observer, point = plan.config, start.store, start.observer, start.point
    method = make_method(config)
    trainer = await start_offline_trainer(start.stack, config, method, start.cluster, observer)
    observer.status("preparing")
    data = plan.data
    await method.prepare(trainer, data.trained(config.training.steps), data.held_out, store.folder, observer)
    if point.state is not None:
        await trainer.load(point.state)
    await begin_at(point, store, observer)
    return OfflineLoop(config, store, method, trainer, data, observer, point.frontier), trainer, None


async def _save_stopped(store: RunStore, observer: Observer, loop: Loop) -> None:
    """With a checkpoint, if there is a step to go on from."""
    if loop.frontier.step:
        observer.status("saving a checkpoint")
        await loop.save()
    await store.journal.add_event("stopped", f"step {loop.frontier.step}")


async def _finish(store: RunStore, observer: Observer, trainer: Trainer, after: Row | None) -> None:
    """Export the trained model, and record that the run is over."""
    observer.status("exporting the model")
    await trainer.export(store.folder / "model")
    for path in (store.folder / "model").iterdir():
        flush(path)
    await store.journal.add_event("finished", json.dumps(after))
    await store.sync()
    observer.finished(store.folder)
