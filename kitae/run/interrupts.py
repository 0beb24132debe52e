"""Ctrl-C and SIGTERM while a run trains."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from kitae.envs.blocking_calls import hurry

_GRACE = 3.0  # seconds for an interrupted run to say goodbye
_ELSEWHERE: "set[Interrupts]" = set()  # of runs in other threads than the main one, which gets the signals


_GIVEN_UP = set[int]()  # threads whose runs are to stop as soon as they can


def give_up(thread: int | None) -> None:
    """Nobody waits for this thread any more: a run that is still loading there stops when it is about to train."""
    if thread is not None:
        _GIVEN_UP.add(thread)


def stop_elsewhere(number: int = signal.SIGINT) -> bool:
    """Stop the runs of other threads at their next safe point, as a signal stops that of the main thread. Whether there
    are any."""
    for each in list(_ELSEWHERE):
        each.loop.call_soon_threadsafe(each.request, number)
    return bool(_ELSEWHERE)


class Interrupts:
    """The first Ctrl-C (or SIGTERM) stops at the next safe point; the second ends the process, whatever it is doing.

    Signals reach the main thread alone; a run in another one is stopped by `stop_elsewhere`.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.loop = asyncio.get_running_loop()
        self.received: int | None = None  # the first signal

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.loop.add_signal_handler(number, self._interrupt, number)
                signal.signal(number, lambda *_: hurry())  # beside the loop's, which hears of it at its next turn
            except (ValueError, NotImplementedError, RuntimeError):  # not the main thread
                _ELSEWHERE.add(self)
                break
        hurry(False)
        if threading.get_ident() in _GIVEN_UP:
            _GIVEN_UP.discard(threading.get_ident())
            self.loop.call_soon(self.request, signal.SIGINT)
        return self

    def request(self, number: int) -> None:
        """Stop at the next safe point, however often it is asked for."""
        if self.received is None:
            self.received = number
            hurry()
            self._stop()

    def _interrupt(self, number: signal.Signals) -> None:
        if self.received is not None:
            # The trainer's thread cannot be interrupted and would be waited for. The journal survives a killed process.
            end = threading.Timer(_GRACE, os._exit, (128 + number,))
            end.daemon = True
            end.start()
            raise KeyboardInterrupt
        self.request(number)

    def __exit__(self, *_: object) -> None:
        hurry(False)
        _ELSEWHERE.discard(self)
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.loop.remove_signal_handler(number)
            except (ValueError, NotImplementedError, RuntimeError):
                return
