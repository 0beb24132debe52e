"""Boxes on other hosts, pools of boxes, and containers where an engine runs."""

import asyncio
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kitae.clients.addresses import address_of, listen
from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import Box, BoxLimits, BoxLost, BoxRefused, BoxWorld
from kitae.sandbox.boxes.box_host import BoxHost
from kitae.sandbox.boxes.box_pool import BoxPool
from kitae.sandbox.boxes.bubblewrap_box import BubblewrapBoxes
from kitae.sandbox.boxes.container_box import ContainerBoxes
from kitae.sandbox.boxes.remote_box import RemoteBoxes
from kitae.serving.running_server import serving

SMALL, KEY = BoxLimits(memory_mb=200, disk_mb=16, processes=40), "a key of some length"


@asynccontextmanager
async def host(most: int = 8, idle: float = 900.0) -> AsyncIterator[str]:
    boxes = BubblewrapBoxes()
    serves, taken = BoxHost(boxes, KEY, most, idle), listen("127.0.0.1", 0)
    sweeping = asyncio.create_task(serves.sweep())
    async with serving(serves.app(), taken):
        yield address_of(taken, "127.0.0.1")
    sweeping.cancel()
    await boxes.close()


def test_a_box_of_another_host_does_what_one_here_does() -> None:
    async def go() -> None:
        async with host() as url:
            boxes = RemoteBoxes([url], KEY)
            await boxes.check()
            box = await boxes.open(SMALL)
            await box.write("/app/f", b"\x00\xff", 0o600)
            assert await box.read("/app/f") == b"\x00\xff"
            assert (await box.run("stat -c %a f; exit 5", folder="/app")).told == "600\n[exit status 5]"
            assert (await box.run("sleep 50", seconds=0.2)).ended == "timeout"
            with pytest.raises(BoxRefused, match="no file"):
                await box.read("/nothing")
            fork = await boxes.open(SMALL, await box.snapshot(["/app"]))
            assert await fork.read("/app/f") == b"\x00\xff"
            await boxes.close()

    asyncio.run(go())


def test_wrong_keys_are_refused_and_unused_boxes_closed() -> None:
    async def go() -> None:
        async with host(most=1, idle=0.3) as url:
            stranger = RemoteBoxes([url], "another key")
            with pytest.raises(ConfigError, match="it refuses the key"):
                await stranger.check()
            await stranger.close()
            boxes = RemoteBoxes([url], KEY)
            first = await boxes.open(SMALL)
            second = await boxes.open(SMALL)  # waits until the first one, which nobody uses, is closed
            with pytest.raises(BoxLost, match="no such box"):
                await first.run("true")
            assert (await second.run("echo fine")).output == "fine\n"
            await boxes.close()

    asyncio.run(go())


@pytest.mark.thorough
def test_boxes_of_a_host_that_is_gone_are_lost_and_others_take_its_place() -> None:
    async def go() -> None:
        command = [sys.executable, "-c", "from kitae.cli.main import run; run()", "sandbox-host", "--port", "0"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "KITAE_SANDBOX_KEY": KEY}
        )
        assert process.stdout is not None
        gone = (await asyncio.to_thread(process.stdout.readline)).split(" at ")[1].split()[0]
        async with host() as url:
            boxes = RemoteBoxes([gone, url], KEY)
            one, two = await boxes.open(SMALL), await boxes.open(SMALL)
            running = asyncio.create_task(one.run("sleep 100"))
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(BoxLost, match="does not answer"):
                await running
            assert (await two.run("echo fine")).output == "fine\n"
            assert (await (await boxes.open(SMALL)).run("echo again")).output == "again\n"
            await boxes.close()
        process.communicate()

    asyncio.run(go())


class Broken(BubblewrapBoxes):
    """Opens the third box."""

    opened = 0

    async def open(self, limits: BoxLimits, world: BoxWorld | None = None) -> Any:
        self.opened += 1
        if self.opened < 3:
            raise BoxLost("not now")
        return await super().open(limits, world)


def test_a_pool_makes_a_world_once_and_tries_again() -> None:
    async def go() -> None:
        boxes, made = Broken(), list[str]()
        pool = BoxPool(boxes, SMALL, most=2)

        async def make(box: Box) -> BoxWorld:
            made.append("once")
            await box.write("/app/f", b"world")
            return await box.snapshot(["/app"])

        async def episode() -> bytes:
            box = await pool.take(await pool.world("a", make))
            try:
                assert len(boxes._open) <= 2
                return await box.read("/app/f")
            finally:
                await pool.give_back(box)

        assert await asyncio.gather(*(episode() for _ in range(5))) == [b"world"] * 5
        assert made == ["once"] and pool.lost == 2
        await pool.close()

    asyncio.run(go())


def test_warm_boxes_are_taken_if_they_are_well() -> None:
    async def go() -> None:
        boxes = BubblewrapBoxes()
        pool = BoxPool(boxes, SMALL, most=4, warm=2)
        pool.warm_up()
        assert pool._warming is not None
        await pool._warming
        waiting = pool._warm[-1]
        await waiting.close()  # it died while it waited
        other = pool._warm[0]
        assert await pool.take() is other and pool.lost == 1
        await pool.close()

    asyncio.run(go())


IMAGE = "localhost/kitae-test:1"


@functools.cache
def engine() -> tuple[list[str], list[str]] | None:
    """The engine's command and options that run a container here, with a small image made of busybox."""
    words = shlex.split(os.environ.get("KITAE_CONTAINER_ENGINE", "podman"))
    options = shlex.split(os.environ.get("KITAE_CONTAINER_OPTIONS", ""))
    busybox = shutil.which("busybox")
    if shutil.which(words[0]) is None or busybox is None:
        return None
    script = f"""set -e; d=$(mktemp -d); mkdir -p $d/bin $d/tmp; cp {busybox} $d/bin/busybox
    for c in sh cat chmod dirname echo head id kill ls mkdir rm seq sleep stat timeout true yes; do
        ln -s busybox $d/bin/$c; done
    tar -C $d -c . | {shlex.join(words)} import - {IMAGE}; rm -rf $d"""
    made = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    if made.returncode:
        return None
    try:
        asyncio.run(ContainerBoxes(IMAGE, words, options).check())
    except ConfigError:
        return None
    return words, options


@pytest.mark.thorough
def test_containers_do_what_other_boxes_do() -> None:
    if (found := engine()) is None:
        pytest.skip("no container engine runs here; see KITAE_CONTAINER_ENGINE in docs/sandboxes.md")

    async def go() -> None:
        boxes = ContainerBoxes(IMAGE, *found)
        box = await boxes.open(SMALL)
        await box.write("/app/f", b"\x00\xff", 0o600)
        assert await box.read("/app/f") == b"\x00\xff"
        assert (await box.run("stat -c %a f; exit 5", folder="/app")).told == "600\n[exit status 5]"
        assert (await box.run("sleep 50", seconds=0.5)).ended == "timeout"
        assert "bytes left out" in (await box.run("seq 10000", output=100)).output
        assert (await box.run("cat /proc/net/dev")).output.count(":") == 1  # lo
        with pytest.raises(BoxRefused, match="no file"):
            await box.read("/nothing")
        fork = await boxes.open(SMALL, await box.snapshot())
        assert await fork.read("/app/f") == b"\x00\xff"
        await boxes.ask(["kill", fork._name], seconds=30)
        with pytest.raises(BoxLost, match="gone"):
            for _ in range(100):
                await fork.run("true")
                await asyncio.sleep(0.1)
        await boxes.close()

    asyncio.run(go())
