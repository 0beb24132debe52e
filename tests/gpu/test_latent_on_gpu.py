"""Latent attention on a GPU: one row for a token in the cache, in CUDA graphs, with drafts, and shared prompts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import load_script

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
make_small = load_script("small_models").make_small
WIDE = {  # the heads of DeepSeek-V3
    "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


async def sample(policy: Policy, draft_tokens: int) -> list[tuple[Request, Completion]]:
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.1), draft_tokens=draft_tokens)
    prompts = [tuple((7 * i + j * j) % 250 + 3 for j in range(5 + 31 * i)) for i in range(3)]
    requests = [
        Request(f"{i}/{j}", p, SamplingParams(max_tokens=4 + 3 * j), 30 * i + j, share=f"{i}")
        for i, p in enumerate(prompts)
        for j in range(8)
    ]
    try:
        return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))
    finally:
        await engine.close()


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("settings", [{}, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "hy_v4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_those_of_keys_and_values(
    dtype: str, family: str, settings: dict[str, Any], draft_tokens: int, tmp_path: Path
) -> None:
    make_small(family, tmp_path, **settings)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype=dtype, device="cuda"))
    gaps = []
    for request, done in asyncio.run(sample(policy, draft_tokens)):
        row = torch.tensor(request.prompt_tokens + done.tokens, device="cuda")
        with torch.no_grad():
            expected = policy.score(row)[len(request.prompt_tokens) - 1 :].cpu()
        gaps.append((torch.tensor(done.logprobs) - expected).abs())
    assert torch.cat(gaps).mean() < (1e-4 if dtype == "float32" else 0.05)
