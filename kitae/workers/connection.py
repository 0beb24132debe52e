"""The conversation with a process at a post: calls and their answers, and frames that come unasked.

A process is *lost* when it ends, breaks off the connection, does not answer a call in time or says nothing for too
long. A lost one is killed and never heard again; whoever waits for its answer gets `PostLost`.
"""

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from kitae.errors import KitaeError
from kitae.workers.base import Cluster, Duty, Post, PostError
from kitae.workers.deadlines import within
from kitae.workers.frames import Array, Frame, pack_frame, read_frame

_SLICES = 10  # of the longest silence
_INQUEST = 2.0  # seconds to find out how a killed process ended


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


class PostLost(Exception):
    """The message says why."""


class Link:
    """Made by `start`. error: what is raised when the other side says that a call failed.

    A subclass hears every frame in `_notice`, and in `_hear` those that answer no call.
    """

    def __init__(self, post: Post, limits: Deadlines, error: type[KitaeError]) -> None:
        self.post = post
        self.limits = limits
        self.lost: str | None = None
        self.greeting: Mapping[str, Any] = {}
        self._error = error
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = False

    @classmethod
    async def start(cls, cluster: Cluster, duty: Duty, limits: Deadlines, error: type[KitaeError], **own: Any) -> Self:
        """Launch it and wait until it is ready; `error`: it refuses the setup; `PostLost`: it does not come up.

        own: for the subclass.
        """
        try:
            post = await cluster.start(duty)
        except PostError as problem:
            raise error(str(problem)) from None
        link = cls(post, limits, error, **own)
        try:
            await link._greet()
        except BaseException:
            await link.end()
            raise
        return link

    @property
    def pid(self) -> int:
        return self.post.pid

    @property
    def last_words(self) -> str:
        """The end of what it wrote, as the end of a sentence."""
        words = self.post.words
        return f"; its stderr ends with:\n{words}" if words else ""

    @property
    def obituary(self) -> str:
        """Why it was lost, and its last words."""
        why = self.lost or ""
        return why if self.last_words in why else why + self.last_words

    def send(self, frame: bytes) -> None:
        if self.lost is None:
            self.post.writer.write(frame)

    async def call(
        self, op: str, arrays: Mapping[str, Array] | None = None, limit: float | None = None, **fields: Any
    ) -> Frame:
        """The answer to a call; the link's error if it says that the call failed, `PostLost` if there is none in time.

        limit: seconds for it, if not those of `limits.answer`.
        """
        reply = await self.ask(op, arrays, limit, **fields)
        if "error" in reply.header:
            raise self._error(reply.header["error"])
        return reply

    async def ask(
        self, op: str, arrays: Mapping[str, Array] | None = None, limit: float | None = None, **fields: Any
    ) -> Frame:
        """Like `call`, but an error is an answer like others."""
        if self.lost is not None:
            raise PostLost(self.lost)
        number = next(self._numbers)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self.send(pack_frame({"call": number, "op": op, **fields}, arrays))
        limit = limit or (self.limits.close if op == "close" else self.limits.answer)
        try:
            reply = await within(limit, asyncio.create_task(_result(future)))
        except TimeoutError:
            self.lose(f"it did not answer {op!r} within {limit:g} s")
            raise PostLost(self.lost) from None
        finally:
            self._calls.pop(number, None)
        return reply

    def lose(self, why: str) -> None:
        """Give it up."""
        if self.lost is not None:
            return
        self.lost = why
        self.post.kill()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(PostLost(why))
        self._on_loss()

    async def close(self) -> None:
        """Ask it to end, and make sure. It is not reported as lost."""
        self._on_loss = lambda: None  # type: ignore[method-assign]
        with suppress(PostLost, KitaeError, TimeoutError):
            await self.call("close")
            await within(self.limits.close, asyncio.create_task(self.post.wait()))
        await self.end()

    async def end(self) -> None:
        """Make sure that it is gone, and let go of everything that belongs to it. It is not reported as lost."""
        self.lost = self.lost or "it was ended"
        self.post.kill()
        for task in self._tasks:
            task.cancel()
        self.post.writer.transport.abort()
        await self.post.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _notice(self, frame: Frame) -> None:
        """Every frame, before it is given to whom it is for."""

    def _hear(self, frame: Frame) -> None:
        """One that answers no call."""

    def _on_loss(self) -> None:
        """Once, when it is lost."""

    async def _greet(self) -> None:
        try:
            first = await within(self.limits.start, asyncio.create_task(read_frame(self.post.reader)))
        except TimeoutError:
            raise PostLost(f"it was not ready within {self.limits.start:g} s{self.last_words}") from None
        if first is None:
            raise PostLost(await self._post_mortem())
        if "refused" in first.header:
            raise self._error(first.header["refused"])
        self.greeting = first.header
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def _listen(self) -> None:
        while (frame := await read_frame(self.post.reader)) is not None:
            self._heard = True
            self._notice(frame)
            future = self._calls.get(frame.header.get("re", -1))
            if future is not None and not future.done():
                future.set_result(frame)
            elif self.lost is None:
                self._hear(frame)
        self.lose(await self._post_mortem())

    async def _watch(self) -> None:
        """Count the slices of time without a sign of life.

        Slices, and not the clock: an event loop that was blocked is late for one slice, and does not take its own delay
        for that of the process.
        """
        silent = 0
        while True:
            await asyncio.sleep(self.limits.silence / _SLICES)
            silent = 0 if self._heard else silent + 1
            self._heard = False
            if silent >= _SLICES:
                self.lose(f"it gave no sign of life for {self.limits.silence:g} s")
            elif why := self._stalled(self.limits.silence / _SLICES):
                self.lose(why)

    def _stalled(self, passed: float) -> str:
        """What is wrong with a process that lives, `passed` seconds after the last look; nothing: it moves."""
        return ""

    async def _post_mortem(self) -> str:
        """Why a process that closed the connection did so. Where nobody can say for a while, its machine is gone too:
        who waits for its work need not wait for that."""
        ended = asyncio.create_task(self.post.wait())
        await asyncio.wait({ended}, timeout=1)
        self.post.kill()
        await asyncio.wait({ended}, timeout=_INQUEST)
        how = ended.result() if ended.done() else f"it broke off the connection, and {self.post.where} does not answer"
        return f"{how}{self.last_words}"


async def _result(future: "asyncio.Future[Frame]") -> Frame:
    return await future
