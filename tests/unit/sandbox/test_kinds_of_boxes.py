"""Boxes of every kind that runs here: what they do, what breaks a limit, what is kept from whom."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import BoxLimits, BoxLost, BoxRefused
from kitae.sandbox.boxes.bubblewrap_box import BubblewrapBox, BubblewrapBoxes

SMALL = BoxLimits(memory_mb=200, disk_mb=16, processes=40)


def boxed(work: Callable[[Any], Awaitable[Any]], limits: BoxLimits = SMALL, **settings: Any) -> Any:
    async def go() -> Any:
        boxes = BubblewrapBoxes(**settings)
        try:
            return await work(await boxes.open(limits))
        finally:
            await boxes.close()

    return asyncio.run(go())


def test_a_box_has_files_a_shell_and_processes_that_live_on() -> None:
    async def work(box: BubblewrapBox) -> None:
        await box.write("/work/a.py", b"print(6 * 7)")
        assert (await box.run("python3 a.py", folder="/work")).told == "42\n"
        assert (await box.run("echo oops >&2; exit 3")).told == "oops\n[exit status 3]"
        began = time.monotonic()
        assert (await box.run("(sleep 0.4; echo late > /work/late) & echo started")).output == "started\n"
        assert time.monotonic() - began < 5
        await box.run("while [ ! -e /work/late ]; do sleep 0.05; done", seconds=10)
        assert await box.read("/work/late") == b"late\n"
        with pytest.raises(BoxRefused, match="no file"):
            await box.read("/dev/zero")
        with pytest.raises(BoxRefused, match="more than 3 bytes"):
            await box.read("/work/late", 3)

    boxed(work)


def test_long_output_is_cut_in_its_middle() -> None:
    async def work(box: BubblewrapBox) -> None:
        said = (await box.run("echo begin; seq 100000; echo end", output=300)).output
        assert said.startswith("begin\n1\n") and said.endswith("100000\nend\n") and "bytes left out" in said
        assert len(said) < 400

    boxed(work)


def test_what_breaks_a_limit_is_killed_and_the_box_goes_on() -> None:
    async def work(box: BubblewrapBox) -> None:
        slow = await box.run("sleep 100 & sleep 100", seconds=0.3)
        assert (slow.status, slow.ended) == (None, "timeout") and "too long" in slow.told
        assert (await box.run("python3 -c 'x = bytearray(400_000_000); input()' < <(sleep 9)")).ended == "memory"
        many = await box.run("for i in $(seq 60); do sleep 50 & done; wait", seconds=20)
        assert many.ended == "processes"
        full = await box.run("head -c 100000000 /dev/zero > /work.bin; ls -s /work.bin")
        assert "No space left" in full.output or "File size limit" in full.output
        with pytest.raises(BoxRefused, match="No space left"):
            await box.write("/more", bytes(20_000_000))
        assert (await box.run("rm /work.bin; echo alive")).output == "alive\n"
        assert "sleep" not in (await box.run("cat /proc/[0-9]*/comm")).output

    boxed(work)


def test_episodes_of_a_group_begin_from_one_world() -> None:
    async def go() -> None:
        boxes = BubblewrapBoxes()
        first = await boxes.open(SMALL)
        await first.run(
            "mkdir -p /app/sub; echo one > /app/sub/f; ln -s sub/f /app/link; chmod 700 /app/sub; echo x > /x"
        )
        world = await first.snapshot(["/app"])
        others = await asyncio.gather(*(boxes.open(SMALL, world) for _ in range(3)))
        await others[0].run("echo two > /app/sub/f")
        said = [(await b.run("cat /app/link; stat -c %a /app/sub; ls /x 2>&1")).output for b in others]
        assert [text.split("\n")[:2] for text in said] == [["two", "700"], ["one", "700"], ["one", "700"]]
        assert all("No such file" in text for text in said)
        await boxes.close()

    asyncio.run(go())


def test_a_box_that_is_killed_is_lost_alone() -> None:
    async def go() -> None:
        boxes = BubblewrapBoxes()
        one, other = await boxes.open(SMALL), await boxes.open(SMALL)
        assert one._process is not None
        running = asyncio.create_task(one.run("sleep 100"))
        await asyncio.sleep(0.3)
        os.kill(one._process.pid, signal.SIGKILL)
        with pytest.raises(BoxLost, match="gone"):
            await running
        with pytest.raises(BoxLost, match="closed"):
            await one.run("true")
        assert (await other.run("echo fine")).output == "fine\n"
        await boxes.close()

    asyncio.run(go())


def test_a_command_that_is_cancelled_ends_with_its_box() -> None:
    async def work(box: BubblewrapBox) -> None:
        mark = "0.7654321"
        running = asyncio.create_task(box.run(f"sleep 10{mark}"))
        for _ in range(200):
            await asyncio.sleep(0.05)
            if _alive(f"10{mark}"):
                break
        assert _alive(f"10{mark}")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for _ in range(200):
            await asyncio.sleep(0.05)
            if not _alive(f"10{mark}"):
                break
        assert not _alive(f"10{mark}")

    boxed(work)


def _alive(argument: str) -> bool:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return any(f"sleep\0{argument}\0".encode() == words for words in found)


async def _served(text: bytes) -> tuple[asyncio.Server, int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(text), text))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


ASK = "import urllib.request as u; print(u.urlopen('http://{}:{}/', timeout=5).read())"


@pytest.mark.parametrize(
    ("network", "host", "answered"),
    [
        (("localhost",), "localhost", True),
        (("example.org",), "localhost", False),
        ("none", "127.0.0.1", False),
        ("all", "127.0.0.1", True),
    ],
)
def test_the_network_is_none_all_or_a_list(network: Any, host: str, answered: bool) -> None:
    async def go() -> None:
        server, port = await _served(b"hello")
        boxes = BubblewrapBoxes()
        box = await boxes.open(BoxLimits(network=network))
        said = (await box.run(f'python3 -c "{ASK.format(host, port)}"', seconds=20)).output
        assert ("b'hello'" in said) == answered, said
        if network != "all":  # what ignores the proxy reaches nothing
            bare = f'env -u http_proxy python3 -c "{ASK.format("127.0.0.1", port)}"'
            assert "hello" not in (await box.run(bare, seconds=20)).output
        await boxes.close()
        server.close()

    asyncio.run(go())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="readable must list what exists"):
        asyncio.run(BubblewrapBoxes(readable=["/nowhere"]).check())
    with pytest.raises(ConfigError, match="hosts by their names"):
        asyncio.run(BubblewrapBoxes().open(BoxLimits(network=("http://a/",))))
