"""Commands that train: a run, several in a chain, or data to train on."""

from pathlib import Path
from typing import Annotated

import typer

from kitae.cli.commands.arguments import RECIPE, Overrides, Run


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
        from kitae.config.locate import shipped_recipes

        known = ", ".join(path.stem for path in shipped_recipes())
        raise typer.BadParameter(f"it must be a file, or one of {known}, got none", param_hint="RECIPE")
    from kitae.cli import training

    training.train(recipe, overrides or [], dry_run, full)


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
    """Go on with a run that was stopped or killed, or beyond its end with training.steps=N."""
    from kitae.cli import training

    training.resume(run, overrides or [], checkpoint, forget)


def scale(run: Run, engines: Annotated[int, typer.Argument(help="How many it shall have.")]) -> None:
    """Change the number of engines of a run on a cluster, while it goes on."""
    from kitae.cli import runs as listing

    listing.scale(run, engines)


def sample(
    target: Annotated[
        str, typer.Argument(help="A recipe (its untrained model), or a run (its trained one).", metavar="RECIPE-OR-RUN")
    ],
    overrides: Overrides = None,
    keep: Annotated[
        str, typer.Option(help="Of each prompt: its best answer, all correct ones, all, or pairs of best and worst.")
    ] = "correct",
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSONL file to write.")] = Path("samples.jsonl"),
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Answers to each prompt; default: training.group_size.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts to ask; default: all of a file.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Prompts of the data to pass over.")] = 0,
    model: Annotated[str | None, typer.Option(help="Another model: a folder, a run, a hub id or a short name.")] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Least score of an example; default: 1 for correct, else any.")
    ] = None,
    min_margin: Annotated[float, typer.Option(min=0, help="Least difference of scores in a pair.")] = 0.0,
    match_lengths: Annotated[
        bool, typer.Option("--match-lengths", help="Of equally good answers, pair those of similar length.")
    ] = False,
    truncated: Annotated[
        bool, typer.Option("--truncated", help="Keep answers that were cut off at sampling.max_tokens too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The counts as one line of JSON, and nothing else.")] = False,
) -> None:
    """Sample and verify answers, as data to train on.

    If it is killed, the same command goes on from there.
    """
    from kitae.cli import sampling

    chosen = sampling.Chosen(keep, min_score, min_margin, match_lengths, truncated)
    sampling.sample(target, overrides or [], chosen, output, n, prompts, first, model, json)


def chain(
    file: Annotated[
        str, typer.Argument(help="A chain file, or the name of one that comes with Kitae (kitae recipes).")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the chain; default: runs/NAME.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often its stages are gone through; default: as it says.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Check all stages, say where it stands, and stop.")] = False,
) -> None:
    """Run stages after each other, each from the last one's model.

    If it is stopped or killed, the same command goes on: finished stages are not run again.
    """
    from kitae.cli import chains

    chains.chain(file, output, rounds, status)
