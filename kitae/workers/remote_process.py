"""A worker process, as seen by the process that started it: on the controller's machine, or on another."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from kitae.workers.base import LaunchSpec
from kitae.workers.process_status import KEPT, describe, ending
from kitae.workers.worker_main import BOOT


class LaunchedProcess:
    """Made by `launch`. ended: becomes how it ended. heard: bytes that it wrote so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self.heard = 0
        self._process = process
        self._said = b""
        self._listening = asyncio.create_task(self._listen())
        self.ended = asyncio.create_task(self._end())

    @classmethod
    async def launch(
        cls,
        spec: LaunchSpec,
        stdin: int,
        environment: Mapping[str, str],
        paths: Sequence[str] | None = None,
        folder: str | None = None,
    ) -> Self:
        """A process that waits for its order (`kitae.workers.worker_main`) on `stdin`; `OSError` where it cannot start.

        paths: of its imports; folder: where it works; None: as here.
        """
        threads = {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", BOOT, spec.module, *(sys.path if paths is None else paths)),
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # deaf to Ctrl-C
                pass_fds=spec.descriptors,
                cwd=folder,
                env={**environment, **threads, **spec.environment},
            )
        )

    @property
    def words(self) -> str:
        return ending(self._said.decode(errors="replace"))

    async def order(self, packed: bytes) -> None:
        """Send it by the standard input, where that is a pipe."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended, and its end says why
            self._process.stdin.write(packed)
            await self._process.stdin.drain()
        self._process.stdin.close()

    def kill(self) -> None:
        """End it and what is left in its session's first group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # `self._process.kill` may take its exit status from asyncio

    async def _end(self) -> str:
        status = await self._process.wait()
        await asyncio.wait({self._listening}, timeout=1)  # its children may still have the pipe
        self._listening.cancel()
        return describe(-status if status < 0 else status << 8)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(2**16):
            self.heard += len(chunk)
            self._said = (self._said + chunk)[-KEPT:]
