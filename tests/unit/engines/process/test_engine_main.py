"""The process of an engine, in this one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

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
from kitae.workers.frames import Frame, read_frame


class Outbox:
    """What it says to its owner."""

    def __init__(self) -> None:
        self.packed: list[bytes] = []

    def write(self, packed: bytes) -> None:
        self.packed.append(packed)

    async def frames(self) -> list[Frame]:
        return [await _frame(packed) for packed in self.packed]

    async def until(self, word: str) -> Frame:
        async with asyncio.timeout(60):
            while True:
                for frame in await self.frames():
                    if word in frame.header:
                        return frame
                await asyncio.sleep(0.02)


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
    for name in ("_TICK", "_PACE"):
        monkeypatch.setattr(engine_main, name, 0.01)
    monkeypatch.setattr(engine_main, "_REPORT", 1)


@asynccontextmanager
async def serving(policy: Policy, disk: ColumnWriter) -> AsyncIterator[tuple[engine_main.Server, Outbox]]:
    publisher, box = MemoryPublisher(), Outbox()
    setup = {"address": asdict(replace(publisher.address, descriptors=())), "version": 0, "records_experts": False}
    setup["engine"] = EngineConfig(memory_gb=0.05).model_dump()
    server = engine_main.Server(policy, setup, box, disk)  # type: ignore[arg-type]
    ticks = asyncio.create_task(server.tick())
    try:
        yield server, box
    finally:
        ticks.cancel()
        await server.engine.close()
        publisher.close()


async def _frame(packed: bytes) -> Frame:
    reader = asyncio.StreamReader()
    reader.feed_data(packed)
    found = await read_frame(reader)
    assert found is not None
    return found


REQUEST = Request("1", (5, 6, 7), SamplingParams(max_tokens=200), seed=1)


def tiny() -> Policy:
    return load_policy(ModelConfig(path="tiny", dtype="float32", device="cpu"))


@pytest.mark.usefixtures("pace")
def test_a_slow_disk_is_no_silence(tmp_path: Path) -> None:
    """Who hears nothing for a minute takes an engine for lost, and ends it."""

    async def body() -> None:
        disk = SlowDisk(tmp_path)
        async with serving(tiny(), disk) as (server, box), asyncio.timeout(60):
            await server.handle(await _frame(engine_frames.pack_request(0, REQUEST)))
            await disk.asked.wait()
            before = len(box.packed)
            while len(box.packed) < before + 5:
                await asyncio.sleep(0.01)
            disk.works.set()
            await box.until("done")

    asyncio.run(body())


@pytest.mark.usefixtures("pace")
def test_another_engine_goes_on_from_what_was_reported_and_lies_in_files(tmp_path: Path) -> None:
    async def body() -> None:
        policy, ledger = tiny(), Ledger[str]()
        with ledger.enter(REQUEST) as flight:
            async with serving(policy, ColumnWriter(tmp_path, "engine-0")) as (server, box):
                await server.handle(
                    await _frame(engine_frames.pack_request(flight.number, ledger.issue(flight, "first")))
                )
                whole = engine_frames.sampled_of(await box.until("done"))
                for frame in [f for f in await box.frames() if "progress" in f.header]:
                    ledger.grow(flight.number, frame.header["start"], engine_frames.sampled_of(frame))
            ledger.lose("first")
            again = ledger.issue(flight, "second")
            assert isinstance(again.prior.tokens, LazyColumn) and len(again.prior.tokens.stretches) > 1
            assert (
                again.prior.tokens.text is None and again.prior.tokens == tuple(whole.tokens)[: len(again.prior.tokens)]
            )
            async with serving(policy, ColumnWriter(tmp_path, "engine-1")) as (server, box):
                await server.handle(await _frame(engine_frames.pack_request(flight.number, again)))
                done = engine_frames.sampled_of(await box.until("done"))
            assert (
                done.tokens == tuple(whole.tokens) and done.logprobs[: len(again.prior.tokens)] == again.prior.logprobs
            )
            assert isinstance(done.tokens, LazyColumn) and done.tokens.text is not None

    asyncio.run(body())
