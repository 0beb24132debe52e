"""The compiled decoder on packed weights against the model's own modules, and after weight updates."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.cache import KVCache
from kitae.engines.native.cpu import CpuRunner, PackedDecoder
from kitae.engines.native.engine import NativeEngine
from kitae.kernels.cpu import amx
from kitae.models.attention import SelfAttention
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny

pytestmark = pytest.mark.skipif(not amx.available(), reason="no AMX")
COVERED = ("llama", "qwen2", "qwen3", "mistral")
Load = Callable[..., Policy]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("packed")

    def get(architecture: str, dtype: str = "bfloat16", hidden: int = 128, **settings: object) -> Policy:
        path = Path(folder / f"{architecture}-{hidden}")
        if not path.exists():
            make_tiny(path, architecture, hidden=hidden)
        return load_policy(ModelConfig.model_validate({"path": str(path), "dtype": dtype, "device": "cpu", **settings}))

    return get


def decoder_of(policy: Policy) -> PackedDecoder:
    decoder = PackedDecoder.of(policy, KVCache(policy, 0.02, 16))
    assert decoder is not None
    return decoder


def own_states(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return policy.hidden(tokens, positions, SelfAttention(positions)).float()


@torch.inference_mode()
def in_rows(decoder: PackedDecoder, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """The last `steps` tokens one by one, the others before them at once, on pages in disorder."""
    pages = torch.tensor([[5, 2, 9, 0, 7, 3]], dtype=torch.int32)
    positions = torch.arange(len(tokens))
    slots = pages[0, positions // 16].long() * 16 + positions % 16
    parts = [range(len(tokens) - steps), *([t] for t in range(len(tokens) - steps, len(tokens)))]
    rows = [torch.tensor(list(part)) for part in parts]
    return torch.cat(
        [decoder.rows(tokens[r], positions[r], slots[r], torch.zeros(len(r), dtype=torch.int64), pages) for r in rows]
    ).float()


@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("architecture", COVERED)
def test_it_is_as_close_to_fp32_as_the_modules_are(architecture: str, hidden: int, load: Load) -> None:
    policy = load(architecture, hidden=hidden)
    tokens = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(1))
    exact = load(architecture, "float32", hidden=hidden)
    with torch.no_grad():
        for p, q in zip(exact.model.parameters(), policy.model.parameters(), strict=True):
            p.copy_(q)
    truth, plain, got = own_states(exact, tokens), own_states(policy, tokens), in_rows(decoder_of(policy), tokens, 20)
    assert (got - truth).norm() < 1.2 * (plain - truth).norm() + 1e-3 * truth.norm()


def test_long_prompts_go_layer_by_layer(load: Load) -> None:
    policy = load("llama")
    decoder = decoder_of(policy)
    tokens = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(70)
    with torch.inference_mode():
        got = decoder.hidden(tokens, positions, positions, SelfAttention(positions)).float()
    torch.testing.assert_close(got, in_rows(decoder, tokens, 1), rtol=0.1, atol=0.15)


def test_what_it_does_not_cover_runs_its_own_modules(load: Load) -> None:
    for policy in (load("gemma3"), load("llama", "float32"), load("llama", hidden=80), load("llama", lora_rank=4)):
        runner = CpuRunner(policy, KVCache(policy, 0.02, 16))
        assert runner.decoder is None
        assert generate(policy, "a")[0].tokens


def generate(policy: Policy, name: str) -> list[Completion]:
    return asyncio.run(_generate(policy, name))


async def _generate(policy: Policy, name: str) -> list[Completion]:
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.02))
    found = await asyncio.gather(*(engine.generate(r) for r in requests(name)))
    await engine.close()
    return found


def requests(name: str) -> list[Request]:
    sampling = SamplingParams(max_tokens=12)
    return [Request(f"{name}/{i}", tuple(range(5, 40 + i // 2)), sampling, seed=i, share=f"{i // 2}") for i in range(6)]


@pytest.mark.parametrize("move", [False, True], ids=["in place", "moved"])
def test_no_packed_copy_outlives_a_weight_update(move: bool, load: Load) -> None:
    """The same weights must give the same tokens and log-probs, whatever was served before."""
    served, fresh = load("llama"), load("llama")

    async def across_updates() -> list[list[Completion]]:
        engine = NativeEngine(served, EngineConfig(memory_gb=0.02))
        assert isinstance(engine.runner, CpuRunner) and engine.runner.decoder is not None
        found = [await asyncio.gather(*(engine.generate(r) for r in requests("before")))]
        for version in (1, 2):
            change(served, version, move)
            await engine.update_weights(WeightUpdate(version))
            found.append(await asyncio.gather(*(engine.generate(r) for r in requests(str(version)))))
        await engine.close()
        return found

    found = asyncio.run(across_updates())
    for version, got in enumerate(found):
        if version:
            change(fresh, version, False)
        expected = generate(fresh, "fresh")
        assert [(c.tokens, c.logprobs) for c in got] == [(c.tokens, c.logprobs) for c in expected]
    assert found[0][0].logprobs != found[1][0].logprobs != found[2][0].logprobs


def change(policy: Policy, version: int, move: bool) -> None:
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_((torch.randn(p.shape, generator=generator) * 0.02).to(p.dtype))
            if move:
                p.data = p.data.clone()


def test_the_copies_are_as_large_as_the_weights(load: Load) -> None:
    policy = load("llama")
    matrices = [p for p in policy.model.parameters() if p.dim() == 2]
    size = sum(p.numel() * 2 for p in matrices)
    assert size <= decoder_of(policy).packed_bytes < size * 1.1
