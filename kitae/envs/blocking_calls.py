"""Calls of the user's own code that may block: named while they do, given up when they take too long.

    await WatchedCall(note, "7/3", 60.0, lambda: environment.step(turn))    code that is `async`: runs on the event loop
    await in_thread(environment.step, turn)                              code that is not: runs in a thread of its own

**On the loop** everything stands still while such code computes, or sleeps without `await`. A thread looks on: after
two seconds it tells who blocks, with file and line. Once the time limit of the call is over, or a moment after somebody
asked the run to stop, a signal raises `Blocked` where the code stands. Not covered: a call into C that ignores signals,
and a run in another thread than the main one, where nothing can be raised inside a call that sleeps.

**In a thread** nobody has to wait: a call that takes too long is left alone. `LeftAlone` is raised there at its next
line of Python. A call that never gets there keeps its thread until the process ends, which does not wait for it.
"""

import asyncio
import contextvars
import ctypes
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_PATIENCE = 2.0  # seconds until a call that blocks is told of
_HURRY = 0.1  # seconds that it may block once the run is to stop
_LOOKS = 0.1  # seconds between two looks
_AGAIN = 1.0  # seconds until `Blocked` is raised once more in code that has swallowed it
_POKE = signal.SIGURG  # the system ignores it where nobody listens
_KITAE, _PYTHON = Path(__file__).parent.parent, Path(asyncio.__file__).parent.parent


class Blocked(BaseException):
    """Raised inside a call that blocks everything. No `Exception`: code that catches those would go on blocking."""


class LeftAlone(BaseException):
    """Raised in a thread whose result nobody waits for any more."""


@dataclass(slots=True)
class _Stretch:
    """What runs on a loop's thread at this moment: from one `await` of an environment's code to the next."""

    which: str
    limit: float
    note: Callable[[str], None]
    since: float
    told: bool = False
    poked: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class _Looker:
    """The thread that looks on, for all loops of this process. hurried: the run is to stop."""

    def __init__(self) -> None:
        self.stretches: dict[int, _Stretch] = {}
        self.hurried = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # also after a fork
            self._thread = threading.Thread(target=self._look, name="kitae-blocking", daemon=True)
            self._thread.start()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(_POKE) is not _poked:
            signal.signal(_POKE, _poked)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOKS)
            for thread, stretch in list(self.stretches.items()):
                if not stretch.told and stretch.seconds >= _PATIENCE:
                    stretch.told = True
                    stretch.note(f"{_told(thread, stretch)}: all episodes wait. Await what takes long, or write a "
                                 "`def` instead of the `async def`, which runs in a thread")  # fmt: skip
                if stretch.seconds >= (_HURRY if self.hurried else stretch.limit):
                    self._poke(thread, stretch)

    def _poke(self, thread: int, stretch: _Stretch) -> None:
        if time.monotonic() - stretch.poked < _AGAIN or self.stretches.get(thread) is not stretch:
            return
        stretch.poked = time.monotonic()
        if thread == threading.main_thread().ident:
            signal.pthread_kill(thread, _POKE)
        else:
            _raise_in(thread, Blocked)


_looker = _Looker()


def hurry(hurried: bool = True) -> None:
    """Somebody asked the run to stop: code that blocks is given up at once. False: a run begins, or is over."""
    _looker.hurried = hurried


async def while_hurried(until: Callable[[], bool]) -> None:
    """Wait while a run that was asked to stop comes to it."""
    while _looker.hurried and not until():
        await asyncio.sleep(_LOOKS / 2)


class WatchedCall(Generic[T]):
    """An environment's call, on the loop. note: is told by another thread what blocks. limit: seconds for one stretch
    between two awaits, after which `Blocked` is raised in it; its text says where it stood."""

    def __init__(self, note: Callable[[str], None], which: str, limit: float, call: Callable[[], Awaitable[T]]) -> None:
        self._note, self._which, self._limit, self._call = note, which, limit, call

    def __await__(self) -> Generator[Any, Any, T]:
        _looker.begin()
        thread = threading.get_ident()
        work: Generator[Any, Any, T] | None = None
        sent, thrown = None, None
        while True:
            stretch = _Stretch(self._which, self._limit, self._note, time.monotonic())
            _looker.stretches[thread] = stretch
            try:
                if work is None:
                    work = self._call().__await__()
                waits = work.throw(thrown) if thrown is not None else work.send(sent)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            finally:
                _looker.stretches.pop(thread, None)
            sent, thrown = None, None
            try:
                sent = yield waits
            except BaseException as error:  # a cancellation, which belongs to the call
                thrown = error


def _poked(number: int, frame: FrameType | None) -> None:
    """In the main thread, between two instructions: the call that blocks, unless it has just ended."""
    thread = threading.get_ident()
    stretch = _looker.stretches.get(thread)
    if stretch is not None and stretch.poked:
        raise Blocked(_told(thread, stretch))


def _told(thread: int, stretch: _Stretch) -> str:
    frame = sys._current_frames().get(thread)
    return f"the environment of {stretch.which} blocks for {stretch.seconds:.1f} s{_place(frame)}"


def _place(frame: FrameType | None) -> str:
    """The innermost line that is the user's own: neither Kitae's nor a library's."""
    lines = traceback.extract_stack(frame) if frame is not None else []
    inside = next((n for n, line in enumerate(lines) if line.filename == __file__ and line.name == "__await__"), None)
    own = [line for line in lines[inside or 0 :] if not _is_library(line.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno} ({(own[-1].line or own[-1].name)[:80]})" if own else ""


def _is_library(file: str) -> bool:
    path = Path(file)
    return "site-packages" in path.parts or path.is_relative_to(_KITAE) or path.is_relative_to(_PYTHON)


async def in_thread(function: Callable[..., T], *values: Any, **arguments: Any) -> T:
    """What the function returns, computed in a thread of its own; given up when this is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(found: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(found)  # type: ignore[arg-type]
        else:
            done.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    def work() -> None:
        found, error = None, None
        try:
            found = context.run(function, *values, **arguments)
        except BaseException as problem:
            error = problem
        with suppress(RuntimeError, LeftAlone):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver, found, error)

    thread = threading.Thread(target=work, name="kitae-own-code", daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        if thread.ident is not None and thread.is_alive():
            _raise_in(thread.ident, LeftAlone)
        raise


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
