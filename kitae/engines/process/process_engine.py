"""An engine in a process of its own: generation and training do not wait for each other.

    ProcessEngine   ── requests, calls ──► socket ──► `engine_main`: a NativeEngine on its own cores or device
                    ◄── results, progress, signs of life ──┘
    a publisher     ── weights ──────────► shared memory or another way, with checksums (see `kitae.weights`)

It is a plain member of an `EnginePool`: when its process is lost, so is the engine. The requests in flight end as
suspended then, with what the process had reported, and the pool continues them elsewhere with the same seeds. The
random numbers of a token depend on its position alone, so nothing shows but a delay.
"""

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kitae.data.pictures import SHELF
from kitae.engines.base import Capabilities, Completion, EngineStats, Request, Sampled, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.process import engine_frames
from kitae.engines.requests_in_flight import Ledger
from kitae.errors import EngineError, EngineLost, WeightsDamaged, WorkerLost
from kitae.models.config import ModelConfig
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe
from kitae.weights.published_version import WeightStore, hold_update
from kitae.workers.background_tasks import BackgroundTasks
from kitae.workers.base import Cluster, LaunchSpec
from kitae.workers.connection import CallFailed, Deadlines, RemoteWorker
from kitae.workers.frames import Frame
from kitae.workers.subprocesses import LocalCluster

_SLOWEST = 20e6  # bytes a second: an engine that gets new weights more slowly is lost
_GLANCES, _MOMENT = 20, 0.5  # times, and seconds between them, that a new file is looked for


