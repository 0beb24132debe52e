"""The watchdog: it hears every movement, and says who waits for what when there is none."""

import asyncio
import itertools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kitae.errors import StalledError
from kitae.rl.watchdog import Watch, whereabouts


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
from kitae.rl import watchdog

watchdog._GRACE = 0.5

async def body():
    guard = asyncio.create_task(watchdog.Watch(0.3, lambda: 0, Path(sys.argv[1])).guard())
    await asyncio.sleep(0)
    time.sleep(600)

asyncio.run(body())
"""


def test_a_stuck_event_loop_ends_the_process(tmp_path: Path) -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", STUCK_LOOP, str(tmp_path / "stalled.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1 and time.monotonic() - began < 140
    assert "nobody waits: the event loop is stuck" in done.stderr
    assert "in body" in (tmp_path / "stalled.txt").read_text()


PAUSED = """
import asyncio, sys, time
from pathlib import Path
from kitae.rl import watchdog

async def body():
    guard = asyncio.create_task(watchdog.Watch(1.5, lambda: 0, Path(sys.argv[1])).guard())
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    assert not guard.done()
    guard.cancel()

asyncio.run(body())
"""


def test_time_in_which_the_process_stood_still_does_not_count(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PAUSED, str(tmp_path / "stalled.txt")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.6)
    process.communicate("go on\n", timeout=120)
    assert process.returncode == 0 and not (tmp_path / "stalled.txt").exists()


def test_whereabouts_change_while_a_thread_works() -> None:
    ended, waiting = threading.Event(), threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(range(1000))
        waiting.wait()

    thread = threading.Thread(target=work, name="kitae-worker-7")
    thread.start()
    try:
        seen = [whereabouts("kitae-worker") for _ in range(200) if not time.sleep(0.001)]
        assert any(a != b for a, b in itertools.pairwise(seen))
        ended.set()
        time.sleep(0.5)
        stuck = [whereabouts("kitae-worker") for _ in range(20) if not time.sleep(0.01)]
        assert all(a == stuck[0] for a in stuck) and stuck[0] != [] == whereabouts("nobody")
    finally:
        ended.set()
        waiting.set()
        thread.join()
