"""The native engine against `model.generate` and plain forward passes, and against itself under pressure.

The contract that all engines have is in `test_conformance`.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import EngineError, RequestError
from kitae.models.policy import Policy
from kitae.models.tiny import ARCHITECTURES, HYBRIDS

TinyPolicy = Callable[..., Policy]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, 250) for _ in range(rng.choice([1, 5, 16, 17, 40]))) for _ in range(count)]


PATHS = [pytest.param(name, False, id=f"{name}-kernels") for name in ARCHITECTURES] + [
    pytest.param(
        name, True, id=f"{name}-plain", marks=() if name in ("llama", "gemma3", *HYBRIDS) else pytest.mark.slow
    )
    for name in (*ARCHITECTURES, *HYBRIDS)
]


OWN = ("plain", "page_size", "draft_tokens", "records_experts")  # arguments of the engine; others are settings


def make_engine(policy: Policy, **settings: Any) -> NativeEngine:
    own = {name: settings.pop(name) for name in OWN if name in settings}
    return NativeEngine(policy, EngineConfig(**{"memory_gb": 0.01, **settings}), **own)


def with_engine(policy: Policy, use: Callable[[NativeEngine], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """Run `use(engine)`, close the engine, and check that every page came back."""

    async def run() -> Any:
        engine = make_engine(policy, **settings)
        try:
            result = await use(engine)
            pool = engine.scheduler.pool
            assert engine.scheduler.idle and pool.free == pool.total, "pages or sequences leaked"
            return result
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def generate(policy: Policy, requests: list[Request], **settings: Any) -> list[Completion]:
    return with_engine(policy, lambda e: asyncio.gather(*(e.generate(r) for r in requests)), **settings)


def pages_gb(policy: Policy, pages: int, page_size: int) -> float:
    return pages * 2 * policy.layers * policy.kv_heads * page_size * policy.head_dim * 4 / 2**30 * 1.0001


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(("architecture", "plain"), PATHS)
def test_greedy_equals_generate(
    architecture: str, plain: bool, tiny_policy: TinyPolicy, tiny_folder: Callable[[str], Path]
) -> None:
    asked = prompts(8)
    got = generate(tiny_policy(architecture), [Request(str(i), p, GREEDY, 0) for i, p in enumerate(asked)], plain=plain)
    for completion, expected in zip(got, greedily(tiny_folder(architecture)), strict=True):
        assert list(completion.tokens) == expected
        assert completion.finish == "length"


@cache
def greedily(folder: Path) -> list[list[int]]:
    """What `generate` of transformers says to the prompts: slow, and the same however the engine is set."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for prompt in prompts(8):
        tokens = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0
        )
        found.append(tokens[0, len(prompt) :].tolist())
    return found


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(("architecture", "plain"), PATHS)
def test_logprobs_equal_a_full_forward_pass(
    architecture: str, plain: bool, tiny_policy: TinyPolicy, tiny_folder: Callable[[str], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(architecture), dtype=torch.float32)
    sampling = SamplingParams(temperature=0.7, max_tokens=30)
    requests = [
        Request(f"{i}/{j}", p, sampling, 100 * i + j, share=f"{i}") for i, p in enumerate(prompts(4)) for j in (0, 1, 2)
    ]
    for request, done in zip(requests, generate(tiny_policy(architecture), requests, plain=plain), strict=True):
        row = torch.tensor([request.prompt_tokens + done.tokens])
        logp = torch.log_softmax(model(row).logits[0, len(request.prompt_tokens) - 1 : -1] / 0.7, -1)
        expected = logp.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_tokens_do_not_depend_on_batch_order_or_preemption(architecture: str, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(architecture)
    sampling = SamplingParams(max_tokens=50)
    requests = [
        Request(f"{i}/{j}", p, sampling, 10 * i + j, share=f"{i}") for i, p in enumerate(prompts(6)) for j in range(4)
    ]
    together = {c.id: c.tokens for c in generate(policy, requests)}
    assert len(set(together.values())) == len(requests), "different seeds gave the same tokens"
    alone = generate(policy, requests[5:6])[0]
    assert alone.tokens == together[alone.id]

    async def crowded(engine: NativeEngine) -> int:
        for c in await asyncio.gather(*(engine.generate(r) for r in reversed(requests))):
            assert c.tokens == together[c.id], c.id
        return engine.stats().preemptions

    preemptions = with_engine(policy, crowded, memory_gb=pages_gb(policy, 40, 8), page_size=8, max_batch=9)
    assert preemptions > 0, "the cache was not small enough to test preemption"


@pytest.mark.sentinel
def test_group_prompt_is_computed_once(tiny_policy: TinyPolicy) -> None:
    prompt = tuple(range(3, 40))
    requests = [Request(str(i), prompt, SamplingParams(max_tokens=4), i, share="g") for i in range(8)]

    async def use(engine: NativeEngine) -> tuple[int, int]:
        await asyncio.gather(*(engine.generate(r) for r in requests))
        return engine.stats().prompt_tokens, engine.stats().prompt_tokens_shared

    assert with_engine(tiny_policy(), use) == (37, 7 * 37)
    assert with_engine(tiny_policy(), use, max_batch=2) == (37, 7 * 37), "late samples must find the prompt cached"


def test_a_prompt_is_computed_once_for_all_who_share(tiny_policy: TinyPolicy) -> None:
    """Groups whose prompts are the same text, as the games of one step; a request without a key has its own."""
    prompt, keys = tuple(range(3, 40)), ("a", "b", "", "")
    requests = [Request(str(i), prompt, SamplingParams(max_tokens=4), i, share=key) for i, key in enumerate(keys)]

    async def use(engine: NativeEngine) -> tuple[int, int]:
        await asyncio.gather(*(engine.generate(r) for r in requests))
        return engine.stats().prompt_tokens, engine.stats().prompt_tokens_shared

    assert with_engine(tiny_policy(), use) == (3 * 37, 37)


def test_a_prompt_is_not_shared_with_who_came_before_an_update(tiny_policy: TinyPolicy) -> None:
    """Of another group too, while the first one still samples with what it computed."""
    prompt = tuple(range(3, 40))
    policy = tiny_policy()
    requests = [Request(key, prompt, SamplingParams(max_tokens=60), 7, share=key) for key in ("a", "b")]

    async def use(engine: NativeEngine) -> tuple[Completion, int]:
        first = asyncio.create_task(engine.generate(requests[0]))
        while not any(s.versions for s in engine.in_flight()):
            await asyncio.sleep(0.001)
        with torch.no_grad():
            policy.head.weight.neg_()  # type: ignore[union-attr]
        await engine.update_weights(WeightUpdate(1))
        assert not first.done()
        second = await engine.generate(requests[1])
        await first
        return second, engine.stats().prompt_tokens

    found, computed = with_engine(policy, use)
    alone = with_engine(policy, lambda e: e.generate(requests[1]))
    assert computed == 2 * 37 and set(found.versions) == {1}
    assert found.tokens == alone.tokens


@pytest.mark.sentinel
def test_a_free_slot_is_refilled_at_once(tiny_policy: TinyPolicy) -> None:
    """Continuous batching: while a long sequence runs, short ones come and go in the other slot."""
    finished: list[str] = []

    async def use(engine: NativeEngine) -> None:
        async def one(name: str, tokens: int) -> None:
            await engine.generate(Request(name, (5, 6, 7), SamplingParams(max_tokens=tokens), 1))
            finished.append(name)

        await asyncio.gather(one("long", 60), *(one(f"short{i}", 5) for i in range(6)))

    with_engine(tiny_policy(), use, max_batch=2)
    assert finished[-1] == "long"


def test_the_context_limits_the_response(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    full = Request("a", (5,) * (policy.max_context - 3), SamplingParams(max_tokens=40), 0)
    assert len(generate(policy, [full], memory_gb=0.05)[0].tokens) == 3


@pytest.mark.sentinel
def test_impossible_requests_fail_alone(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    good = Request("good", (5, 6), SamplingParams(max_tokens=20), 0)
    bad = {
        "empty": (Request("empty", (), GREEDY, 0), "the prompt is empty"),
        "long": (Request("long", (5,) * policy.max_context, GREEDY, 0), f"the context of {policy.max_context}"),
        "cache": (Request("cache", (5,) * 400, GREEDY, 0), "raise engine.memory_gb"),
        "vocabulary": (Request("vocabulary", (5, 10**6), GREEDY, 0), "token ids must be in"),
        "tokens": (Request("tokens", (5,), SamplingParams(max_tokens=0), 0), "at least 1, got 0"),
    }

    async def use(engine: NativeEngine) -> list[Any]:
        return await asyncio.gather(
            engine.generate(good), *(engine.generate(r) for r, _ in bad.values()), return_exceptions=True
        )

    results = with_engine(policy, use, memory_gb=pages_gb(policy, 8, 16))
    assert len(results[0].tokens) == 20
    for result, (_, message) in zip(results[1:], bad.values(), strict=True):
        assert isinstance(result, RequestError) and message in str(result), result


def test_cache_exhausted_by_one_sequence(tiny_policy: TinyPolicy) -> None:
    """A response that outgrows the whole cache fails with a clear error; its neighbour finishes."""
    policy = tiny_policy()
    requests = [
        Request("greedy for memory", (5,) * 20, SamplingParams(max_tokens=400), 0),
        Request("modest", (6,) * 20, SamplingParams(max_tokens=30), 1),
    ]

    async def use(engine: NativeEngine) -> list[Any]:
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    failed, fine = with_engine(policy, use, memory_gb=pages_gb(policy, 10, 16))
    assert isinstance(failed, RequestError) and "fill the whole cache" in str(failed)
    assert len(fine.tokens) == 30


@pytest.mark.sentinel
def test_abort_and_cancel_free_their_place(tiny_policy: TinyPolicy) -> None:
    async def use(engine: NativeEngine) -> Completion:
        sampling = SamplingParams(max_tokens=400)
        aborted = asyncio.create_task(engine.generate(Request("a", (5, 6), sampling, 0)))
        cancelled = asyncio.create_task(engine.generate(Request("b", (5, 6), sampling, 0)))
        while engine.stats().generated_tokens < 10:
            await asyncio.sleep(0.001)
        cancelled.cancel()
        await engine.abort("a")
        await engine.abort("never existed")
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        while not engine.scheduler.idle:
            await asyncio.sleep(0.001)
        return await aborted

    done = with_engine(tiny_policy(), use)
    assert done.finish == "abort" and 0 < len(done.tokens) < 400


def test_a_freed_cache_changes_nothing_but_memory(tiny_policy: TinyPolicy) -> None:
    """Paused in the middle of sequences, the cache goes; they go on as if it had not."""
    policy = tiny_policy()
    sampling = SamplingParams(max_tokens=120)
    requests = [Request(f"{i}", (5, 6, 7), sampling, 10 + i, share="x") for i in range(4)]

    async def use(engine: NativeEngine) -> list[Completion]:
        running = [asyncio.create_task(engine.generate(r)) for r in requests]
        while engine.stats().generated_tokens < 20:
            await asyncio.sleep(0.001)
        await engine.pause()
        assert engine.stats().running == 0 and engine.cache.keys == []
        await engine.update_weights(WeightUpdate(1))
        await engine.resume()
        assert len(engine.cache.keys) == policy.layers
        return [await task for task in running]

    freed = with_engine(policy, use, keep_cache=False)
    for a, b in zip(generate(policy, requests), freed, strict=True):
        assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert set(b.versions) == {0, 1}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("architecture", (*ARCHITECTURES, *HYBRIDS))
def test_suspended_and_recomputed_sequences_go_on_as_if_nothing_had_happened(
    architecture: str, tiny_policy: TinyPolicy
) -> None:
    """Suspended in the middle and continued, by the same engine or another, or recomputed in flight: the same tokens.

    But for a draw that falls on the border of two tokens: the same sums are rounded in another order.
    """
    sampling = SamplingParams(max_tokens=60)
    # With seed 5 a draw falls within 4e-8 of the border between two tokens: which one it is, rounding decides.
    requests = [Request(str(i), p, sampling, seed=10 + i) for i, p in enumerate(prompts(6))]
    whole = generate(tiny_policy(architecture), requests, page_size=4)

    async def until(engine: NativeEngine, tokens: int) -> None:
        while engine.stats().generated_tokens < tokens:
            await asyncio.sleep(0.001)

    async def interrupted(engine: NativeEngine) -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        await until(engine, 30)
        await engine.update_weights(WeightUpdate(0, recompute=True))
        await until(engine, 60)
        await engine.suspend()
        return [await task for task in tasks]

    suspended = with_engine(tiny_policy(architecture), interrupted, page_size=4)
    assert {p.finish for p in suspended} == {"suspended"} and all(0 < len(p.tokens) < 60 for p in suspended)
    continued = generate(
        tiny_policy(architecture),
        [replace(r, prior=p.sampled) for r, p in zip(requests, suspended, strict=True)],
        page_size=4,
    )
    different = 0
    for one, other, part in zip(whole, continued, suspended, strict=True):
        assert other.finish == "length" and len(other.tokens) == 60
        assert other.logprobs[: len(part.tokens)] == part.logprobs, "what was sampled is not computed again"
        pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), 60)
        different += same < 60
        torch.testing.assert_close(
            torch.tensor(one.logprobs[:same]), torch.tensor(other.logprobs[:same]), atol=1e-4, rtol=0
        )
    assert different <= 1


def test_recompute_forgets_the_old_weights(tiny_policy: TinyPolicy, tiny_folder: Callable[[str], Path]) -> None:
    """After an update with `recompute`, log-probs are those of the new weights alone; with the old cache, not."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    sampling = SamplingParams(temperature=1.0, max_tokens=120)
    prompt = prompts(1, seed=3)[0] + (7, 8, 9, 10)

    def gap(recompute: bool) -> float:
        policy = tiny_policy("llama")

        async def use(engine: NativeEngine) -> Completion:
            task = asyncio.create_task(engine.generate(Request("r", prompt, sampling, 0)))
            while engine.stats().generated_tokens < 20:
                await asyncio.sleep(0.001)
            await engine.pause()
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.3)
            await engine.update_weights(WeightUpdate(1, recompute=recompute))
            await engine.resume()
            return await task

        done = with_engine(policy, use)
        first = done.versions.index(1)
        assert 20 <= first < 120 and set(done.versions[first:]) == {1}
        tokens = torch.tensor([[*prompt, *done.tokens]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        return float((expected - torch.tensor(done.logprobs))[first:].abs().max())

    assert gap(recompute=True) < 1e-3 < gap(recompute=False)


def test_broken_weights_fail_loudly(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    with torch.no_grad():
        next(policy.model.parameters()).fill_(float("nan"))

    async def run() -> None:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
        try:
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate(Request("r", (5, 6), SamplingParams(), 0))
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(Request("s", (5, 6), SamplingParams(), 0))
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.sentinel
def test_lora_is_served_and_weights_are_shared(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", lora_rank=4)
    request = Request("r", (5, 6, 7), GREEDY, 0)
    before = generate(policy, [request])[0]
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    assert generate(policy, [request])[0].tokens != before.tokens, "the engine must see the trainer's own tensors"
