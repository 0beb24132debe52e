"""From the settings of a run to its loop: the way of `kitae train` and `kitae resume`, from top to bottom.

    train    settings ─► plan ─► services ─► a new folder ─┐
    resume   folder ─► settings ─► plan ─► services ───────┴─► observers ─► attempts ─► loop ─► trained model

A plan has checked settings and open data (`plan`), services are the verifier and the environment (`services`). An
attempt begins at a checkpoint, puts trainer, engine and loop together, and ends with the run, with Ctrl-C, or with the
trainer, which the next attempt starts again. The loops are `kitae.rl.loops` and `kitae.offline.loop`.
"""

import json
import signal
from collections.abc import Iterable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kitae.config.root import Root, StageConfig
from kitae.envs.rollouts import episodes_of
from kitae.errors import ConfigError, Stopped, TrainerLost
from kitae.kernels.allocation import gc_frozen
from kitae.observe.attach_observers import watched
from kitae.observe.observer import Audience, Observer
from kitae.offline.loop import OfflineLoop
from kitae.offline.methods import make_method
from kitae.rl.evaluations import RunEvaluations
from kitae.rl.loops import Pipeline
from kitae.run.assembly import serve_first_version, start_learning, start_offline_trainer, start_serving
from kitae.run.interrupts import Interrupts
from kitae.run.plan import OfflinePlan, RLPlan, make_plan
from kitae.run.resume_point import ResumePoint, begin_at, check_models_of, finished, resume_point
from kitae.run.services import RunServices
from kitae.store.checkpoints import START, Frontier
from kitae.store.disk import disk_errors, flush, private
from kitae.store.run_folder import Result, RunStore
from kitae.trainer.base import Trainer
from kitae.workers.backends import counts_of, open_cluster
from kitae.workers.base import Cluster

_MOST_FRUITLESS = 3  # attempts in a row that may lose their trainer before they have trained a new step

Row = dict[str, Any]


def train(config: Root, audience: Audience) -> Result:
    """Train a new run. What can be found wrong with it is, before its folder is made."""
    plan = make_plan(config, audience.note)
    with (
        private(plan.config.run.shared),
        RunServices(plan, audience.note) as services,
        closing(RunStore.create(plan.config)) as store,
    ):
        return _watched(services, store, audience, None, False)


def resume(
    folder: Path,
    audience: Audience,
    overrides: Iterable[str] = (),
    checkpoint: str | None = None,
    forget: bool = False,
) -> Result:
    """Go on with a run from its last checkpoint, or the one named. A finished run is left as it is."""
    with (
        disk_errors(folder),
        closing(RunStore.open(folder, overrides, anew=forget and checkpoint == START)) as store,
    ):
        if forget and checkpoint != START and isinstance(store.config, StageConfig):
            raise ConfigError(
                f"--forget gives up answers that were sampled after a checkpoint; a run of method.kind = "
                f"{store.config.method.kind!r} samples none: --from CHECKPOINT alone goes back to an older one"
            )
        if checkpoint is None and (result := finished(folder, store.config)) is not None:
            t = store.config.training
            audience.note(
                f"{folder} is finished: {t.ended_at(result.step)}; its model is {result.model}\n"
                f"train it further with: kitae resume {folder} {t.beyond(result.step)}"
            )
            return result
        return go_on(store, audience, checkpoint, forget)


def go_on(store: RunStore, audience: Audience, checkpoint: str | None = None, forget: bool = False) -> Result:
    """Train in a folder that is there, and close it. Steps after the checkpoint are trained again as they were, or
    given up with `forget`."""
    with private(store.config.run.shared), closing(store):
        if not forget:  # before anybody reads a file of theirs
            check_models_of(store)
        plan = make_plan(store.config, audience.note)
        with RunServices(plan, audience.note) as services:
            return _watched(services, store, audience, checkpoint, forget)


def _watched(
    services: RunServices, store: RunStore, audience: Audience, checkpoint: str | None, forget: bool
) -> Result:
    config, folder = store.config, store.folder
    with (
        disk_errors(folder),
        audience.watch(config, folder) as screen,
        watched(config, config.observe, folder, screen) as observer,
    ):
        services.note = observer.note
        try:
            return services.run(_until_done(services, store, observer, checkpoint, forget))
        finally:
            services.note = audience.note  # nobody watches what is said from here on


async def _until_done(
    services: RunServices, store: RunStore, observer: Observer, checkpoint: str | None, forget: bool
) -> Result:
    """Attempt after attempt, as after a crash, but in the same process. Steps that are trained again count as progress
    only once they are behind the last one that the metrics have."""
    fruitless = 0
    while True:
        before = _last_logged(store)
        try:
            return await _attempt(services, store, observer, checkpoint, forget)
        except TrainerLost as lost:
            fruitless = 0 if _last_logged(store) > before else fruitless + 1
            if fruitless == _MOST_FRUITLESS:
                raise
            observer.note(f"{lost}. The run goes on from its last checkpoint")
            await store.journal.add_event("trainer lost", str(lost))
        checkpoint, forget = None, False
        store.changes.clear()  # they are recorded


def _last_logged(store: RunStore) -> int:
    return max((row["step"] for row in store.metrics.rows("step")), default=0)


class Loop(Protocol):
    """What trains. safe_point: where it stops, in words. last_step: the one that the run ends with, as far as is known
    yet."""

    safe_point: str
    last_step: int

    @property
    def frontier(self) -> Frontier: ...
    async def run(self) -> Row | None:
        """Train to the last step, and return the evaluation after it. Raises `Stopped` after `stop`."""

    def stop(self) -> None: ...
    async def save(self) -> None: ...
    def evaluation(self, step: int) -> Row | None:
        """What an evaluation found, if it was made."""


async def _attempt(
    services: RunServices, store: RunStore, observer: Observer, checkpoint: str | None, forget: bool
) -> Result:
    """From a checkpoint to the end of the run, or to Ctrl-C; what is started here is closed, whatever happens."""
    plan = services.plan
    point = resume_point(store, plan.fingerprint(), checkpoint, forget)
    async with AsyncExitStack() as stack:
        config = plan.config
        counts = counts_of(config.cluster, config.engine_processes)
        if (cluster := await open_cluster(config.cluster, counts, config.model.device)) is not None:
            stack.push_async_callback(cluster.close)
        start = _Start(stack, services, store, observer, cluster, point)
        if isinstance(plan, RLPlan):
            loop, trainer = await _start_rl(start, plan)
        else:
            loop, trainer = await _start_offline(start, plan)

        def stop() -> None:
            observer.note(f"stopping {loop.safe_point}; press Ctrl-C again to stop at once")
            loop.stop()

        stack.enter_context(gc_frozen())
        with Interrupts(stop) as interrupts:
            try:
                after = await loop.run()
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


async def _start_rl(start: _Start, plan: RLPlan) -> tuple[Loop, Trainer]:
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
    return pipeline, learning.trainer


async def _start_offline(start: _Start, plan: OfflinePlan) -> tuple[Loop, Trainer]:
    config, store, observer, point = plan.config, start.store, start.observer, start.point
    method = make_method(config)
    trainer = await start_offline_trainer(start.stack, config, method, start.cluster, observer)
    observer.status("preparing")
    data = plan.data
    await method.prepare(trainer, data.trained(config.training.steps), data.held_out, store.folder, observer)
    if point.state is not None:
        await trainer.load(point.state)
    await begin_at(point, store, observer)
    return OfflineLoop(config, store, method, trainer, data, observer, point.frontier), trainer


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
