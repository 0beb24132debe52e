"""The command line in processes of its own, which are forked from one that has the imports done.

Imports take most of the time of a tiny run. What is forked is otherwise a process like any other: with a terminal's
signals, to be killed, with its own exit status. So are the processes of its verifier.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from warm_starts import VERIFIERS, Server, context


class Command:
    """`kitae` with some arguments, started: what the tests need of `subprocess.Popen`.

    `script` is run in place of the program, with the arguments in `sys.argv`. What it and its children print is kept in
    a file.
    """

    def __init__(self, arguments: Sequence[str], script: str, folder: Path, *, own_session: bool) -> None:
        kept, name = tempfile.mkstemp(prefix="kitae-output-")
        os.close(kept)
        self._output = Path(name)
        values = (str(self._output), list(arguments), script, str(folder), dict(os.environ), own_session)
        self._process = context().Process(target=_run, args=values)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def printed(self) -> str:
        """What it has said until now."""
        return self._output.read_text(encoding="utf-8")

    def ended(self, timeout: float | None = None) -> str:
        """Wait for its end; all that it has said. One that does not end in time is killed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired("kitae", timeout or 0, self.printed())
        output = self.printed()
        self._output.unlink()
        return output


def _run(
    output: str, arguments: list[str], script: str, folder: str, environment: dict[str, str], own_session: bool
) -> None:
    import torch

    if own_session:
        os.setsid()
    log = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    warm = Server.forked()
    asyncio.create_subprocess_exec = warm.instead_of(asyncio.create_subprocess_exec, VERIFIERS)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # no picture at the end: it takes longer than the run
    sys.argv = ["-c", *arguments]
    exec(script, {"__name__": "__main__"})
