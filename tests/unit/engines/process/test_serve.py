"""The process of an engine, in this one."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.process import serve, wire
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.processes.frames import read_frame
from kitae.store.columns import ColumnWriter, Filed
from kitae.weights.memory import MemoryPublisher


class Outbox:
    """What it says to its owner."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    async def headers(self) -> list[dict[str, Any]]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(self.frames))
        reader.feed_eof()
        found = []
        while (frame := await read_frame(reader)) is not None:
            found.append(frame.header)
        return found


class SlowDisk(ColumnWriter):
    """Takes nothing before it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "engine-0")
        self.asked, self.works = asyncio.Event(), asyncio.Event()

    async def add(self, tokens: Sequence[int], logprobs: Sequence[float], text: str | None = None) -> Filed:
        self.asked.set()
        await self.works.wait()
        return await super().add(tokens, logprobs, text)


def test_a_slow_disk_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hears nothing for a minute takes an engine for lost, and ends it."""
    monkeypatch.setattr(serve, "_TICK", 0.01)
    monkeypatch.setattr(serve, "_PACE", 0.01)
    monkeypatch.setattr(serve, "_REPORT", 1)

    async def body(address: Any) -> None:
        box, disk = Outbox(), SlowDisk(tmp_path)
        policy = load_policy(ModelConfig(path="tiny", dtype="float32", device="cpu"))
        setup = {"address": asdict(replace(address, descriptors=())), "version": 0}
        setup["engine"] = EngineConfig(memory_gb=0.05).model_dump()
        server = serve.Server(policy, setup, box, disk)  # type: ignore[arg-type]
        request = Request("1", (5, 6, 7), SamplingParams(max_tokens=200), seed=1)
        ticks = asyncio.create_task(server.tick())
        await server.handle(await _frame(wire.pack_request(0, request)))
        async with asyncio.timeout(60):
            await disk.asked.wait()
            before = len(box.frames)
            while len(box.frames) < before + 5:
                await asyncio.sleep(0.01)
            disk.works.set()
            while not any("done" in header for header in await box.headers()):
                await asyncio.sleep(0.05)
        ticks.cancel()
        await server.engine.close()

    publisher = MemoryPublisher()
    try:
        asyncio.run(body(publisher.address))
    finally:
        publisher.close()


async def _frame(packed: bytes) -> Any:
    reader = asyncio.StreamReader()
    reader.feed_data(packed)
    return await read_frame(reader)
