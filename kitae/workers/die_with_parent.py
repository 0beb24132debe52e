"""A program that ends with whoever started it, and with it all that it has started.

    python -c "from kitae.workers.die_with_parent import main; main()" PROGRAM ARGUMENTS…

It stays between the two: a signal at its parent's death makes it kill every process below it, also those that have left
for a session of their own. When the program ends, it ends with the same status. With a grace, the program is first told
to end by itself: one that is killed may leave things behind.
"""

import os
import signal
import sys
import time
from collections.abc import Set
from contextlib import suppress

from kitae.workers.process_status import children_of, family_of

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK = 0.05  # seconds between two looks whether a program has ended


def tethered(command: list[str], grace: float = 0.0) -> list[str]:
    """The command line of a program on a tether; our imports work there. grace: seconds to end by itself."""
    paths = [p for p in sys.path if p]
    boot = f"import sys; sys.path[:0] = {paths!r}; from kitae.workers.die_with_parent import main; main({grace})"
    return [sys.executable, "-c", boot, *command]


def main(grace: float = 0.0) -> None:
    tie(grace)
    child = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # they are the program's now: whoever waits for their end must not wait for us
        os.dup2(null, stream)
    while True:
        pid, status = os.wait()
        if pid == child:
            sweep()
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def tie(grace: float = 0.0) -> None:
    """From now on this process ends when its parent does, and with it all below; it must wait in its main thread."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: _end(grace))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    adopt()
    if os.getppid() != parent:  # it died before we could hold on to it
        _end(grace)


def adopt() -> None:
    """What processes below leave behind becomes a child of this one, by which it is found."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end(grace: float) -> None:
    if grace:
        _ask(grace)
    sweep()
    os._exit(1)


def _ask(grace: float) -> None:
    """The program, to end by itself, and wait so long for it."""
    for child in children_of(os.getpid()):
        with suppress(OSError):
            os.kill(child, signal.SIGTERM)
    for _ in range(int(grace / _LOOK)):
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if not children_of(os.getpid()):
            return
        time.sleep(_LOOK)


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
