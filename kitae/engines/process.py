"""An engine in a process of its own, beside the trainer: generation and training do not wait for each other.

    ProcessEngine ── requests, calls ──► socket ──► kitae.engines.serve: a NativeEngine on its own cores or device
                  ◄── results, progress, signs of life ──┘
                  ── weights ─────────► shared memory, with checksums (see `transport`)

The process is expendable. What is needed to start another is here: the requests in flight, what they had sampled when
it last said so, and, in shared memory, the weights. A new process loads these and continues the requests with the same
seeds; the random numbers of a token depend on its position alone, so nothing shows but a delay.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from kitae.engines import wire
from kitae.engines.base import Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.child import Child, ChildLost, Limits
from kitae.engines.config import EngineConfig
from kitae.engines.probe import Probe
from kitae.engines.transport import Mode, Published, Sync, WeightTransport
from kitae.errors import EngineError, RequestError
from kitae.models.config import ModelConfig
from kitae.types import FinishReason

_MAX_RESTARTS = 3  # within
_MINUTE = 60.0  # seconds
_MAX_RESENT = 2  # times that one update is sent again

log = logging.getLogger("kitae")


@dataclass(slots=True, eq=False)
class _Flight:
    """A request whose result is awaited, and what it has so far."""

    number: int
    request: Request
    future: "asyncio.Future[Completion]"
    sampled: Sampled
    child: Child | None = None  # that works on it
    ending: FinishReason | None = None  # asked for by `abort` or `park`

    @property
    def prior(self) -> Sampled:
        return self.progress(0)

    def progress(self, known: int) -> Sampled:
        """What to continue from, after the first `known` tokens. The last token reported may have been the one that
        ended it: it is drawn again."""
        s, part = self.sampled, slice(known, max(len(self.request.prior.tokens), len(self.sampled.tokens) - 1))
        return Sampled(s.tokens[part], s.logprobs[part], s.versions[part])

    def add(self, start: int, news: Sampled) -> None:
        s = self.sampled
        self.sampled = Sampled(
            s.tokens[:start] + news.tokens, s.logprobs[:start] + news.logprobs, s.versions[:start] + news.versions
        )

    def settle(self, result: Completion | EngineError) -> None:
        if self.future.done():
            return
        if isinstance(result, EngineError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def end_early(self) -> None:
        assert self.ending is not None
        self.settle(wire.completion(self.request.id, self.prior, self.ending))


class ProcessEngine:
    """Implements `kitae.engines.base.Engine`, and `probe`. `close` it when done.

        engine = ProcessEngine(config.model, config.engine, threads=1, cores=[1], version=0)
        await engine.start()

    model: what the process loads, onto `model.device`. It serves the weights of that folder as `version` until the
    first `update_weights`, so a resumed run must send its weights before anything else.
    config: of the native engine.
    threads: of torch in the process; None: as many as torch likes.
    cores: the processors it may use (Linux); None: all that this process may use.
    sync: how weights travel: "full" sends everything; "delta" what has changed, where it can: fewer bytes, more time.
    limits: how long the process may take for what.

    The process starts with `start` or the first use, and then belongs to that event loop. A process that is lost is
    replaced, `_MAX_RESTARTS` times within a minute; after that, as when the process never comes up, every call raises
    `EngineError`, with the last that the process wrote to stderr.

    `update_weights` needs the tensors, the same ones each time, and reads them until it returns. It does its work even
    if its caller is cancelled. `last_sync` says how the last one went.
    """

    shares_weights = False

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        version: int = 0,
        sync: Mode = "full",
        limits: Limits | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise EngineError(f"threads of the engine's process must be at least 1, got {threads}")
        if cores is not None:
            allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
            if not cores or not set(cores) <= allowed:
                raise EngineError(f"cores of the engine's process must be some of {sorted(allowed)}, got {list(cores)}")
        self.last_sync: Sync | None = None
        self._setup = {
            "model": model.model_dump(),
            "engine": config.model_dump(),
            "threads": threads,
            "cores": None if cores is None else list(cores),
        }
        self._version = version
        self._limits = limits or Limits()
        self._transport = WeightTransport(sync)
        self._published: Published | None = None  # what the image holds
        self._flights: dict[str, _Flight] = {}
        self._numbered: dict[int, _Flight] = {}
        self._numbers = itertools.count()
        self._starting: asyncio.Task[Child] | None = None  # also when it has started
        self._past = EngineStats(version, 0, 0, 0, 0, 0, 0, 0.0)  # counters of lost processes
        self._restarts: list[float] = []  # when
        self._resent = 0
        self._paused = False
        self._closed = False
        self._failure: EngineError | None = None
        self._updating = asyncio.Lock()
        self._image = asyncio.Lock()  # nobody reads the shared memory while it is written

    # The face.

    async def start(self) -> None:
        """Start the process and wait until it can serve; `EngineError` if it cannot."""
        await self._ready()

    async def generate(self, request: Request) -> Completion:
        self._check_open()
        if request.id in self._flights:
            raise RequestError(f"request id {request.id!r} is in flight already")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        flight = _Flight(next(self._numbers), request, future, request.prior)
        self._flights[request.id] = self._numbered[flight.number] = flight
        try:
            if (child := self._current()) is not None:
                self._issue(flight, child)
            elif self._starting is None:
                self._launch(None)
            return await future  # a process that starts takes up all that is in flight
        except asyncio.CancelledError:
            if flight.child is not None and flight.child.lost is None:
                flight.child.send(wire.pack({"call": -1, "op": "abort", "id": request.id}))
            raise
        finally:
            del self._flights[request.id], self._numbered[flight.number]

    async def update_weights(self, update: WeightUpdate) -> int:
        self._check_open()
        return await asyncio.shield(asyncio.create_task(self._update(update)))

    async def pause(self) -> None:
        self._paused = True
        await self._call("pause")

    async def resume(self) -> None:
        self._paused = False
        await self._call("resume")

    async def abort(self, request_id: str) -> None:
        self._check_open()
        if (flight := self._flights.get(request_id)) is not None:
            await self._end_early([flight], "abort", id=request_id)

    async def park(self) -> None:
        self._check_open()
        await self._end_early(list(self._flights.values()), "park")

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        flights = self._flights.values()
        return {flight.request.id: flight.progress(known.get(flight.request.id, 0)) for flight in flights}

    async def probe(self) -> Probe:
        """The process's log-probs of a fixed short sequence, and its version: for `check_engine`."""
        reply = await self._call("probe")
        return Probe(reply["version"], tuple(reply["logprobs"]))

    def sync_metrics(self) -> dict[str, float]:
        return self.last_sync.metrics() if self.last_sync else {}

    def stats(self) -> EngineStats:
        """As the process last told, a moment ago; counters go on over restarts."""
        child = self._current()
        running = 0 if child is None else min(child.stats.running, len(self._flights))
        return replace(
            self._past if child is None else _add(self._past, child.stats),
            version=self._version,
            running=running,
            waiting=len(self._flights) - running,
            restarts=len(self._restarts),
            resent=self._resent,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail_flights(EngineError("the engine was closed"))
        if self._starting is not None:
            if not self._starting.done():
                self._starting.cancel()
            (child,) = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(child, Child):
                await child.close()
        async with self._image:
            self._transport.close()

    # The process.

    async def _ready(self) -> Child:
        """The process, once it serves; started if there is none."""
        self._check_open()
        if self._starting is None:
            self._launch(None)
        starting = self._starting
        assert starting is not None
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():  # by `close`, not the caller
                self._check_open()
            raise

    def _launch(self, lost: Child | None) -> None:
        self._starting = asyncio.create_task(self._start(lost))
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if by nobody else

    async def _start(self, lost: Child | None) -> Child:
        """The first process (lost: None), which has one chance, or one in place of another."""
        try:
            if lost is not None:
                await lost.end()
                self._count_restart(lost.obituary)
            while True:
                try:
                    return await self._start_one()
                except ChildLost as error:
                    if lost is None:
                        raise EngineError(f"the engine's process could not start: {error}") from None
                    self._count_restart(str(error))
        except EngineError as error:
            self._fail(error)
            raise

    async def _start_one(self) -> Child:
        """A process with the current weights, at work on all that is in flight."""
        descriptors = self._transport.descriptors
        setup = {**self._setup, "version": self._version, "descriptors": descriptors, "parent": os.getpid()}
        child = await Child.start(setup, descriptors, self._limits, self._hear, self._on_loss)
        try:
            async with self._image:
                if self._published is not None:
                    self._version = self._published.version
                    if not await self._load(child, self._published):
                        raise EngineError(
                            f"the shared copy of version {self._version} is damaged, and a new process needs it"
                        )
            if self._paused:
                await child.call("pause")
            if child.lost is not None:
                raise ChildLost(child.obituary)
        except BaseException:
            await child.end()
            raise
        for flight in self._flights.values():
            if not flight.future.done():
                self._issue(flight, child)
        return child

    def _count_restart(self, why: str) -> None:
        now = time.monotonic()
        self._restarts.append(now)
        recent = sum(now - then < _MINUTE for then in self._restarts)
        if recent > _MAX_RESTARTS:
            raise EngineError(f"the engine's process was lost {recent} times within a minute, the last time: {why}")
        log.warning("the engine's process is replaced: %s", why)

    def _on_loss(self, child: Child) -> None:
        self._past = _add(self._past, child.stats)
        for flight in self._flights.values():
            if flight.child is child:
                flight.child = None
                if flight.ending is not None:
                    flight.end_early()
        if not self._closed and self._starting is not None and self._starting.done():  # else `_start` deals with it
            self._launch(child)

    def _current(self) -> Child | None:
        task = self._starting
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result() if task.result().lost is None else None

    def _issue(self, flight: _Flight, child: Child) -> None:
        flight.child = child
        flight.sampled = flight.prior
        child.send(wire.pack_request(flight.number, replace(flight.request, prior=flight.sampled)))

    def _hear(self, child: Child, message: wire.Message) -> None:
        header = message.header
        number = header.get("done", header.get("failed", header.get("progress")))
        flight = self._numbered.get(number) if number is not None else None
        if "failed" in header and not header["alone"]:
            self._fail(EngineError(header["text"]))
        elif flight is None:  # a sign of life, or the caller is gone
            return
        elif "progress" in header:
            flight.add(header["start"], message.sampled)
        elif "failed" in header:
            flight.settle(RequestError(header["text"]))
        else:
            flight.settle(message.completion(flight.request.id))

    async def _call(self, op: str) -> dict[str, Any]:
        """Ask whichever process there is."""
        while True:
            child = await self._ready()
            try:
                return await child.call(op)
            except ChildLost:
                continue

    async def _end_early(self, flights: list[_Flight], op: str, **fields: Any) -> None:
        child = self._current()
        for flight in flights:
            flight.ending = "abort" if op == "abort" else "parked"
            if child is None or flight.child is not child:
                flight.end_early()
        if child is not None and any(flight.child is child for flight in flights):
            with suppress(ChildLost):  # then they have ended with what they had
                await child.call(op, **fields)

    # Weights.

    async def _update(self, update: WeightUpdate) -> int:
        if update.tensors is None:
            raise EngineError(
                f"weight update {update.version} must have tensors: the engine's process does not share the trainer's"
            )
        async with self._updating:
            began = time.perf_counter()
            for resent in range(_MAX_RESENT + 1):
                published = await self._publish(update, in_full=resent > 0)
                if await self._send(published, update.recompute):
                    break
                self._resent += 1
                log.warning("version %d did not reach the engine's process whole, and is sent again", update.version)
            else:
                self._fail(EngineError(f"version {update.version} does not reach the engine's process whole"))
                self._check_open()
            self._version = update.version
            seconds = time.perf_counter() - began
            self.last_sync = Sync(update.version, published.mode, published.bytes, seconds, published.unchanged, resent)
            return self._version

    async def _publish(self, update: WeightUpdate, in_full: bool) -> Published:
        child = await self._ready()
        assert update.tensors is not None
        dtypes = {}
        for name, tensor in update.tensors.items():
            if name not in child.parameters:
                raise EngineError(f"weight update {update.version} names an unknown parameter {name!r}")
            dtype, shape = child.parameters[name]
            if tuple(tensor.shape) != shape:
                raise EngineError(
                    f"weight update {update.version}: {name!r} must have shape {shape}, got {tuple(tensor.shape)}"
                )
            dtypes[name] = getattr(torch, dtype)
        base = None if in_full or child.loaded is None else child.loaded[0]
        async with self._image:
            published = await asyncio.to_thread(
                self._transport.publish, update.version, update.tensors, base=base, dtypes=dtypes
            )
            self._published = self._transport.in_full(published)
        return published

    async def _send(self, published: Published, recompute: bool) -> bool:
        """Have it loaded, by whichever process there is; whether it arrived whole."""
        lost = False
        while True:
            child = await self._ready()
            if lost and child.loaded == (published.version, published.checksum):
                return True  # it has started with these weights
            has_base = published.base is None or (child.loaded is not None and child.loaded[0] == published.base)
            try:
                return await self._load(child, published if has_base else self._transport.in_full(published), recompute)
            except ChildLost:
                lost = True

    async def _load(self, child: Child, published: Published, recompute: bool = False) -> bool:
        child.loaded = None
        reply = await child.call("load", published=published.record(), recompute=recompute)
        if reply["checksum"] != published.checksum:
            return False
        child.loaded = (published.version, published.checksum)
        return True

    # Endings.

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine is closed: {self._failure}") from self._failure
        if self._closed:
            raise EngineError("the engine is closed")

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        self._fail_flights(error)

    def _fail_flights(self, error: EngineError) -> None:
        for flight in self._flights.values():
            flight.settle(error)


def _add(past: EngineStats, more: EngineStats) -> EngineStats:
    return replace(
        past,
        prompt_tokens=past.prompt_tokens + more.prompt_tokens,
        prompt_tokens_shared=past.prompt_tokens_shared + more.prompt_tokens_shared,
        generated_tokens=past.generated_tokens + more.generated_tokens,
        preemptions=past.preemptions + more.preemptions,
        busy_seconds=past.busy_seconds + more.busy_seconds,
    )
