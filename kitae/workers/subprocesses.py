"""Worker processes on this machine: plain subprocesses, each on one end of a pair of sockets."""

import asyncio
import os
import socket

from kitae.workers.base import LaunchError, LaunchSpec, end_processes
from kitae.workers.remote_process import LaunchedProcess
from kitae.workers.worker_main import pack_order


class LocalCluster:
    """Implements `kitae.workers.base.Cluster`. Pools mean nothing here: there is one machine."""

    host = "127.0.0.1"
    remote = False

    def __init__(self) -> None:
        self._processes: set[LocalProcess] = set()

    async def start(self, spec: LaunchSpec) -> "LocalProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                launched = await LaunchedProcess.launch(spec, theirs.fileno(), os.environ)
            except BaseException as error:
                writer.transport.abort()
                if isinstance(error, OSError):
                    raise LaunchError(f"{spec.name} could not start: {error}") from None
                raise
        process = LocalProcess(launched, reader, writer)  # it is known here before anybody can be cancelled
        writer.write(pack_order(spec, os.getpid()))
        self._processes.add(process)
        launched.ended.add_done_callback(lambda _: self._processes.discard(process))
        return process

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
