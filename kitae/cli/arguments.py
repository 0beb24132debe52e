"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from kitae.config.locate import find_run

RECIPE = typer.Argument(
    help="A recipe file, or the name of one that comes with Kitae (kitae recipes).", metavar="RECIPE"
)
Recipe = Annotated[str, RECIPE]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings: section.key=value …", metavar="[SECTION.KEY=VALUE]…")
]
Run = Annotated[
    Path,
    typer.Argument(
        help="A run folder, e.g. runs/quickstart-001, or its name (kitae runs lists them).",
        metavar="RUN",
        callback=find_run,
    ),
]
Runs = Annotated[
    list[Path],
    typer.Argument(help="Run folders or names.", metavar="RUN", callback=lambda runs: [find_run(run) for run in runs]),
]
