"""Commands on what recipes are made of: algorithms, data, verifiers, environments."""

from pathlib import Path
from typing import Annotated

import typer

from kitae.cli.commands.arguments import Overrides, Recipe


def recipes() -> None:
    """List the recipes that come with Kitae."""
    from kitae.cli import inspection

    inspection.recipes()


def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="A method (its formula, source, trap and settings) or a stage (its choices).")
    ] = None,
) -> None:
    """List the algorithms, or explain one.

    Each is a choice for each of eight stages.
    """
    from kitae.cli import algorithms as listing

    listing.algorithms(name)


def validate(
    recipe: Recipe,
    overrides: Overrides = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Check only so many prompts; default: all of a file.")
    ] = None,
) -> None:
    """Check that gold answers score 1.

    Scores the references of a recipe's data with its verifier, and lists those that do not score 1.
    """
    from kitae.cli import verification

    verification.validate(recipe, overrides or [], limit)


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="An evaluation's file to look for in the data; may be repeated.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="How many to show as the model sees them.")] = 3,
) -> None:
    """Say what a recipe's data are.

    Rows, tokens, duplicates, overlap with evaluations, and examples with the trained tokens in ⟦brackets⟧.
    """
    from kitae.cli import data as report

    report.data(recipe, overrides or [], against or [], examples)


def verifiers() -> None:
    """List the verifiers, each with an example."""
    from kitae.cli import verification

    verification.verifiers()


def verify(
    name: Annotated[str, typer.Argument(help="A verifier (kitae verifiers), or file.py:function.")],
    source: Annotated[Path, typer.Option("--input", help="JSONL: id, response, reference, context.")],
    target: Annotated[Path, typer.Option("--output", help="JSONL: id, score, outcome, components, detail.")],
    option: Annotated[
        list[str] | None, typer.Option(help="A param of the verifier: key=value; may be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one for each core.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one check.")] = 10.0,
) -> None:
    """Score a file of responses."""
    from kitae.cli import verification

    verification.verify(name, source, target, option or [], workers, timeout)


def environments() -> None:
    """List the environments, each with its params."""
    from kitae.cli import environments as listing

    listing.environments()
