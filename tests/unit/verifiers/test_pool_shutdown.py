"""A pool that closes while one of its workers is being replaced leaves no process behind."""

import asyncio
import gc
import os
import signal
import warnings
from pathlib import Path

import pytest

from kitae.verifiers.pool import VerifierPool

SLOW = """
import os, time
def score(response, reference, context):
    with open(reference, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("turns", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 5])
def test_close_waits_for_a_worker_that_is_being_killed(tmp_path: Path, turns: int) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    note = tmp_path / "pid"

    async def body() -> None:
        async with VerifierPool(f"{tmp_path / 'slow.py'}:score", workers=1) as pool:
            check = asyncio.create_task(pool.score("x", str(note)))
            while not (note.exists() and note.read_text()):
                await asyncio.sleep(0.01)
            check.cancel()  # kills the worker; a restart begins
            for _ in range(turns):
                await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(body())
        gc.collect()
    assert [str(w.message) for w in caught] == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("turns", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("cancelled", [False, True])
def test_close_while_a_worker_that_died_is_being_replaced_for_a_check(turns: int, cancelled: bool) -> None:
    before = set(children(os.getpid()))

    async def body() -> None:
        async with VerifierPool("exact", workers=1) as pool:
            (template,) = set(children(os.getpid())) - before
            for worker in children(template):
                os.kill(worker, signal.SIGKILL)
            await asyncio.sleep(0.1)
            check = asyncio.create_task(pool.score("x", "x"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if cancelled:
                check.cancel()
        score = (await asyncio.wait_for(asyncio.gather(check, return_exceptions=True), 10))[0]
        assert isinstance(score, asyncio.CancelledError) if cancelled else not score.valid or score.value == 1

    asyncio.run(body())
    assert set(children(os.getpid())) <= before


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
