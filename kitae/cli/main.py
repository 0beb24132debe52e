"""The command line: what commands there are, and how it ends.

A command is a function of the module that is named like it, or like its group; the module is imported when its command
is asked for, so `--help` answers at once.
"""

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train.train", "Train a model by a recipe."),
    "resume": ("train.resume", "Go on with a run that was stopped, or beyond its end."),
    "scale": ("runs.scale", "Change the number of engines of a run."),
    "sample": ("sample.sample", "Sample and verify answers, as data to train on."),
    "chain": ("chain.chain", "Run stages after each other, each from the last one's model."),
    "export": ("export.export", "Write a trained model as other programs take it."),
    "runs": ("runs.runs", "List runs with their status, results and size."),
    "compare": ("runs.compare", "Compare settings and results of runs."),
    "clean": ("runs.clean", "Free disk that runs take."),
    "eval": ("eval.evaluate", "Measure models on held-out prompts and suites; compare them."),
    "suites": ("eval.suites", "List the suites that models can be evaluated on."),
    "show": ("show.show", "Show sampled answers with their rewards."),
    "diagnose": ("runs.diagnose", "Say what is wrong with a run, and what to change."),
    "replay": ("runs.replay", "Compute a past step again and compare."),
    "plot": ("runs.plot", "Draw the curves of a run as a PNG."),
    "simulate": ("simulation.simulate", "Predict throughput and staleness of schedules on many devices."),
    "import": ("importing.import_recipe", "Turn another trainer's settings into a recipe."),
    "recipes": ("recipes.recipes", "List the recipes that come with Kitae."),
    "algorithms": ("choices.algorithms", "List the algorithms, or explain one."),
    "validate": ("verify.validate", "Check that reference answers score 1 under the verifier."),
    "tasks": ("software.tasks", "Write tasks about software for agents with a shell."),
    "data": ("data.data", "Inspect a recipe's data: tokens, duplicates, overlap."),
    "verifiers": ("verify.verifiers", "List the verifiers, each with an example."),
    "verify": ("verify.verify", "Score a file of responses."),
    "environments": ("choices.environments", "List the environments, each with its params."),
    "ui": ("serve.ui", "Look at runs in a browser: curves, rollouts, timelines."),
    "serve": ("serve.serve", "Serve a model or a reward model over an OpenAI-compatible API."),
    "tinker": ("tinker.tinker", "Serve a base model to train adapters on, for Tinker's client."),
    "sandbox-host": ("sandbox_host.sandbox_host", "Open sandboxes here for runs on other machines."),
    "report": ("runs.report", "Write a run into one HTML file, to send to somebody."),
    "doctor": ("doctor.doctor", "Check this machine, or whether a model is fit to be trained."),
}
"""In the order in which --help lists them: the function in `kitae.cli`, and what it does."""


class Commands(TyperGroup):
    """The commands of `COMMANDS`, each imported when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: Any = dict.fromkeys(COMMANDS)
        self.commands = names  # for the suggestion to who mistypes one

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name][0].split(".")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        alone.command(cmd_name)(getattr(import_module(f"kitae.cli.{module}"), function))
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


app = typer.Typer(
    cls=Commands,
    name="kitae",
    help="Train language models by reinforcement learning with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    """Entry point: errors that Kitae raises on purpose are printed without a traceback, and exit with 1.

    Whatever is printed may hold text of a model; see `kitae.observe.plain_output`.
    """
    from kitae.observe.plain_output import PlainOutput

    streams = sys.stdout, sys.stderr
    plain: tuple[Any, Any] = PlainOutput(sys.stdout), PlainOutput(sys.stderr)
    sys.stdout, sys.stderr = plain
    try:
        _run()
    finally:
        sys.stdout, sys.stderr = streams


def _run() -> None:
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
