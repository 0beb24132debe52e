"""The buffer: its slots are what bounds staleness."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.pipeline.buffer import Buffer, Outcome

EMPTY = Outcome(None, ())


async def free_slots(buffer: Buffer) -> int:
    """Reserve until it blocks; returns how often it did not."""
    count = 0
    while True:
        try:
            async with asyncio.timeout(0.01):
                await buffer.reserve()
        except TimeoutError:
            return count
        count += 1


@pytest.mark.parametrize(("prompts", "staleness", "slots"), [(1, 0, 1), (4, 0, 4), (4, 1, 8), (3, 4, 15)])
def test_slots(prompts: int, staleness: int, slots: int) -> None:
    buffer = Buffer(prompts, staleness)
    assert buffer.slots == slots
    assert asyncio.run(free_slots(buffer)) == slots
    assert buffer.taken == slots


def test_reserve_blocks_until_release() -> None:
    async def body() -> None:
        buffer = Buffer(2, 0)
        await buffer.reserve()
        await buffer.reserve()
        blocked = [asyncio.create_task(buffer.reserve()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in blocked)
        buffer.put(EMPTY)
        await buffer.take(1)
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in blocked), "an outcome taken is not a slot freed"
        buffer.release(2)
        await asyncio.sleep(0.01)
        assert [task.done() for task in blocked] == [True, True, False]
        assert buffer.taken == 2
        blocked[2].cancel()

    asyncio.run(body())


def test_a_cancelled_reserve_takes_no_slot() -> None:
    async def body() -> None:
        buffer = Buffer(1, 0)
        await buffer.reserve()
        waiting = asyncio.create_task(buffer.reserve())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        buffer.release(1)
        assert await free_slots(buffer) == 1

    asyncio.run(body())


def test_take_waits_for_all_it_wants_in_order() -> None:
    async def body() -> None:
        buffer = Buffer(3, 0)
        outcomes = [Outcome(None, ()) for _ in range(3)]
        taking = asyncio.create_task(buffer.take(3))
        for outcome in outcomes[:2]:
            buffer.put(outcome)
        await asyncio.sleep(0.01)
        assert not taking.done()
        buffer.put(outcomes[2])
        assert all(a is b for a, b in zip(await taking, outcomes, strict=True))

    asyncio.run(body())


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 6))
def test_nothing_in_flight_is_older_than_the_bound(prompts: int, staleness: int, steps: int) -> None:
    """A greedy feeder against a trainer that releases a batch per version: the age of what it trains on is bounded."""

    async def body() -> list[int]:
        buffer = Buffer(prompts, staleness)
        version = 0
        issued: asyncio.Queue[int] = asyncio.Queue()

        async def feed() -> None:
            for _ in range(prompts * steps):
                await buffer.reserve()
                issued.put_nowait(version)
                buffer.put(EMPTY)

        feeder = asyncio.create_task(feed())
        ages = []
        for step in range(steps):
            await buffer.take(prompts)
            ages += [step - issued.get_nowait() for _ in range(prompts)]
            version = step + 1
            buffer.release(prompts)
        await feeder
        return ages

    ages = asyncio.run(body())
    assert len(ages) == prompts * steps
    assert min(ages) >= 0
    assert max(ages) == min(staleness, steps - 1)
