"""`kitae train` and `kitae resume`."""

from pathlib import Path

from kitae.cli.locate import find_recipe
from kitae.config import Config, load_config
from kitae.errors import ConfigError, KitaeError


def train(recipe: str, overrides: list[str], dry_run: bool) -> None:
    config = load_config(find_recipe(recipe), overrides)
    check(config)
    if dry_run:
        print(config.to_json())
        from kitae.pipeline.estimate import estimate

        print(estimate(config))
        return
    from kitae.store.run import RunStore

    _run(RunStore.create(config), None)


def resume(run: Path, checkpoint: str | None) -> None:
    from kitae.store.run import RunStore

    _run(RunStore.open(run), checkpoint)


def check(config: Config) -> None:
    """What can be refused without loading a model: tasks, verifiers and their options."""
    from kitae.data.tasks import find_task
    from kitae.verifiers.registry import check_params, resolve

    if config.data.task is not None:
        find_task(config.data.task).resolve(config.data.params)
    if ":" not in config.verifier.name:  # a user's own file is loaded by a worker, never here
        check_params(resolve(config.verifier.name), config.verifier.params)
    elif not Path(config.verifier.name.rpartition(":")[0]).is_file():
        raise ConfigError(f"verifier.name {config.verifier.name!r}: there is no such file")


def _run(store: object, checkpoint: str | None) -> None:
    from kitae.observe.progress import make_progress
    from kitae.pipeline.session import train as run_session
    from kitae.store.run import RunStore

    assert isinstance(store, RunStore)
    folder, config = store.folder, store.config
    with make_progress(config, folder) as progress:
        try:
            result = run_session(store, progress, checkpoint)
        except KitaeError as error:
            raise type(error)(f"{error}\nthe run folder is {folder}; go on with: kitae resume {folder}") from error
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
    if before and after:
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
