"""Exact mode: a token's log-prob is the same to the last bit, however it was computed."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_scripts import load_script

from kitae.algorithms.config import AlgorithmConfig
from kitae.config.recipe import load_config
from kitae.engines.base import Completion, EngineStats, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import ConfigError, EngineError, ModelError
from kitae.kept_sets import joined_sets
from kitae.models.config import ModelConfig
from kitae.models.exact import check
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.observe.meter import Meter
from kitae.trainer.base import Column, Conditions
from kitae.trainer.build_worker import reinforced
from kitae.trainer.collective_ops import Alone
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import MicroBatch, pack_rows
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.objectives import PolicyScorer
from kitae.trainer.trainable_model import TrainableModel
from kitae.types import Sample

TinyPolicy = Callable[..., Policy]
DTYPES = ["float32", "bfloat16"]
TEMPERATURE = 0.8


def requests(groups: int = 6, size: int = 4) -> list[Request]:
    rng = random.Random(0)
    asked = []
    for g in range(groups):
        prompt = tuple(rng.randrange(3, 250) for _ in range(rng.choice([1, 9, 16, 50])))
        sampling = [SamplingParams(TEMPERATURE, rng.randrange(2, 24)) for _ in range(size)]
        asked += [Request(f"{g}/{i}", prompt, s, 100 * g + i, share=f"{g}") for i, s in enumerate(sampling)]
    return asked


def generate(policy: Policy, asked: list[Request], **settings: Any) -> tuple[list[Completion], EngineStats]:
    async def run() -> tuple[list[Completion], EngineStats]:
        page = {"page_size": settings.pop("page_size")} if "page_size" in settings else {}
        engine = NativeEngine(policy, EngineConfig(**{"memory_gb": 0.01, **settings}), **page)
        try:
            return await asyncio.gather(*(engine.generate(r) for r in asked)), engine.stats()
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def to_samples(asked: list[Request], done: list[Completion]) -> list[Sample]:
    samples = []
    for i, (r, c) in enumerate(zip(asked, done, strict=True)):
        tokens = np.array(r.prompt_tokens + c.tokens)
        mask = np.arange(len(tokens)) >= len(r.prompt_tokens)
        mu = np.zeros(len(tokens), dtype=np.float32)
        mu[mask] = c.logprobs
        group, length = int(str(r.share)), len(r.prompt_tokens)
        kept = joined_sets([(None, length), (c.kept, len(c.tokens))])
        samples.append(Sample(group, i, tokens, length, mask, mu + 1, {"logp_mu": mu}, kept=kept))
    return samples


def gap(policy: Policy, samples: list[Sample], *, share_prompts: bool = True, **settings: Any) -> float:
    policy.plain = not share_prompts
    algorithm, training = AlgorithmConfig(), TrainingConfig(**settings)
    trainer = LocalTrainer(reinforced(policy, training, algorithm, max_tokens=64, temperature=TEMPERATURE))
    found = asyncio.run(trainer.annotate(samples, [Column.OLD]))
    return max(float(np.abs(s.loss("logp_old") - s.loss("logp_mu")).max()) for s in found)


def with_adapters(policy: Policy) -> Policy:
    """Adapters start as no change at all; here they are one."""
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


CASES = [("llama", 0), ("qwen2", 0), ("qwen3", 4), ("gemma3", 0), ("mistral", 0)]


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "lora"), CASES)
def test_the_trainer_finds_what_the_engine_reported(
    architecture: str, lora: int, dtype: str, tiny_policy: TinyPolicy
) -> None:
    policy = with_adapters(tiny_policy(architecture, dtype=dtype, exact=True, lora_rank=lora))
    asked = requests()
    samples = to_samples(asked, generate(policy, asked)[0])
    assert gap(policy, samples) == 0.0
    assert gap(policy, samples, token_budget=90) == 0.0, "packed otherwise"
    assert gap(policy, samples, share_prompts=False) == 0.0


def test_without_exact_mode_there_is_a_gap(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(dtype="bfloat16")
    asked = requests()
    assert gap(policy, to_samples(asked, generate(policy, asked)[0])) > 1e-3


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rollout_does_not_depend_on_the_others(dtype: str, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen2", dtype=dtype, exact=True)
    asked = requests(16, 4)[:58]  # with those below, 64
    filtered = SamplingParams(1.0, 20, top_p=0.9, top_k=40, min_p=0.01)
    asked += [Request(f"f{i}", (5, 6, i + 7), filtered, i) for i in range(3)]
    asked += [Request(f"g{i}", (5, 6, i + 7), SamplingParams(0.0, 20), i) for i in range(3)]

    def results(asked: list[Request], **settings: Any) -> dict[str, tuple[Any, ...]]:
        return {c.id: (c.tokens, c.logprobs) for c in generate(policy, asked, **settings)[0]}

    together = results(asked)
    assert results(asked, max_batch=3) == together
    assert results(asked, prefill_tokens=16, page_size=5) == together, "prompts computed one by one"
    for alone in (asked[17], asked[-1], asked[-6]):
        assert results([alone]) == {alone.id: together[alone.id]}
    page = 2 * policy.layers * policy.kv_heads * 4 * policy.head_dim * (4 if dtype == "float32" else 2)
    done, stats = generate(policy, asked, page_size=4, memory_gb=110 * page / 2**30)
    assert stats.preemptions > 0
    assert {c.id: (c.tokens, c.logprobs) for c in done} == together, "computed again after preemption"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_gradients_are_those_of_the_plain_model(architecture: str, tiny_policy: TinyPolicy) -> None:
    asked = requests(3, 3)
    samples = to_samples(asked, generate(tiny_policy(architecture), asked)[0])
    grads = []
    for exact in (True, False):
        policy = tiny_policy(architecture, exact=exact)
        training = TrainingConfig(token_budget=120)
        trained = TrainableModel(_Objective(policy, training, TEMPERATURE), training, Alone(), total_updates=1)
        trained.forward_backward(pack_rows(samples, training, policy.device, policy.dtype)[1], Conditions())
        grads.append({n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 10
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=3e-5)


class _Objective(PolicyScorer):
    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> torch.Tensor:
        logp_N, entropy_N = self.score(micro, entropy_grad=True)
        return -(logp_N * (1 + micro.sample_N)).sum() + 0.1 * entropy_N.sum()


def test_the_probe_finds_a_module_that_looks_at_its_neighbours(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(exact=True)
    layer: Any = policy.base.get_decoder().layers[0].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(x) + x.mean(-2, keepdim=True)
    with pytest.raises(ModelError, match=r"a probe computed in several passes differs by .* from the same alone"):
        check(policy)


def test_a_copy_of_an_exact_policy_uses_its_own_weights(tiny_policy: TinyPolicy) -> None:
    from kitae.trainer.reference_policy import _frozen_copy

    policy = tiny_policy(exact=True)
    copy = _frozen_copy(policy)
    assert copy.exact
    tokens = torch.arange(3, 30, device=policy.device)
    before = copy.score(tokens)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(copy.score(tokens), before) and not torch.equal(policy.score(tokens), before)


RECIPE = """
[model]
exact = true
device = "{device}"
[data]
task = "arithmetic"
"""


@pytest.mark.parametrize(
    ("setting", "device", "complaint"),
    [
        ("model.plain=true", "cpu", "kernels of its own, got model.plain = true"),
        (
            "engine.kind=process",
            "auto",
            "model.exact needs engine.kind = 'native' on a CPU, got 'process'",
        ),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(setting: str, device: str, complaint: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(device=device))
    assert load_config(recipe).model.exact
    with pytest.raises(ConfigError, match=complaint):
        load_config(recipe, [setting])
    assert load_config(recipe, [setting, "model.exact=false"])


def test_a_process_of_its_own_is_exact_on_a_gpu(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(device="cuda"))
    assert load_config(recipe, ["engine.kind=process"]).model.exact


def test_a_plain_engine_refuses_an_exact_policy(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(EngineError, match="kernels of its own, got a plain engine"):
        NativeEngine(tiny_policy(exact=True), EngineConfig(memory_gb=0.01), plain=True)


@pytest.mark.parametrize(
    ("kind", "extra", "complaint"),
    [
        ("Granite", {"logits_scaling": 2.0}, "its head scales or caps the logits"),
        ("Mixtral", {"num_local_experts": 2}, r"model.layers.0.mlp.* has '"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depend on the len"),
    ],
)
def test_models_that_are_not_covered_are_refused(
    kind: str, extra: dict[str, Any], complaint: str, tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    import shutil

    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, **extra,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in tiny_folder("llama").glob("*token*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ModelError, match=complaint):
        load_policy(ModelConfig(path=str(tmp_path), dtype="float32", device="cpu", exact=True))


def test_layers_with_heads_of_their_own_are_refused(tmp_path: Path) -> None:
    load_script("small_models").make_small("gemma4_text", tmp_path)
    with pytest.raises(ModelError, match="heads of keys differ from layer to layer"):
        load_policy(ModelConfig(path=str(tmp_path), dtype="float32", device="cpu", exact=True))
