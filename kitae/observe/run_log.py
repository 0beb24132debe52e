"""RUN/console.log: what the user saw of a run, line by line; each resume appends to it.

console = Console()
console.say("2 of 16 reference answers do not score 1")    on the screen, and kept
with console.attached(folder):                             what was kept and what follows goes into the file
    console.log("step 1/15  reward 0.531")                 only into the file, as it is shown by other code
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from kitae.observe.plain_output import visible

FILE = "console.log"


class Console:
    def __init__(self) -> None:
        self._kept: list[str] = []
        self._path: Path | None = None

    def say(self, text: str) -> None:
        print(visible(text), flush=True)
        self.log(text)

    def log(self, text: str) -> None:
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S}  {visible(text.strip())}\n"
        if self._path is None:
            self._kept.append(line)
            return
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(line)
        except OSError:
            pass  # a full disk ends the run where data would be lost, not here

    @contextmanager
    def attached(self, folder: Path) -> Iterator[None]:
        """Write everything from here on to the folder's file, warnings of libraries included."""
        self._path = folder / FILE
        self.log("$ " + " ".join(["kitae", *sys.argv[1:]]))
        for line in self._kept:
            self.log(line.split("  ", 1)[1])
        self._kept.clear()
        warnings = _Warnings(self)
        logging.getLogger().addHandler(warnings)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(warnings)
            self._path = None


class _Warnings(logging.Handler):
    """Prints warnings as logging itself would, and logs them."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        print(visible(text), file=sys.stderr, flush=True)
        self._console.log(text)
