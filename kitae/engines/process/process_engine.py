"""An engine in a process of its own, beside the trainer: generation and training do not wait for each other.

    ProcessEngine   ── requests, calls ──► socket ──► `serve`: a NativeEngine on its own cores or device
                    ◄── results, progress, signs of life ──┘
    a publisher     ── weights ──────────► shared memory or another way, with checksums (see `kitae.weights`)

The process is expendable. What is needed to start another is here: the requests in flight, what they had sampled when
it last said so, and where to fetch the weights. A new process loads these and continues the requests with the same
seeds; the random numbers of a token depend on its position alone, so nothing shows but a delay.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kitae.engines.base import Capabilities, Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.process import engine_frames
from kitae.engines.process.engine_child import Child
from kitae.engines.requests_in_flight import Flight, Ledger
from kitae.errors import EngineError, EngineLost, RequestError, WeightsDamaged
from kitae.models.config import ModelConfig
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe
from kitae.weights.published_version import WeightStore
from kitae.workers.base import Cluster, Duty
from kitae.workers.connection import Deadlines, PostLost
from kitae.workers.frames import Frame, pack_frame
from kitae.workers.subprocesses import LocalCluster

_MAX_RESTARTS = 3  # within
_MINUTE = 60.0  # seconds
_GLANCES, _MOMENT = 20, 0.5  # times, and seconds between them, that a new file is looked for

log = logging.getLogger("kitae")


class ProcessEngine:
    """Implements `kitae.engines.base.Engine`. `close` it when done.

        publisher = MemoryPublisher()  # which is a weight store too, and the caller's to close, after the engine
        engine = ProcessEngine(config.model, config.engine, publisher, threads=1, cores=[1], version=0)
        await engine.start()

    model: what the process loads, onto `model.device`. It serves the weights of that folder as `version` until the
    first is published, so a resumed run must send its weights before anything else.
    config: of the native engine.
    weight_store: where to read what was published, and how to fetch it; any number of engines may have the same.
    cluster: who finds a place for the process, in `pool`; None: it is on this machine.
    threads: of torch in the process; None: as many as torch likes.
    cores: the processors it may use (Linux); None: all that this process may use.
    limits: how long the process may take for what.
    columns: a folder that the process and all who read its answers see; it files them there (`kitae.store.columns`),
    and what comes here is where they lie. None: they come here. records_experts: as `NativeEngine` does.

    The process starts with `start` or the first use, and then belongs to that event loop. A process that is lost is
    replaced, `_MAX_RESTARTS` times within a minute; after that, as when the process never comes up, every call raises
    `EngineError`, with the last that the process wrote to stderr. A process that starts late or again loads what was
    published last: an engine that is not paused meanwhile may serve that before its `update_weights` is called.
    once: a process that is lost is not replaced; what it was sampling ends as suspended, with what it had told, and
    every call raises `EngineLost`. So a fleet gives the requests to others at once, and whoever replaces the engine
    sees to its weights.

    `update_weights` takes only the manifest that was published last. It does its work even if its caller is cancelled.
    """

    capabilities = Capabilities(shares_weights=False, scores=True)

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        weight_store: WeightStore,
        *,
        cluster: Cluster | None = None,
        pool: str = "",
        name: str = "the engine's process",
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        version: int = 0,
        limits: Deadlines | None = None,
        once: bool = False,
        columns: Path | None = None,
        records_experts: bool = False,
    ) -> None:
        if threads is not None and threads < 1:
            raise EngineError(f"threads of the engine's process must be at least 1, got {threads}")
        if cores is not None:
            allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
            if not cores or not set(cores) <= allowed:
                raise EngineError(f"cores of the engine's process must be some of {sorted(allowed)}, got {list(cores)}")
        self._setup = {
            "model": model.model_dump(),
            "engine": config.model_dump(),
            "threads": threads,
            "name": name.replace(" ", "-"),
            "columns": "" if columns is None else str(columns.absolute()),
            "records_experts": records_experts,
        }
        self._duty = Duty(
            name, "kitae.engines.process.engine_main", {}, pool, threads, None if cores is None else tuple(cores)
        )
        self._weight_store = weight_store
        self._cluster = cluster or LocalCluster()
        self._version = version
        self._limits = limits or Deadlines()
        self._once = once
        self._columns = columns
        self._ledger: Ledger[Child] = Ledger()
        self._starting: asyncio.Task[Child] | None = None  # also when it has started
        self._past = EngineStats(version, 0, 0, 0, 0, 0, 0, 0.0)  # counters of lost processes
        self._restarts: list[float] = []  # when
        self._paused = False
        self._closed = False
        self._failure: EngineError | None = None
        self._updating = asyncio.Lock()

    # The face.

    async def start(self) -> None:
        """Start the process and wait until it can serve; `EngineError` if it cannot."""
        await self._ready()

    async def generate(self, request: Request) -> Completion:
        self._check_open()
        with self._ledger.enter(request) as flight:
            if (child := self._current()) is not None:
                self._issue(flight, child)
            elif self._starting is None:
                self._launch(None)
            try:
                return await flight.future  # a process that starts takes up all that is in flight
            except asyncio.CancelledError:
                if flight.holder is not None:
                    flight.holder.send(pack_frame({"call": -1, "op": "abort", "id": request.id}))
                raise

    async def update_weights(self, update: WeightUpdate) -> int:
        self._check_open()
        updating = asyncio.create_task(self._update(update))
        updating.add_done_callback(_see)
        return await asyncio.shield(updating)

    async def probe(self) -> tuple[Probe, ...]:
        reply = await self._call("probe")
        return (Probe(reply["version"], tuple(reply["logprobs"])),)

    async def pause(self) -> None:
        self._paused = True
        await self._call("pause")

    async def resume(self) -> None:
        self._paused = False
        await self._call("resume")

    async def abort(self, request_id: str) -> None:
        self._check_open()
        child = self._current()
        if self._ledger.end_early("abort", child, request_id) and child is not None:
            with suppress(PostLost):  # then it has ended with what it had
                await child.call("abort", id=request_id)

    async def suspend(self) -> None:
        self._check_open()
        child = self._current()
        if self._ledger.end_early("suspended", child) and child is not None:
            with suppress(PostLost):
                await child.call("suspend")

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        return self._ledger.progress(known)

    def stats(self) -> EngineStats:
        """As the process last told, a moment ago; counters go on over restarts."""
        child = self._current()
        running = 0 if child is None else min(child.stats.running, len(self._ledger))
        return replace(
            self._past if child is None else _add(self._past, child.stats),
            version=self._version,
            running=running,
            waiting=len(self._ledger) - running,
            restarts=len(self._restarts),
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ledger.fail(EngineError("the engine was closed"))
        if self._starting is not None:
            if not self._starting.done():
                self._starting.cancel()
            (child,) = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(child, Child):
                await child.close()
        async with self._updating:  # an update whose caller is gone finds the engine closed and lets go of the memory
            pass

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
        self._starting.add_done_callback(_see)

    async def _start(self, lost: Child | None) -> Child:
        """The first process (lost: None), which has one chance, or one in place of another."""
        try:
            if lost is not None:
                await lost.end()
                self._count_restart(lost.obituary)
            while True:
                try:
                    return await self._start_one()
                except PostLost as error:
                    if lost is None:
                        raise EngineError(f"the engine's process could not start: {error}") from None
                    self._count_restart(str(error))
        except EngineError as error:
            self._fail(error)
            raise

    async def _start_one(self) -> Child:
        """A process with the current weights, at work on all that is in flight."""
        address = self._weight_store.address
        setup = {**self._setup, "version": self._version, "address": asdict(replace(address, descriptors=()))}
        duty = replace(self._duty, setup=setup, descriptors=address.descriptors)
        child = await Child.start(
            self._cluster, duty, self._limits, EngineError, hear=self._hear, on_loss=self._on_loss
        )
        try:
            await self._check_shared(child)
            await self._load_current(child)
            if self._paused:
                await child.call("pause")
            if child.lost is not None:
                raise PostLost(child.obituary)
        except BaseException:
            await child.end()
            raise
        for flight in self._ledger.open():
            self._issue(flight, child)
        return child

    async def _check_shared(self, child: Child) -> None:
        """Whether the file of its answers is seen from here, if need be after a moment."""
        if self._columns is None:
            return
        path = self._columns / child.greeting["file"]
        for _ in range(_GLANCES):
            if await asyncio.to_thread(path.exists):
                return
            await asyncio.sleep(_MOMENT)
        raise EngineError(
            f"the run folder must be on a disk that all machines share, but {path}, which the process on "
            f"{child.post.where} writes, is not seen here"
        )

    async def _load_current(self, child: Child) -> None:
        """What was published last. Damaged weights end the engine, unless an update is under way, which sees it too."""
        async with self._weight_store.hold() as manifest:
            if manifest is None:
                return
            damaged = await _load(child, manifest)
            if damaged and not self._updating.locked():
                raise EngineError(
                    f"the shared copy of version {manifest.version} is damaged, and a new process needs it"
                )
            if not damaged:
                self._version = manifest.version

    def _count_restart(self, why: str) -> None:
        now = time.monotonic()
        self._restarts.append(now)
        recent = sum(now - then < _MINUTE for then in self._restarts)
        if recent > _MAX_RESTARTS:
            raise EngineError(f"the engine's process was lost {recent} times within a minute, the last time: {why}")
        log.warning("the engine's process is replaced: %s", why)

    def _on_loss(self, child: Child) -> None:
        self._past = _add(self._past, child.stats)
        self._ledger.lose(child)
        if self._closed or self._starting is None or not self._starting.done():
            return  # `_start` deals with it
        if self._once:
            self._give_up(child)
        else:
            self._launch(child)

    def _give_up(self, child: Child) -> None:
        """Nobody serves here any more."""
        self._failure = self._failure or EngineLost(f"its process was lost: {child.obituary}")
        self._ledger.end_early("suspended", None)

    def _current(self) -> Child | None:
        task = self._starting
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result() if task.result().lost is None else None

    def _issue(self, flight: Flight[Child], child: Child) -> None:
        child.send(engine_frames.pack_request(flight.number, self._ledger.issue(flight, child)))

    def _hear(self, child: Child, frame: Frame) -> None:
        match frame.header:
            case {"failed": _, "alone": False, "text": text}:
                self._fail(EngineError(text))
            case {"failed": number, "text": text}:
                if (flight := self._ledger.find(number)) is not None:
                    flight.settle(RequestError(text))
            case {"done": number, "finish": finish}:
                if (flight := self._ledger.find(number)) is not None:
                    flight.complete(engine_frames.sampled_of(frame), finish, engine_frames.experts_of(frame))
            case {"progress": number, "start": start}:
                self._ledger.grow(number, start, engine_frames.sampled_of(frame))
            case _:  # a sign of life
                pass

    async def _call(self, op: str) -> dict[str, Any]:
        """Ask whichever process there is."""
        while True:
            child = await self._ready()
            try:
                return (await child.call(op)).header
            except PostLost:
                continue

    # Weights.

    async def _update(self, update: WeightUpdate) -> int:
        """Have it loaded, by whichever process there is."""
        if update.manifest is None:
            raise EngineError(
                f"weight update {update.version} must have a manifest: the engine's process does not share the "
                "trainer's weights"
            )
        async with self._updating:
            while True:
                child = await self._ready()
                async with self._weight_store.hold() as current:
                    if update.manifest != current:
                        raise EngineError(
                            f"weight update {update.version} must be what was published last, got the manifest of "
                            f"version {update.manifest.version}"
                        )
                    try:
                        damaged = await _load(child, update.manifest, update.recompute)
                    except PostLost:
                        continue
                if damaged:
                    raise WeightsDamaged(
                        f"version {update.version} did not reach the engine's process whole: damaged are "
                        f"{len(damaged)} of {len(update.manifest.buckets)} buckets"
                    )
                self._version = update.manifest.version
                return self._version

    # Endings.

    def _check_open(self) -> None:
        if self._failure is not None:
            kind = EngineLost if isinstance(self._failure, EngineLost) else EngineError
            raise kind(f"the engine is closed: {self._failure}") from self._failure
        if self._closed:
            raise EngineError("the engine is closed")

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        self._ledger.fail(error)


def _see(task: "asyncio.Task[Any]") -> None:
    """Its error, if nobody else does: then it is no news."""
    if not task.cancelled():
        task.exception()


async def _load(child: Child, manifest: Manifest, recompute: bool = False) -> list[int]:
    """The buckets that are damaged in the process."""
    reply = await child.call("load", manifest=manifest.record(), recompute=recompute)
    damaged: list[int] = reply.header["damaged"]
    return damaged


def _add(past: EngineStats, more: EngineStats) -> EngineStats:
    return replace(
        past,
        prompt_tokens=past.prompt_tokens + more.prompt_tokens,
        prompt_tokens_shared=past.prompt_tokens_shared + more.prompt_tokens_shared,
        generated_tokens=past.generated_tokens + more.generated_tokens,
        preemptions=past.preemptions + more.preemptions,
        restored=past.restored + more.restored,
        busy_seconds=past.busy_seconds + more.busy_seconds,
        repaired=past.repaired + more.repaired,
    )
