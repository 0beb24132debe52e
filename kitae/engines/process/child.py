"""One process of a `ProcessEngine`, from its start to its end, and the conversation with it.

A process is *lost* when it ends, breaks off the connection, does not answer a call in time, says nothing for too long
or makes no progress. A lost one is killed and never heard again; whoever waits for its answer gets `ChildLost`.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kitae.engines.base import EngineStats
from kitae.engines.process import wire
from kitae.errors import EngineError
from kitae.processes.deadlines import within
from kitae.processes.status import describe

_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from kitae.engines.process.serve import main; main()"  # our imports work
)
_SLICES = 10  # of the longest silence
_WORDS = 4_000  # bytes of stderr that are remembered


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: `Deadlines(start=300, answer=120, silence=60, stall=600, close=10)`.

    start: to load the model, and to build the kernels the first time; answer: to a call, a weight update included;
    silence: between two signs of life, of which there are four in a second; stall: in which a process that has work
    takes no step; close: to end by itself.
    """

    start: float = 300.0
    answer: float = 120.0
    silence: float = 60.0
    stall: float = 600.0
    close: float = 10.0


class ChildLost(Exception):
    """The message says why."""


class Child:
    """Made by `start`. `hear` is called with every frame that answers no call, `lost` once, when it is lost."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Deadlines) -> None:
        self.pid = process.pid
        self.lost: str | None = None
        self.stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0.0)
        self._process = process
        self._limits = limits
        self._words = b""
        self._reading = asyncio.create_task(self._read_words())
        self._writer: asyncio.StreamWriter | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = False
        self._rests = False  # paused
        self._hear: Callable[[Child, wire.Frame], None]
        self._on_loss: Callable[[Child], None]

    @classmethod
    async def start(
        cls,
        setup: Mapping[str, Any],
        descriptors: tuple[int, ...],
        limits: Deadlines,
        hear: "Callable[[Child, wire.Frame], None]",
        on_loss: "Callable[[Child], None]",
    ) -> "Child":
        """Launch it and wait until it serves; `EngineError`: it refuses the model; `ChildLost`: it does not come up."""
        ours, theirs = socket.socketpair()
        threads = {} if setup["threads"] is None else {"OMP_NUM_THREADS": str(setup["threads"])}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOT, json.dumps(setup), *sys.path),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # deaf to Ctrl-C
                pass_fds=descriptors,
                env=os.environ | threads,
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise EngineError(f"the engine's process could not start: {error}") from None
            raise
        finally:
            theirs.close()
        child = cls(process, limits)
        try:
            await child._greet(ours, hear, on_loss)
        except BaseException:
            await child.end()
            raise
        return child

    async def _greet(
        self,
        stream: socket.socket,
        hear: "Callable[[Child, wire.Frame], None]",
        on_loss: "Callable[[Child], None]",
    ) -> None:
        reader, self._writer = await asyncio.open_connection(sock=stream)
        try:
            first = await within(self._limits.start, asyncio.create_task(wire.read(reader)))
        except TimeoutError:
            raise ChildLost(f"it was not ready within {self._limits.start:g} s{self.last_words}") from None
        if first is None:
            raise ChildLost(await self._post_mortem())
        if "refused" in first.header:
            raise EngineError(first.header["refused"])
        self._hear, self._on_loss = hear, on_loss
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._watch())]

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr, as the end of a sentence."""
        words = self._words.decode(errors="replace").strip()
        return f"; its stderr ends with:\n{words}" if words else ""

    def send(self, frame: bytes) -> None:
        assert self._writer is not None
        if self.lost is None:
            self._writer.write(frame)

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """The answer to a call; `EngineError` if it says that the call failed, `ChildLost` if there is none in time."""
        if self.lost is not None:
            raise ChildLost(self.lost)
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self.send(wire.pack({"call": number, "op": op, **fields}))
        limit = self._limits.close if op == "close" else self._limits.answer
        try:
            reply: dict[str, Any] = await within(limit, asyncio.create_task(_result(future)))
        except TimeoutError:
            self.lose(f"it did not answer {op!r} within {limit:g} s")
            raise ChildLost(self.lost) from None
        finally:
            self._calls.pop(number, None)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply

    def lose(self, why: str) -> None:
        """Give it up."""
        if self.lost is not None:
            return
        self.lost = why
        self._kill()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ChildLost(why))
        self._on_loss(self)

    @property
    def obituary(self) -> str:
        """Why it was lost, and its last words."""
        why = self.lost or ""
        return why if self.last_words in why else why + self.last_words

    async def close(self) -> None:
        """Ask it to end, and make sure. It is not reported as lost."""
        self._on_loss = lambda _: None
        with suppress(ChildLost, EngineError, TimeoutError):
            await self.call("close")
            await within(self._limits.close, asyncio.create_task(self._process.wait()))
        await self.end()

    async def end(self) -> None:
        """Make sure that it is gone, and let go of everything that belongs to it. It is not reported as lost."""
        self.lost = self.lost or "it was ended"
        self._kill()
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        await self._process.wait()
        await asyncio.wait({self._reading}, timeout=1)
        self._reading.cancel()
        await asyncio.gather(*self._tasks, self._reading, return_exceptions=True)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (frame := await wire.read(reader)) is not None:
            self._heard = True
            self.stats = EngineStats(**frame.header.pop("stats"))
            self._rests = frame.header.pop("rests")
            future = self._calls.get(frame.header.get("re", -1))
            if future is not None and not future.done():
                future.set_result(frame.header)
            elif self.lost is None:
                self._hear(self, frame)
        self.lose(await self._post_mortem())

    async def _watch(self) -> None:
        """Count the slices of time without a sign of life, or without a step while there is work.

        Slices, and not the clock: an event loop that was blocked is late for one slice, and does not take its own delay
        for that of the process.
        """
        silent = stalled = 0
        before = self.stats
        while True:
            await asyncio.sleep(self._limits.silence / _SLICES)
            silent = 0 if self._heard else silent + 1
            self._heard = False
            now = self.stats
            moves = (now.generated_tokens, now.prompt_tokens, now.busy_seconds)
            moved = moves != (before.generated_tokens, before.prompt_tokens, before.busy_seconds)
            has_work = now.running + now.waiting > 0 and not self._rests
            stalled = stalled + 1 if has_work and not moved else 0
            before = now
            if silent >= _SLICES:
                self.lose(f"it gave no sign of life for {self._limits.silence:g} s")
            elif stalled * self._limits.silence / _SLICES >= self._limits.stall:
                self.lose(f"it had work and took no step for {self._limits.stall:g} s")

    async def _post_mortem(self) -> str:
        """Why a process that closed the connection did so."""
        await asyncio.wait({asyncio.create_task(self._process.wait())}, timeout=1)
        self._kill()
        status = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=1)
        return f"{describe(-status if status < 0 else status << 8)}{self.last_words}"

    async def _read_words(self) -> None:
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(2**16):
            self._words = (self._words + chunk)[-_WORDS:]

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # `self._process.kill` may take its exit status from asyncio


async def _result(future: "asyncio.Future[dict[str, Any]]") -> dict[str, Any]:
    return await future
