"""The same code on one GPU: engine against generate, gradients against the CPU, and a training run."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from short_settings import algorithm_with
from transformers import AutoModelForCausalLM

from kitae.engines.base import Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.models.tiny import ARCHITECTURES

sys.path += [str(Path(__file__).parents[1] / part) for part in ("integration", "unit/trainer", "unit/algorithms")]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TinyPolicy = Callable[..., Policy]


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_and_logprobs_equal_the_model(
    architecture: str, tiny_policy: TinyPolicy, tiny_folder: Callable[[str], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(architecture), dtype=torch.float32).cuda()
    prompt = tuple(range(5, 35))
    requests = [
        Request("greedy", prompt, SamplingParams(0.0, 40), 0),
        *(Request(f"{i}", prompt, SamplingParams(0.8, 40, top_p=1.0), i, share="g") for i in range(4)),
        Request("filtered", prompt, SamplingParams(0.8, 40, top_p=0.9, top_k=50, min_p=0.01), 9),
    ]

    async def run() -> list[object]:
        engine = NativeEngine(tiny_policy(architecture, device="cuda"), EngineConfig(memory_gb=0.1))
        try:
            return await asyncio.gather(*(engine.generate(r) for r in requests))
        finally:
            await engine.close()

    greedy, *sampled, _ = asyncio.run(run())
    rows = torch.tensor([prompt], device="cuda")
    expected = model.generate(rows, do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    assert list(greedy.tokens) == expected[0, len(prompt) :].tolist()
    for done in sampled:
        logits = model(torch.tensor([prompt + done.tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits / 0.8, -1).gather(1, torch.tensor(done.tokens, device="cuda")[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), logp.cpu(), atol=1e-4, rtol=0)


def test_gradient_equals_the_cpu(tiny_policy: TinyPolicy) -> None:
    from test_gradient import SHAPES, assert_same, gradient, make_samples

    samples = make_samples(SHAPES, gaps=True)
    algorithm = algorithm_with(preset="grpo", entropy_coef=0.01)
    on_gpu = {n: g.cpu() for n, g in gradient(tiny_policy(device="cuda"), samples, algorithm).items()}
    assert_same(on_gpu, gradient(tiny_policy(device="cpu"), samples, algorithm), 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reward_rises(dtype: str, tmp_path: Path) -> None:
    from harness import rows, run_toy

    result = run_toy(tmp_path, f"model.dtype={dtype}", "model.device=cuda")
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert steps[0]["reward"] < 0.2 and steps[-1]["reward"] > 0.75
    if dtype == "float32":
        assert max(r["logp_gap_max"] for r in steps) < 1e-3


@pytest.mark.parametrize("preset", ["ppo", "gspo", "reinforce++", "remax", "minirl", "gmpo", "entropy-control", "opsm"])
def test_methods_learn(preset: str, tmp_path: Path) -> None:
    """Those with a critic, a reference, a greedy baseline, sums over sequences, or an entropy gradient."""
    from harness import HERE, rows, run_toy

    verifier = f"verifier.name={HERE / 'toy.py'}:any_digit"
    updates = "training.minibatches=1" if preset == "remax" else "training.minibatches=2"
    settings = ["model.device=cuda", f"algorithm.preset={preset}", "training.steps=17", "eval.prompts=0", updates]
    rewards = [r["reward"] for r in rows(run_toy(tmp_path, verifier, *settings).folder)]
    assert rewards[0] < 0.6 and sum(rewards[-4:]) / 4 >= 0.85, rewards


def test_token_stages_equal_the_cpu() -> None:
    """Loss and gradient of every preset on the fixed batch."""
    from golden import golden_row

    from kitae.algorithms.presets import PRESETS

    for preset in PRESETS:
        here, there = golden_row(preset), golden_row(preset, "cuda")
        assert there["loss"] == pytest.approx(here["loss"], abs=2e-5), preset
        for key, gradient in here["gradient"].items():
            assert there["gradient"][key] == pytest.approx(gradient, abs=2e-5), (preset, key)