class ProcessEngine:
    """Implements `kitae.engines.base.Engine`. `start` it first, and `close` it when done.

        publisher = MemoryPublisher()  # which is a weight store too, and the caller's to close, after the engine
        engine = ProcessEngine(config.model, config.engine, publisher, threads=1, cores=[1], version=0)
        await engine.start()

    model: what the process loads, onto `model.device`. config: of the native engine. weight_store: where to read what
    was published, and how to fetch it; any number of engines may have the same. cluster: finds a place for the process,
    in `pool`; None: it is on this machine. threads: of torch in the process; None: as many as torch likes. cores: the
    processors it may use (Linux); None: all that this process may use. limits: how long the process may take for what.
    columns: a folder that the process and all who read its answers see; it files them there (`kitae.store.columns`),
    and what comes here is where they lie. None: they come here. records_experts: as `NativeEngine` does.

    The engine serves the weights of the model's folder as `version` until the first is published. One that starts later
    loads what was published last: unless it is paused, it may serve that before its `update_weights` is called.
    `update_weights` takes only the manifest that was published last. It does its work even if its caller is cancelled.

    name: of this engine alone; lost: becomes the reason when its process is lost, and from then on every call raises
    `EngineLost`. Both are there when it has started.
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
        name: str = "engine",
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        version: int = 0,
        limits: Deadlines | None = None,
        columns: Path | None = None,
        records_experts: bool = False,
    ) -> None:
        if threads is not None and threads < 1:
            raise EngineError(f"threads of the engine's process must be at least 1, got {threads}")
        if cores is not None:
            allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
            if not cores or not set(cores) <= allowed:
                raise EngineError(f"cores of the engine's process must be some of {sorted(allowed)}, got {list(cores)}")
        address = weight_store.address
        setup = {
            "model": model.model_dump(),
            "engine": config.model_dump(),
            "threads": threads,
            "name": name.replace(" ", "-"),
            "columns": "" if columns is None else str(columns.absolute()),
            "pictures": str(SHELF.folder or ""),
            "records_experts": records_experts,
            "version": version,
            "address": asdict(replace(address, descriptors=())),
        }
        own_cores = None if cores is None else tuple(cores)
        module = "kitae.engines.process.engine_main"
        self._spec = LaunchSpec(name, module, setup, pool, threads, own_cores, address.descriptors)
        self._weight_store = weight_store
        self._cluster = cluster or LocalCluster()
        self._version = version
        self._limits = limits or Deadlines()
        self._columns = columns
        self._ledger: Ledger[ProcessEngine] = Ledger()
        self._remote: RemoteWorker | None = None
        self._closed = False
        self._still = 0.0  # seconds that it has had work and has taken no step
        self._before: EngineStats | None = None
        self._updating = asyncio.Lock()
        self._tasks = BackgroundTasks()

    async def start(self) -> None:
        """Start the process and wait until it serves what was published last; `EngineError` if it cannot, which is
        `WeightsDamaged` if that does not arrive whole."""
        try:
            remote = self._remote = await RemoteWorker.start(
                self._cluster, self._spec, self._limits, EngineError, self._on_event, self._stalled
            )
            self.lost, self.name = remote.lost, f"{self._spec.name} (process {remote.pid})"
            await self._check_shared(remote)
            async with self._weight_store.hold() as manifest:
                if manifest is not None:
                    if damaged := await self._load(manifest):
                        raise WeightsDamaged(
                            f"the shared copy of version {manifest.version} is damaged, and a new process needs it: "
                            f"damaged are {len(damaged)} of {len(manifest.buckets)} buckets"
                        )
                    self._version = manifest.version
        except WorkerLost as error:
            await self.close()
            raise EngineError(f"{self._spec.name} could not start: {error}") from None
        except BaseException:
            await self.close()
            raise

    async def _check_shared(self, remote: RemoteWorker) -> None:
        """Whether the file of its answers is seen from here, if need be after a moment."""
        if self._columns is None:
            return
        path = self._columns / remote.greeting["file"]
        for _ in range(_GLANCES):
            if await asyncio.to_thread(path.exists):
                return
            await asyncio.sleep(_MOMENT)
        raise EngineError(
            f"the run folder must be on a disk that all machines share, but {path}, which the process on "
            f"{remote.process.where} writes, is not seen here"
        )

    @property
    def pid(self) -> int:
        return self._serving().pid

    def _serving(self) -> RemoteWorker:
        if self._remote is not None and self._remote.lost.done():
            raise EngineLost(f"its process was lost: {self._remote.gone}")
        if self._closed or self._remote is None:
            raise EngineError("the engine is closed" if self._closed else "the engine has not been started")
        return self._remote

    def _stalled(self, passed: float) -> str:
        """A process that has work and takes no step is lost too."""
        now, before = self.stats(), self._before or self.stats()
        moves = (now.generated_tokens, now.prompt_tokens, now.busy_seconds)
        moved = moves != (before.generated_tokens, before.prompt_tokens, before.busy_seconds)
        assert self._remote is not None
        told = self._remote.status
        has_work = told["stats"]["running"] + told["stats"]["waiting"] > 0 and not told["rests"]
        self._before, self._still = now, self._still + passed if has_work and not moved else 0.0
        return f"it had work and took no step for {self._limits.stall:g} s" if self._still >= self._limits.stall else ""

    # Requests.

    async def generate(self, request: Request) -> Completion:
        remote = self._serving()
        with self._ledger.enter(request) as flight:
            header, arrays = engine_frames.request_to_wire(self._ledger.issue(flight, self))
            try:
                done = await remote.call("generate", arrays, limit=math.inf, flight=flight.number, **header)
            except WorkerLost:
                if self._closed:
                    raise EngineError("the engine was closed") from None
                return flight.ended(flight.ending or "suspended")
            except CallFailed as error:
                raise EngineError(str(error)) from None
        sampled, experts = engine_frames.sampled_of(done), engine_frames.experts_of(done)
        return Completion.of(request.id, sampled, done.header["finish"], experts, done.arrays.get("proof"))

    def _on_event(self, frame: Frame) -> None:
        """What a long response has so far."""
        self._ledger.grow(frame.header["flight"], frame.header["start"], engine_frames.sampled_of(frame))

    async def abort(self, request_id: str) -> None:
        remote = self._serving()
        if self._ledger.end_early("abort", self, request_id):
            with suppress(WorkerLost):  # then it ends with what it had
                await remote.call("abort", id=request_id)

    async def suspend(self) -> None:
        remote = self._serving()
        if self._ledger.end_early("suspended", self):
            with suppress(WorkerLost):
                await remote.call("suspend")

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        return self._ledger.progress(known)

    # Weights, and the rest.

    async def update_weights(self, update: WeightUpdate) -> int:
        self._serving()
        return await self._tasks.shielded(self._update(update))

    async def _update(self, update: WeightUpdate) -> int:
        async with self._updating, hold_update(self._weight_store, update.version, update.manifest) as manifest:
            damaged = await self._load(manifest, update.recompute)
        if damaged:
            raise WeightsDamaged(
                f"version {update.version} did not reach the engine's process whole: damaged are {len(damaged)} of "
                f"{len(manifest.buckets)} buckets"
            )
        self._version = manifest.version
        return self._version

    async def _load(self, manifest: Manifest, recompute: bool = False) -> list[int]:
        """The buckets that are damaged in the process."""
        limit = self._limits.answer + sum(bucket.bytes for bucket in manifest.buckets) / _SLOWEST
        reply = await self._call("load", limit=limit, manifest=manifest.record(), recompute=recompute)
        damaged: list[int] = reply["damaged"]
        return damaged

    async def probe(self) -> tuple[Probe, ...]:
        reply = await self._call("probe")
        return (Probe(reply["version"], tuple(reply["logprobs"]), reply["rounding"]),)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        remote = self._serving()
        try:
            return (await remote.call(op, **fields)).header
        except WorkerLost as error:
            raise EngineLost(f"its process was lost: {error}") from None
        except CallFailed as error:
            raise EngineError(str(error)) from None

    def stats(self) -> EngineStats:
        """As the process reported last, a moment ago."""
        waiting = len(self._ledger)
        if self._remote is None:
            return EngineStats(self._version, 0, 0, 0, 0, 0, waiting, 0.0)
        stats = EngineStats(**self._remote.status["stats"])
        running = 0 if self._remote.gone else min(stats.running, waiting)
        return replace(stats, version=self._version, running=running, waiting=waiting - running)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._remote is not None:
            await self._remote.close()
        await self._tasks.finish()  # an update whose caller is gone lets go of the published weights
