"""The process of an engine, in this one."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.process import engine_frames, engine_main
from kitae.engines.requests_in_flight import Ledger
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.store.columns import ColumnWriter, Filed, LazyColumn
from kitae.weights.shared_memory import MemoryPublisher
from kitae.workers.frames import Array, Frame, pack_frame, unpack_frame


class Outbox:
    """What it sends to its owner, through JSON and back; and its ticks."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.ticks = 0

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        self.frames.append(unpack_frame(pack_frame(header, arrays)))

    async def tick(self, server: engine_main.EngineWorker) -> None:
        while True:
            await asyncio.sleep(0.01)
            server.tick()
            self.ticks += 1


async def generate(server: engine_main.EngineWorker, number: int, request: Request) -> Frame:
    header, arrays = engine_frames.request_to_wire(request)
    call = unpack_frame(pack_frame({"flight": number, **header}, arrays))
    return unpack_frame(pack_frame(*await server.concurrent["generate"](call)))


class SlowDisk(ColumnWriter):
    """Takes nothing before it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "engine-0")
        self.asked, self.works = asyncio.Event(), asyncio.Event()

    async def add(self, tokens: Sequence[int], logprobs: Sequence[float], text: str | None = None) -> Filed:
        self.asked.set()
        await self.works.wait()
        return await super().add(tokens, logprobs, text)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports as often as can be."""
    monkeypatch.setattr(engine_main, "_PACE", engine_main.TICK)
    monkeypatch.setattr(engine_main, "_REPORT", 1)


@asynccontextmanager
async def serving(policy: Policy, disk: ColumnWriter) -> AsyncIterator[tuple[engine_main.EngineWorker, Outbox]]:
    publisher, box = MemoryPublisher(), Outbox()
    setup = {"address": asdict(replace(publisher.address, descriptors=())), "version": 0, "records_experts": False}
    setup["engine"] = EngineConfig(memory_gb=0.05).model_dump()
    server = engine_main.EngineWorker(policy, setup, box.send, disk)
    ticks = asyncio.create_task(box.tick(server))
    try:
        yield server, box
    finally:
        ticks.cancel()
        await server.engine.close()
        publisher.close()


REQUEST = Request("1", (5, 6, 7), SamplingParams(max_tokens=200), seed=1)


def tiny() -> Policy:
    return load_policy(ModelConfig(path="tiny", dtype="float32", device="cpu"))


@pytest.mark.usefixtures("pace")
def test_a_slow_disk_is_no_silence(tmp_path: Path) -> None:
    """Who hears nothing for a minute takes an engine for lost, and ends it."""

    async def body() -> None:
        disk = SlowDisk(tmp_path)
        async with serving(tiny(), disk) as (server, box), asyncio.timeout(60):
            done = asyncio.create_task(generate(server, 0, REQUEST))
            await disk.asked.wait()
            before = box.ticks
            while box.ticks < before + 5:
                await asyncio.sleep(0.01)
            disk.works.set()
            await done

    asyncio.run(body())


@pytest.mark.usefixtures("pace")
def test_another_engine_goes_on_from_what_was_reported_and_lies_in_files(tmp_path: Path) -> None:
    async def body() -> None:
        policy, ledger = tiny(), Ledger[str]()
        with ledger.enter(REQUEST) as flight:
            async with serving(policy, ColumnWriter(tmp_path, "engine-0")) as (server, box):
                done = await generate(server, flight.number, ledger.issue(flight, "first"))
                whole = engine_frames.sampled_of(done)
                for frame in box.frames:
                    ledger.grow(flight.number, frame.header["start"], engine_frames.sampled_of(frame))
            ledger.lose("first")
            again = ledger.issue(flight, "second")
            assert isinstance(again.prior.tokens, LazyColumn) and len(again.prior.tokens.stretches) > 1
            assert (
                again.prior.tokens.text is None and again.prior.tokens == tuple(whole.tokens)[: len(again.prior.tokens)]
            )
            async with serving(policy, ColumnWriter(tmp_path, "engine-1")) as (server, box):
                found = engine_frames.sampled_of(await generate(server, flight.number, again))
            assert found.tokens == tuple(whole.tokens)
            assert found.logprobs[: len(again.prior.tokens)] == again.prior.logprobs
            assert isinstance(found.tokens, LazyColumn) and found.tokens.text is not None

    asyncio.run(body())
