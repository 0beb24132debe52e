"""Sequences that a full or freed cache pushes out, and that come back from the memory of the host."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_native_engine import generate, pages_gb, prompts, with_engine

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.runner import ModelRunner, Result
from kitae.engines.native.scheduler import Admission
from kitae.models.policy import Policy

TinyPolicy = Callable[..., Policy]


@contextmanager
def again(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many preempted sequences were computed again, admission by admission."""
    found: list[int] = []
    plain = ModelRunner.prefill

    def counted(self: ModelRunner, admission: Admission) -> Result:
        found.append(sum(s.swapped is None for s in admission.resumed))
        return plain(self, admission)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "prefill", counted)
        yield found


def asked(count: int, tokens: int = 50) -> list[Request]:
    return [
        Request(f"{i}/{j}", p, SamplingParams(max_tokens=tokens), 10 * i + j, share=f"{i}")
        for i, p in enumerate(prompts(count))
        for j in range(4)
    ]


def numbers(found: list[Completion]) -> dict[str, tuple[Any, ...]]:
    return {c.id: (c.tokens, c.logprobs) for c in found}


@pytest.mark.parametrize("dtype", ["model", "int8"])
def test_a_crowded_cache_computes_nothing_again(
    dtype: str, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, requests = tiny_policy("llama"), asked(6)
    together = numbers(generate(policy, requests, cache_dtype=dtype))

    async def crowded(engine: NativeEngine) -> None:
        room = engine.scheduler.host_pages
        found = numbers(list(await asyncio.gather(*(engine.generate(r) for r in reversed(requests)))))
        same = {id for id, (tokens, _) in found.items() if tokens == together[id][0]}
        # On a GPU the size of a batch decides the last bit of a product, and this a number of 8 bits.
        loose = dtype == "int8" and policy.device.type == "cuda"
        assert len(same) == len(requests) or (loose and len(same) > 0.8 * len(requests))
        for id in same:
            assert found[id][1] == pytest.approx(together[id][1], abs=0.02 if loose else 1e-4)
        stats = engine.stats()
        assert stats.restored == stats.preemptions > 0
        assert engine.scheduler.host_pages == room, "all of it is free again"
        assert engine.scheduler.pool.free == engine.scheduler.pool.total

    memory = pages_gb(policy, 40, 8) * ((policy.head_dim + 4) / (4 * policy.head_dim) if dtype == "int8" else 1)
    with again(monkeypatch) as found:
        with_engine(policy, crowded, memory_gb=memory, page_size=8, max_batch=9, cache_dtype=dtype, host_memory_gb=0.01)
    assert sum(found) == 0


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pages=st.integers(18, 60),
    host=st.integers(0, 60),
    page_size=st.sampled_from([1, 4, 8]),
    max_batch=st.integers(2, 12),
    aborted=st.sets(st.integers(0, 19), max_size=4),
)
def test_any_room_gives_the_same_answers(
    pages: int, host: int, page_size: int, max_batch: int, aborted: set[int], tiny_policy: TinyPolicy
) -> None:
    """With none, too little or enough of either memory; with requests that are given up on the way."""
    policy, requests = tiny_policy("llama"), asked(5, 30)
    alone = numbers(generate(policy, requests))
    sizes = {"memory_gb": pages_gb(policy, pages * 8 // page_size, page_size)}
    sizes["host_memory_gb"] = pages_gb(policy, host * 8 // page_size, page_size)

    async def crowded(engine: NativeEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        await asyncio.sleep(0.02)
        for i in aborted:
            await engine.abort(requests[i].id)
        for i, (request, task) in enumerate(zip(requests, tasks, strict=True)):
            done = await task
            assert i in aborted or done.tokens == alone[request.id][0]
        engine.scheduler.forget_sessions()
        assert engine.scheduler.pool.free == engine.scheduler.pool.total
        assert engine.scheduler.host_pages == int(sizes["host_memory_gb"] * 2**30 // engine.cache.page_bytes)

    with_engine(policy, crowded, page_size=page_size, max_batch=max_batch, **sizes)


async def until_each_has(engine: NativeEngine, requests: list[Request], tokens: int) -> None:
    while len(now := engine.in_flight()) < len(requests) or any(len(s.versions) < tokens for s in now):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_a_freed_cache_comes_back(
    recompute: bool, moved: bool, tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the trainer works. New weights compute it again if that is asked for, and then all of it."""
    policy, requests = tiny_policy("llama"), asked(2, 80)
    expected = numbers(generate(policy, requests))

    async def paused(engine: NativeEngine) -> dict[str, tuple[Any, ...]]:
        running = [asyncio.create_task(engine.generate(r)) for r in requests]
        await until_each_has(engine, requests, 5)
        await engine.pause()
        assert all(s.swapped is not None for s in engine.in_flight())
        if moved:
            await engine.update_weights(WeightUpdate(1, recompute=recompute))
        assert engine.stats().waiting == len(requests)
        await engine.resume()
        found = numbers(list(await asyncio.gather(*running)))
        assert engine.stats().restored == (0 if moved and recompute else len(requests))
        return found

    with again(monkeypatch) as counted:
        found = with_engine(policy, paused, keep_cache=False, host_memory_gb=0.01)
    assert sum(counted) == (len(requests) if moved and recompute else 0)
    assert {id: tokens for id, (tokens, _) in found.items()} == {id: tokens for id, (tokens, _) in expected.items()}
