"""Work beside other work is remembered while it runs, and ended."""

import asyncio

from kitae.workers.background_tasks import Chores


def test_chores_are_remembered_while_they_run() -> None:
    async def body() -> None:
        chores, go = Chores(), asyncio.Event()
        task = chores.have(go.wait())
        assert chores.tasks == {task}
        go.set()
        assert await task
        await asyncio.sleep(0)
        assert not chores.tasks

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

        chores = Chores()
        chores.have(stubborn())
        chores.have(failing())
        await asyncio.sleep(0)
        await chores.end()
        assert ended == ["cleaned up"] and not chores.tasks

    asyncio.run(body())
