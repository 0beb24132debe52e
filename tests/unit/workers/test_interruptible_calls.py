"""Checks that are interrupted: at once, whatever they are at, and without harm to what comes after them."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kitae.types import Score
from kitae.verifiers.pool import VerifierPool
from kitae.workers import interruptible_calls
from kitae.workers.interruptible_calls import CutShort, briefly, foreign, is_spoilt

CHECKS = """
import os, time
from kitae.verifiers.base import repeatable
from kitae.workers.interruptible_calls import foreign

CALLS = []

@repeatable
def score(response, reference, context):
    CALLS.append(response)
    if response == "hang":
        while True: pass
    if response == "swallow":
        while True:
            try:
                while True: pass
            except Exception: pass
    if response == "foreign hang":
        with foreign():
            while True: pass
    if response == "foreign":
        with foreign():
            return os.getpid()
    if response == "slow":
        end = time.process_time() + 0.2
        while time.process_time() < end: pass
    if response == "pid": return os.getpid()
    return 1.0
"""


@pytest.fixture(autouse=True)
def unspoilt() -> Iterator[None]:
    yield
    interruptible_calls._State.spoilt = False


def loop_for_ever() -> None:
    while True:
        pass


def test_a_result_in_time_is_returned_and_nothing_rings_later() -> None:
    for _ in range(2_000):
        assert briefly(0.001, lambda: 7) == 7
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass


def test_an_interrupt_comes_soon_and_passes_through_what_catches_exceptions() -> None:
    def stubborn() -> None:
        while True:
            with suppress(Exception):
                loop_for_ever()

    for call in (loop_for_ever, stubborn):
        began = time.process_time()
        with pytest.raises(CutShort):
            briefly(0.002, call)
        assert time.process_time() - began < 2


def test_an_interrupt_that_is_swallowed_is_repeated() -> None:
    def swallow() -> None:
        with suppress(BaseException):
            loop_for_ever()
        loop_for_ever()

    with pytest.raises(CutShort):
        briefly(0.002, swallow)


def test_time_that_others_had_does_not_count() -> None:
    assert briefly(0.02, lambda: time.sleep(0.2) or "slept") == "slept"


def test_an_interrupt_in_foreign_code_spoils_the_process() -> None:
    def hang() -> None:
        with foreign():
            loop_for_ever()

    def fail() -> None:
        with foreign():
            raise ValueError

    with pytest.raises(CutShort):
        briefly(0.002, loop_for_ever)
    with pytest.raises(ValueError):
        fail()
    assert not is_spoilt()
    with pytest.raises(CutShort):
        briefly(0.002, hang)
    assert is_spoilt()

    def enter() -> str:
        with foreign():
            return "entered"

    with pytest.raises(CutShort):
        briefly(1.0, enter)
    assert enter() == "entered", "who does not ask for a brief answer cannot be put off"


def test_mathematics_can_be_interrupted_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most checks are, at their first tries; all get the score that they get without that."""
    cases = [
        *((r"\boxed{\int_0^1 x\,dx}", "1/2", 1.0), (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0), ("It is 5", "6", 0.0)),
        *((r"\boxed{\sum_{k=1}^{4} k}", "10", 1.0), (r"\boxed{\frac{3}{4}}", "0.75", 1.0), (r"\boxed{2}", "3", 0.0)),
    ]
    for name, value in (("_LEAST", 0.0001), ("_ALLOWANCE", 0.5), ("_YOUNG", 0.0)):
        monkeypatch.setattr(f"kitae.verifiers.pool.{name}", value)
    lanes: list[int] = []
    attempt = VerifierPool._attempt

    async def counted(self: VerifierPool, job: str, lane: int, timeout: float) -> list[Score] | None:
        lanes.append(lane)
        return await attempt(self, job, lane, timeout)

    monkeypatch.setattr(VerifierPool, "_attempt", counted)

    async def body() -> list[Score]:
        async with VerifierPool("math", workers=2) as pool:
            return await asyncio.gather(*(pool.score(response, reference) for response, reference, _ in cases * 20))

    assert [score.value for score in asyncio.run(body())] == [value for *_, value in cases * 20]
    assert lanes.count(0) == len(cases) * 20 and lanes.count(2) > 10


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checks") / "checks.py"
    path.write_text(CHECKS)
    return f"{path}:score"


