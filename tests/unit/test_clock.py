"""A loop whose clock jumps, and the one question what time it is."""

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kitae.clock import VirtualLoop, now


def virtual(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def test_hours_pass_at_once_and_in_order() -> None:
    heard = []

    async def at(seconds: float) -> None:
        await asyncio.sleep(seconds)
        heard.append((seconds, now()))

    async def body() -> float:
        await asyncio.gather(*(at(s) for s in (7200.0, 0.5, 3600.25, 0.5)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return now()

    began = time.monotonic()
    assert virtual(body()) == pytest.approx(7260.0)
    assert time.monotonic() - began < 30
    assert [s for s, _ in heard] == [0.5, 0.5, 3600.25, 7200.0]
    assert all(s == pytest.approx(t) for s, t in heard)


def test_threads_take_no_time() -> None:
    async def body() -> tuple[float, float, list[float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        ticks = []

        async def tick() -> None:
            while True:
                ticks.append(now())
                await asyncio.sleep(1.0)

        ticking = asyncio.create_task(tick())

        def work() -> float:
            time.sleep(0.05)  # real, so not on this clock
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
            time.sleep(0.05)
            return 42.0

        await asyncio.sleep(3.5)
        with ThreadPoolExecutor(1) as pool:
            result = await loop.run_in_executor(pool, work)
        ticking.cancel()
        return result, now(), ticks

    assert virtual(body()) == (42.0, 3.5, [0.0, 1.0, 2.0, 3.0])


def test_waiting_for_nothing_is_an_error() -> None:
    async def body() -> None:
        await asyncio.sleep(12)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="at 12 s of virtual time everything waits"):
        virtual(body())


def test_outside_of_it_time_is_real() -> None:
    async def inside() -> float:
        return now()

    before = time.monotonic()
    assert before <= now() <= time.monotonic()
    assert before <= asyncio.run(inside()) <= time.monotonic()
