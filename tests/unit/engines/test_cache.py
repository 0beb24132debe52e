"""The pages of the cache; in 8 bits: half the memory, numbers off by half a unit at most, and all else as before."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import load_script
from test_native_engine import TinyPolicy, generate, pages_gb, prompts, with_engine

from kitae.config.recipe import parse_config
from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.page_cache import KVCache, Pages
from kitae.errors import ConfigError, EngineError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.routing import RouterShape

make_small = load_script("small_models").make_small


def made(*, heads: int = 2, size: int = 4, dim: int = 8) -> Pages:
    nothing = torch.full((6, heads, size), float("nan"))
    return Pages(torch.zeros(6, heads, size, dim, dtype=torch.int8), nothing, torch.float32)


def test_numbers_differ_by_half_a_unit_at_most() -> None:
    pages, rows = made(), torch.randn(7, 2, 8) * torch.logspace(-6, 4, 7)[:, None, None]
    page, slot = torch.arange(7) // 4, torch.arange(7) % 4
    pages.write(page, slot, rows)
    unit = rows.abs().amax(-1, keepdim=True) / 127
    assert ((pages.at(page, slot) - rows).abs() <= 0.501 * unit).all()
    assert torch.equal(pages.read([0, 1]).transpose(1, 2).flatten(0, 1)[:7], pages.at(page, slot))


def test_nothing_but_zeros_stays_zeros() -> None:
    pages, here = made(), torch.tensor([2])
    pages.write(here, here, torch.zeros(1, 2, 8))
    assert not pages.at(here, here).any()


def test_twice_the_pages_for_the_same_memory(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    dim, wide = policy.head_dim, policy.dtype.itemsize
    few, many = (KVCache(policy, 0.01, 16, eight_bits=bits).pages for bits in (False, True))
    assert many / few == pytest.approx(dim * wide / (dim + 4), rel=0.01)


def test_layers_differ_in_heads_and_their_size(tmp_path: Path) -> None:
    """MiMo-V2-Flash has twice the heads in layers with windows, Gemma 4 wider ones in the others. Sequences that a full
    cache pushes out come back with all of them."""
    for family, sizes in (("mimo_v2_flash", [(2, 16), (4, 16), (2, 16)]), ("gemma4_text", [(2, 16), (2, 32)] * 2)):
        make_small(family, tmp_path / family)
        policy = load_policy(ModelConfig(path=str(tmp_path / family), dtype="float32", device="cpu"))
        cache = KVCache(policy, 0.01, 16)
        assert cache.sizes == sizes and not cache.is_even
        assert [pages.numbers.shape[1::2] for pages in cache.values] == [torch.Size(size) for size in sizes]
        assert cache.page_bytes == 4 * 16 * 2 * sum(heads * dim for heads, dim in sizes)
        requests = [Request(f"{i}", p, SamplingParams(max_tokens=40), i) for i, p in enumerate(prompts(4))]
        together = {done.id: done.tokens for done in generate(policy, requests)}
        room = 16.01 * cache.page_bytes / 2**30

        async def crowded(engine: NativeEngine, requests: list[Request] = requests, known: Any = together) -> None:
            found = await asyncio.gather(*map(engine.generate, requests))
            assert {done.id: done.tokens for done in found} == known
            assert engine.stats().preemptions > 0

        with_engine(policy, crowded, memory_gb=room, host_memory_gb=0.01)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "mixtral"])
def test_logprobs_are_near_those_of_a_full_forward_pass(architecture: str, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(architecture)
    requests = [
        Request(f"{i}/{j}", p, SamplingParams(max_tokens=30), 10 * i + j, share=f"{i}")
        for i, p in enumerate(prompts(4))
        for j in range(3)
    ]
    gaps = []
    for request, done in zip(requests, generate(policy, requests, cache_dtype="int8"), strict=True):
        expected = policy.score(torch.tensor(request.prompt_tokens + done.tokens))[len(request.prompt_tokens) - 1 :]
        gaps.append((torch.tensor(done.logprobs) - expected).abs())
    assert 1e-6 < torch.cat(gaps).mean() < 0.02


@pytest.mark.thorough
def test_tokens_do_not_depend_on_batch_order_or_preemption(tiny_policy: TinyPolicy) -> None:
    """Prompts and tails of those that were preempted are computed with what decoding steps would read."""
    policy = tiny_policy("llama")
    requests = [
        Request(f"{i}/{j}", p, SamplingParams(max_tokens=50), 10 * i + j, share=f"{i}")
        for i, p in enumerate(prompts(6))
        for j in range(4)
    ]
    together = {c.id: c.tokens for c in generate(policy, requests, cache_dtype="int8")}

    async def crowded(engine: NativeEngine) -> int:
        for c in await asyncio.gather(*(engine.generate(r) for r in reversed(requests))):
            assert c.tokens == together[c.id], c.id
        return engine.stats().preemptions

    memory = pages_gb(policy, 40, 8) * (policy.head_dim + 4) / (4 * policy.head_dim)
    assert with_engine(policy, crowded, memory_gb=memory, page_size=8, max_batch=9, cache_dtype="int8") > 0


def test_memory_given_back_and_taken_again(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("mixtral")
    cache = KVCache(policy, 0.01, 16, RouterShape.of(policy.model), eight_bits=True)
    cache.free()
    assert cache.keys == [] and cache.experts is None
    cache.allocate()
    assert len(cache.keys) == policy.layers and cache.keys[0].scales is not None
    here = torch.tensor([0])
    cache.values[1].write(here, here, torch.ones(1, policy.kv_heads, policy.head_dim))
    cache.copy_pages([0], [3])
    assert torch.equal(cache.values[1].at(here + 3, here), torch.ones(1, policy.kv_heads, policy.head_dim))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model": {"exact": True, "path": "x"}, "engine": {"cache_dtype": "int8"}}, "model.exact needs engine.cache_"),
        ({"engine": {"kind": "vllm", "urls": ["http://localhost:1"], "cache_dtype": "int8"}}, "engine.cache_dtype is"),
        ({"engine": {"cache_dtype": "int4"}}, "engine.cache_dtype"),
    ],
)
def test_what_is_refused(settings: dict[str, dict[str, object]], complaint: str) -> None:
    whole = {"model": {"path": "x"}, "data": {"task": "sort"}, "verifier": {"name": "exact"}, **settings}
    with pytest.raises(ConfigError, match=complaint):
        parse_config(whole)


def test_it_is_off_by_default() -> None:
    assert EngineConfig().cache_dtype == "model"


def test_an_exact_policy_refuses_eight_bits(tiny_policy: TinyPolicy) -> None:
    """Also where no recipe was checked: its kernels would take them for floats, and read beyond the cache."""
    config = EngineConfig(memory_gb=0.01, cache_dtype="int8")
    with pytest.raises(EngineError, match=r"an exact policy needs .* = 'model', got 'int8'"):
        NativeEngine(tiny_policy("llama", exact=True), config)
