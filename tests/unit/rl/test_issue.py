"""What becomes of a slot's groups: the real `Issuing`, buffer and journal, with groups that do what a test says."""

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kitae.config.root import RLConfig
from kitae.envs.episode_context import Suspended
from kitae.errors import DiskFullError, EngineError
from kitae.observe.observer import Silent
from kitae.rl.buffer import Buffer, Slot
from kitae.rl.issue import Curriculum, GivenUp, Issuing
from kitae.rl.watchdog import Watch
from kitae.store.journal import Journal
from kitae.types import Group, Message, Prompt

Ask = Callable[[int], Awaitable[bool]]  # group id → whether it is worth training on


class Questions:
    def at(self, index: int) -> Prompt:
        return Prompt(f"p{index}", (Message("user", str(index)),), str(index), {})


class Answers:
    def __init__(self, ask: Ask) -> None:
        self.asked = Counter[int]()
        self.worth: dict[int, bool] = {}
        self.stopping = asyncio.Event()
        self._ask = ask

    async def group(self, group_id: int, prompt: Prompt, *_: Any, **__: Any) -> Group:
        self.asked[group_id] += 1
        self.worth[group_id] = await self._ask(group_id)
        return Group(group_id, prompt, ())

    async def suspend(self) -> None:
        self.stopping.set()


class Life:
    """One process of a run with batches of n slots; the journal outlives it."""

    def __init__(self, folder: Path, ask: Ask, n: int, oversample: float, max_refill: float = 3.0) -> None:
        pipeline = {"refill": {"most": max_refill, "oversample": oversample}}
        training = {"prompts_per_step": n, "steps": 1, "group_size": 2, "warmup_steps": 0}
        config = RLConfig.model_validate(
            {
                "data": {"task": "reverse"},
                "algorithm": {"preset": "grpo", "filter": "zero-variance"},
                "pipeline": pipeline,
                "training": training,
            }
        )
        self.journal = Journal(folder / "journal.sqlite")
        self.buffer = Buffer(n, 0)
        self.answers = Answers(ask)
        self.issuing = Issuing(
            config, self.journal, Questions(), self.answers, self.buffer, Curriculum(config.pipeline, 0, {}), Silent(),
            Watch(1800.0, lambda: 0, folder / "stacks.txt"), wants_greedy=False,
            drop_reason=lambda g: None if self.answers.worth[g.id] else "dull",
        )  # type: ignore[arg-type]  # fmt: skip

    async def batch(self, suspend_after: float | None = None) -> list[Slot]:
        """The first one; none if the run is stopped before."""
        slots: list[Slot] = []
        try:
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                feeding = tasks.create_task(self.issuing.feed(tasks, last_step=1))
                if suspend_after is None:
                    slots = await self.buffer.take()
                else:
                    await asyncio.sleep(suspend_after)
                    await self.issuing.suspend()
                feeding.cancel()
                self.issuing.cancel()
        finally:
            self.journal.close()
        return slots


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def fates(folder: Path) -> Counter[str]:
    journal = Journal(folder / "journal.sqlite", read_only=True)
    found = Counter(reason for *_, reason in journal.groups())
    journal.close()
    return found


@in_a_loop
async def test_the_first_in_order_is_taken_however_late_it_is(tmp_path: Path) -> None:
    async def ask(group: int) -> bool:
        await asyncio.sleep(0.2 if group == 1 else 0.01)
        return group >= 1

    life = Life(tmp_path, ask, n=1, oversample=3)
    (slot,) = await life.batch()
    assert slot.result and slot.result.group and slot.result.group.id == 1
    assert [group.id for group, _ in slot.result.dropped] == [0]
    assert life.issuing.taken(0) == GivenUp(overdue=0, spare=2), "the third, and what took the first one's place"
    assert fates(tmp_path) == Counter({"spare": 2})


@pytest.mark.parametrize("hangs", [False, True])
@in_a_loop
async def test_an_error_ends_the_run_whoever_waits(hangs: bool, tmp_path: Path) -> None:
    async def ask(group: int) -> bool:
        if group == 1:
            await asyncio.sleep(0.05)
            raise EngineError("it cannot go on")
        await asyncio.sleep(1000 if hangs else 0.5)
        return True

    with pytest.raises(ExceptionGroup) as raised:
        await Life(tmp_path, ask, n=1, oversample=2).batch()
    assert [type(error) for error in raised.value.exceptions] == [EngineError]
    assert not fates(tmp_path)


@pytest.mark.parametrize("oversample", [1, 2])
@in_a_loop
async def test_an_error_while_a_run_stops_is_heard(oversample: int, tmp_path: Path) -> None:
    async def ask(group: int) -> bool:
        await life.answers.stopping.wait()
        if group == oversample - 1:
            raise DiskFullError("no space left")
        raise Suspended

    life = Life(tmp_path, ask, n=1, oversample=oversample)
    with pytest.raises(ExceptionGroup) as raised:
        await life.batch(suspend_after=0.1)
    assert [type(error) for error in raised.value.exceptions] == [DiskFullError]


@pytest.mark.parametrize("oversample", [1, 1.5, 2, 3])
@in_a_loop
async def test_a_stop_costs_no_prompt_and_no_refill(oversample: float, tmp_path: Path) -> None:
    """The last slot is slow, the others have what they need when the run stops."""
    n = 4

    async def ask(group: int) -> bool:
        if slow(group) and not hurry:
            await life.answers.stopping.wait()
            raise Suspended
        return group >= n and not slow(group)

    def slow(group: int) -> bool:
        row = life.journal._reader.execute("SELECT slot FROM prompts WHERE group_id = ?", (group,)).fetchone()
        return bool(row[0] == n - 1)

    hurry = True
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    life = Life(whole, ask, n, oversample, max_refill=1)
    await life.batch()
    hurry = False
    life = Life(broken, ask, n, oversample, max_refill=1)
    assert await life.batch(suspend_after=0.3) == []
    hurry = True
    before = fates(broken)
    life = Life(broken, ask, n, oversample, max_refill=1)
    slots = await life.batch()
    assert len(slots) == n and max(life.answers.asked.values()) == 1
    assert fates(broken) == before, "slots that were ready ask nothing new"
    counts = [Journal(folder / "journal.sqlite", read_only=True).counts()["prompts"] for folder in (whole, broken)]
    assert counts[0] == counts[1]