@pytest.mark.thorough
def test_long_checks_are_put_off_without_a_new_process(checks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short checks get their scores from the process that met the long ones before.

    They have more than the usual 0.8 ms here: on a busy machine a cold cache or a page fault takes that long, and a
    short check that is put off twice has a right to a process that nobody has spoilt.
    """
    for name, value in (("_LEAST", 0.02), ("_SHORTEST", 0.3)):
        monkeypatch.setattr(f"kitae.verifiers.pool.{name}", value)

    async def body() -> tuple[set[float], list[Score]]:
        async with VerifierPool(checks, workers=1, timeout=0.5) as pool:
            await asyncio.gather(*(pool.score("fine", None) for _ in range(60)))
            kinds = ("hang", "swallow", "foreign hang", "slow")
            long = [asyncio.create_task(pool.score(kind, None)) for kind in kinds]
            pids = {score.value for score in await asyncio.gather(*(pool.score("pid", None) for _ in range(100)))}
            assert not any(task.done() for task in long)
            return pids, await asyncio.gather(*long)

    pids, long = asyncio.run(body())
    assert len(pids) == 1
    assert [score.detail for score in long[:3]] == ["timed out after 0.5 s"] * 3
    assert long[3] == Score(1.0)


def test_foreign_code_is_never_entered_again_in_a_spoilt_process(checks: str) -> None:
    async def body() -> tuple[float, float]:
        async with VerifierPool(checks, workers=1, timeout=0.5) as pool:
            await asyncio.gather(*(pool.score("fine", None) for _ in range(60)))
            before = asyncio.create_task(pool.score("pid", None))
            hang = asyncio.create_task(pool.score("foreign hang", None))
            after = asyncio.create_task(pool.score("foreign", None))
            first, _, second = await asyncio.gather(before, hang, after)
            return first.value, second.value

    first, second = asyncio.run(body())
    assert first != second


def test_functions_that_did_not_promise_are_never_interrupted(tmp_path: Path) -> None:
    source = CHECKS.replace("@repeatable\n", "") + "\ndef count(response, reference, context):\n"
    (tmp_path / "own.py").write_text(source + "    score(response, reference, context)\n    return len(CALLS)\n")

    async def body() -> list[float]:
        async with VerifierPool(f"{tmp_path / 'own.py'}:count", workers=1) as pool:
            kinds = ["fine"] * 60 + ["slow"]
            return [(await pool.score(kind, None)).value for kind in kinds]

    assert asyncio.run(body())[-1] == 61


def test_the_hanging_share_costs_little(checks: str) -> None:
    """In processor time of the worker that serves the short ones: a moment for each long one, not a process."""

    async def body() -> tuple[float, VerifierPool]:
        async with VerifierPool(checks, workers=1, timeout=0.3) as pool:
            await asyncio.gather(*(pool.score("fine", None) for _ in range(60)))
            (worker,) = pool._workers
            pid = worker._process.pid  # type: ignore[union-attr]
            began = time.clock_gettime((~pid << 3) | 2)
            hanging = [asyncio.create_task(pool.score("hang", None)) for _ in range(20)]
            await asyncio.gather(*(pool.score("fine", None) for _ in range(400)))
            used = time.clock_gettime((~pid << 3) | 2) - began
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
            return used, pool

    used, _ = asyncio.run(body())
    assert used < 20 * 0.005 + 400 * 0.001


def test_import_is_cheap() -> None:
    code = "import sys, kitae.workers.interruptible_calls; print('sympy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
