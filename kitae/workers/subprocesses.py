"""Worker processes on this machine: plain subprocesses, each on one end of a pair of sockets."""

import asyncio
import os
import socket

from kitae.workers.base import LaunchError, LaunchSpec, end_processes
from kitae.workers.gpus import COMPUTING, GpuShares
from kitae.workers.remote_process import LaunchedProcess
from kitae.workers.worker_main import pack_order


class LocalCluster:
    """Implements `kitae.workers.base.Cluster`. Of a pool only this counts: ranks and engines get a GPU each, and share
    them where there are too few.

    gpus: those that it hands out; None: all processes see what this one sees.
    """

    host = "127.0.0.1"
    remote = False

    def __init__(self, gpus: GpuShares | None = None) -> None:
        self._gpus = gpus or GpuShares([])
        self._processes: set[LocalProcess] = set()

    async def start(self, spec: LaunchSpec) -> "LocalProcess":
        ours, theirs = socket.socketpair()
        gpu = self._gpus.take() if spec.pool in COMPUTING else ""
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                environment = {**os.environ, **self._gpus.environment(gpu)}
                launched = await LaunchedProcess.launch(spec, theirs.fileno(), environment)
            except BaseException as error:
                writer.transport.abort()
                self._gpus.give_back(gpu)
                if isinstance(error, OSError):
                    raise LaunchError(f"{spec.name} could not start: {error}") from None
                raise
        process = LocalProcess(launched, reader, writer)  # it is known here before anybody can be cancelled
        writer.write(pack_order(spec, os.getpid()))
        self._processes.add(process)
        launched.ended.add_done_callback(lambda _: self._forget(process, gpu))
        return process

    def _forget(self, process: "LocalProcess", gpu: str) -> None:
        self._processes.discard(process)
        self._gpus.give_back(gpu)

    async def close(self) -> None:
        await end_processes(self._processes)


class LocalProcess:
    """Implements `kitae.workers.base.WorkerProcess`."""

    where = "this machine"

    def __init__(self, process: LaunchedProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = process.pid
        self.reader = reader
        self.writer = writer
        self._process = process

    @property
    def words(self) -> str:
        return self._process.words

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> str:
        return await asyncio.shield(self._process.ended)
