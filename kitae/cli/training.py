"""`kitae train` and `kitae resume`."""

from pathlib import Path
from typing import TYPE_CHECKING

from kitae.cli.locate import find_recipe
from kitae.config import Config, load_config
from kitae.errors import ConfigError, KitaeError

if TYPE_CHECKING:
    from kitae.pipeline.session import Sources
    from kitae.store.run import RunStore


def train(recipe: str, overrides: list[str], dry_run: bool) -> None:
    config = load_config(find_recipe(recipe), overrides)
    check(config)
    if dry_run:
        print(config.to_json())
        from kitae.pipeline.estimate import estimate

        print(estimate(config))
        return
    from kitae.pipeline.session import prepare
    from kitae.store.run import RunStore

    sources = prepare(config, print)
    _run(RunStore.create(config), sources, None)


def resume(run: Path, overrides: list[str], checkpoint: str | None) -> None:
    from kitae.pipeline.session import prepare
    from kitae.store.run import RunStore

    store = RunStore.open(run, overrides)
    try:
        sources = prepare(store.config, print)
    except BaseException:
        store.close()
        raise
    _run(store, sources, checkpoint)


def check(config: Config) -> None:
    """What can be refused without loading a model: tasks, data files, verifiers and their options."""
    from kitae.algorithms.stages import resolve_stages
    from kitae.data.prompts import open_stream
    from kitae.data.tasks import find_task
    from kitae.models.load import find_model
    from kitae.verifiers.registry import check_params, resolve

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


def _run(store: "RunStore", sources: "Sources", checkpoint: str | None) -> None:
    from kitae.observe.progress import make_progress
    from kitae.pipeline.session import train as run_session

    folder, config = store.folder, store.config
    try:
        with make_progress(config, folder) as progress:
            result = run_session(store, sources, progress, checkpoint)
    except KitaeError as error:
        raise type(error)(f"{error}\nthe run folder is {folder}; go on with: kitae resume {folder}") from error
    except KeyboardInterrupt:
        raise KitaeError(f"interrupted; go on with: kitae resume {folder}") from None
    if not result.finished:
        print(f"\nstopped after step {result.step}; everything is saved. Go on with:\n    kitae resume {folder}")
        return
    _report(folder, config, result.before, result.after)


def _report(folder: Path, config: Config, before: dict[str, float] | None, after: dict[str, float] | None) -> None:
    from kitae.observe.progress import peak_memory_gb

    try:
        from kitae.observe.plots import plot_run

        picture = str(plot_run(folder))
    except ImportError:
        picture = "needs matplotlib: pip install 'kitae[plots]'"
    print()
    if before and after and None not in (before["avg"], after["avg"]):
        rise = after["avg"] - before["avg"]
        print(
            f"held-out accuracy  {before['avg']:.3f} → {after['avg']:.3f}  ({rise:+.3f}; "
            f"{int(after['prompts'])} prompts, 95 % interval {after['avg_low']:.3f}–{after['avg_high']:.3f})"
        )
    print(f"peak memory        {peak_memory_gb():.1f} GB")
    print(f"run folder         {folder}")
    print(f"curves             {picture}")
    print(f"trained model      {folder / 'model'}")
    print(f"next               kitae show {folder} --worst     (what it still gets wrong)")
