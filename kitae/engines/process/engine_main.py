"""The process of a `ProcessEngine`: a native engine whose methods its owner calls (`kitae.workers.serve`).

Several times a second it sends how it fares, and what long sequences have so far, so that little is lost with it.

Where it has a folder for that, it files what it sampled there, with the text, and sends the place: a long answer costs
its owner no more than a short one. Then it reports every 10 seconds what sequences have so far.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.data.chat import Chat
from kitae.data.pictures import SHELF
from kitae.engines.base import Sampled, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.process import engine_frames
from kitae.errors import StoreError
from kitae.kernels.allocation import gc_frozen
from kitae.models.config import ModelConfig
from kitae.store.columns import ColumnWriter
from kitae.types import Runs
from kitae.workers.frames import Frame
from kitae.workers.serve import NOTHING, TICK, Reply, Send, Served, serve

if TYPE_CHECKING:
    from kitae.engines.native.sequence import Decoding
    from kitae.models.policy import Policy

_REPORT = 64  # new tokens of a sequence that are worth a report
_PACE = 10.0  # seconds between two such reports, where they are filed
_MOMENT = 0.002  # seconds


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """In a worker process (`kitae.workers.worker_main`)."""

    async def make(send: Send) -> EngineWorker:
        import torch

        from kitae.models.load import load_policy
        from kitae.models.routing import routers_of

        if setup["threads"] is not None:
            torch.set_num_threads(setup["threads"])
        columns = ColumnWriter(Path(setup["columns"]), setup["name"]) if setup["columns"] else None
        if setup["pictures"]:
            SHELF.keep_in(Path(setup["pictures"]))
        policy = load_policy(ModelConfig(**setup["model"]))
        if setup["records_experts"]:
            routers_of(policy.model)  # or it is refused
        return EngineWorker(policy, setup, send, columns)

    serve(stream, make, gc_frozen)


class EngineWorker(Served):
    def __init__(self, policy: "Policy", setup: dict[str, Any], send: Send, columns: ColumnWriter | None) -> None:
        from kitae.engines.native.engine import NativeEngine
        from kitae.weights.base import Address
        from kitae.weights.transports import make_receiver

        self.policy = policy
        self.receiver = make_receiver(Address(**setup["address"]), dict(policy.model.named_parameters()))
        self.engine = NativeEngine(
            policy, EngineConfig(**setup["engine"]), setup["version"], records_experts=setup["records_experts"]
        )
        self.greeting = {"file": columns.file if columns else ""}
        self.concurrent = {"generate": self._generate}
        self.ordered = {
            "load": self._load,
            "probe": self._probe,
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "suspend": self._suspend,
        }
        self._send = send
        self._columns = columns
        self._chat = Chat(policy.tokenizer)
        self._paused = False  # by the owner
        self._broken = False  # an update did not arrive whole: no step with these weights
        self._flights: dict[str, int] = {}  # numbers of requests at the owner
        self._reported: dict[int, int] = {}  # tokens of each that the owner knows
        self._ticks = 0
        self._reporting: asyncio.Task[None] | None = None

    def status(self) -> dict[str, Any]:
        stats = replace(self.engine.stats(), repaired=self.receiver.repaired)
        return {"stats": asdict(stats), "rests": self._paused or self._broken}

    def tick(self) -> None:
        self._ticks += 1
        if self._columns is not None and self._ticks % round(_PACE / TICK):
            return
        if self._reporting is None or self._reporting.done():  # the disk may be slow
            self._reporting = asyncio.create_task(self._report())

    async def close(self) -> None:
        await self.engine.close()

    async def _report(self) -> None:
        """What long sequences have so far."""
        grown = [
            (self._flights[key], start, sequence.between(start, end))
            for sequence in self.engine.in_flight()
            if (key := sequence.request.id) in self._flights
            and (end := len(sequence.versions)) - (start := self._start(sequence)) >= _REPORT
        ]
        with suppress(StoreError):  # it is raised where the answer is filed
            filed = await self._file([news for _, _, news in grown])
            for (flight, start, _), news in zip(grown, filed, strict=True):
                self._reported[flight] = start + len(news.tokens)
                header, arrays = engine_frames.sampled_to_wire(news)
                self._send({"event": "progress", "flight": flight, "start": start, **header}, arrays)

    def _start(self, sequence: "Decoding") -> int:
        """How many of its tokens the owner knows."""
        return self._reported.get(self._flights[sequence.request.id], len(sequence.request.prior.tokens))

    async def _file(self, sampled: Sequence[Sampled], texts: Sequence[str | None] = ()) -> list[Sampled]:
        """The same, unread, where there is a place for it."""
        if self._columns is None:
            return list(sampled)
        pairs = zip(sampled, texts or [None] * len(sampled), strict=True)
        filed = await asyncio.gather(*(self._columns.add(s.tokens, s.logprobs, text) for s, text in pairs))
        folder = self._columns.folder
        return [
            engine_frames.filed(folder, ((place, 0, place.tokens),), Runs.of(s.versions), s.kept)
            for s, place in zip(sampled, filed, strict=True)
        ]

    async def _until_free(self, request_id: str) -> None:
        """Wait until a cancelled request with this id is gone, which the engine's thread takes a moment for. The owner
        refuses an id that is in flight, so nothing else has it."""
        while request_id in self._flights or any(s.request.id == request_id for s in self.engine.in_flight()):
            await asyncio.sleep(_MOMENT)

    async def _generate(self, frame: Frame) -> Reply:
        request, flight = engine_frames.request_of(frame), frame.header["flight"]
        await self._until_free(request.id)
        self._flights[request.id] = flight
        try:
            done = await self.engine.generate(request)
            text = self._chat.read(done.tokens, request.sampling.stop_strings).text if self._columns else ""
            (sampled,) = await self._file([done.sampled], [text])
        finally:
            del self._flights[request.id]
            self._reported.pop(flight, None)
        header, arrays = engine_frames.sampled_to_wire(sampled, done.experts)
        proof = {} if done.proof is None else {"proof": done.proof}
        return {"finish": done.finish, **header}, {**arrays, **proof}

    async def _pause(self, frame: Frame) -> Reply:
        self._paused = True
        await self.engine.pause()
        return NOTHING

    async def _resume(self, frame: Frame) -> Reply:
        self._paused = False
        await self._go_on()
        return NOTHING

    async def _abort(self, frame: Frame) -> Reply:
        await self.engine.abort(frame.header["id"])
        return NOTHING

    async def _suspend(self, frame: Frame) -> Reply:
        await self.engine.suspend()
        return NOTHING

    async def _load(self, frame: Frame) -> Reply:
        from kitae.weights.base import Manifest

        manifest = Manifest.of(frame.header["manifest"])
        await self.engine.pause()
        try:
            damaged = await asyncio.to_thread(self.receiver.fetch, manifest)
            self._broken = bool(damaged)
            if not damaged:
                await self.engine.update_weights(WeightUpdate(manifest.version, recompute=frame.header["recompute"]))
        finally:
            await self._go_on()
        return {"damaged": damaged}, {}

    async def _probe(self, frame: Frame) -> Reply:
        from kitae.weights.probe import probe_tolerance, score_probe

        await self.engine.pause()
        try:
            logprobs = await asyncio.to_thread(score_probe, self.policy)
        finally:
            await self._go_on()
        rounding = probe_tolerance(self.policy.dtype)
        return {"version": self.engine.version, "logprobs": logprobs, "rounding": rounding}, {}

    async def _go_on(self) -> None:
        if not self._paused and not self._broken:
            await self.engine.resume()
