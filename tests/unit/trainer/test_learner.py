"""What surrounds the policy: the reference, the critic, and the order in which a step of learning uses them."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_with
from test_gradient import SHAPES, make_samples
from trainer_workers import column_of, forward_backward, make_worker

from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import GroupStages
from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.base import Column, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.learner import Learner, Learnt
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.objectives import value_loss
from kitae.trainer.reference_policy import Reference
from kitae.trainer.training_worker import Worker
from kitae.types import FloatArray, Group, Message, Prompt, Rollout, Sample, Score, Segment

TinyPolicy = Callable[..., Policy]
TRAINING = TrainingConfig(steps=10, lr=1e-2)


def move(policy: Policy, by: float = 0.05) -> None:
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).to(p.device))


def reference_of(policy: Policy, **choices: Any) -> Reference:
    algorithm = algorithm_with(kl_coef=0.1, **{"reference": "frozen", **choices})
    return Reference(policy, algorithm, TRAINING, temperature=1.0)


def scores(reference: Reference, samples: list[Sample]) -> list[FloatArray]:
    """Log-probs of the loss tokens under the reference, row by row."""
    return reference.outputs(pack_rows(samples, TRAINING, torch.device("cpu"), torch.float32)[1])


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["copy", "adapters"])
def test_a_frozen_reference_stays_the_initial_model(settings: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(**settings)
    samples = make_samples(SHAPES)
    algorithm = algorithm_with(kl_coef=0.1, reference="frozen")
    worker = make_worker(policy, TRAINING, algorithm, reference=True)
    before = column_of(worker, samples)
    move(policy)
    worker.finish_step(400)
    after = column_of(worker, samples, Column.REFERENCE), column_of(worker, samples)
    for initial, held, moved in zip(before, *after, strict=True):
        np.testing.assert_allclose(held, initial, atol=1e-5)
        assert np.abs(moved - initial).max() > 1e-3


def test_a_reference_shares_what_is_not_trained_and_nothing_else(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(lora_rank=4)
    mine = set(reference_of(policy)._policy.model.parameters())
    for name, parameter in policy.model.named_parameters():
        assert (parameter in mine) == (not parameter.requires_grad) == ("lora_" not in name)
    assert not set(tiny_policy().model.parameters()) & mine


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("settings", [{}, {"plain": True}, {"exact": True}], ids=["fused", "plain", "exact"])
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
                scores(reference, samples)

        computing = asyncio.create_task(asyncio.to_thread(keep_computing))
        sampling = SamplingParams(max_tokens=100)
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
    fresh = reference_of(tiny_policy(), reference="ema", reference_every=2)
    fresh.load_state(ema.state())
    for a, b in zip(fresh._policy.model.parameters(), ema._policy.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def with_values(samples: list[Sample], target: float) -> list[Sample]:
    """What a critic learns from: old values of 0 and these returns, averaged over all tokens."""
    columns = {"value": 0.0, "return": target, "value_weight": 1 / sum(s.loss_tokens for s in samples)}
    return [s.with_columns(**{n: s.spread(np.float32(x)) for n, x in columns.items()}) for s in samples]


def critic_of(
    policy: Policy, critic: Policy, training: TrainingConfig = TRAINING, *, lr: float = 1e-2, clip: float = 0.0
) -> Worker:
    algorithm = algorithm_with(preset="ppo", kl_coef=0.0, critic_lr=lr, critic_clip=clip)
    return make_worker(policy, training, algorithm, critic=ScalarModel(critic))


def test_the_critic_starts_at_zero_and_learns_returns(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    samples = make_samples(SHAPES, gaps=True)
    worker = critic_of(tiny_policy(), tiny_policy())
    assert all((v == 0).all() for v in column_of(worker, samples, Column.VALUE))
    for _ in range(25):
        forward_backward(worker, with_values(samples, 0.7), roles=[Role.CRITIC])
        worker.optim_step()
    for s, values in zip(samples, column_of(worker, samples, Column.VALUE), strict=True):
        np.testing.assert_allclose(values[s.mask_T], 0.7, atol=0.1)
        assert (values[~s.mask_T] == 0).all()
    worker.save(tmp_path)
    fresh = critic_of(tiny_policy(), tiny_policy())
    fresh.load(tmp_path)
    assert (fresh.trained[Role.CRITIC].optimizer.updates, fresh.updates) == (25, 0)
    for a, b in zip(*(column_of(w, samples, Column.VALUE) for w in (fresh, worker)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_critics_gradient_does_not_depend_on_the_cut(tiny_policy: TinyPolicy) -> None:
    samples = with_values(make_samples(SHAPES), 0.7)
    found = []
    for budget, share in ((10_000, True), (40, False)):
        training = TrainingConfig(token_budget=budget)
        worker = critic_of(tiny_policy(), tiny_policy(), training, clip=0.2)
        worker.policy.plain = not share
        forward_backward(worker, samples, roles=[Role.CRITIC])
        found.append([p.grad for p in worker.trained[Role.CRITIC].optimizer.masters])
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


def make(policy: Policy, training: TrainingConfig, critic: Policy | None = None, **choices: Any) -> Learner:
    algorithm = algorithm_with(**choices)
    groups = GroupStages(algorithm, 8)
    values = None if critic is None else ScalarModel(critic)
    worker = make_worker(policy, training, algorithm, reference=groups.wants_reference, critic=values)
    return Learner(LocalTrainer(worker), groups, Control(algorithm), training, seed=0)


def learn(learner: Learner, step: int, groups: list[Group] | None = None) -> Learnt:
    return asyncio.run(learner.learn(step, some_groups() if groups is None else groups))


def test_a_step_counts_its_updates_and_measures(tiny_policy: TinyPolicy) -> None:
    learner = make(tiny_policy(), TrainingConfig(steps=10, minibatches=2, epochs=2, lr=1e-3))
    learnt = learn(learner, 1)
    assert learnt.updates == 4 and learner.updates == 4
    assert learnt.samples == 12
    assert learnt.numbers["ratio_max"] > 1.0 and learnt.numbers["clip_low"] >= 0


def test_no_samples_no_update(tiny_policy: TinyPolicy) -> None:
    learner = make(tiny_policy(), TRAINING, preset="raft", filter_correct_above=2.0)
    assert learn(learner, 1).updates == 0
    assert learner.updates == 0


def test_rejected_samples_are_not_even_computed(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(tiny_policy(), TrainingConfig(steps=10, epochs=2), preset="raft++")
    asked: list[tuple[int, Any]] = []
    annotate = learner.trainer.annotate

    async def spy(samples: Any, columns: Any) -> list[Sample]:
        asked.append((len(samples), columns))
        return await annotate(samples, columns)

    monkeypatch.setattr(learner.trainer, "annotate", spy)
    assert learn(learner, 1).samples == 4
    assert asked == [(4, [Column.OLD])]


def test_the_critic_warms_up_while_the_policy_stands_still(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    choices = {"preset": "ppo", "kl_coef": 0.0, "critic_lr": 1e-2, "critic_clip": 0.5, "critic_warmup": 1}
    learner = make(policy, TRAINING, tiny_policy(), **choices)
    before = [p.detach().clone() for p in policy.model.parameters()]
    numbers = learn(learner, 1).numbers
    assert numbers["value_loss"] > 0 and "loss" not in numbers
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert "loss" in learn(learner, 2).numbers
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


def test_an_estimate_replaces_the_extra_forward_pass(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make(tiny_policy(), TrainingConfig(steps=10, epochs=2), anchor="interpolated")
    monkeypatch.setattr(learner.trainer, "annotate", None)
    learnt = learn(learner, 3)
    assert learnt.updates == 2 and learnt.numbers["logp_gap_max"] > 0


def test_learning_state_round_trip(tiny_policy: TinyPolicy, tmp_path: Path) -> None:
    choices: dict[str, Any] = {
        "kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 10.0, "reference": "reset", "reference_every": 1,
        "entropy_target": 9.0, "shaping_norm": "running",
    }  # fmt: skip
    learner = make(tiny_policy(), TRAINING, **choices)
    for step in (1, 2):
        learn(learner, step)
    asyncio.run(learner.save(tmp_path, learner.state()))
    fresh = make(tiny_policy(), TRAINING, **choices)
    asyncio.run(fresh.load(tmp_path))
    assert fresh.updates == learner.updates == 2
    assert fresh.state() == learner.state()
    coefficients = fresh.control.coefficients
    assert coefficients.entropy > 0 and coefficients.kl != 0.1 and fresh.groups.reward_moments.count > 0
    a, b = learn(learner, 3).numbers, learn(fresh, 3).numbers
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
    learnt = learn(learner, 1)
    assert learnt.skipped == 1 and learnt.numbers["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
