import asyncio
import time

import pytest

from kitae.workers.background_tasks import within


def test_a_task_in_time_gives_its_result_or_its_error() -> None:
    async def give(value: int) -> int:
        await asyncio.sleep(0)
        return 6 // value

    async def body() -> None:
        assert await within(5, asyncio.create_task(give(2))) == 3
        with pytest.raises(ZeroDivisionError):
            await within(5, asyncio.create_task(give(0)))

    asyncio.run(body())


def test_a_late_task_is_cancelled() -> None:
    async def body() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        with pytest.raises(TimeoutError):
            await within(0.05, task)
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(body())


def test_a_blocked_loop_does_not_take_its_own_delay_for_the_task_s() -> None:
    async def body() -> str:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        loop.call_later(0.1, answer.set_result, "here")

        async def wait() -> str:
            return await answer

        loop.call_later(0.01, time.sleep, 0.5)  # longer than the deadline
        return await within(0.3, asyncio.create_task(wait()))

    assert asyncio.run(body()) == "here"
