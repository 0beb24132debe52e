"""Requests of one session: what was computed is kept, and whether it was changes nothing but the work."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_native_engine import make_engine, pages_gb

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.fake import FakeEngine
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.models.tiny import ARCHITECTURES, HYBRIDS

TinyPolicy = Callable[..., Policy]


async def talk(engine: Any, name: str, turns: int, rng: random.Random, session: bool) -> list[Completion]:
    """A conversation: after each answer something is added, and all of it is the next prompt."""
    context = tuple(rng.randrange(3, 250) for _ in range(rng.randrange(1, 40)))
    said = []
    for number in range(turns):
        sampling = SamplingParams(max_tokens=rng.randrange(1, 30))
        request = Request(f"{name}/{number}", context, sampling, rng.getrandbits(40), session=name if session else "")
        done = await engine.generate(request)
        said.append(done)
        context += done.tokens + tuple(rng.randrange(3, 250) for _ in range(rng.randrange(0, 20)))
    return said


def talks(policy: Policy, seed: int, count: int, turns: int, session: bool, **config: Any) -> tuple[list[Any], int]:
    async def run() -> tuple[list[Any], int]:
        engine = make_engine(policy, **config)
        try:
            found = await asyncio.gather(
                *(talk(engine, f"t{i}", turns, random.Random(f"{seed}/{i}"), session) for i in range(count))
            )
            scheduler = engine.scheduler
            assert scheduler.idle and (session or not scheduler.session_prefixes)
            computed = engine.stats().prompt_tokens
            scheduler.forget_sessions()
            assert scheduler.pool.free == scheduler.pool.total, "pages leaked"
            return found, computed
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def assert_same(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert [c.tokens for c in a] == [c.tokens for c in b]
        for x, y in zip(a, b, strict=True):
            assert x.logprobs == pytest.approx(y.logprobs, abs=2e-4)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain"])
@pytest.mark.parametrize("architecture", (*ARCHITECTURES, *HYBRIDS))
def test_a_kept_cache_gives_the_same_answers_for_less_work(
    architecture: str, plain: bool, tiny_policy: TinyPolicy
) -> None:
    policy = tiny_policy(architecture)
    expected, all_of_it = talks(policy, 1, 3, 4, session=False, plain=plain, page_size=8)
    found, computed = talks(policy, 1, 3, 4, session=True, plain=plain, page_size=8)
    assert_same(found, expected)
    assert computed < 0.6 * all_of_it


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 3, 8, 16]),
    tokens=st.integers(300, 1200),
    max_batch=st.integers(1, 6),
)
def test_a_crowded_cache_gives_the_same_answers(
    seed: int, page_size: int, tokens: int, max_batch: int, tiny_policy: TinyPolicy
) -> None:
    policy = tiny_policy("llama")
    expected, _ = talks(policy, seed, 5, 4, session=False)
    size = {"page_size": page_size, "memory_gb": pages_gb(policy, -(-tokens // page_size) + 2, page_size)}
    found, _ = talks(policy, seed, 5, 4, session=True, max_batch=max_batch, **size)
    assert_same(found, expected)


def test_what_does_not_go_on_with_a_session_is_computed_anew(tiny_policy: TinyPolicy) -> None:
    async def run() -> None:
        engine = make_engine(tiny_policy(), page_size=8)
        prompt, sampling = tuple(range(3, 40)), SamplingParams(max_tokens=4)
        first = await engine.generate(Request("a", prompt, sampling, 1, session="t"))
        other = (*prompt[:-1], 200)
        for id, context in (("b", prompt), ("c", other), ("d", (*other, 7)), ("e", (*prompt, *first.tokens))):
            plain = await engine.generate(Request(f"{id}/plain", context, sampling, 2))
            in_session = await engine.generate(Request(id, context, sampling, 2, session="t"))
            assert in_session.tokens == plain.tokens
        engine.scheduler.forget_sessions()
        assert engine.scheduler.pool.free == engine.scheduler.pool.total
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_forget_sessions_where_all_is_computed_again(recompute: bool, tiny_policy: TinyPolicy) -> None:
    async def run() -> int:
        engine = NativeEngine(tiny_policy(), EngineConfig(memory_gb=0.01))
        prompt = tuple(range(3, 40))
        done = await engine.generate(Request("a", prompt, SamplingParams(max_tokens=4), 1, session="t"))
        await engine.update_weights(WeightUpdate(1, recompute=recompute))
        before = engine.stats().prompt_tokens
        after = (*prompt, *done.tokens, 9)
        await engine.generate(Request("b", after, SamplingParams(max_tokens=4), 1, session="t"))
        await engine.close()
        return engine.stats().prompt_tokens - before

    assert asyncio.run(run()) == (42 if recompute else 2)


def test_a_fleet_sends_a_thread_where_it_was() -> None:
    async def run() -> None:
        homes = list[str]()
        pool = EnginePool.of([FakeEngine(lambda r, i=i: homes.append(f"{r.session}{i}") or [1]) for i in range(3)])
        asked = [Request(f"{n}/{t}", (1,), SamplingParams(max_tokens=1), 0, session=t) for n in range(4) for t in "abc"]
        await asyncio.gather(*(pool.generate(r) for r in asked[:3]))
        for request in asked[3:]:
            await pool.generate(request)
        assert len(set(homes)) == 3

    asyncio.run(run())
