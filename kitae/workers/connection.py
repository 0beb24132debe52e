"""The controller's end of the connection with a worker process (`kitae.workers.serve` is the other one).

A worker is *lost* when its process ends, breaks off the connection, does not answer a call in time, or gives no sign of
life for too long. A lost worker is killed, and nothing of it is read any more; whoever waits for a reply of
it gets `WorkerLost`.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import kitae.errors as errors
from kitae.errors import KitaeError, WorkerLost
from kitae.workers.background_tasks import within
from kitae.workers.base import Cluster, LaunchError, LaunchSpec, WorkerProcess
from kitae.workers.frames import Array, Frame, pack_frame, read_frame

_SLICES = 10  # of the longest silence
_WORK_SECONDS, _WORK_BYTES = 0.1, 1_000_000  # of processor time, and read: so much is progress
_INQUEST = 2.0  # seconds to find out how a killed process ended


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: `Deadlines(start=300, answer=120, silence=60, stall=600, close=10)`.

    start: in which a process that is not ready yet does nothing, as far as its processor time and what it reads tell;
    loading a model may take as long as it needs. answer: to a call;
    silence: between two signs of life, of which there are four in a second; stall: in which a process that has work
    takes no step; close: to end by itself.
    """

    start: float = 300.0
    answer: float = 120.0
    silence: float = 60.0
    stall: float = 600.0
    close: float = 10.0


class CallFailed(KitaeError):
    """A call met an error that is not one of Kitae's, such as a bug. The worker goes on."""


