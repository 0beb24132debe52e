"""The experts that an engine records are those of a plain pass over the same tokens, whatever became of the pages."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kitae.algorithms.group_stages import experts_of
from kitae.data.packing import NO_RECORD
from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.page_cache import KVCache
from kitae.engines.native.paged_attention import DecodeAttention
from kitae.engines.native.runner import ModelRunner
from kitae.engines.native.scheduler import Admission
from kitae.errors import ModelError
from kitae.models.policy import Policy
from kitae.models.routing import RouterShape, record_routing, replay_routing
from kitae.models.tiny import MIXTURES
from kitae.types import Chain, Segment

TinyPolicy = Callable[..., Policy]
Use = Callable[[NativeEngine], Coroutine[Any, Any, Any]]


def recorded(policy: Policy, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Of all tokens but the last, by one pass."""
    with torch.no_grad(), record_routing(policy.model) as record:
        policy.score(torch.tensor(tokens, device=policy.device))
    return record.experts_TLK[:-1].cpu().numpy()


def assert_recorded(policy: Policy, request: Request, done: Completion) -> None:
    assert done.experts is not None and done.experts.dtype == np.uint8
    expected = recorded(policy, (*request.prompt_tokens, *done.tokens))[request.experts_from :]
    np.testing.assert_array_equal(done.experts, expected)


def with_engine(policy: Policy, use: Use, **settings: Any) -> Any:
    async def run() -> Any:
        own = {name: settings.pop(name) for name in ("plain", "page_size") if name in settings}
        config = EngineConfig(**{"memory_gb": 0.01, **settings})
        engine = NativeEngine(policy, config, records_experts=True, **{"page_size": 8, **own})
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def asked(count: int, *, length: int = 30, samples: int = 3) -> list[Request]:
    """Groups of samples: prompts of one token, up to a border of pages, on it, and after it."""
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, 250) for _ in range(n)) for n in (1, 7, 8, 9, 16, 21)[:count]]
    sampling = SamplingParams(max_tokens=length)
    return [
        Request(f"{i}/{j}", p, sampling, 10 * i + j, share=f"{i}", experts_from=0)
        for i, p in enumerate(prompts)
        for j in range(samples)
    ]


def memory_of(policy: Policy, pages: int) -> float:
    page = RouterShape.of(policy.model).bytes * 8 + 2 * policy.layers * policy.kv_heads * 8 * policy.head_dim * 4
    return (pages + 0.01) * page / 2**30


