"""What programs try from within boxes, and faults of boxes while they work, in every kind that runs here.

Attempts at the settings of this machine stop short of changing them.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_remote_boxes import IMAGE, KEY, engine

from kitae.clients.addresses import address_of, listen
from kitae.sandbox.boxes.base import BoxLimits, BoxLost, BoxRefused
from kitae.sandbox.boxes.box_host import BoxHost
from kitae.sandbox.boxes.bubblewrap_box import BubblewrapBoxes
from kitae.sandbox.boxes.container_box import ContainerBoxes
from kitae.sandbox.boxes.remote_box import RemoteBoxes
from kitae.serving.running_server import serving

LIMITS = BoxLimits(memory_mb=256, disk_mb=32, processes=60)
SECRET = "a secret that lies on this machine"

PYTHON = {
    "read the first process's memory": "print(open('/proc/1/mem', 'rb').read(1))",
    "read its environment": "print(open('/proc/1/environ').read() or 1/0)",
    "open its pipes": "print(open('/proc/1/fd/0', 'rb', 0).read(1))",
    "write to its pipes": "open('/proc/1/fd/1', 'wb', 0).write(b'x')",
    "trace it": "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
    "look into it": "import ctypes; b = ctypes.create_string_buffer(64); "
    "assert ctypes.CDLL(None).process_vm_readv(1, b, 1, b, 1, 0) > 0",
    "kill it": "import os, signal, time; os.kill(1, signal.SIGKILL); time.sleep(0.2); print(open('/nothing').read())",
    "become another user": "import os; os.setuid(1000)",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/mnt', b'tmpfs', 0, None) == 0",
    "unmount": "import ctypes; assert ctypes.CDLL(None).umount2(b'/usr', 2) == 0",
    "new namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "change the root": "import os; os.chroot('/tmp')",
    "a kernel's socket": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a packet socket": "import socket; socket.socket(17, socket.SOCK_RAW)",
    "another machine": "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
    "this machine": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "keys of the kernel": "import ctypes; assert ctypes.CDLL(None).syscall(250, 0, -3, 0) >= 0",
    "bpf": "import ctypes; assert ctypes.CDLL(None).syscall(321, 0, 0, 0) >= 0",
    "a device": "import os; os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0)); open('/tmp/sda', 'rb').read(1)",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'r+b', 0)",
    "higher limits": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (1, 1))",
    "a higher priority": "import os; os.nice(-5)",
    "the system's programs": "open('/usr/bin/python3', 'ab')",
    "a link to the system": "import os; os.link('/usr/bin/env', '/tmp/env')",
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "the host's name": "import socket; socket.sethostname(socket.gethostname())",
    "restart": "import ctypes; assert ctypes.CDLL(None).reboot(0) == 0",
    "a module": "import ctypes; assert ctypes.CDLL(None).syscall(313, 0, b'', 0) >= 0",
    "fill /dev": "open('/dev/x', 'wb').write(bytes(10_000_000))",
    "fill shared memory": "open('/dev/shm/x', 'wb').write(bytes(100_000_000))",
    "memory beside the limits": "import ctypes; assert ctypes.CDLL(None).syscall(29, 0, 1 << 30, 0o1600) >= 0",
    "an open file by its number": "import ctypes; assert ctypes.CDLL(None).syscall(304, -100, b'', 0) >= 0",
}
SHELL = {
    "the secret by its path": "cat {secret}",
    "the secret by a link": "ln -s {secret} /tmp/l; cat /tmp/l",
    "the secret through the first process": "cat /proc/1/root{secret}",
    "all files": "grep -rlsF '{text}' / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr --exclude-dir=lib",
    "passwords": "cat /etc/shadow",
    "the run's home": "ls {home}/.ssh {home}/.config {home}/.cache",
    "set-user programs": "find / -xdev -perm -4000 -user 0 -exec test ! -k {{}} \\; -print 2>/dev/null | "
    "while read f; do $f --help >/dev/null 2>&1; done; mount -t tmpfs none /mnt",
    "other processes": "[ $(ls -d /proc/[0-9]* | wc -l) -gt 12 ]",
}


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Any]:
    if kind == "bubblewrap":
        boxes: Any = BubblewrapBoxes()
        yield boxes
        await boxes.close()
    elif kind == "container":
        found = await asyncio.to_thread(engine)
        if found is None:
            pytest.skip("no container engine runs here")
        boxes = ContainerBoxes(IMAGE, *found)
        yield boxes
        await boxes.close()
    else:
        inner = BubblewrapBoxes()
        host, taken = BoxHost(inner, KEY), listen("127.0.0.1", 0)
        async with serving(host.app(), taken):
            boxes = RemoteBoxes([address_of(taken, "127.0.0.1")], KEY)
            yield boxes
            await boxes.close()
        await inner.close()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bubblewrap", "remote"])
def test_no_attempt_comes_through(kind: str, tmp_path: Path) -> None:
    """Each attempt ends with status 0 if it succeeds. After each of them the box still answers."""
    (tmp_path / "secret").write_text(SECRET)

    async def go() -> None:
        there = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = there.sockets[0].getsockname()[1]
        async with opened(kind) as boxes:
            box = await boxes.open(LIMITS)
            for name, code in PYTHON.items():
                await box.write("/tmp/try.py", code.replace("{port}", str(port)).encode())
                done = await box.run("/usr/bin/python3 /tmp/try.py", seconds=20)
                assert done.status not in (0, 127), (name, done)
            for name, code in SHELL.items():
                place, home = tmp_path / "secret", Path.home()
                done = await box.run(code.format(secret=place, text=SECRET[:20], home=home), seconds=30)
                assert done.status != 0 and SECRET not in done.output, (name, done)
            assert (await box.run("echo fine")).output == "fine\n"
        there.close()

    asyncio.run(go())


@pytest.mark.thorough
def test_no_attempt_of_a_shell_comes_through_a_container(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)

    async def go() -> None:
        async with opened("container") as boxes:
            box = await boxes.open(LIMITS)
            attempts = {**SHELL, "kernel settings": ": >> /proc/sys/kernel/core_pattern",
                        "the network": "ping -c 1 -W 1 192.0.2.1", "devices": "head -c 1 /dev/vda"}  # fmt: skip
            for name, code in attempts.items():
                place, home = tmp_path / "secret", Path.home()
                done = await box.run(code.format(secret=place, text=SECRET[:20], home=home), seconds=30)
                assert done.status != 0 and SECRET not in done.output, (name, done)

    asyncio.run(go())


async def _fault(kind: str, boxes: Any, rng: random.Random) -> str:
    """One box and one fault; what the box's user sees of it."""
    box = await boxes.open(LIMITS)
    what = rng.choice(["killed", "disk", "memory", "processes", "hangs", "floods", "cancelled", "closed"])
    if what == "killed" and kind != "bubblewrap":
        what = "closed"
    try:
        if what == "killed":
            running = asyncio.create_task(box.run("sleep 100"))
            await asyncio.sleep(rng.uniform(0, 0.3))
            os.kill(box._process.pid, signal.SIGKILL)
            await running
        elif what == "disk":
            done = await box.run("head -c 100000000 /dev/zero > /tmp/x")
            assert done.status != 0
            await box.write("/tmp/y", bytes(10_000_000))
        elif what == "memory":
            done = await box.run("/usr/bin/python3 -c 'x = bytearray(600_000_000); import time; time.sleep(20)'")
            assert done.ended == "memory", done
        elif what == "processes":
            done = await box.run("for i in $(seq 100); do sleep 30 & done; wait", seconds=30)
            assert done.ended == "processes", done
        elif what == "hangs":
            assert (await box.run("trap '' TERM INT; sleep 100", seconds=0.3)).ended == "timeout"
        elif what == "floods":
            done = await box.run("yes", seconds=0.3, output=1000)
            assert done.ended == "timeout" and len(done.output) < 1100
        elif what == "cancelled":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.run("sleep 100"), 0.2)
        else:
            await box.close()
            await box.run("true")
    except (BoxLost, BoxRefused) as loss:
        assert (type(loss) is BoxLost) == (what in ("killed", "closed")), (what, loss)
    else:
        assert what not in ("killed", "closed"), what
    await box.close()
    return what


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trials"), [("bubblewrap", 80), ("remote", 40)])
def test_faults_cost_their_own_box_alone(kind: str, trials: int) -> None:
    async def go() -> list[str]:
        async with opened(kind) as boxes:
            other = await boxes.open(LIMITS)
            rng, found = random.Random(0), list[str]()
            for n in range(0, trials, 4):
                found += await asyncio.gather(*(_fault(kind, boxes, rng) for _ in range(4)))
                assert (await other.run(f"echo {n} >> /tmp/n; wc -l < /tmp/n")).output == f"{n // 4 + 1}\n"
            return found

    found = asyncio.run(go())
    print({what: found.count(what) for what in sorted(set(found))})
    assert len(found) == trials
