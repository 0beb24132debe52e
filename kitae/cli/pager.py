"""Long output on a terminal goes through a pager, as much of it as the reader asks for; elsewhere it is plain."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from kitae.observe.plain_output import terminal_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_LESS = "FRX"  # leave at once where all fits on the screen, keep colours, leave the screen as it is


def pager() -> list[str] | None:
    """The command of `$PAGER`, or less; None: plain output, because nobody sits there or wants one."""
    if not sys.stdout.isatty():
        return None
    wanted = os.environ.get("PAGER", "less").strip()
    try:
        command = shlex.split(wanted)
    except ValueError:  # a quotation that does not end
        return None
    return command if command and command[0] != "cat" and shutil.which(command[0]) else None


def show_all(pieces: Iterable["RenderableType"], command: list[str] | None) -> None:
    """Each piece is made when it is needed; what a reader who leaves has not seen is never made."""
    from rich.console import Console

    if command is None:
        console = Console(file=terminal_of(sys.stdout))
        for piece in pieces:
            console.print(piece)
        return
    width = shutil.get_terminal_size().columns
    environment = {**os.environ, "LESS": os.environ.get("LESS", _LESS)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, encoding="utf-8", env=environment)
    assert process.stdin is not None
    try:
        console = Console(force_terminal=True, width=width)
        for piece in pieces:
            with console.capture() as drawn:  # rich itself would end the program when the reader leaves
                console.print(piece)
            process.stdin.write(drawn.get())
            process.stdin.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the reader has left
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                continue  # it is the pager's: the screen is to be left as it was
