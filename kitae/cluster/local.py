"""Posts on this machine: plain subprocesses, each on one end of a pair of sockets."""

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress

from kitae.cluster.base import Duty, PostError
from kitae.cluster.worker import BOOT
from kitae.processes.status import describe

_WORDS = 4_000  # bytes of what a process wrote that are remembered


class LocalCluster:
    """Implements `kitae.cluster.base.Cluster`. Pools mean nothing here: there is one machine."""

    remote = False

    def __init__(self) -> None:
        self._posts: set[LocalPost] = set()

    async def start(self, duty: Duty) -> "LocalPost":
        ours, theirs = socket.socketpair()
        order = {
            "module": duty.module,
            "setup": dict(duty.setup),
            "cores": None if duty.cores is None else list(duty.cores),
            "parent": os.getpid(),
            "connect": None,
        }
        threads = {} if duty.threads is None else {"OMP_NUM_THREADS": str(duty.threads)}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", BOOT, json.dumps(order), *sys.path),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # deaf to Ctrl-C
                pass_fds=duty.descriptors,
                env={**os.environ, **threads, **duty.environment},
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise PostError(f"{duty.name} could not start: {error}") from None
            raise
        finally:
            theirs.close()
        post = LocalPost(process, *await asyncio.open_connection(sock=ours))
        self._posts.add(post)
        post.ended.add_done_callback(lambda _: self._posts.discard(post))
        return post

    async def close(self) -> None:
        left = list(self._posts)
        for post in left:
            post.kill()
        for post in left:
            await post.wait()


class LocalPost:
    """Implements `kitae.cluster.base.Post`."""

    where = "this machine"

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self.reader = reader
        self.writer = writer
        self._process = process
        self._said = b""
        self._listening = asyncio.create_task(self._listen())
        self.ended = asyncio.create_task(self._end())

    @property
    def words(self) -> str:
        return self._said.decode(errors="replace").strip()

    def kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # `self._process.kill` may take its exit status from asyncio

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def _end(self) -> str:
        status = await self._process.wait()
        await asyncio.wait({self._listening}, timeout=1)  # its children may still have the pipe
        self._listening.cancel()
        return describe(-status if status < 0 else status << 8)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(2**16):
            self._said = (self._said + chunk)[-_WORDS:]