class RemoteWorker:
    """A worker process, made by `start`.

    greeting: what it sent when it was ready. status: what it sent last of its state. lost: becomes the reason when the
    worker is lost, with the end of what it wrote; a worker that is ended on purpose is not lost.
    """

    def __init__(
        self,
        process: WorkerProcess,
        limits: Deadlines,
        on_event: Callable[[Frame], None],
        stalled: Callable[[float], str],
    ) -> None:
        self.process = process
        self.limits = limits
        self.greeting: Mapping[str, Any] = {}
        self.status: Mapping[str, Any] = {}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._stalled = stalled
        self._ended = False
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = False

    @classmethod
    async def start(
        cls,
        cluster: Cluster,
        spec: LaunchSpec,
        limits: Deadlines,
        error: type[KitaeError],
        on_event: Callable[[Frame], None] = lambda frame: None,
        stalled: Callable[[float], str] = lambda passed: "",
    ) -> "RemoteWorker":
        """Launch a worker and wait until it is ready. `error`: it refuses the setup, or there is no place for it;
        `WorkerLost`: it does not come up.

        on_event: called with every event that it sends. stalled: called several times within the longest silence, with
        the seconds since the last time; says what is wrong with a worker that lives, or nothing.
        """
        try:
            process = await cluster.start(spec)
        except LaunchError as problem:
            raise error(str(problem)) from None
        remote = cls(process, limits, on_event, stalled)
        try:
            await remote._greet(error)
        except BaseException:
            await remote.end()
            raise
        return remote

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def gone(self) -> str:
        """Why it cannot be used any more; "": it can."""
        if self.lost.done():
            return self.lost.result()
        return "it was ended" if self._ended else ""

    @property
    def last_words(self) -> str:
        """The end of what it wrote, as the end of a sentence."""
        words = self.process.words
        return f"; its stderr ends with:\n{words}" if words else ""

    async def call(
        self, op: str, arrays: Mapping[str, Array] | None = None, *, limit: float | None = None, **fields: Any
    ) -> Frame:
        """The reply. Errors of Kitae's are raised here as what they are there, any other as `CallFailed`; `WorkerLost`
        where there is no reply in time. A caller that is cancelled cancels a concurrent call.

        limit: seconds for it, if not those of `limits.answer`; infinite: as long as the worker lives.
        """
        if self.gone:
            raise WorkerLost(self.gone)
        number, limit = next(self._numbers), limit or self.limits.answer
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        try:
            self.send({"call": number, "op": op, **fields}, arrays)
            self._calls[number] = future
            if math.isinf(limit):
                reply = await future
            else:
                reply = await within(limit, asyncio.create_task(_result(future)))
        except TimeoutError:
            self.lose(f"it did not answer {op!r} within {limit:g} s")
            raise WorkerLost(self.gone) from None
        except asyncio.CancelledError:
            self.send({"cancel": number})
            raise
        finally:
            self._calls.pop(number, None)
        if "error" in reply.header:
            raise _error_of(reply.header)
        return reply

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
        packed = pack_frame(header, arrays)
        if not self.gone:
            self.process.writer.write(packed)

    def lose(self, why: str) -> None:
        """Give it up."""
        if self.gone:
            return
        self.process.kill()
        self.lost.set_result(why if self.last_words in why else why + self.last_words)
        self._fail_calls()

    async def close(self) -> None:
        """Ask it to end, and make sure."""
        with suppress(KitaeError, TimeoutError):
            await self.call("close", limit=self.limits.close)
            self._ended = True
            await within(self.limits.close, asyncio.create_task(self.process.wait()))
        await self.end()

    async def end(self) -> None:
        """Make sure that it is gone, and let go of everything that belongs to it."""
        self._ended = True
        self.process.kill()
        self._fail_calls()
        for task in self._tasks:
            task.cancel()
        self.process.writer.transport.abort()
        await self.process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fail_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorkerLost(self.gone))

    async def _greet(self, error: type[KitaeError]) -> None:
        first = await self._until_ready()
        if first is None:
            raise WorkerLost(await self._post_mortem())
        if "refused" in first.header:
            raise error(first.header["refused"])
        self.greeting, self.status = first.header, first.header.get("status", {})
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def _until_ready(self) -> Frame | None:
        """The first frame that is no sign of work; `WorkerLost` when there has been none for too long."""
        reading, idle = asyncio.create_task(self._read_first()), 0
        try:
            while idle < _SLICES:
                await asyncio.wait({reading}, timeout=self.limits.start / _SLICES)
                if reading.done():
                    return reading.result()
                idle = 0 if self._heard else idle + 1
                self._heard = False
        finally:
            reading.cancel()
        raise WorkerLost(f"it was not ready, and did nothing for {self.limits.start:g} s{self.last_words}")

    async def _read_first(self) -> Frame | None:
        seconds, read = 0.0, 0
        while (frame := await read_frame(self.process.reader)) is not None and "working" in frame.header:
            now_seconds, now_read = frame.header["working"]
            if now_seconds - seconds >= _WORK_SECONDS or now_read - read >= _WORK_BYTES:
                self._heard, seconds, read = True, now_seconds, now_read
        return frame

    async def _listen(self) -> None:
        while (frame := await read_frame(self.process.reader)) is not None:
            self._heard = True
            self.status = frame.header.get("status", self.status)
            future = self._calls.get(frame.header.get("re", -1))
            if future is not None and not future.done():
                future.set_result(frame)
            elif "event" in frame.header and not self.gone:
                self._on_event(frame)
        self.lose(await self._post_mortem())

    async def _watch(self) -> None:
        """Count the slices of time without a sign of life.

        Slices, and not the clock: an event loop that was blocked is late for one slice, and does not take its own delay
        for that of the process.
        """
        silent, pause = 0, self.limits.silence / _SLICES
        while True:
            await asyncio.sleep(pause)
            silent = 0 if self._heard else silent + 1
            self._heard = False
            if silent >= _SLICES:
                self.lose(f"it gave no sign of life for {self.limits.silence:g} s")
            elif why := self._stalled(pause):
                self.lose(why)

    async def _post_mortem(self) -> str:
        """Why a process that closed the connection did so. Where nobody can say for a while, its machine is gone too:
        who waits for its work need not wait for that."""
        ended = asyncio.create_task(self.process.wait())
        await asyncio.wait({ended}, timeout=1)
        self.process.kill()
        await asyncio.wait({ended}, timeout=_INQUEST)
        how = (
            ended.result() if ended.done() else f"it broke off the connection, and {self.process.where} does not answer"
        )
        return f"{how}{self.last_words}"


def _error_of(header: Mapping[str, Any]) -> KitaeError:
    kind = getattr(errors, header["kind"], None)
    if isinstance(kind, type) and issubclass(kind, KitaeError):
        return kind(header["error"])
    return CallFailed(header["error"])


async def _result(future: "asyncio.Future[Frame]") -> Frame:
    return await future