def turn_routers(policy: Policy) -> None:
    """So that they choose others."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(parameter.flip(0))


async def until_each_has(engine: NativeEngine, requests: Sequence[Request], tokens: int) -> None:
    while sum(len(s.versions) >= tokens for s in engine.in_flight()) < len(requests):
        await asyncio.sleep(0.001)


async def all_of(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(r) for r in requests)))


def assert_all_recorded(policy: Policy, requests: Sequence[Request], use: Use, **settings: Any) -> None:
    """Of what an engine with these settings gives to who uses it."""
    for request, done in zip(requests, with_engine(policy, use, **settings), strict=True):
        assert_recorded(policy, request, done)


def assert_recorded_in_a_crowd(
    policy: Policy, *, before: Callable[[NativeEngine], None] = lambda _: None, **settings: Any
) -> None:
    """With a cache that is too small for all at once."""
    requests = asked(6, length=50)

    async def crowded(engine: NativeEngine) -> list[Completion]:
        assert engine.cache.pages == 40
        before(engine)
        found = await all_of(engine, requests)
        assert engine.stats().preemptions > 0, "the cache was not small enough"
        return found

    assert_all_recorded(policy, requests, crowded, memory_gb=memory_of(policy, 40), max_batch=9, **settings)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("settings", [{}, {"plain": True}, {"page_size": 1}, {"max_batch": 2}], ids=str)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_they_are_those_of_a_plain_pass(architecture: str, settings: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    """Also of prompts that several samples share, at the borders of pages."""
    requests = asked(6)
    assert_all_recorded(tiny_policy(architecture), requests, lambda e: all_of(e, requests), **settings)


def test_a_plain_pass_chooses_by_the_token(tiny_policy: TinyPolicy) -> None:
    """Or the others would show nothing."""
    for architecture in MIXTURES:
        policy = tiny_policy(architecture)
        found = recorded(policy, [t for r in asked(6) for t in r.prompt_tokens])
        assert len(np.unique(found, axis=0)) > 10, architecture


@pytest.mark.parametrize("host_memory_gb", [0.0, 0.01])
def test_after_preemption(host_memory_gb: float, tiny_policy: TinyPolicy) -> None:
    assert_recorded_in_a_crowd(tiny_policy("qwen3_moe"), host_memory_gb=host_memory_gb)


def test_what_is_computed_again_chooses_for_nothing_that_was_sampled(tiny_policy: TinyPolicy) -> None:
    """It is rounded otherwise, and may choose other experts: here it always does."""

    def spoilt(engine: NativeEngine) -> None:
        plain = engine.runner.prefill

        def prefill(admission: Admission) -> Any:
            results = plain(admission)
            for sequence in admission.resumed:
                assert engine.cache.experts is not None and sequence.swapped is None
                engine.cache.experts[sequence.pages[sequence.prompt_length // 8 :]] = 99
            return results

        engine.runner.prefill = prefill  # type: ignore[method-assign]

    assert_recorded_in_a_crowd(tiny_policy("qwen3_moe"), before=spoilt)


@pytest.mark.parametrize("host_memory_gb", [0.0, 0.01])
def test_freed_and_computed_again_or_brought_back(host_memory_gb: float, tiny_policy: TinyPolicy) -> None:
    """With engine.keep_cache = false, in the middle of an answer."""
    policy, requests = tiny_policy("qwen3_moe"), asked(3, length=80)

    async def paused(engine: NativeEngine) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(r)) for r in requests]
        await until_each_has(engine, requests, 5)
        await engine.pause()
        assert engine.cache.experts is None, "its memory is given back with that of keys and values"
        await engine.resume()
        return list(await asyncio.gather(*running))

    assert_all_recorded(policy, requests, paused, keep_cache=False, host_memory_gb=host_memory_gb)


def test_suspended_and_continued(tiny_policy: TinyPolicy) -> None:
    """Who continues an answer computes all of it, and tells of all of it; what is known of it stays as it was."""
    policy, requests = tiny_policy("qwen3_moe"), asked(6, length=80)

    async def interrupted(engine: NativeEngine) -> Any:
        running = [asyncio.create_task(engine.generate(r)) for r in requests]
        await until_each_has(engine, requests, 5)
        await engine.suspend()
        parts = await asyncio.gather(*running)
        for request, part in zip(requests, parts, strict=True):
            assert part.finish == "suspended"
            assert_recorded(policy, request, part)
        other = [None if p.experts is None else p.experts + 100 for p in parts]
        again = [replace(r, prior=p.sampled) for r, p in zip(requests, parts, strict=True)]
        known = [replace(r, id=f"known {r.id}", prior_experts=told) for r, told in zip(again, other, strict=True)]
        return await all_of(engine, again), await all_of(engine, known), other

    again, known, other = with_engine(policy, interrupted)
    for request, done, same, told in zip(requests, again, known, other, strict=True):
        assert len(done.tokens) == 80 and done.tokens == same.tokens
        assert_recorded(policy, request, done)
        expected = [*told, *done.experts[len(told) :]]
        np.testing.assert_array_equal(same.experts, expected)


def test_aborted(tiny_policy: TinyPolicy) -> None:
    policy, requests = tiny_policy("qwen3_moe"), asked(2, length=80, samples=1)

    async def aborted(engine: NativeEngine) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(r)) for r in requests]
        await until_each_has(engine, requests, 5)
        await engine.abort(requests[0].id)
        return list(await asyncio.gather(*running))

    found = with_engine(policy, aborted)
    assert 5 <= len(found[0].tokens) < len(found[1].tokens) == 80
    for request, done in zip(requests, found, strict=True):
        assert_recorded(policy, request, done)


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_a_weight_update_in_flight(recompute: bool, tiny_policy: TinyPolicy) -> None:
    """What was sampled before has the experts of the old weights, computed again or not."""
    policy, old, requests = tiny_policy("qwen3_moe"), tiny_policy("qwen3_moe"), asked(3, length=80)
    before: dict[str, int] = {}

    async def updated(engine: NativeEngine) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(r)) for r in requests]
        await until_each_has(engine, requests, 5)
        await engine.pause()
        before.update({s.request.id: s.cached for s in engine.in_flight()})
        turn_routers(policy)
        await engine.update_weights(WeightUpdate(1, recompute=recompute))
        await engine.resume()
        return list(await asyncio.gather(*running))

    for request, done in zip(requests, with_engine(policy, updated), strict=True):
        tokens, cut = (*request.prompt_tokens, *done.tokens), before[request.id]
        assert done.experts is not None and set(done.versions) == {0, 1}
        then = recorded(old, tokens[: cut + 1])
        assert (then != recorded(policy, tokens)[:cut]).any(), "the update changes what is chosen"
        np.testing.assert_array_equal(done.experts[:cut], then)
        layers = slice(None) if recompute else slice(1)  # the first reads no old keys and values
        np.testing.assert_array_equal(done.experts[cut:, layers], recorded(policy, tokens)[cut:, layers])


@pytest.mark.parametrize("memory_gb", [0.01, None], ids=["kept", "crowded"])
def test_turns_of_a_thread(memory_gb: float | None, tiny_policy: TinyPolicy) -> None:
    """Each tells of what comes after the last; the pages of the one before were kept, or had to go."""
    policy = tiny_policy("qwen3_moe")

    async def talk(engine: NativeEngine, name: str) -> tuple[Chain, int]:
        rng = random.Random(name)
        chain = Chain(tuple(rng.randrange(3, 250) for _ in range(rng.randrange(1, 20))), ())
        for turn in range(4):
            sampling = SamplingParams(max_tokens=rng.randrange(1, 20))
            request = Request(
                f"{name}/{turn}", chain.tokens, sampling, rng.getrandbits(40), session=name, experts_from=chain.unrouted
            )
            done = await engine.generate(request)
            assert_recorded(policy, request, done)
            said = Segment("model", done.tokens, done.logprobs, done.versions, experts=done.experts)
            heard = Segment.observed([rng.randrange(3, 250) for _ in range(rng.randrange(1, 12))])
            chain = Chain(chain.prompt_tokens, (*chain.segments, said, heard))
        return chain, engine.stats().prompt_tokens

    async def talks(engine: NativeEngine) -> list[tuple[Chain, int]]:
        return list(await asyncio.gather(*(talk(engine, f"t{i}") for i in range(4))))

    found = with_engine(policy, talks, memory_gb=memory_gb or memory_of(policy, 24))
    everything = sum(len(c.prompt_tokens) + sum(len(s.tokens) for s in c.segments[:-1]) for c, _ in found)
    assert (max(computed for _, computed in found) < everything) == (memory_gb is not None)
    for chain, _ in found:
        experts_TLK, heard = experts_of(chain), len(chain.segments[-1].tokens)
        assert experts_TLK is not None and len(experts_TLK) == chain.length - 1
        np.testing.assert_array_equal(experts_TLK[:-heard], recorded(policy, chain.tokens)[:-heard])
        assert (experts_TLK[-heard:] == NO_RECORD).all(), "nothing was computed there"


def test_nothing_is_kept_that_nobody_wants(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen3_moe")
    (request,) = asked(1, samples=1)
    (done,) = with_engine(policy, lambda e: all_of(e, [replace(request, experts_from=None)]))
    assert done.experts is None

    async def plain() -> Completion:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
        try:
            assert engine.cache.experts is None
            return await engine.generate(request)
        finally:
            await engine.close()

    assert asyncio.run(plain()).experts is None


def test_a_model_without_experts_is_refused(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(ModelError, match="needs router modules, got LlamaForCausalLM without any"):
        NativeEngine(tiny_policy(), EngineConfig(memory_gb=0.01), records_experts=True)


def test_many_experts_have_larger_numbers() -> None:
    assert RouterShape(1, 1, 256).dtype == torch.uint8 and RouterShape(1, 1, 257).dtype == torch.int16
    assert RouterShape(3, 2, 257).bytes == 12


def test_a_trainer_that_replays_beside_it_leaves_it_alone(tiny_policy: TinyPolicy) -> None:
    """They use the same modules in different threads, and each hears of its own passes."""
    policy, requests = tiny_policy("qwen3_moe"), asked(6, length=80)
    tokens = torch.arange(5, 60)
    other = torch.from_numpy(recorded(policy, [*tokens.tolist(), 0])).flip(0)

    async def beside(engine: NativeEngine) -> list[Completion]:
        def train() -> None:
            for _ in range(30):
                with torch.no_grad(), replay_routing(policy.model, other):
                    policy.score(tokens)

        found, _ = await asyncio.gather(all_of(engine, requests), asyncio.to_thread(train))
        return found

    for request, done in zip(requests, with_engine(policy, beside), strict=True):
        assert_recorded(policy, request, done)


class _Ops(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_written_can_be_captured_as_a_graph(tiny_policy: TinyPolicy) -> None:
    """Tensors into tensors: nothing is read by the host, and no shape depends on a value."""
    policy = tiny_policy("qwen3_moe", plain=True)  # as on a GPU, whose experts are no loop
    tokens, places = torch.arange(5, 8), (torch.tensor([0, 1, 1]), torch.tensor([2, 0, 3]))
    found = []
    for routers in (None, RouterShape.of(policy.model)):
        cache = KVCache(policy, 0.01, 8, routers)
        runner = ModelRunner(policy, cache, plain=True)
        table, lengths = torch.tensor([[0, 1]], dtype=torch.int32).expand(3, 2), torch.tensor([3, 9, 12])
        with torch.inference_mode(), _Ops() as ops:
            context = DecodeAttention(cache, table, lengths, None)
            with runner.recording(*places):
                policy.hidden(tokens, lengths - 1, context)
        found.append(ops.seen)
    assert found[1] - found[0] == {"aten.select.int": 2, "aten.to.dtype": 2, "aten.index_put_.default": 2}
