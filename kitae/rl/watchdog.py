"""The watchdog: when nothing in a run has moved for too long, it reports who waits for what, and ends the run.

    watch = Watch(limit=1800, pulse=lambda: engine.stats().generated_tokens, file=folder / "stalled.txt")
    with watch.waits("train", "a batch"): ...

Something moves when a wait begins or ends, or when the pulse changes. A thread looks; so it also notices when the event
loop itself is stuck. Time in which the whole process stood still (Ctrl-Z, say) does not count. The message has one line
for each kind of wait; the file has the stacks of all threads and tasks.
"""

import asyncio
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kitae.errors import StalledError

_GRACE = 20.0  # seconds for the event loop to end the run, before the process is ended


class Watch:
    """limit: seconds without any movement. pulse: a value that changes while something works that waits for nothing."""

    def __init__(self, limit: float, pulse: Callable[[], object], file: Path) -> None:
        self.limit = limit
        self._pulse = pulse
        self._file = file
        self._waits: dict[int, tuple[str, str, Callable[[], str], float]] = {}
        self._numbers = itertools.count()
        self._pauses = 0
        self._moved = time.monotonic()
        self._ended = threading.Event()

    @contextmanager
    def waits(self, who: str, what: str, more: Callable[[], str] = str, *, paused: bool = False) -> Iterator[None]:
        """`who` waits for `what`; `more` is asked for details if it takes too long. paused: it may take any time."""
        number = next(self._numbers)
        self._pauses += paused
        self._moved = time.monotonic()
        self._waits[number] = (who, what, more, self._moved)
        try:
            yield
        finally:
            self._moved = time.monotonic()
            self._pauses -= paused
            del self._waits[number]

    async def guard(self) -> None:
        """Raise `StalledError` when the run is stuck; else run until it is cancelled."""
        loop = asyncio.get_running_loop()
        stalled: asyncio.Future[None] = loop.create_future()
        self._moved = time.monotonic()
        threading.Thread(target=self._look, args=(loop, stalled), name="kitae-watch", daemon=True).start()
        try:
            await stalled
        finally:
            self._ended.set()

    def report(self) -> str:
        """`train waits 612 s for a batch: 7 of 8 groups are there`, one line for each pair of who and what."""
        kinds: dict[tuple[str, str], list[tuple[float, Callable[[], str]]]] = {}
        for who, what, more, since in list(self._waits.values()):
            kinds.setdefault((who, what), []).append((since, more))
        lines = []
        for (who, what), found in sorted(kinds.items(), key=lambda kind: min(kind[1], key=lambda f: f[0])[0]):
            since, more = min(found, key=lambda f: f[0])
            many = f" ({len(found)} of them)" if len(found) > 1 else ""
            details = f": {text}" if (text := more()) else ""
            lines.append(f"  {who}{many} waits {time.monotonic() - since:.0f} s for {what}{details}")
        return "\n".join(lines) or "  nobody waits: the event loop is stuck, or something outside the loops is"

    def _look(self, loop: asyncio.AbstractEventLoop, stalled: "asyncio.Future[None]") -> None:
        pulse, looked, interval = self._pulse(), time.monotonic(), min(5.0, self.limit / 5)
        while not self._ended.wait(interval):
            slept, looked = time.monotonic() - looked, time.monotonic()
            if slept > 2 * interval:  # this thread was not let run, so nobody was
                self._moved += slept - interval
            if (now := self._pulse()) != pulse:
                pulse, self._moved = now, time.monotonic()
            if time.monotonic() - self._moved > self.limit and not self._pauses:
                break
        else:
            return
        message = f"nothing has moved for {self.limit:g} s (pipeline.stall_limit):\n{self.report()}"
        message += f"\nThe stacks of all threads and tasks are in {self._file}; the run can be resumed."
        try:
            self._file.write_text(f"{message}\n\n{_stacks(loop)}")
        except OSError as problem:  # perhaps the disk is what is stuck
            message += f"\n(they could not be written: {problem})"
        loop.call_soon_threadsafe(_fail, stalled, StalledError(message))
        if not self._ended.wait(_GRACE):
            print(f"error: {message}\nThe event loop does not answer: ending the process.", file=sys.stderr, flush=True)
            os._exit(1)


def whereabouts(name: str) -> object:
    """Where threads whose names begin so are in their programs: it changes while they work, however long that takes."""
    threads = {thread.ident for thread in threading.enumerate() if thread.name.startswith(name)}
    frames = (frame for ident, frame in sys._current_frames().items() if ident in threads)
    return [[(f.f_code, f.f_lasti) for f, _ in traceback.walk_stack(frame)] for frame in frames]


def _fail(future: "asyncio.Future[None]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _stacks(loop: asyncio.AbstractEventLoop) -> str:
    """What every thread and every task is doing."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    for task in asyncio.all_tasks(loop):
        stack = "".join("".join(traceback.format_stack(frame)[-1:]) for frame in task.get_stack())
        parts.append(f"Task {task.get_name()} {task.get_coro()}:\n{stack}")
    return "\n".join(parts)
