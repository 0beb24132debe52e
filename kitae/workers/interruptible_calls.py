"""Calls that can be interrupted, so that a long one costs the others a moment and no process.

    score = briefly(0.001, lambda: function(response, …))      raises `CutShort` after a millisecond of the processor

An exception that may come between any two instructions leaves pure functions as they were. It may leave the state that
a library keeps between calls half changed: such code runs inside `foreign()`. A process that was interrupted there is
spoilt: it goes on with what needs no such code, `foreign()` interrupts what does, and whoever gave it the work replaces
it before it gets a call that must not be put off again.

Covered: code in Python. Not covered: a call into C that does not return; for that whoever waits has a deadline.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time
from typing import TypeVar

T = TypeVar("T")

_AGAIN = 0.05  # seconds of processor time until an interrupt that was swallowed (in a destructor, say) is repeated


class CutShort(BaseException):
    """The call takes longer than it may now. No `Exception`: libraries catch those and go on."""


class _State:
    brief = spoilt = False


def is_spoilt() -> bool:
    return _State.spoilt


def briefly(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call()`; `CutShort` once it has used so much processor time. In the main thread only.

    The clock that rings is that of the wall, because timers of processor time are as coarse as the scheduler's tick;
    what others had of the processor meanwhile does not count.
    """
    end, armed = process_time() + seconds, True

    def ring(*_: object) -> None:
        nonlocal end
        if armed and (now := process_time()) >= end:
            end = now + _AGAIN
            raise CutShort

    previous = signal.signal(signal.SIGALRM, ring)
    _State.brief = True
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        try:
            return call()
        finally:
            armed = False
    finally:  # reached even if it rings right before `armed` is unset: the next one is far off
        armed = _State.brief = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def foreign() -> Iterator[None]:
    """Around code that keeps state which an interrupt may leave half changed."""
    if _State.spoilt and _State.brief:
        raise CutShort
    try:
        yield
    except Exception:
        raise
    except BaseException:
        _State.spoilt = True
        raise
