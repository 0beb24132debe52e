"""A program that ends with whoever started it, and with it all that it has started.

    python -c "from kitae.processes.tether import main; main()" PROGRAM ARGUMENTS…

It stays between the two: a signal at its parent's death makes it kill every process below it, also those that have left
for a session of their own. When the program ends, it ends with the same status.
"""

import os
import signal
import sys
from contextlib import suppress

from kitae.processes.status import family_of

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def tethered(command: list[str]) -> list[str]:
    """The command line of a program on a tether; our imports work there."""
    boot = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; from kitae.processes.tether import main; main()"
    return [sys.executable, "-c", boot, *command]


def main() -> None:
    parent = os.getppid()
    _hold_on()
    signal.signal(signal.SIGTERM, lambda *_: _end())
    child = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # they are the program's now: whoever waits for their end must not wait for us
        os.dup2(null, stream)
    if os.getppid() != parent:  # it died before we could hold on to it
        _end()
    while True:
        pid, status = os.wait()
        if pid == child:
            _sweep()
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _hold_on() -> None:
    """Be told when the parent dies, and inherit what processes below leave behind."""
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end() -> None:
    _sweep()
    os._exit(1)


def _sweep() -> None:
    """Kill all below until none is left; each that is killed leaves its children to us."""
    for _ in range(100):
        below = family_of(os.getpid())[1:]
        if not below:
            return
        for pid in below:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
