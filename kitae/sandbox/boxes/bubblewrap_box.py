"""Boxes of bubblewrap, on this machine, without an engine and without rights.

A box has the machine's own programs, read-only (/usr and what links there, the interpreter of Kitae, what `readable`
lists), and everything else is a disk in memory of `disk_mb` that begins empty and that it may write. It has processes,
a host name and a network of its own, no capability, and the filter of system calls of `kitae.sandbox.seccomp`. Its
first process is `box_runner`, which this process speaks with; when that pipe closes, everything in it ends.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Self

from kitae.errors import ConfigError
from kitae.sandbox.backends import python_folders
from kitae.sandbox.boxes.allowed_hosts import AllowedHosts
from kitae.sandbox.boxes.base import BoxLimits, BoxLost, BoxRefused, BoxWorld, Ran
from kitae.sandbox.program_sandbox import bwrap_program, own_proc
from kitae.sandbox.seccomp import filter_fd

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl", "/etc/ca-certificates", "/etc/bash.bashrc")
_NAMES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")  # where it may reach the machine's network
_FILES = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
}
_FOLDERS = ("/root", "/home", "/tmp", "/var/tmp", "/var/log", "/opt", "/srv", "/run", "/etc")
_PATH = "/root/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLES = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", "PIP_USER": "1",
              "PIP_BREAK_SYSTEM_PACKAGES": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
_KITAE = Path(__file__).parents[2]
_SLACK = 20.0  # seconds beyond a command's own, for a busy machine, until a box counts as lost
_START = 60.0
_MOST = 2**30  # bytes of an answer


class BubblewrapBoxes:
    """A kind of box: `BubblewrapBoxes(readable=["/opt/data"], variables={"CI": "1"})`."""

    name = "bubblewrap"

    def __init__(self, readable: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> None:
        self._readable = [str(Path(path).expanduser().absolute()) for path in readable]
        self._variables = dict(variables or {})
        self._open = set[BubblewrapBox]()

    async def check(self) -> None:
        bwrap_program()
        for path in self._readable:
            if not os.path.exists(path):
                raise ConfigError(f"readable must list what exists, got {path!r}")

    async def open(self, limits: BoxLimits, world: BoxWorld | None = None) -> "BubblewrapBox":
        hosts = None if isinstance(limits.network, str) else await AllowedHosts.of(limits.network)
        box = BubblewrapBox(self._command(limits, hosts), limits, hosts, self._open)
        try:
            await box.start(world)
        except BaseException:
            await box.close()
            raise
        return box

    async def close(self) -> None:
        for box in list(self._open):
            await box.close()

    def _command(self, limits: BoxLimits, hosts: AllowedHosts | None) -> list[str]:
        """`--seccomp FD` is added by who starts it. The order matters: what is mounted later lies above."""
        size = ["--size", str(limits.disk_mb * 2**20)]
        words = [bwrap_program(), "--die-with-parent", "--new-session", "--as-pid-1", "--unshare-user", "--unshare-pid"]
        words += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL", "--uid", "0"]
        words += [
            "--gid",
            "0",
            "--hostname",
            "box",
            "--clearenv",
            *(["--unshare-net"] if limits.network == "none" else []),
        ]
        for name, value in {**_VARIABLES, **(hosts.variables if hosts else {}), **self._variables}.items():
            words += ["--setenv", name, value]
        words += [*size, "--tmpfs", "/", *own_proc(), "--dev", "/dev", *size, "--tmpfs", "/dev/shm"]
        words += ["--remount-ro", "/dev"]
        for folder in _FOLDERS:
            words += ["--perms", "1777" if folder.endswith("tmp") else "0755", "--dir", folder]
        for path in _SYSTEM:
            words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
        settings = [*_SETTINGS, *(_NAMES if limits.network == "all" else ())]
        for path in [*settings, *python_folders(), *self._readable]:
            words += ["--ro-bind-try", path, path]
        shown = [*_SYSTEM, *python_folders(), *self._readable]
        if any(_KITAE.is_relative_to(path) for path in shown):  # tasks are made of files that come with it
            words += ["--tmpfs", str(_KITAE)]
        return [*words, "--chdir", "/"]


class BubblewrapBox:
    """A `Box`; see `BubblewrapBoxes.open`."""

    def __init__(
        self, command: list[str], limits: BoxLimits, hosts: AllowedHosts | None, among: "set[BubblewrapBox]"
    ) -> None:
        self._command, self._limits, self._hosts, self._among = command, limits, hosts, among
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def start(self, world: BoxWorld | None) -> None:
        looks = filter_fd()
        seccomp = [] if looks is None else ["--seccomp", str(looks)]
        python = os.path.realpath(sys.executable)
        source = (resources.files("kitae.sandbox.boxes") / "box_runner.py").read_text("utf-8")
        inside = [python, "-I", "-S", "-c", source, str(self._limits.memory_mb), str(self._limits.disk_mb),
                  str(self._limits.processes)]  # fmt: skip
        words = [*self._command, *seccomp, "--", *inside]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(words if self._hosts is None else self._hosts.around(words)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=() if looks is None else (looks,),
                env={},
            )
        except OSError as problem:
            raise BoxLost(f"a box could not start: {problem}") from None
        finally:
            if looks is not None:
                os.close(looks)
        self._among.add(self)
        for path, text in _FILES.items():
            await self._ask({"do": "write", "path": path, "mode": 0o644}, text, _START)
        if world is not None:
            assert world.kind == "tar", f"a bubblewrap box begins from a tar file, got {world.kind}"
            await self._ask({"do": "unpack"}, world.data, _START)

    async def run(self, command: str, *, seconds: float = 60.0, output: int = 20_000, folder: str = "/") -> Ran:
        order = {"do": "run", "command": command, "seconds": seconds, "output": output, "folder": folder}
        answer, said = await self._ask(order, b"", seconds + _SLACK)
        return Ran(answer["status"], said.decode(errors="replace"), answer["ended"])

    async def read(self, path: str, most: int = 2**24) -> bytes:
        return (await self._ask({"do": "read", "path": path, "most": most}, b"", _START))[1]

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._ask({"do": "write", "path": path, "mode": mode}, data, _START)

    async def snapshot(self, folders: Sequence[str] = ("/",)) -> BoxWorld:
        return BoxWorld("tar", (await self._ask({"do": "pack", "folders": list(folders)}, b"", _START))[1])

    async def close(self) -> None:
        self._among.discard(self)
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
        if self._hosts is not None:
            self._hosts.close()

    async def _ask(self, order: Mapping[str, Any], data: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        async with self._lock:
            if self._process is None:
                raise BoxLost("the box is closed")
            try:
                async with asyncio.timeout(seconds):
                    answer, found = await self._exchange(self._process, order, data)
            except TimeoutError:
                await self.close()
                raise BoxLost(f"the box did not answer within {seconds:g} s") from None
            except (EOFError, ConnectionError):
                raise BoxLost(f"the box is gone{await self._last_words()}") from None
            except BaseException:  # cancelled: its answer would be taken for the next one's
                await self.close()
                raise
        if "refused" in answer:
            raise BoxRefused(answer["refused"])
        return answer, found

    async def _exchange(
        self, process: asyncio.subprocess.Process, order: Mapping[str, Any], data: bytes
    ) -> tuple[dict[str, Any], bytes]:
        assert process.stdin is not None and process.stdout is not None
        head = json.dumps(order).encode()
        process.stdin.write(len(head).to_bytes(8, "little") + len(data).to_bytes(8, "little") + head + data)
        await process.stdin.drain()
        lengths = await process.stdout.readexactly(16)
        sizes = int.from_bytes(lengths[:8], "little"), int.from_bytes(lengths[8:], "little")
        if max(sizes) > _MOST:
            raise EOFError
        answer: dict[str, Any] = json.loads(await process.stdout.readexactly(sizes[0]))
        return answer, await process.stdout.readexactly(sizes[1])

    async def _last_words(self) -> str:
        process, self._process = self._process, None
        self._among.discard(self)
        if process is None:
            return ""
        with suppress(ProcessLookupError):
            process.kill()
        _, words = await process.communicate()
        return f": {words.decode(errors='replace').strip()[-500:]}" if words.strip() else ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
