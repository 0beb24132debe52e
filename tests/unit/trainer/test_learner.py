"""What surrounds the trainer: the reference, the critic, and the order in which a step of learning uses them."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kitae.algorithms.objective import Objective
from kitae.trainer.critic import Critic, value_loss
from kitae.trainer.trainer import Trainer
from test_gradient import SHAPES, make_samples

from kitae.algorithms.config import AlgorithmConfig
from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.trainer.config import TrainingConfig
from kitae.trainer.learner import Learner
from kitae.trainer.reference import Reference
from kitae.types import Batch, Group, Message, Prompt, Rollout, Sample, Score, Segment

TinyPolicy = Callable[..., Policy]
TRAINING = TrainingConfig(steps=10, lr=1e-2)


def move(policy: Policy, by: float = 0.05) -> None:
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).to(p.device))


def reference_of(policy: Policy, **choices: Any) -> Reference:
    algorithm = AlgorithmConfig(kl_coef=0.1, **{"reference": "frozen", **choices})
    return Reference(policy, algorithm, TRAINING, temperature=1.0)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["copy", "adapters"])
def test_a_frozen_reference_stays_the_initial_model(settings: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(**settings)
    samples = make_samples(SHAPES)
    trainer = Trainer(policy, TRAINING, temperature=1.0)
    reference = reference_of(policy)
    before = trainer.logprobs(samples)
    move(policy)
    reference.finish_step(400)
    for initial, held, moved in zip(before, reference.logprobs(samples), trainer.logprobs(samples), strict=True):
        np.testing.assert_allclose(held, initial, atol=1e-5)
        assert np.abs(moved - initial).max() > 1e-3


def test_a_reference_shares_what_is_not_trained_and_nothing_else(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(lora_rank=4)
    mine = set(reference_of(policy)._policy.model.parameters())
    for name, parameter in policy.model.named_parameters():
        assert (parameter in mine) == (not parameter.requires_grad) == ("lora_" not in name)
    assert not set(tiny_policy().model.parameters()) & mine


@pytest.mark.parametrize("settings", [{}, {"fuse": False}, {"exact": True}], ids=["fused", "plain", "exact"])
def test_the_reference_is_computed_while_the_engine_samples(settings: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    """Every token of the engine is the policy's, not the reference's, whatever the trainer's thread does meanwhile."""
    policy = tiny_policy(lora_rank=4, **settings)
    reference = reference_of(policy)
    move(policy)
    samples = make_samples(SHAPES)

    async def run() -> list[Completion]:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.02))
        ended = threading.Event()

        def keep_computing() -> None:
            while not ended.is_set():
                reference.logprobs(samples)

        computing = asyncio.create_task(asyncio.to_thread(keep_computing))
        sampling = SamplingParams(max_tokens=200)
        try:
            return await asyncio.gather(*(engine.generate(Request(str(i), (5, 7 + i), sampling, i)) for i in range(8)))
        finally:
            ended.set()
            await computing
            await engine.close()

    for i, done in enumerate(asyncio.run(asyncio.wait_for(run(), 120))):
        expected = policy.score(torch.tensor([5, 7 + i, *done.tokens], device=policy.device))[1:]
        np.testing.assert_allclose(done.logprobs, expected.cpu().numpy(), atol=1e-4)


