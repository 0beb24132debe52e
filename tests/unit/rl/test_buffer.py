"""The buffer, against a model of it: no schedule of issues, results and trainings breaks the bound or gets stuck."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kitae.rl.buffer import Buffer, Slot, SlotResult

T = TypeVar("T")
NOTHING = SlotResult(None, ())


def trained(buffer: Buffer, version: int) -> None:
    """A batch has become this version, and the engine serves it."""
    buffer.train(version)
    buffer.release(version)


async def now(work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives without waiting, or None."""
    task = asyncio.ensure_future(work)
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    return None


class Schedule(RuleBasedStateMachine):
    """Feed, finish in any order, train, serve: as the loops may interleave them, and overdue slots are waited for."""

    @initialize(size=st.integers(1, 4), bound=st.integers(0, 4), steps=st.integers(1, 12), drop=st.booleans())
    def start(self, size: int, bound: int, steps: int, drop: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.buffer = Buffer(size, bound, on_overdue=self.give_up if drop else None)
        self.given_up: list[int] = []
        self.total = steps * size
        self.issued = 0
        self.in_flight: list[Slot] = []
        self.trained: list[int] = []
        self.batch: list[Slot] = []  # being trained
        self.unserved: list[Slot] = []  # trained, and the engine does not serve that version yet

    def give_up(self, slot: Slot) -> None:
        assert slot.result is None and slot.version < self.buffer.version, "only old ones that are not ready"
        self.in_flight.remove(slot)
        self.given_up.append(slot.number)
        self.total += 1  # another takes its place

    @precondition(lambda self: self.issued < self.total)
    @rule()
    def issue(self) -> None:
        is_full = len(self.buffer.open) + len(self.batch) + len(self.unserved) == self.buffer.slots
        slot = self.loop.run_until_complete(now(self.buffer.reserve(self.issued)))
        assert (slot is None) == is_full
        if slot is not None:
            assert slot.version == self.buffer.served
            self.issued += 1
            self.in_flight.append(slot)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slot = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.buffer.put(slot, NOTHING)

    @precondition(lambda self: not self.batch and (not self.unserved or self.buffer.bound))
    @rule()
    def take(self) -> None:
        """Where generation may run ahead, also a moment before the engine serves the last version."""
        batch = self.loop.run_until_complete(now(self.buffer.take()))
        if batch is None:
            return
        assert len(batch) == self.buffer.size
        for slot in batch:
            assert slot.result is not None
            assert 0 <= self.buffer.version - slot.version <= self.buffer.bound, "the bound"
            assert slot.number not in self.trained, "trained twice"
            self.trained.append(slot.number)
        self.batch = batch

    @precondition(lambda self: self.batch and not self.unserved)
    @rule()
    def train(self) -> None:
        self.batch, self.unserved = [], self.batch
        self.buffer.train(self.buffer.version + 1)

    @precondition(lambda self: self.unserved)
    @rule()
    def serve(self) -> None:
        self.unserved = []
        self.buffer.release(self.buffer.version)

    @precondition(lambda self: not self.batch and not self.unserved)
    @rule(slow=st.integers(0, 6))
    def a_step_while_the_oldest_are_slow(self, slow: int) -> None:
        while self.issued < self.total and len(self.buffer.open) < self.buffer.slots:
            self.issue()
        while len(self.in_flight) > slow:
            self.buffer.put(self.in_flight.pop(), NOTHING)
        self.take()
        if self.batch:
            self.train()
            self.serve()

    @invariant()
    def the_ledger_balances(self) -> None:
        if hasattr(self, "buffer"):
            open_now = [slot.number for slot in self.buffer.open]
            assert sorted([*open_now, *self.trained, *self.given_up]) == list(range(self.issued))
            assert len(self.buffer.open) + len(self.batch) + len(self.unserved) <= self.buffer.slots

    @invariant()
    def nothing_gets_stuck(self) -> None:
        """With everything issued that may be, and all of it ready, there is a batch."""
        if not hasattr(self, "buffer") or self.batch or self.unserved:
            return
        full = len(self.buffer.open) == self.buffer.slots or self.issued == self.total
        if full and not self.in_flight and self.buffer.open:
            assert self.buffer.pick() is not None
        ready = sum(slot.result is not None for slot in self.buffer.open)
        if self.buffer.on_overdue and ready >= self.buffer.size:
            assert self.buffer.pick() is not None, "it waits for nobody"

    def teardown(self) -> None:
        """And from anywhere the run can be finished."""
        if not hasattr(self, "buffer"):
            return
        for _ in range(10 * self.total + 10):
            if self.unserved:
                self.serve()
            if self.batch:
                self.train()
                self.serve()
            while self.in_flight:
                self.buffer.put(self.in_flight.pop(), NOTHING)
            while self.issued < self.total and len(self.buffer.open) < self.buffer.slots:
                self.issue()
            while self.in_flight:
                self.buffer.put(self.in_flight.pop(0), NOTHING)
            self.take()
        self.loop.close()
        assert sorted([*self.trained, *self.given_up]) == list(range(self.total))


Schedule.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedule = Schedule.TestCase  # about 12,000 steps


@pytest.mark.parametrize(("prompts", "staleness", "slots"), [(1, 0, 1), (8, 0, 8), (8, 1, 16), (3, 4, 15)])
def test_slots(prompts: int, staleness: int, slots: int) -> None:
    async def body() -> None:
        buffer = Buffer(prompts, staleness)
        for number in range(slots):
            await buffer.reserve(number)
        waiting = asyncio.create_task(buffer.reserve(slots))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        for slot in list(buffer.open):
            buffer.put(slot, NOTHING)
        batch = await buffer.take()
        await asyncio.sleep(0.01)
        assert len(batch) == prompts and not waiting.done(), "not before the engine serves the new version"
        trained(buffer, 1)
        slot = await waiting
        assert (slot.number, slot.version) == (slots, 1)

    asyncio.run(body())


def test_a_cancelled_reserve_takes_no_slot() -> None:
    async def body() -> None:
        buffer = Buffer(1, 0)
        slot = await buffer.reserve(0)
        waiting = asyncio.create_task(buffer.reserve(1))
        await asyncio.sleep(0)
        waiting.cancel()
        buffer.put(slot, NOTHING)
        await buffer.take()
        trained(buffer, 1)
        await asyncio.wait_for(buffer.reserve(2), 1)

    asyncio.run(body())


def test_the_old_are_waited_for_only_when_they_must_be() -> None:
    async def body() -> None:
        buffer = Buffer(2, 2)
        a, b, c, d, e, f = [await buffer.reserve(i) for i in range(6)]
        buffer.put(e, NOTHING)
        assert buffer.pick() is None
        buffer.put(f, NOTHING)
        assert await buffer.take() == [e, f], "those that finish first need not wait"
        trained(buffer, 1)
        g, h = await buffer.reserve(6), await buffer.reserve(7)
        buffer.put(h, NOTHING)
        buffer.put(g, NOTHING)
        assert buffer.pick() is None, "a, b, c and d must be trained at versions 1 and 2: two of them now"
        buffer.put(d, NOTHING)
        assert buffer.pick() is None
        buffer.put(b, NOTHING)
        assert await buffer.take() == [b, d]
        trained(buffer, 2)
        buffer.put(a, NOTHING)
        assert buffer.pick() is None
        buffer.put(c, NOTHING)
        assert await buffer.take() == [a, c]

    asyncio.run(body())


def test_the_next_batch_may_be_taken_before_the_last_is_served() -> None:
    async def body() -> None:
        buffer = Buffer(1, 1)
        first, second = await buffer.reserve(0), await buffer.reserve(1)
        buffer.put(first, NOTHING)
        buffer.put(second, NOTHING)
        assert await buffer.take() == [first]
        buffer.train(1)
        assert await buffer.take() == [second]
        waiting = asyncio.create_task(buffer.reserve(2))
        await asyncio.sleep(0)
        assert not waiting.done(), "no slot is free before its version is served"
        buffer.release(1)
        assert (await waiting).version == 1

    asyncio.run(body())


def test_a_resumed_slot_keeps_its_version() -> None:
    async def body() -> None:
        buffer = Buffer(1, 2, version=5)
        young, old = await buffer.reserve(8), await buffer.reserve(7, version=3)
        buffer.put(young, NOTHING)
        assert buffer.pick() is None
        buffer.put(old, NOTHING)
        assert await buffer.take() == [old]

    asyncio.run(body())


def test_a_slot_is_filled_once() -> None:
    buffer = Buffer(1, 0)
    slot = asyncio.run(buffer.reserve(0))
    buffer.put(slot, NOTHING)
    with pytest.raises(AssertionError, match="has been filled already"):
        buffer.put(slot, NOTHING)
