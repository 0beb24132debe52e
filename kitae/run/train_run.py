"""From the settings of a run to its loop: the way of `kitae train` and `kitae resume`, from top to bottom.

    train    settings ─► plan ─► services ─► a new folder ─┐
    resume   folder ─► settings ─► plan ─► services ───────┴─► observers ─► attempts ─► loop ─► trained model

A plan has checked settings and open data (`plan`), services are the verifier and the environment (`services`). An
attempt (`attempt`) begins at a checkpoint, puts trainer, engine and loop together, and ends with the run, with Ctrl-C,
or with the trainer, which the next attempt starts again.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from kitae.config.root import Root, StageConfig
from kitae.errors import ConfigError, TrainerLost
from kitae.observe.attach_observers import watched
from kitae.observe.observer import Audience, Observer
from kitae.run.attempt import attempt
from kitae.run.hand_over import NOBODY, HandOver
from kitae.run.plan import make_plan
from kitae.run.resume_point import check_models_of, finished
from kitae.run.services import RunServices
from kitae.store.checkpoints import START
from kitae.store.disk import disk_errors, private
from kitae.store.run_folder import Result, RunStore, reserved

_MOST_FRUITLESS = 3  # attempts in a row that may lose their trainer before they have trained a new step


def train(config: Root, audience: Audience, hands: HandOver = NOBODY) -> Result:
    """Train a new run. What can be found wrong with it is, before its folder is made."""
    return _train(config, audience, hands, None)


def train_placed(config: Root, place: Callable[[Path], Root], audience: Audience, hands: HandOver = NOBODY) -> Result:
    """Train a new run whose data `place` writes into its folder; it returns the settings that name it there. The folder
    is removed again where something is found wrong."""
    with private(config.run.shared), reserved(config.run) as folder:
        return _train(place(folder), audience, hands, folder)


def _train(config: Root, audience: Audience, hands: HandOver, folder: Path | None) -> Result:
    plan = make_plan(config, audience.note)
    with (
        private(plan.config.run.shared),
        RunServices(plan, audience.note) as services,
        closing(RunStore.create(plan.config, folder)) as store,
    ):
        return _watched(services, store, audience, None, False, hands)


def resume(
    folder: Path,
    audience: Audience,
    overrides: Iterable[str] = (),
    checkpoint: str | None = None,
    forget: bool = False,
    hands: HandOver = NOBODY,
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
        return go_on(store, audience, checkpoint, forget, hands)


def go_on(
    store: RunStore,
    audience: Audience,
    checkpoint: str | None = None,
    forget: bool = False,
    hands: HandOver = NOBODY,
) -> Result:
    """Train in a folder that is there, and close it. Steps after the checkpoint are trained again as they were, or
    given up with `forget`."""
    with private(store.config.run.shared), closing(store):
        if not forget:  # before anybody reads a file of theirs
            check_models_of(store)
        plan = make_plan(store.config, audience.note)
        with RunServices(plan, audience.note) as services:
            return _watched(services, store, audience, checkpoint, forget, hands)


def _watched(
    services: RunServices,
    store: RunStore,
    audience: Audience,
    checkpoint: str | None,
    forget: bool,
    hands: HandOver,
) -> Result:
    config, folder = store.config, store.folder
    with (
        disk_errors(folder),
        audience.watch(config, folder) as screen,
        watched(config, config.observe, folder, screen) as observer,
    ):
        services.note = observer.note
        try:
            return services.run(_until_done(services, store, observer, checkpoint, forget, hands))
        finally:
            services.note = audience.note  # nobody watches what is said from here on


async def _until_done(
    services: RunServices,
    store: RunStore,
    observer: Observer,
    checkpoint: str | None,
    forget: bool,
    hands: HandOver,
) -> Result:
    """Attempt after attempt, as after a crash, but in the same process. Steps that are trained again count as progress
    only once they are behind the last one that the metrics have."""
    fruitless = 0
    while True:
        before = _last_logged(store)
        try:
            return await attempt(services, store, observer, checkpoint, forget, hands)
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
