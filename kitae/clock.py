"""What time it is for the loops of a run: that of their event loop, so that a simulated run has a simulated clock."""

import asyncio
import selectors
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def now() -> float:
    """Seconds on the clock of the running event loop; outside of one, of `time.monotonic`, which loops use too."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps: when nothing is ready, its clock jumps to the next timer.

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(asyncio.sleep(3600))     # returns at once

    Work in threads (`run_in_executor`) takes no time on that clock: it stands still until that is done. `RuntimeError`
    if everything waits and neither a timer nor a thread is left to end that. What waits for the world outside, sockets
    or processes, does not belong here.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._working = 0  # threads
        super().__init__(_Jumping(self._pass_time))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        self._working += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(lambda _: self._add_working(-1))
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Its threads are waited for by one that nobody counts."""
        self._working += 1
        await super().shutdown_default_executor()
        self._working -= 1

    def _add_working(self, count: int) -> None:
        self._working += count

    def _pass_time(self, timeout: float | None) -> float | None:
        """The loop would wait so long (None: for ever); how long it really shall."""
        if self._working and timeout != 0:
            return None
        if timeout is None:
            raise RuntimeError(f"at {self._now:.6g} s of virtual time everything waits, and nothing will end that")
        self._now += max(0.0, timeout)
        return 0.0


class _Jumping(selectors.DefaultSelector):
    """Asks how long to wait."""

    def __init__(self, wait: Callable[[float | None], float | None]) -> None:
        super().__init__()
        self._wait = wait

    def select(self, timeout: float | None = None) -> Any:
        return super().select(self._wait(timeout))
