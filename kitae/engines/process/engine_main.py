"""The process of a `ProcessEngine`: a native engine that takes its requests from a socket.

It answers `{"generate": n, …}` with `{"done": n, …}` or `{"failed": n, …}`, whenever that is, and, in order,
`{"call": n, "op": …}` with `{"re": n, …}`. Between these it tells, several times a second, how it fares and what long
sequences have so far, so that little is lost with it. It ends when the connection does, and with its parent.

Where it has a folder for that, it files what it sampled there, with the text, and tells the place: what its owner hears
of an answer is as short for a long one. It then tells every 10 seconds what sequences have so far.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.data.chat import Chat
from kitae.engines.base import Sampled, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.process import engine_frames
from kitae.errors import EngineError, KitaeError, RequestError, StoreError
from kitae.kernels.allocation import gc_frozen
from kitae.models.config import ModelConfig
from kitae.store.columns import ColumnWriter
from kitae.types import ExpertArray, Runs
from kitae.workers.frames import Frame, pack_frame, read_frame

if TYPE_CHECKING:
    from kitae.engines.native.sequence import Decoding
    from kitae.models.policy import Policy

_TICK = 0.25  # seconds
_REPORT = 64  # new tokens of a sequence that are worth telling
_PACE = 10.0  # seconds between two such reports, where they are filed


def main(setup: dict[str, Any], stream: socket.socket) -> None:
    """At a post (`kitae.workers.worker_main`)."""
    import torch

    from kitae.models.load import load_policy
    from kitae.models.routing import routers_of

    if setup["threads"] is not None:
        torch.set_num_threads(setup["threads"])
    try:
        columns = ColumnWriter(Path(setup["columns"]), setup["name"]) if setup["columns"] else None
        policy = load_policy(ModelConfig(**setup["model"]))
        if setup["records_experts"]:
            routers_of(policy.model)  # or it is refused
    except KitaeError as error:
        stream.sendall(pack_frame({"refused": str(error)}))
        return
    with gc_frozen():
        asyncio.run(_serve(policy, setup, stream, columns))
    os._exit(0)  # a clean exit of all that is loaded takes a second


async def _serve(policy: "Policy", setup: dict[str, Any], stream: socket.socket, columns: ColumnWriter | None) -> None:
    reader, writer = await asyncio.open_connection(sock=stream)
    server = Server(policy, setup, writer, columns)
    ticks = asyncio.create_task(server.tick())
    with suppress(ConnectionError):
        while not server.closing and (frame := await read_frame(reader)) is not None:
            await server.handle(frame)
    ticks.cancel()
    await server.engine.close()
    with suppress(ConnectionError):
        await writer.drain()


class Server:
    def __init__(
        self, policy: "Policy", setup: dict[str, Any], writer: asyncio.StreamWriter, columns: ColumnWriter | None
    ) -> None:
        from kitae.engines.native.engine import NativeEngine
        from kitae.weights.base import Address
        from kitae.weights.transports import make_receiver

        self.policy = policy
        self.closing = False
        self.receiver = make_receiver(Address(**setup["address"]), dict(policy.model.named_parameters()))
        self.engine = NativeEngine(
            policy, EngineConfig(**setup["engine"]), setup["version"], records_experts=setup["records_experts"]
        )
        self._writer = writer
        self._columns = columns
        self._chat = Chat(policy.tokenizer)
        self._paused = False  # by the owner
        self._broken = False  # an update did not arrive whole: no step with these weights
        self._numbers: dict[str, int] = {}
        self._told: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reporting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reporting.set_result(None)
        self._send({"ready": True, "file": columns.file if columns else ""})

    async def handle(self, frame: Frame) -> None:
        header = frame.header
        if "generate" in header:
            task = asyncio.create_task(self._generate(header["generate"], frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # a call that follows must find it
            return
        try:
            reply = await self._call(header)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}" if not isinstance(error, KitaeError) else str(error)}
        self._send({"re": header["call"], **reply})

    async def tick(self) -> None:
        """Signs of life, and now and then a report."""
        ticks = 0
        while True:
            await asyncio.sleep(_TICK)
            ticks += 1
            if self._reporting.done() and (self._columns is None or ticks % round(_PACE / _TICK) == 0):
                self._reporting = asyncio.create_task(self._report())  # the disk may be slow, and silence is death
            self._send({"tick": True})

    async def _report(self) -> None:
        """What long sequences have so far."""
        grown = [
            (self._numbers[key], start, sequence.between(start, end))
            for sequence in self.engine.in_flight()
            if (key := sequence.request.id) in self._numbers
            and (end := len(sequence.versions)) - (start := self._start(sequence)) >= _REPORT
        ]
        with suppress(StoreError):  # who waits for the answer hears of it
            filed = await self._file([news for _, _, news in grown])
            for (number, start, _), news in zip(grown, filed, strict=True):
                self._told[number] = start + len(news.tokens)
                self._send({"progress": number, "start": start}, news)

    def _start(self, sequence: "Decoding") -> int:
        """How many of its tokens the owner knows."""
        return self._told.get(self._numbers[sequence.request.id], len(sequence.request.prior.tokens))

    async def _file(self, sampled: Sequence[Sampled], texts: Sequence[str | None] = ()) -> list[Sampled]:
        """The same, unread, where there is a place for it."""
        if self._columns is None:
            return list(sampled)
        pairs = zip(sampled, texts or [None] * len(sampled), strict=True)
        filed = await asyncio.gather(*(self._columns.add(s.tokens, s.logprobs, text) for s, text in pairs))
        folder = self._columns.folder
        return [
            engine_frames.kept(folder, ((place, 0, place.tokens),), Runs.of(s.versions))
            for s, place in zip(sampled, filed, strict=True)
        ]

    async def _generate(self, number: int, frame: Frame) -> None:
        request = engine_frames.request_of(frame)
        known = request.id in self._numbers
        if not known:
            self._numbers[request.id] = number
        try:
            done = await self.engine.generate(request)
            text = self._chat.read(done.tokens, request.sampling.stop_strings).text if self._columns else ""
            (sampled,) = await self._file([done.sampled], [text])
            self._send({"done": number, "finish": done.finish}, sampled, done.experts)
        except Exception as error:
            text = str(error) if isinstance(error, KitaeError) else f"{type(error).__name__}: {error}"
            self._send({"failed": number, "text": text, "alone": isinstance(error, RequestError)})
        finally:
            if not known:
                self._numbers.pop(request.id, None)
                self._told.pop(number, None)

    async def _call(self, header: dict[str, Any]) -> dict[str, Any]:
        match header["op"]:
            case "load":
                return await self._load(header["manifest"], header["recompute"])
            case "pause":
                self._paused = True
                await self.engine.pause()
            case "resume":
                self._paused = False
                await self._go_on()
            case "abort":
                await self.engine.abort(header["id"])
            case "suspend":
                await self.engine.suspend()
            case "probe":
                return await self._probe()
            case "close":
                self.closing = True
            case other:
                raise EngineError(f"an engine's process does not know the call {other!r}")
        return {}

    async def _load(self, record: dict[str, Any], recompute: bool) -> dict[str, Any]:
        from kitae.weights.base import Manifest

        manifest = Manifest.of(record)
        await self.engine.pause()
        try:
            damaged = await asyncio.to_thread(self.receiver.fetch, manifest)
            self._broken = bool(damaged)
            if not damaged:
                await self.engine.update_weights(WeightUpdate(manifest.version, recompute=recompute))
        finally:
            await self._go_on()
        return {"damaged": damaged}

    async def _probe(self) -> dict[str, Any]:
        from kitae.weights.probe import score_probe

        await self.engine.pause()
        try:
            logprobs = await asyncio.to_thread(score_probe, self.policy)
        finally:
            await self._go_on()
        return {"version": self.engine.version, "logprobs": logprobs}

    async def _go_on(self) -> None:
        if not self._paused and not self._broken:
            await self.engine.resume()

    def _send(self, header: dict[str, Any], sampled: Sampled | None = None, experts: ExpertArray | None = None) -> None:
        stats = replace(self.engine.stats(), repaired=self.receiver.repaired)
        header |= {"stats": asdict(stats), "rests": self._paused or self._broken}
        self._writer.write(
            pack_frame(header) if sampled is None else engine_frames.pack_sampled(header, sampled, experts)
        )
