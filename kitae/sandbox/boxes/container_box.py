"""Boxes that are containers of podman or docker, for images of any kind.

Every operation is a call of the engine's command: what a container isolates is the engine's affair (rootless podman
and gVisor's runtime isolate more than docker as root). Without `network`, a container has none; a list of hosts is
refused, because the engine cannot keep it. Files are limited by `disk_mb` only where the engine's storage can.
"""

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from kitae.errors import ConfigError
from kitae.sandbox.boxes.base import BoxLimits, BoxLost, BoxRefused, BoxWorld, Ran
from kitae.sandbox.boxes.box_runner import Ends

_START, _SLACK, _BUILD = 120.0, 20.0, 1800.0  # seconds
_GONE = ("no such container", "is not running", "container state improper", "no container with name")
_SHELL = 'if [ -x /bin/bash ]; then exec /bin/bash -c "$1"; else exec /bin/sh -c "$1"; fi'
_TIMED = f'exec timeout -s KILL "$2" /bin/sh -c \'{_SHELL}\' sh "$1"'
_KILLED = 137


class ContainerBoxes:
    """A kind of box: `ContainerBoxes("python:3.12", engine=["podman"])`; without an engine, what is installed.

    options: further words of `run`: `["--runtime", "runsc"]`.
    """

    name = "container"

    def __init__(self, image: str, engine: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        found = next((name for name in ("podman", "docker") if shutil.which(name)), "podman")
        self._image, self._engine, self._options = image, list(engine) or [found], list(options)
        self._open, self._images = set[ContainerBox](), list[str]()

    async def check(self) -> None:
        if shutil.which(self._engine[0]) is None:
            raise ConfigError(f"containers need podman or docker, and there is no program {self._engine[0]!r}")
        status, said = await self.ask(
            ["run", "--rm", *self._words(BoxLimits()), self._image, "/bin/sh", "-c", ":"], seconds=_START
        )
        if status:
            raise ConfigError(f"containers do not work here: {said.decode(errors='replace').strip()[-500:]}")

    async def open(self, limits: BoxLimits, world: BoxWorld | None = None) -> "ContainerBox":
        image = self._image if world is None else world.data.decode()
        name = f"kitae-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        box = ContainerBox(self, name, self._open)
        words = ["run", "-d", "--rm", "--name", name, "--init", *self._words(limits), image, "sleep", "infinity"]
        status, said = await self.ask(words, seconds=_START)
        if status:
            await box.close()
            raise BoxLost(f"a container could not start: {said.decode(errors='replace').strip()[-500:]}")
        return box

    async def close(self) -> None:
        for box in list(self._open):
            await box.close()
        for image in self._images:
            await self.ask(["rmi", "-f", image], seconds=_START)
        self._images.clear()

    def keep(self, image: str) -> None:
        """Remove an image at the end."""
        self._images.append(image)

    async def build(self, folder: Path) -> str:
        """The image of a folder with a Dockerfile. Raises `ConfigError` if it fails."""
        name = f"kitae-{uuid.uuid4().hex[:12]}"
        status, said = await self.ask(["build", "-t", name, str(folder)], seconds=_BUILD)
        if status:
            raise ConfigError(f"{folder}/Dockerfile: {said.decode(errors='replace').strip()[-800:]}")
        self.keep(name)
        return name

    def _words(self, limits: BoxLimits) -> list[str]:
        if not isinstance(limits.network, str):
            raise ConfigError("containers have network 'none' or 'all', got a list of hosts")
        words = ["--memory", f"{limits.memory_mb}m", "--pids-limit", str(limits.processes)]
        words += ["--security-opt", "no-new-privileges", "--shm-size", f"{limits.disk_mb}m"]
        return [*words, *(["--network", "none"] if limits.network == "none" else []), *self._options]

    async def ask(
        self, words: Sequence[str], data: bytes = b"", *, seconds: float, most: int = 2**30
    ) -> tuple[int, bytes]:
        """The status and output of a call of the engine; of long output both ends. `TimeoutError` if it hangs."""
        process = await asyncio.create_subprocess_exec(
            *self._engine, *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                writing = asyncio.create_task(_write(process.stdin, data))
                said = Ends(most)
                while part := await process.stdout.read(2**16):
                    said.add(part)
                await writing
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return status, said.told()


class ContainerBox:
    """A `Box`; see `ContainerBoxes.open`."""

    def __init__(self, boxes: ContainerBoxes, name: str, among: "set[ContainerBox]") -> None:
        self._boxes, self._name, self._among = boxes, name, among
        among.add(self)

    async def run(self, command: str, *, seconds: float = 60.0, output: int = 20_000, folder: str = "/") -> Ran:
        words = ["exec", "-w", folder, self._name, "/bin/sh", "-c", _TIMED, "sh", command, f"{seconds:g}"]
        began = time.monotonic()
        try:
            status, said = await self._boxes.ask(words, seconds=seconds + _SLACK, most=output)
        except TimeoutError:
            return Ran(None, "", "timeout")
        text = said.decode(errors="replace")
        if status in (125, 126, 255, 1) and any(mark in text[-500:].lower() for mark in _GONE):
            raise BoxLost(f"the container is gone: {text.strip()[-300:]}")
        if status != _KILLED:
            return Ran(status, text)
        return Ran(None, text, "timeout" if time.monotonic() - began >= seconds else "memory")

    async def read(self, path: str, most: int = 2**24) -> bytes:
        status, found = await self._raw(f'[ -f "$1" ] && head -c {most + 1} "$1"', path, b"", most + 1)
        if status:
            raise BoxRefused(f"{path} is no file")
        if len(found) > most:
            raise BoxRefused(f"{path} has more than {most} bytes")
        return found

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        script = f'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod {mode:o} "$1"'
        status, said = await self._raw(script, path, data, 10_000)
        if status:
            raise BoxRefused(said.decode(errors="replace").strip())

    async def _raw(self, script: str, path: str, data: bytes, most: int) -> tuple[int, bytes]:
        words = ["exec", "-i", self._name, "/bin/sh", "-c", script, "sh", path]
        try:
            status, said = await self._boxes.ask(words, data, seconds=_START, most=2 * most)
        except TimeoutError:
            raise BoxLost(f"the container did not answer within {_START:g} s") from None
        if status and any(mark in said[-500:].decode(errors="replace").lower() for mark in _GONE):
            raise BoxLost("the container is gone")
        return status, said

    async def snapshot(self, folders: Sequence[str] = ("/",)) -> BoxWorld:
        """All of the container's files, as an image: an engine has no part of one."""
        image = f"kitae-world-{uuid.uuid4().hex[:12]}"
        status, said = await self._boxes.ask(["commit", "-q", self._name, image], seconds=_START)
        if status:
            raise BoxLost(f"the container could not be kept: {said.decode(errors='replace').strip()[-300:]}")
        self._boxes.keep(image)
        return BoxWorld("image", image.encode())

    async def close(self) -> None:
        self._among.discard(self)
        with suppress(TimeoutError, OSError):
            await self._boxes.ask(["rm", "-f", "-t", "0", self._name], seconds=_START)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _write(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(OSError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()
