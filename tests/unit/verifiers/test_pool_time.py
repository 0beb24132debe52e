"""Whose time counts: that of the check, never that of the machine or of others."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitae.types import Score
from kitae.verifiers.pool import VerifierPool

LOUD = "LOUD AND CLEAR WORDS IN THE ENGLISH LANGUAGE AND NOTHING ELSE AT ALL"
CAPITALS = {"instructions": [{"id": "change_case:english_capital", "kwargs": {}}]}


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def own_file(tmp_path: Path, body: str) -> str:
    (tmp_path / "own.py").write_text(body)
    return f"{tmp_path / 'own.py'}:score"


@pytest.mark.thorough
def test_the_language_detector_is_loaded_before_the_fork() -> None:
    """A worker's first check costs about as much as its second: loading the profiles takes 0.2 s or more."""

    async def body() -> tuple[float, Score]:
        async with VerifierPool("instructions", workers=1) as pool:
            began = time.perf_counter()
            await pool.score("x", {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]})
            simple = time.perf_counter() - began
            began = time.perf_counter()
            score = await pool.score(LOUD, CAPITALS)
            return time.perf_counter() - began - simple, score

    rounds = [asyncio.run(body()) for _ in range(3)]
    assert all(score.value == 1 for _, score in rounds)
    assert min(extra for extra, _ in rounds) < 0.1


@pytest.mark.slow  # it keeps all processors busy
def test_instructions_under_load_are_scored_rightly() -> None:
    async def body() -> list[Score]:
        async with VerifierPool("instructions", workers=8, timeout=0.4) as pool:
            return await asyncio.gather(*(pool.score(LOUD, CAPITALS) for _ in range(40)))

    with busy_machine(2 * (os.cpu_count() or 1)):
        scores = asyncio.run(body())
    assert {score.value for score in scores} == {1.0}


def worker_pids(pool: VerifierPool) -> list[int]:
    """The processes that the pool's template has forked; other tests' processes are below us too."""
    process = pool._template._process
    assert process is not None
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("verifier", ["math", "number"])
def test_a_frozen_worker_is_replaced_and_the_check_repeated(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitae.workers.templates.worker_handle._INDULGENCE", 2)

    async def body() -> tuple[Score, VerifierPool]:
        async with VerifierPool(verifier, workers=1, timeout=0.5) as pool:
            for pid in worker_pids(pool):
                os.kill(pid, signal.SIGSTOP)
            return await pool.score("It is 12", "12"), pool

    score, pool = asyncio.run(body())
    assert score == Score(1.0)
    assert (pool.stats.timeouts, pool.stats.errors, pool.stats.retries) == (0, 0, 1)


def test_frozen_twice_is_an_error_and_never_a_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitae.workers.templates.worker_handle._INDULGENCE", 2)

    async def freeze(pool: VerifierPool) -> None:
        while True:
            for pid in worker_pids(pool):
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.005)

    async def body() -> tuple[Score, VerifierPool]:
        async with VerifierPool("number", workers=1, timeout=0.3) as pool:
            freezer = asyncio.create_task(freeze(pool))
            score = await pool.score("1" * 200_000 + " It is 12", "12")
            freezer.cancel()
            return score, pool

    score, pool = asyncio.run(body())
    assert not score.valid and "kept from the processor" in score.detail
    assert pool.stats.timeouts == 0 and pool.stats.errors == 1


@pytest.mark.slow  # it keeps all processors busy
def test_a_check_that_uses_up_its_time_is_wrong_even_on_a_busy_machine(tmp_path: Path) -> None:
    """Where the verifier says so; and not before it has used it."""
    source = "import time\ndef score(response, reference, context):\n"
    name = own_file(tmp_path, source + "    while time.process_time() < reference: pass\n    return 1")

    async def body() -> tuple[list[Score], VerifierPool]:
        async with VerifierPool(name, workers=1, timeout=0.5) as pool:
            pool._template._greeting = replace(pool._template.greeting, on_timeout="wrong")
            return [await pool.score("", 60), await pool.score("", 0.4)], pool

    with busy_machine(os.cpu_count() or 1):
        (late, good), pool = asyncio.run(body())
    assert late == Score(0.0, detail="timed out after 0.5 s") and good == Score(1.0)
    assert (pool.stats.timeouts, pool.stats.retries, pool.stats.errors) == (1, 0, 0)


def test_waiting_counts_but_is_never_a_0(tmp_path: Path) -> None:
    name = own_file(tmp_path, "import time\ndef score(response, reference, context): time.sleep(60)")

    async def body() -> tuple[Score, float, VerifierPool]:
        async with VerifierPool(name, workers=1, timeout=0.5) as pool:
            pool._template._greeting = replace(pool._template.greeting, on_timeout="wrong")
            began = time.monotonic()
            return await pool.score("", None), time.monotonic() - began, pool

    score, seconds, _pool = asyncio.run(body())
    assert not score.valid and seconds < 40


def test_an_async_function_that_hangs(tmp_path: Path) -> None:
    source = "import asyncio\nasync def score(response, reference, context):\n"
    name = own_file(tmp_path, source + "    await asyncio.sleep(60 if response else 0)\n    return 1")

    async def body() -> list[Score]:
        async with VerifierPool(name, workers=1, timeout=0.5) as pool:
            return [await pool.score("hang", None), await pool.score("", None)]

    hung, fine = asyncio.run(body())
    assert hung.detail == "timed out after 0.5 s" and fine == Score(1.0)


def test_a_worker_that_dies_while_idle_costs_no_check(tmp_path: Path) -> None:
    name = own_file(tmp_path, "def score(response, reference, context): return 1")

    async def body() -> tuple[list[Score], Any]:
        async with VerifierPool(name, workers=2) as pool:
            for pid in worker_pids(pool):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.2)
            return await asyncio.gather(*(pool.score("", None) for _ in range(4))), pool.stats

    scores, stats = asyncio.run(body())
    assert scores == [Score(1.0)] * 4 and stats.errors == 0
