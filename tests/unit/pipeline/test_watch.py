"""The watchdog: it hears every movement, and says who waits for what when there is none."""

import asyncio
import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kitae.errors import StalledError
from kitae.pipeline.watch import Watch


def test_it_names_who_waits_for_what(tmp_path: Path) -> None:
    watch = Watch(0.3, lambda: 0, tmp_path / "stalled.txt")

    async def stuck() -> None:
        with watch.waits("train", "a batch", lambda: "3 of 8 are ready"), watch.waits("sync", "a version"):
            await asyncio.sleep(60)

    async def body() -> None:
        waiting = [asyncio.create_task(stuck(), name="a loop that is stuck") for _ in range(2)]
        try:
            await asyncio.wait_for(watch.guard(), 20)
        finally:
            for task in waiting:
                task.cancel()

    with pytest.raises(StalledError) as caught:
        asyncio.run(body())
    message = str(caught.value)
    assert "nothing has moved for 0.3 s" in message
    assert "train (2 of them) waits" in message and "for a batch: 3 of 8 are ready" in message
    assert "sync (2 of them) waits" in message
    stacks = (tmp_path / "stalled.txt").read_text()
    assert message in stacks and "Thread MainThread" in stacks and "a loop that is stuck" in stacks
    assert "await asyncio.sleep(60)" in stacks


@pytest.mark.parametrize("how", ["waits", "pulse"])
def test_a_run_that_moves_is_left_alone(how: str, tmp_path: Path) -> None:
    beats = itertools.count()
    watch = Watch(0.3, lambda: next(beats) if how == "pulse" else 0, tmp_path / "stalled.txt")

    async def body() -> None:
        guard = asyncio.create_task(watch.guard())
        for _ in range(10):
            if how == "waits":
                with watch.waits("feed", "a slot"):
                    await asyncio.sleep(0.1)
            else:
                await asyncio.sleep(0.1)
        assert not guard.done()
        guard.cancel()

    asyncio.run(body())
    assert not (tmp_path / "stalled.txt").exists()


STUCK_LOOP = """
import asyncio, sys, time
from pathlib import Path
from kitae.pipeline import watch

watch._GRACE = 0.5

async def body():
    guard = asyncio.create_task(watch.Watch(0.3, lambda: 0, Path(sys.argv[1])).guard())
    await asyncio.sleep(0)
    time.sleep(60)

asyncio.run(body())
"""


def test_a_stuck_event_loop_ends_the_process(tmp_path: Path) -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", STUCK_LOOP, str(tmp_path / "stalled.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and time.monotonic() - began < 40
    assert "nobody waits: the event loop is stuck" in done.stderr
    assert "in body" in (tmp_path / "stalled.txt").read_text()
