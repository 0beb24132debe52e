"""The experts that an engine records are those of a plain pass over the same tokens, whatever became of the pages."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.models.routing import Mixture, record_routing
from kitae.models.tiny import MIXTURES

TinyPolicy = Callable[..., Policy]


def recorded(policy: Policy, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Of all tokens but the last, by one pass."""
    with torch.no_grad(), record_routing(policy.model) as record:
        policy.score(torch.tensor(tokens, device=policy.device))
    return record.experts_TLK[:-1].cpu().numpy()


def assert_recorded(policy: Policy, request: Request, done: Completion) -> None:
    assert done.experts is not None and done.experts.dtype == np.uint8
    expected = recorded(policy, (*request.prompt_tokens, *done.tokens))[request.experts_from :]
    np.testing.assert_array_equal(done.experts, expected)


def with_engine(policy: Policy, use: Callable[[NativeEngine], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    async def run() -> Any:
        config = EngineConfig(**{"memory_gb": 0.01, "page_size": 8, **settings})
        engine = NativeEngine(policy, config, records_experts=True)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def asked(count: int, *, length: int = 30, samples: int = 3, thread: str = "") -> list[Request]:
    """Groups of samples: prompts of one token, up to a border of pages, on it, and after it."""
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, 250) for _ in range(n)) for n in (1, 7, 8, 9, 16, 21)[:count]]
    sampling = SamplingParams(max_tokens=length)
    return [
        Request(f"{i}/{j}", p, sampling, 10 * i + j, share=f"{i}", experts_from=0)
        for i, p in enumerate(prompts)
        for j in range(samples)
    ]


async def all_of(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(r) for r in requests)))


@pytest.mark.parametrize("settings", [{}, {"fast": False}, {"page_size": 1}, {"max_batch": 2}], ids=str)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_they_are_those_of_a_plain_pass(architecture: str, settings: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    """Also of prompts that several samples share, at the borders of pages."""
    policy, requests = tiny_policy(architecture), asked(6)
    for request, done in zip(requests, with_engine(policy, lambda e: all_of(e, requests), **settings), strict=True):
        assert_recorded(policy, request, done)


def test_a_plain_pass_chooses_by_the_token(tiny_policy: TinyPolicy) -> None:
    """Or the others would show nothing."""
    for architecture in MIXTURES:
        policy = tiny_policy(architecture)
        found = recorded(policy, [t for r in asked(6) for t in r.prompt_tokens])
        assert len(np.unique(found, axis=0)) > 10, architecture


def test_after_preemption(tiny_policy: TinyPolicy) -> None:
    policy, requests = tiny_policy("qwen3_moe"), asked(6, length=50)
    page = Mixture.of(policy.model).bytes * 8 + 2 * policy.layers * policy.kv_heads * 8 * policy.head_dim * 4

    async def crowded(engine: NativeEngine) -> list[Completion]:
        assert engine.cache.pages == 40
        found = await all_of(engine, requests)
        assert engine.stats().preemptions > 0, "the cache was not small enough"
        return found

    found = with_engine(policy, crowded, memory_gb=40.01 * page / 2**30, max_batch=9)
    for request, done in zip(requests, found, strict=True):
        assert_recorded(policy, request, done)
