"""Work beside other work is remembered while it runs, and ended."""

import asyncio

from kitae.workers.background_tasks import BackgroundTasks


def test_tasks_are_remembered_while_they_run() -> None:
    async def body() -> None:
        tasks, go = BackgroundTasks(), asyncio.Event()
        task = tasks.start(go.wait())
        assert tasks.tasks == {task}
        go.set()
        assert await task
        await asyncio.sleep(0)
        assert not tasks.tasks

    asyncio.run(body())


def test_the_end_waits_for_all_of_them() -> None:
    async def body() -> None:
        ended = []

        async def stubborn() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                ended.append("cleaned up")

        async def failing() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                raise ValueError("in the end")

        tasks = BackgroundTasks()
        tasks.start(stubborn())
        tasks.start(failing())
        await asyncio.sleep(0)
        await tasks.cancel()
        assert ended == ["cleaned up"] and not tasks.tasks

    asyncio.run(body())
