"""`kitae chain`: stages after each other, each from the model of the one before."""

import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kitae.cli.sample import watching
from kitae.cli.screen import Screen
from kitae.cli.text import table
from kitae.config.locate import find_chain
from kitae.errors import Interrupted

if TYPE_CHECKING:
    from kitae.chains.chain_file import ChainPlan


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
    from kitae.chains.chain_file import read_chain
    from kitae.chains.chain_runner import inspect_chain, run_chain

    found = read_chain(find_chain(file), output, rounds)
    inspect_chain(found)
    _print(found)
    if status:
        return
    with Screen(f"kitae chain {file}{f' -o {output}' if output else ''}") as screen:
        try:
            run_chain(found, screen, watching)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on from here", signal.SIGINT) from None
    _print(found)


def _print(found: "ChainPlan") -> None:
    """Where it stands."""
    from kitae.chains.chain_folder import read_record
    from kitae.chains.chain_report import HEADER, cells, final_model, lines_of

    lines = lines_of(found, *read_record(found))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(table([list(HEADER), *map(cells, lines)], left=4, width=width))
    if all(line.status == "finished" for line in lines):
        print(f"\nreport         {found.folder / 'report.md'}\ntrained model  {final_model(found, lines)}")
    print()
