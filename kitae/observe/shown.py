"""What Python shows of a run unless told otherwise: lines or a table in a terminal, curves in a notebook.

What was shown is kept in RUN/console.log, as from the command line.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kitae.config.root import Root
from kitae.observe.observer import Observer
from kitae.observe.progress import Progress, make_progress
from kitae.observe.run_log import Console


class Shown:
    """The audience of a run that is started from Python."""

    def __init__(self) -> None:
        self._console = Console()

    def note(self, text: str) -> None:
        self._console.say(text)

    @contextmanager
    def watch(self, config: Root, folder: Path) -> Iterator[Observer]:
        log = self._console.log
        with self._console.attached(folder):
            progress = _in_notebook(config, folder, log) if is_notebook() else make_progress(config, folder, log)
            with progress:
                yield progress


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell: Any = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _in_notebook(config: Root, folder: Path, log: Any) -> Progress:
    try:
        from kitae.observe.notebook_progress import NotebookProgress

        return NotebookProgress(config, folder, log)
    except ImportError:  # no matplotlib: lines
        return Progress(config, folder, log)
