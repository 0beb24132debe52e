"""`kitae train` and `kitae resume`. From here the way goes on in `kitae.api` and `kitae.run.train_run`."""

from typing import Annotated

import typer

from kitae.cli.arguments import RECIPE, Overrides, Run
from kitae.cli.screen import Screen
from kitae.config.locate import find_recipe, shipped_recipes
from kitae.config.recipe import load_config
from kitae.config.root import RLConfig
from kitae.data.data_files import check_files


def train(
    recipe: Annotated[str | None, RECIPE] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen, in what time and memory; load nothing.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With --dry-run: all settings.")] = False,
) -> None:
    """Train a model by a recipe.

    For a first try: kitae train quickstart
    """
    if recipe is None:
        known = ", ".join(path.stem for path in shipped_recipes())
        raise typer.BadParameter(f"it must be a file, or one of {known}, got none", param_hint="RECIPE")
    config = load_config(find_recipe(recipe), overrides or [])
    if dry_run:
        from kitae.cli.preview import preview
        from kitae.run.doubts import doubts
        from kitae.run.plan import check

        check(config)
        for text in doubts(config):
            print(f"warning: {text}")
        preview(config, full)
        return
    check_files(config.files)  # before torch is imported
    from kitae import api

    with Screen() as screen:
        if isinstance(config, RLConfig):
            _warn_of_memory(config, screen)
        screen.report(api.train(config, observer=screen))


def resume(
    run: Run,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--from", help="A checkpoint, e.g. step-000010, or start; default: the last checkpoint."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Give up the steps after that checkpoint, instead of training them again.")
    ] = False,
) -> None:
    """Go on with a run that was stopped, or beyond its end.

    One that was killed goes on from its last checkpoint; training.steps=N gives a finished one more steps.
    """
    from kitae import api

    with Screen() as screen:
        result = api.resume(run, overrides=overrides or [], checkpoint=checkpoint, forget=forget, observer=screen)
        if screen.config is not None:  # else it was finished before
            screen.report(result)


def _warn_of_memory(config: RLConfig, screen: Screen) -> None:
    """It is an estimate: who knows better may go on."""
    from kitae.cli.preview import shortage
    from kitae.study.memory_estimate import glance

    needs = glance(config)
    if needs is not None and not needs.fits:
        screen.note(f"warning: {shortage(needs)}")
