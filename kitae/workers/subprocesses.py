"""Posts on this machine: plain subprocesses, each on one end of a pair of sockets."""

import asyncio
import os
import socket

from kitae.workers.base import Duty, PostError, end_posts
from kitae.workers.remote_process import PostProcess
from kitae.workers.worker_main import pack_order


class LocalCluster:
    """Implements `kitae.workers.base.Cluster`. Pools mean nothing here: there is one machine."""

    host = "127.0.0.1"
    remote = False

    def __init__(self) -> None:
        self._posts: set[LocalPost] = set()

    async def start(self, duty: Duty) -> "LocalPost":
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                process = await PostProcess.launch(duty, theirs.fileno(), os.environ)
            except BaseException as error:
                writer.transport.abort()
                if isinstance(error, OSError):
                    raise PostError(f"{duty.name} could not start: {error}") from None
                raise
        post = LocalPost(process, reader, writer)  # it is known here before anybody can be cancelled
        writer.write(pack_order(duty, os.getpid()))
        self._posts.add(post)
        process.ended.add_done_callback(lambda _: self._posts.discard(post))
        return post

    async def close(self) -> None:
        await end_posts(self._posts)


class LocalPost:
    """Implements `kitae.workers.base.Post`."""

    where = "this machine"

    def __init__(self, process: PostProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
