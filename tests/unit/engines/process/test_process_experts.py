"""Experts that an engine in its own process tells: those of a plain pass, also after the process was lost."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.process.process_engine import ProcessEngine
from kitae.errors import EngineError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.routing import record_routing
from kitae.store.columns import LazyColumn
from kitae.weights.published_version import EmptyWeightStore

pytestmark = pytest.mark.usefixtures("warm_posts")


def engine_of(folder: Path, **settings: Any) -> ProcessEngine:
    model = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    return ProcessEngine(
        model, EngineConfig(memory_gb=0.02), EmptyWeightStore(), threads=1, records_experts=True, **settings
    )


def asked(tokens: int) -> list[Request]:
    sampling = SamplingParams(temperature=0.8, max_tokens=tokens)
    return [Request(f"{i}", tuple(range(5, 20 + i)), sampling, i, share=f"{i // 2}", experts_from=3) for i in range(4)]


def assert_recorded(folder: Path, requests: list[Request], found: list[Completion]) -> None:
    policy = load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu"))
    for request, done in zip(requests, found, strict=True):
        with torch.no_grad(), record_routing(policy.model) as record:
            policy.score(torch.tensor((*request.prompt_tokens, *done.tokens)))
        assert done.experts is not None and done.experts.dtype == np.uint8
        np.testing.assert_array_equal(done.experts, record.experts_TLK[3:-1])


@pytest.mark.parametrize("filed", [False, True], ids=["told", "filed"])
def test_they_are_those_of_a_plain_pass(filed: bool, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where the answers themselves lie in files. What nobody wants is not told."""
    requests = asked(20)

    async def run() -> tuple[list[Completion], Completion]:
        engine = engine_of(tiny_folder("qwen3_moe"), columns=tmp_path if filed else None)
        try:
            await engine.start()
            found = await asyncio.gather(*map(engine.generate, requests))
            return found, await engine.generate(Request("other", (5, 6), SamplingParams(max_tokens=3), 0))
        finally:
            await engine.close()

    found, other = asyncio.run(asyncio.wait_for(run(), 100))
    assert all(isinstance(done.tokens, LazyColumn) == filed for done in found) and other.experts is None
    assert_recorded(tiny_folder("qwen3_moe"), requests, found)


@pytest.mark.thorough
def test_of_a_pool_one_of_which_is_lost(tiny_folder: Callable[[str], Path]) -> None:
    """Who goes on with its answers computes them again, and tells of all their positions."""
    requests = asked(400)

    async def run() -> tuple[list[Completion], int]:
        engines = [engine_of(tiny_folder("qwen3_moe")) for _ in range(2)]
        await asyncio.gather(*(engine.start() for engine in engines))
        pool = EnginePool.of(engines)
        try:
            running = [asyncio.create_task(pool.generate(r)) for r in requests]
            while not any(s.tokens for s in engines[0].progress({}).values()):
                await asyncio.sleep(0.02)
            os.kill(engines[0].pid, signal.SIGKILL)
            return list(await asyncio.gather(*running)), pool.losses
        finally:
            await pool.close()

    found, lost = asyncio.run(asyncio.wait_for(run(), 100))
    assert lost == 1
    assert_recorded(tiny_folder("qwen3_moe"), requests, found)


@pytest.mark.thorough
def test_suspended_and_continued(tiny_folder: Callable[[str], Path]) -> None:
    """What is known stays, also in another process than told it."""
    requests = asked(400)

    async def run() -> tuple[list[Completion], list[Completion]]:
        engine = engine_of(tiny_folder("qwen3_moe"))
        try:
            await engine.start()
            running = [asyncio.create_task(engine.generate(r)) for r in requests]
            while not any(s.tokens for s in engine.progress({}).values()):
                await asyncio.sleep(0.01)
            await engine.suspend()
            parts = list(await asyncio.gather(*running))
            told = [None if p.experts is None else p.experts + 100 for p in parts]
            assert {p.finish for p in parts} == {"suspended"} and any(t is not None for t in told)
            again = zip(requests, parts, told, strict=True)
            go_on = [replace(r, id=f"on {r.id}", prior=p.sampled, prior_experts=t) for r, p, t in again]
            return parts, list(await asyncio.gather(*map(engine.generate, go_on)))
        finally:
            await engine.close()

    parts, found = asyncio.run(asyncio.wait_for(run(), 100))
    for i, (part, done) in enumerate(zip(parts, found, strict=True)):
        assert done.experts is not None
        known = 0 if part.experts is None else len(part.experts)
        experts = np.concatenate([done.experts[:known] - 100, done.experts[known:]]).astype(np.uint8)
        found[i] = replace(done, experts=experts)
    assert_recorded(tiny_folder("qwen3_moe"), requests, found)


def test_a_model_without_experts_is_refused(tiny_folder: Callable[[str], Path]) -> None:
    async def run() -> None:
        engine = engine_of(tiny_folder("llama"))
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="needs router modules, got LlamaForCausalLM without any"):
        asyncio.run(asyncio.wait_for(run(), 100))
