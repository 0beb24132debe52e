"""The command line: what commands there are, and how it ends.

Typer alone is imported; each command imports what it needs, so --help answers at once.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kitae.cli.commands import ingredients, measurement, runs, serving, training

app = typer.Typer(
    name="kitae",
    help="Train language models by reinforcement learning with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "train": training.train,
    "resume": training.resume,
    "scale": training.scale,
    "sample": training.sample,
    "chain": training.chain,
    "runs": runs.runs,
    "compare": runs.compare,
    "clean": runs.clean,
    "eval": measurement.evaluate,
    "suites": measurement.suites,
    "show": runs.show,
    "diagnose": runs.diagnose,
    "replay": runs.replay,
    "plot": runs.plot,
    "simulate": measurement.simulate,
    "recipes": ingredients.recipes,
    "algorithms": ingredients.algorithms,
    "validate": ingredients.validate,
    "data": ingredients.data,
    "verifiers": ingredients.verifiers,
    "verify": ingredients.verify,
    "environments": ingredients.environments,
    "ui": runs.ui,
    "serve": serving.serve,
    "report": runs.report,
    "doctor": measurement.doctor,
}
"""In the order in which --help lists them."""

for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def _version(wanted: bool) -> None:
    if wanted:
        from kitae import __version__

        print(f"kitae {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


_INTERRUPTED = 130  # the exit status that typer turns Ctrl-C into


def run() -> None:
    """Entry point: errors that Kitae raises on purpose are printed without a traceback, and exit with 1."""
    from kitae.errors import Interrupted, KitaeError, StalledError

    try:
        app()
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signal)
    except StalledError as error:  # a thread that is stuck would keep the interpreter from ending
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    except KitaeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:
            print("interrupted", file=sys.stderr)
        raise
