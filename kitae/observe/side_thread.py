"""Work that must never delay a run: it is done in a separate thread, and dropped if the thread cannot keep up."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

Note = Callable[[str], None]
Work = Callable[[], None]

MOST = 1000
"""How many pieces of work, such as rows of metrics, may wait."""


class Aside:
    """Does one piece of work after the other. The caller never waits, and never sees a failure.

    The first failure and the first dropped piece are reported at once, their numbers by `close`. The thread is a
    daemon, so a hanging one is abandoned.
    """

    def __init__(self, name: str, note: Note, most: int = MOST) -> None:
        self.name = name
        self.dropped = 0
        self.failed = 0
        self._note = note
        self._queue: queue.Queue[Work | None] = queue.Queue(most)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"kitae-{name}", daemon=True)
        self._thread.start()

    def do(self, work: Work) -> None:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._note(f"{self.name} cannot keep up: what does not fit into its queue is dropped")

    def close(self, seconds: float) -> bool:
        """Finish the waiting work within this many seconds. Returns whether all of it was done."""
        self._ended.set()
        with suppress(queue.Full):  # then the loop ends when it has emptied the queue
            self._queue.put_nowait(None)
        self._thread.join(seconds)
        done = not self._thread.is_alive()
        if not done:
            self._note(f"{self.name} was left behind: it did not finish within {seconds:g} s")
        if self.dropped or self.failed > 1:
            self._note(f"{self.name}: {self.dropped} pieces were dropped, {self.failed} failed")
        return done

    def _loop(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=0.5)
            except queue.Empty:
                if self._ended.is_set():
                    return
                continue
            if work is None:
                return
            try:
                work()
            except BaseException as error:  # anything that another library raises, exits included
                self.failed += 1
                if self.failed == 1:
                    self._note(f"{self.name} failed: {_brief(error)}")


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
