"""The gradient of a step: equal to plain autograd, and independent of how the step is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from short_settings import algorithm_of, algorithm_with
from trainer_workers import column_of, forward_backward, make_worker, weighted
from transformers import AutoModelForCausalLM

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.control import Control
from kitae.models.policy import Policy
from kitae.models.tiny import ARCHITECTURES, HYBRIDS
from kitae.trainer.base import Role
from kitae.trainer.config import TrainingConfig
from kitae.types import Sample

TinyPolicy = Callable[..., Policy]
TEMPERATURE = 0.8


def make_samples(shapes: list[tuple[int, int, int]], seed: int = 0, gaps: bool = False) -> list[Sample]:
    """(group, prompt length, response length) each; `gaps` puts observation tokens into the responses."""
    rng = np.random.default_rng(seed)
    prompts: dict[tuple[int, int], Any] = {}
    samples = []
    for index, (group, prompt, response) in enumerate(shapes):
        start = prompts.setdefault((group, prompt), rng.integers(3, 250, prompt))
        tokens = np.concatenate([start, rng.integers(3, 250, response)])
        mask = np.arange(len(tokens)) >= prompt
        if gaps and response > 3:
            mask[prompt + 1 : prompt + 3] = False
        mu = np.where(mask, rng.normal(-5, 0.3, len(tokens)), 0).astype(np.float32)
        advantage = np.where(mask, rng.normal(), 0).astype(np.float32)
        blank = np.zeros(len(tokens), dtype=np.float32)
        columns = {"logp_mu": mu, "version": blank, "score": blank, "advantage": advantage}
        samples.append(Sample(group, index, tokens, prompt, mask, blank, columns))
    return samples


def gradient(
    policy: Policy, samples: list[Sample], algorithm: AlgorithmConfig, *, share_prompts: bool = True, **config: Any
) -> dict[str, torch.Tensor]:
    policy.model.zero_grad(set_to_none=True)
    policy.plain = not share_prompts
    worker = make_worker(policy, TrainingConfig(**config), algorithm, temperature=TEMPERATURE)
    forward_backward(worker, weighted(samples, algorithm), coefficients=Control(algorithm).coefficients)
    optimizer = worker.trained[Role.POLICY].optimizer
    found = {n: m.grad.clone() for n, m in zip(optimizer.names, optimizer.masters, strict=True) if m.grad is not None}
    assert found
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1.0, b[name].abs().max().item())
        assert (a[name] - b[name]).abs().max().item() <= tolerance * scale, name


SHAPES = [(0, 5, 3), (0, 5, 9), (1, 12, 1), (1, 12, 7), (1, 12, 7), (2, 30, 20), (0, 5, 2), (3, 1, 4)]


@pytest.mark.parametrize("architecture", (*ARCHITECTURES, *HYBRIDS))
def test_logprobs_and_gradient_equal_plain_autograd(
    architecture: str, tiny_policy: TinyPolicy, tiny_folder: Callable[[str], Path]
) -> None:
    samples = make_samples(SHAPES, gaps=True)
    algorithm = algorithm_with(preset="grpo", entropy_coef=0.01)
    policy = tiny_policy(architecture)
    got = gradient(policy, samples, algorithm)
    ours = column_of(make_worker(policy, temperature=TEMPERATURE), samples)

    model = AutoModelForCausalLM.from_pretrained(
        tiny_folder(architecture), dtype=torch.float32, attn_implementation="eager"
    )
    total = torch.zeros(())
    for s, logp_T in zip(weighted(samples, algorithm), ours, strict=True):
        logp_all = torch.log_softmax(model(torch.tensor(s.tokens_T[None])).logits[0, :-1] / TEMPERATURE, -1)
        mask = torch.tensor(s.mask_T[1:])
        logp = logp_all.gather(1, torch.tensor(s.tokens_T[1:, None]))[:, 0]
        torch.testing.assert_close(torch.tensor(logp_T[1:])[mask], logp.detach()[mask], atol=1e-4, rtol=0)
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        correction = (logp.detach() - torch.tensor(s.columns["logp_mu"][1:])).exp().clamp(max=2.0)
        loss = -torch.tensor(s.columns["advantage"][1:]) * (logp - logp.detach()).exp() * correction - 0.01 * entropy
        total = total + (loss * torch.tensor(s.weight_T[1:]))[mask].sum()
    total.backward()
    assert_same(got, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_gradient_does_not_depend_on_the_cut(tiny_policy: TinyPolicy, data: st.DataObject) -> None:
    """Micro-batch budget, order, prompt sharing and activation checkpointing change nothing."""
    shapes = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([2, 9]), st.integers(1, 12)), min_size=2, max_size=8)
    )
    aggregation = data.draw(
        st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length", "prompt-mean"])
    )
    length = {"aggregation_length": 64} if aggregation == "constant-length" else {}
    samples = make_samples(shapes, gaps=data.draw(st.booleans()))
    algorithm = algorithm_of({"preset": "grpo", "aggregation": aggregation, **length})
    policy = tiny_policy()
    whole = gradient(policy, samples, algorithm, token_budget=10_000)
    shuffled = data.draw(st.permutations(samples))
    cut = gradient(
        policy,
        shuffled,
        algorithm,
        token_budget=data.draw(st.integers(1, 60)),
        share_prompts=data.draw(st.booleans()),
        checkpoint_activations=data.draw(st.booleans()),
    )
    assert_same(cut, whole)


def test_old_logprobs_make_the_ratio(tiny_policy: TinyPolicy) -> None:
    """With stored old log-probs far away, clipped tokens lose their gradient."""
    policy = tiny_policy()
    samples = make_samples([(0, 4, 5), (0, 4, 6)])
    logp = column_of(make_worker(policy, temperature=TEMPERATURE), samples)
    positive = [s.with_columns(advantage=s.spread(np.float32(1))) for s in samples]
    far = [s.with_columns(logp_old=old - 1.0) for s, old in zip(positive, logp, strict=True)]  # ratio e > 1.2
    for name, grad in gradient(policy, far, AlgorithmConfig(preset="grpo")).items():
        assert not grad.any(), name
    near = [s.with_columns(logp_old=old) for s, old in zip(positive, logp, strict=True)]
    assert_same(
        gradient(policy, near, AlgorithmConfig(preset="grpo")),
        gradient(policy, positive, AlgorithmConfig(preset="grpo")),
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_bfloat16_gradients_are_as_close_to_fp32_as_those_of_plain_torch(
    architecture: str, tiny_policy: TinyPolicy
) -> None:
    """Fused layers whose products add into the masters, against the model's own modules."""
    samples = make_samples(SHAPES)
    algorithm = algorithm_with(preset="grpo", kl_coef=0.0)
    exact = tiny_policy(architecture, plain=True)
    for p in exact.model.parameters():
        p.data = p.data.bfloat16().float()
    expected = gradient(exact, samples, algorithm)

    def error(plain: bool) -> float:
        policy = tiny_policy(architecture, dtype="bfloat16", plain=plain)
        policy.plain = False  # rows are packed alike
        worker = make_worker(policy, TrainingConfig(token_budget=60), algorithm, temperature=TEMPERATURE)
        forward_backward(worker, weighted(samples, algorithm))
        optimizer = worker.trained[Role.POLICY].optimizer
        masters = dict(zip(optimizer.names, optimizer.masters, strict=True))
        assert all(p.grad is None for p in optimizer.parameters)
        assert masters.keys() == expected.keys()
        gaps = [(m.grad - expected[n]).pow(2).sum() for n, m in masters.items() if m.grad is not None]
        return float((torch.stack(gaps).sum() / sum(g.pow(2).sum() for g in expected.values())).sqrt())

    assert error(plain=False) < 1.2 * error(plain=True) + 1e-3
