"""A worker process, seen from whoever gives it work: ask, pause, kill, read what it prints, learn how it ended."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Self

from kitae.workers.background_tasks import SLICES
from kitae.workers.process_status import describe, family_of, processor_time, state_of

_STDERR_TAIL = 2_000  # bytes of stderr that are remembered
_MAX_LINE = 10_000  # bytes of a line that are passed on
_LAST_WORDS = 0.1  # seconds for what a process that has ended left in its pipe


class Words:
    """What a process writes to its stdout and stderr: passed on as whole lines, and the end of it kept."""

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


_INDULGENCE = 10  # times a deadline, at most, for a process that others keep from the processor
_LOOKS = 50  # times within a second that a silent worker is looked at


class WorkerDied(Exception):
    """The process is gone or useless; the message says why."""


class OutOfTimeError(Exception):
    """An answer is given up. `OutOfTimeError("computed")`: it used its limit of processor time: its own doing.

    "waited": for something else than the processor, for as long as its limit. "starved": it was ready to go on, or
    stopped by others, and did not get its time within many times the limit: the machine's doing.
    """

    @property
    def reason(self) -> str:
        return str(self)


class TemplateWorker:
    """One worker, seen from outside: made by a `Template`, whose `reap` it needs to learn how it ended."""

    def __init__(
        self,
        pid: int,
        reap: Callable[[int], Coroutine[None, None, int | None]],
        replies: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
        words: Words,
    ) -> None:
        self.pid = pid
        self._wait_for_end = reap
        self._replies, self._requests, self._words = replies, requests, words
        self._reaping: asyncio.Task[int | None] | None = None
        self.paused = False
        self._began = 0.0

    @property
    def ended(self) -> bool:
        return self._replies.at_eof()

    async def ask(self, message: bytes, message_id: int, seconds: float) -> dict[str, Any]:
        """The answer to a message; `OutOfTimeError` where that takes longer than it may.

        Looked at from time to time. What counts is the processor time that the process used, and time in which it
        waited by itself; both have the same limit. Time in which it was ready and others had the processor, or in which
        it was stopped or waited for memory from a disk, is the machine's, and has a limit many times as long; time in
        which the pool had it paused does not count at all.
        """
        task = asyncio.create_task(self._exchange(message, message_id))
        began = before = self._began = processor_time(self.pid)
        glance = seconds / SLICES
        waited = passed = 0.0
        try:
            while True:
                await asyncio.wait({task}, timeout=glance)
                if task.done():
                    return task.result()
                used = processor_time(self.pid)
                before, ran = used, used - before
                if self.paused:
                    continue
                passed += glance
                waited += max(0.0, glance - ran) if state_of(self.pid) == "S" else 0.0
                for reason, spent, limit in (
                    ("computed", used - began, seconds),
                    ("waited", waited, seconds),
                    ("starved", passed, seconds * _INDULGENCE),
                ):
                    if spent >= 0.99 * limit:
                        raise OutOfTimeError(reason)
        finally:
            task.cancel()

    async def _exchange(self, message: bytes, message_id: int) -> dict[str, Any]:
        """Send one message and wait for its answer; `EOFError` where the process has ended."""
        try:
            self._requests.write(message)
            await self._requests.drain()
            line = await self._replies.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            reply: dict[str, Any] = json.loads(line)
        except ConnectionError:
            raise EOFError from None
        except ValueError:  # not JSON, or longer than the limit
            reply = {}
        if reply.pop("id", None) != message_id:  # or a fork of it answers too
            raise WorkerDied(f"it broke the protocol{self._words.last()}")
        return reply

    def owes(self, seconds: float) -> float:
        """What is left of so much processor time, where it is ready to use it and others have the processor; else 0."""
        return max(0.0, seconds - (processor_time(self.pid) - self._began)) if state_of(self.pid) == "R" else 0.0

    def pause(self, paused: bool) -> None:
        """Leave the processor to others, with all that it has started, or go on. One that only waits need not."""
        everybody = family_of(self.pid)
        if paused and not any(state_of(pid) == "R" for pid in everybody):
            return
        self.paused = paused
        for pid in everybody:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP if paused else signal.SIGCONT)

    async def post_mortem(self) -> str:
        """Why a worker that has ended, or closed its pipe, did so."""
        await self._words.rest()
        for _ in range(_LOOKS):
            if state_of(self.pid) in ("Z", ""):
                return f"{describe(await self._reap())}{self._words.last()}"
            await asyncio.sleep(1 / _LOOKS)
        return f"it closed its pipe{self._words.last()}"

    async def kill(self) -> None:
        """End the process and the children it started, and let go of the pipes that any others may hold."""
        if self._reaping is None:  # afterwards its id may be somebody else's
            strayed = [pid for pid in family_of(self.pid) if pid != self.pid]  # some may have left the group
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            for pid in strayed:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        await self._reap()
        self._requests.transport.abort()
        await self._words.close()

    async def _reap(self) -> int | None:
        if self._reaping is None:
            self._reaping = asyncio.create_task(self._wait_for_end(self.pid))
        return await asyncio.shield(self._reaping)
