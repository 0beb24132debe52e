"""What processes print."""

import asyncio
import os
from collections.abc import Callable
from typing import Self

_STDERR_TAIL = 2_000  # bytes of stderr that are remembered
_MAX_LINE = 10_000  # bytes of a line that are told on
_LAST_WORDS = 0.1  # seconds for what a process that has ended left in its pipe


class Words:
    """What a process writes to its stdout and stderr: told on as whole lines, and the end of it remembered."""

    def __init__(
        self, transport: asyncio.ReadTransport, reader: asyncio.StreamReader, hear: Callable[[bytes], None]
    ) -> None:
        self._transport = transport
        self._hear = hear
        self._tail = b""
        self._task = asyncio.create_task(self._read(reader))

    @classmethod
    async def of(cls, descriptor: int, hear: Callable[[bytes], None]) -> Self:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        return cls(transport, reader, hear)

    async def rest(self) -> None:
        """Wait until all is read, a second at most: a child that escaped may hold the pipe open."""
        await asyncio.wait({self._task}, timeout=1)

    def last(self) -> str:
        words = self._tail.decode(errors="replace").strip()
        return f"; its stderr ends with:\n{words}" if words else ""

    async def close(self) -> None:
        """Hear what is left, and no more: a child that escaped may hold the pipe open and go on."""
        await asyncio.wait({self._task}, timeout=_LAST_WORDS)
        self._task.cancel()
        self._transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        line = b""
        while chunk := await reader.read(2**16):
            self._tail = (self._tail + chunk)[-_STDERR_TAIL:]
            whole, newline, rest = chunk.rpartition(b"\n")
            if newline:
                self._hear(line + whole)
            line = rest if newline else (line + rest)[:_MAX_LINE]
        if line:
            self._hear(line)
