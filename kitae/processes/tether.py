"""A program that ends with whoever started it, and with it all that it has started.

    python -c "from kitae.processes.tether import main; main()" PROGRAM ARGUMENTS…

It stays between the two: a signal at its parent's death makes it kill every process below it, also those that have left
for a session of their own. When the program ends, it ends with the same status.
"""

import os
import signal
import sys
from collections.abc import Set
from contextlib import suppress

from kitae.processes.status import children_of, family_of

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def tethered(command: list[str]) -> list[str]:
    """The command line of a program on a tether; our imports work there."""
    boot = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}; from kitae.processes.tether import main; main()"
    return [sys.executable, "-c", boot, *command]


def main() -> None:
    tie()
    child = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # they are the program's now: whoever waits for their end must not wait for us
        os.dup2(null, stream)
    while True:
        pid, status = os.wait()
        if pid == child:
            sweep()
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def tie() -> None:
    """From now on this process ends when its parent does, and with it all below; it must wait in its main thread."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: _end())
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    adopt()
    if os.getppid() != parent:  # it died before we could hold on to it
        _end()


def adopt() -> None:
    """What processes below leave behind becomes a child of this one, by which it is found."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end() -> None:
    sweep()
    os._exit(1)


def sweep(spare: Set[int] = frozenset()) -> None:
    """Kill all below until none is left, but for some children; each that is killed leaves its own to us."""
    for _ in range(100):
        below = [pid for child in children_of(os.getpid()) if child not in spare for pid in family_of(child)]
        if not below:
            return
        for pid in below:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in below:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
