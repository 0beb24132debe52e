"""`kitae train` and `kitae resume`."""

import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.cli.locate import find_recipe
from kitae.cli.text import as_size
from kitae.config.load import load_config
from kitae.config.root import RLConfig
from kitae.errors import ConfigError, Interrupted, KitaeError, StoreError
from kitae.observe.console import Console

if TYPE_CHECKING:
    from kitae.pipeline.prepare import Sources
    from kitae.store.run import RunStore

Evaluated = dict[str, Any] | None


def train(recipe: str, overrides: list[str], dry_run: bool, full: bool) -> None:
    config = load_config(find_recipe(recipe), overrides)
    check(config)
    if dry_run:
        from kitae.cli.preview import preview

        preview(config, full)
        return
    console = Console()
    sources = _prepare(config, console)
    from kitae.store.run import RunStore

    _run(RunStore.create(config), sources, console)


def resume(run: Path, overrides: list[str], checkpoint: str | None, forget: bool) -> None:
    from kitae.store.run import RunStore

    console = Console()
    store = RunStore.open(run, overrides)
    try:
        if checkpoint is None and _is_finished(run, store.config):
            store.close()
            return
        sources = _prepare(store.config, console)
    except BaseException:
        store.close()
        raise
    _run(store, sources, console, checkpoint, forget)


def _is_finished(run: Path, config: RLConfig) -> bool:
    """Whether nothing is left to do, which is said; what cannot go on is refused."""
    from kitae.store.look import look

    seen = look(run)
    if not (seen.is_finished and seen.has_model):
        return False
    if seen.step == config.training.steps:
        print(f"{run} is finished: {seen.step} of {config.training.steps} steps; its model is {run / 'model'}")
        print(f"train it further with: kitae resume {run} training.steps={2 * seen.step}")
        return True
    if not seen.checkpoints:
        raise StoreError(
            f"{run} cannot go on: its checkpoints were removed. Start a new run from its model with: kitae train "
            f"RECIPE model.path={run} (or train all of its steps again, from its journal, with --from start)"
        )
    return False


def _prepare(config: RLConfig, console: Console) -> "Sources":
    """Everything that can go wrong before the run folder is made or touched."""
    from kitae.models.load import check_model
    from kitae.observe.trackers import check_installed
    from kitae.pipeline.prepare import prepare
    from kitae.store.run import is_run

    check_installed(config.observe.trackers)
    sources = prepare(config, console.say)
    folder = check_model(config.model)
    if is_run(Path(config.model.path).expanduser()):
        console.say(f"{config.model.path} is a run: its trained model {folder} is taken")
    return sources


def check(config: RLConfig) -> None:
    """What can be refused without loading a model: tasks, data files, verifiers and their options."""
    from kitae.algorithms.stages import resolve_stages
    from kitae.data.prompts import open_stream
    from kitae.data.tasks import find_task
    from kitae.models.load import find_model
    from kitae.verifiers.calls import check_params
    from kitae.verifiers.registry import resolve

    resolve_stages(config.algorithm.model_dump())
    if config.data.task is not None:
        find_task(config.data.task).resolve(config.data.params)
    if ":" not in config.verifier.name:  # a user's own file is loaded by a worker, never here
        check_params(resolve(config.verifier.name), config.verifier.params)
    elif not Path(config.verifier.name.rpartition(":")[0]).expanduser().is_file():
        raise ConfigError(
            f"verifier.name must be a known name or file.py:function, got {config.verifier.name!r}: no such file"
        )
    if config.data.path is not None:
        open_stream(config.data, config.run.seed)
    find_model(config.model.path, download=False)


def _run(
    store: "RunStore", sources: "Sources", console: Console, checkpoint: str | None = None, forget: bool = False
) -> None:
    from kitae.observe.progress import make_progress
    from kitae.observe.watching import watched
    from kitae.pipeline.session import train as run_session

    folder, config = store.folder, store.config
    with console.attached(folder):
        try:
            with (
                make_progress(config, folder, console.log) as progress,
                watched(config, config.observe, folder, progress) as observer,
            ):
                result = run_session(store, sources, observer, checkpoint, forget=forget)
        except KitaeError as error:
            console.log(f"error: {error}")
            raise type(error)(f"{error}\nthe run folder is {folder}; go on with: kitae resume {folder}") from error
        except KeyboardInterrupt:
            console.log("interrupted")
            raise Interrupted(f"interrupted; go on with: kitae resume {folder}", signal.SIGINT) from None
        except BaseException:
            console.log(traceback.format_exc())
            raise
        if result.stopped_by is not None:
            message = f"stopped after step {result.step}; everything is saved. Go on with:\n    kitae resume {folder}"
            console.log(message)
            raise Interrupted(message, result.stopped_by)
        _report(folder, result.before, result.after, console)


def _report(folder: Path, before: Evaluated, after: Evaluated, console: Console) -> None:
    from kitae.observe.diagnosis import diagnose
    from kitae.observe.progress import peak_memory_gb
    from kitae.store.look import look, size_of

    try:
        from kitae.observe.plots import plot_run

        picture = str(plot_run(folder))
    except ImportError:
        picture = "needs matplotlib: pip install 'kitae[plots]'"
    lines = []
    if before and after and None not in (before["avg"], after["avg"]):
        rise = after["avg"] - before["avg"]
        lines.append(
            f"held-out accuracy  {before['avg']:.3f} → {after['avg']:.3f}  ({rise:+.3f}; "
            f"{int(after['prompts'])} prompts, 95 % interval {after['avg_low']:.3f}–{after['avg_high']:.3f})"
        )
    lines += [
        f"peak memory        {peak_memory_gb():.1f} GB",
        f"disk               {as_size(look(folder).size)}, {as_size(size_of(folder / 'checkpoints'))} of it "
        f"checkpoints (kitae clean {folder})",
        f"run folder         {folder}",
        f"curves             {picture}",
        f"trained model      {folder / 'model'}",
        f"next               kitae show {folder} --worst     (what it still gets wrong)",
    ]
    if found := diagnose(folder):
        titles = "; ".join(finding.title for finding in found)
        lines.append(f"diagnosis          {titles} (kitae diagnose {folder})")
    print()
    console.say("\n".join(lines))
