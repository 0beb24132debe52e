"""Latent attention keeps one row for a token, and gives what the model gives from keys and values of all heads."""

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from benchmark_scripts import load_script
from test_native_engine import generate, prompts, with_engine

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.native.engine import NativeEngine
from kitae.engines.native.page_cache import KVCache
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.study.model_shape import read_model

make_small = load_script("small_models").make_small
FAMILIES = ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu", "longcat_flash", "hy_v4")
Load = Callable[..., Policy]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def folder(family: str) -> Path:
        made: Path = make_small(family, tmp_path_factory.mktemp(family))
        return made

    def get(family: str, **settings: object) -> Policy:
        values = {"path": str(folder(family)), "dtype": "float32", "device": "cpu", **settings}
        return load_policy(ModelConfig.model_validate(values))

    return get


def asked(count: int) -> list[Request]:
    return [
        Request(f"{i}/{j}", p, SamplingParams(max_tokens=40), 10 * i + j, share=f"{i}")
        for i, p in enumerate(prompts(count))
        for j in range(2)
    ]


def farthest(policy: Policy, requests: list[Request], found: list[Completion]) -> float:
    """How far log-probs are from those of a pass that makes keys and values."""
    most = 0.0
    for request, done in zip(requests, found, strict=True):
        expected = policy.score(torch.tensor(request.prompt_tokens + done.tokens))[len(request.prompt_tokens) - 1 :]
        most = max(most, float((torch.tensor(done.logprobs) - expected).abs().max()))
    return most


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_keys_and_values(family: str, plain: bool, load: Load) -> None:
    policy, requests = load(family), asked(4)
    latent = KVCache(policy, 0.01, 16)
    assert set(latent.sizes) == {(1, 16 + 8)} and all(latent.latents)
    assert latent.page_bytes == len(latent.sizes) * 16 * 24 * 4
    assert farthest(policy, requests, generate(policy, requests, plain=plain)) < 1e-4


@pytest.mark.parametrize("eight_bits", [False, True])
def test_the_memory_is_predicted(eight_bits: bool, load: Load) -> None:
    for family in ("deepseek_v3", "llama"):
        policy = load(family)
        shape = read_model(policy.source)
        assert shape is not None
        kept = KVCache(policy, 0.01, 16, eight_bits=eight_bits)
        assert kept.page_bytes == 16 * shape.cache_bytes(4, eight_bits=eight_bits)


def test_what_comes_back_from_the_host_or_is_computed_again(load: Load) -> None:
    policy, requests = load("deepseek_v3"), asked(5)
    together = {done.id: done.tokens for done in generate(policy, requests)}

    async def crowded(engine: NativeEngine) -> None:
        found = await asyncio.gather(*map(engine.generate, requests))
        assert {done.id: done.tokens for done in found} == together
        assert engine.stats().preemptions > 0
        assert farthest(policy, requests, list(found)) < 1e-4

    room = 16.01 * KVCache(policy, 0.01, 16).page_bytes / 2**30
    for host in (0.0, 0.01):
        with_engine(policy, crowded, memory_gb=room, host_memory_gb=host)


def test_rows_of_8_bits(load: Load) -> None:
    policy, requests = load("deepseek_v3"), asked(4)
    assert 1e-6 < farthest(policy, requests, generate(policy, requests, cache_dtype="int8")) < 0.3


def test_projections_with_adapters_keep_keys_and_values(load: Load) -> None:
    """Their products would be those of the weights below."""
    policy, requests = load("minicpm3", lora_rank=4, lora_targets="kv_b_proj"), asked(3)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.3)
    cache = KVCache(policy, 0.01, 16)
    assert set(cache.sizes) == {(4, 24)} and not any(cache.latents)
    assert farthest(policy, requests, generate(policy, requests)) < 1e-4


def test_keys_that_are_made_otherwise_are_kept(load: Load) -> None:
    policy = load("deepseek_v3")
    attention = policy.decoder.layers[1].self_attn  # type: ignore[attr-defined]
    made = attention.expand_kv

    def other(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = made(*given)
        return keys, 2 * values

    attention.expand_kv = other
    cache = KVCache(policy, 0.01, 16)
    assert [latent is not None for latent in cache.latents] == [True, False]
    requests = asked(3)
    assert farthest(policy, requests, generate(policy, requests)) < 1e-4