def test_a_reference_that_moves(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    policy = tiny_policy()
    start = [p.detach().clone() for p in policy.model.parameters()]
    ema = reference_of(policy, reference="ema", reference_every=2, reference_mix=0.25)
    reset = reference_of(policy, reference="reset", reference_every=3)
    move(policy)
    for step in (1, 2, 3):
        ema.finish_step(step)
        reset.finish_step(step)
    for p, initial, mixed, taken in zip(
        policy.model.parameters(), start, ema._policy.model.parameters(), reset._policy.model.parameters(), strict=True
    ):
        torch.testing.assert_close(mixed, 0.75 * initial + 0.25 * p)
        torch.testing.assert_close(taken, p)
    ema.save_state(tmp_path)
    fresh = reference_of(tiny_policy(), reference="ema", reference_every=2)
    fresh.load_state(tmp_path)
    for a, b in zip(fresh._policy.model.parameters(), ema._policy.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def with_values(samples: list[Sample], target: float) -> Batch:
    def laid_out(s: Sample, value: float) -> Any:
        return np.where(s.mask_T, np.float32(value), np.float32(0))

    return Batch(tuple(replace(s, value_T=laid_out(s, 0.0), return_T=laid_out(s, target)) for s in samples))


def test_the_critic_starts_at_zero_and_learns_returns(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    samples = make_samples(SHAPES, gaps=True)
    critic = Critic(tiny_policy(), TRAINING, lr=1e-2, clip=0.0)
    assert all((v == 0).all() for v in critic.values(samples))
    for _ in range(25):
        critic.forward_backward(with_values(samples, 0.7))
        critic.optim_step()
    for s, values in zip(samples, critic.values(samples), strict=True):
        np.testing.assert_allclose(values[s.mask_T], 0.7, atol=0.1)
        assert (values[~s.mask_T] == 0).all()
    critic.save_state(tmp_path)
    fresh = Critic(tiny_policy(), TRAINING, lr=1e-2, clip=0.0)
    fresh.load_state(tmp_path, 25)
    for a, b in zip(fresh.values(samples), critic.values(samples), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_critics_gradient_does_not_depend_on_the_cut(tiny_policy: TinyPolicy) -> None:
    batch = with_values(make_samples(SHAPES), 0.7)
    found = []
    for budget, share in ((10_000, True), (40, False)):
        critic = Critic(tiny_policy(), TrainingConfig(token_budget=budget, share_prompts=share), lr=1e-2, clip=0.2)
        critic.forward_backward(batch)
        found.append([p.grad for p in critic.optimizer.masters])
    assert any(g is not None and g.abs().max() > 0 for g in found[0])
    for a, b in zip(*found, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_a_clipped_value_that_moved_too_far_has_no_gradient() -> None:
    value = torch.tensor([0.9, 0.2, 0.5], requires_grad=True)
    loss = value_loss(value, torch.full((3,), 0.5), torch.tensor([1.0, 1.0, 0.0]), clip=0.2)
    assert loss.tolist() == pytest.approx([0.045, 0.32, 0.125])
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    assert gradient.tolist() == pytest.approx([0.0, -0.8, 0.5])


def some_groups(count: int = 4) -> list[Group]:
    """Groups with one right answer of three."""
    rng = np.random.default_rng(3)

    def answer(group: int, index: int) -> Rollout:
        n = 2 + index
        tokens = tuple(int(t) for t in rng.integers(3, 250, n))
        segment = Segment("model", tokens, (-5.0,) * n, (0,) * n)
        return Rollout.of(group, index, (5, 6, 7, group + 8), (segment,), "stop", "", Score(float(index == 0)))

    return [
        Group(g, Prompt(str(g), (Message("user", "?"),), ""), tuple(answer(g, i) for i in range(3)))
        for g in range(count)
    ]


def make(policy: Policy, training: TrainingConfig, critic: Critic | None = None, **choices: Any) -> Learner:
    objective = Objective(AlgorithmConfig(**choices), 8)
    reference = Reference(policy, objective.config, training, 1.0) if objective.wants_reference else None
    trainer = Trainer(policy, training, temperature=1.0, entropy_grad=objective.wants_entropy_gradient)
    return Learner(trainer, objective, 0, reference, critic)


def test_a_step_counts_its_updates_and_measures(tiny_policy: TinyPolicy) -> None:
    learner = make(tiny_policy(), TrainingConfig(steps=10, minibatches=2, epochs=2, lr=1e-3))
    metrics = learner.learn(1, some_groups())
    assert metrics["updates"] == 4 and learner.updates == 4
    assert metrics["samples_trained"] == 12
    assert metrics["ratio_max"] > 1.0 and metrics["clip_low"] >= 0


def test_no_samples_no_update(tiny_policy: TinyPolicy) -> None:
    learner = make(tiny_policy(), TRAINING, preset="raft", correct_above=2.0)
    assert learner.learn(1, some_groups())["updates"] == 0
    assert learner.updates == 0


def test_rejected_samples_are_not_even_computed(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(tiny_policy(), TrainingConfig(steps=10, epochs=2), preset="raft++")
    asked: list[int] = []
    logprobs = learner.trainer.logprobs
    monkeypatch.setattr(learner.trainer, "logprobs", lambda samples: asked.append(len(samples)) or logprobs(samples))
    assert learner.learn(1, some_groups())["samples_trained"] == 4
    assert asked == [4]


def test_the_critic_warms_up_while_the_policy_stands_still(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    critic = Critic(tiny_policy(), TRAINING, lr=1e-2, clip=0.5, warmup=1)
    choices = {"preset": "ppo", "kl_coef": 0.0}
    learner = make(policy, TRAINING, critic, **choices)
    before = [p.detach().clone() for p in policy.model.parameters()]
    metrics = learner.learn(1, some_groups())
    assert metrics["value_loss"] > 0 and "loss" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert "loss" in learner.learn(2, some_groups())
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


def test_an_estimate_replaces_the_extra_forward_pass(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(tiny_policy(), TrainingConfig(steps=10, epochs=2), anchor="interpolated")
    monkeypatch.setattr(learner.trainer, "logprobs", None)
    metrics = learner.learn(3, some_groups())
    assert metrics["updates"] == 2 and metrics["logp_gap_max"] > 0


def test_learning_state_round_trip(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    choices: dict[str, Any] = {
        "kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 10.0, "reference": "reset", "reference_every": 1,
        "entropy_target": 9.0, "reward_norm": "running",
    }  # fmt: skip
    learner = make(tiny_policy(), TRAINING, **choices)
    for step in (1, 2):
        learner.learn(step, some_groups())
    learner.save_state(tmp_path)
    fresh = make(tiny_policy(), TRAINING, **choices)
    fresh.load_state(tmp_path, learner.updates)
    assert fresh.objective.state() == learner.objective.state()
    assert fresh.objective.state()["entropy_coef"] > 0 and fresh.objective.kl_coef != 0.1
    a, b = learner.learn(3, some_groups()), fresh.learn(3, some_groups())
    for key in ("loss", "kl_k1", "kl_coef", "entropy_coef", "grad_norm"):
        assert a[key] == pytest.approx(b[key], abs=1e-5), key


def test_a_loss_that_is_no_number_leaves_the_weights_alone(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    """Also where its gradient happens to be finite."""
    (tmp_path / "bad.py").write_text(
        "def gate(ratio_N, tokens): return -tokens.advantage_N * ratio_N + tokens.weight_N * float('nan')\n"
    )
    policy = tiny_policy()
    before = [p.detach().clone() for p in policy.model.parameters()]
    learner = make(policy, TRAINING, gate=f"{tmp_path / 'bad.py'}:gate")
    assert learner.learn(1, some_groups())["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
