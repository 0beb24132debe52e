"""Train a run of any kind, or go on with one: what the command line, the Python API and chains have in common."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kitae.config.root import Root, StageConfig
from kitae.errors import ConfigError, StoreError
from kitae.observe.attach_observers import watched
from kitae.observe.observer import Audience, Observer, Silent
from kitae.run.build import Start, check, prepare
from kitae.store.run_folder import Result, RunStore
from kitae.store.run_summary import look


class Bystander:
    """An observer that needs to know nothing of a run beforehand, as an audience."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def note(self, text: str) -> None:
        self._observer.note(text)

    def watch(self, config: Root, folder: Path) -> AbstractContextManager[Observer]:
        return nullcontext(self._observer)


def audience_of(observer: Observer | Audience | None) -> Audience:
    if isinstance(observer, Audience):
        return observer
    return Bystander(observer or Silent())


def begin(config: Root, audience: Audience) -> Result:
    """Train a new run. What can be found wrong is, before its folder is made."""
    check(config)
    config, start = prepare(config, audience.note)
    return _train(RunStore.create(config), start, audience, None, False)


def go_on(
    folder: Path,
    audience: Audience,
    overrides: Iterable[str] = (),
    checkpoint: str | None = None,
    forget: bool = False,
) -> Result:
    """Go on with a run from its last checkpoint, or the one named. Of a finished one, this is said."""
    store = RunStore.open(folder, overrides)
    try:
        if forget and isinstance(store.config, StageConfig):
            raise ConfigError(
                f"--forget gives up answers that were sampled after a checkpoint; a run of method.kind = "
                f"{store.config.method.kind!r} samples none: --from CHECKPOINT alone goes back to an older one"
            )
        if checkpoint is None and (result := _finished(folder, store.config)) is not None:
            audience.note(
                f"{folder} is finished: {result.step} of {result.step} steps; its model is {result.model}\n"
                f"train it further with: kitae resume {folder} training.steps={2 * result.step}"
            )
            store.close()
            return result
        _, start = prepare(store.config, audience.note)
    except BaseException:
        store.close()
        raise
    return _train(store, start, audience, checkpoint, forget)


def _train(store: RunStore, start: Start, audience: Audience, checkpoint: str | None, forget: bool) -> Result:
    config, folder = store.config, store.folder
    with audience.watch(config, folder) as observer, watched(config, config.observe, folder, observer) as everybody:
        return start(store, everybody, checkpoint, forget)


def _finished(folder: Path, config: Root) -> Result | None:
    """How a run ended, if nothing is left to do; one that cannot go on is refused."""
    seen = look(folder)
    if not (seen.is_finished and seen.has_model):
        return None
    if seen.step == config.training.steps:
        return result_of(folder)
    if not seen.checkpoints:
        raise StoreError(
            f"{folder} cannot go on: its checkpoints were removed. Start a new run from its model with: kitae train "
            f"RECIPE model.path={folder} (or train all of its steps again, from its journal, with --from start)"
        )
    return None


def result_of(folder: Path) -> Result:
    """How a finished run ended."""
    seen = look(folder)
    by_step = {row["step"]: row for row in seen.evaluations}
    return Result(folder, None, seen.step, by_step.get(0), by_step.get(seen.step))
