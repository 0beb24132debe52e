"""Routing replay in the trainer: the updates of a batch use the experts that π_old chose, however rows are cut."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from short_settings import algorithm_with
from test_gradient import SHAPES, assert_same, gradient, make_samples
from trainer_workers import make_worker

from kitae.algorithms.config import AlgorithmConfig
from kitae.data.packing import NO_RECORD, lay_out, pack
from kitae.errors import ModelError
from kitae.models.policy import Policy
from kitae.models.routing import RouterLoad, record_routing, replay_routing
from kitae.trainer.base import Batch, Column, Conditions, Role
from kitae.trainer.config import TrainingConfig
from kitae.trainer.local_trainer import LocalTrainer
from kitae.types import Sample

TinyPolicy = Callable[..., Policy]
ROUTED = algorithm_with(routing="old")
TRAINING = TrainingConfig(minibatches=2)


def annotated(policy: Policy, samples: list[Sample], *, share_prompts: bool = True, **training: Any) -> list[Sample]:
    """With log-probs and experts of the policy as it is now."""
    policy.plain = not share_prompts
    trainer = LocalTrainer(make_worker(policy, TRAINING.model_copy(update=training), ROUTED))
    try:
        return asyncio.run(trainer.annotate(samples, [Column.OLD, Column.EXPERTS]))
    finally:
        asyncio.run(trainer.close())


def turn_routers(policy: Policy) -> None:
    """So that they choose others."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(parameter.flip(0))


@pytest.mark.parametrize("training", [{}, {"share_prompts": False}, {"token_budget": 24}], ids=str)
def test_experts_of_a_sample_are_those_it_has_alone(training: dict[str, Any], tiny_policy: TinyPolicy) -> None:
    policy, samples = tiny_policy("qwen3_moe"), make_samples(SHAPES)
    for s, plain in zip(annotated(policy, samples, **training), samples, strict=True):
        assert s.key == plain.key, "in the order in which they were given"
        with torch.no_grad(), record_routing(policy.model) as record:
            policy.score(torch.tensor(np.asarray(s.tokens_T)))
        assert s.experts is not None and len(s.experts) == s.length - 1
        np.testing.assert_array_equal(s.experts, record.experts_TLK[:-1])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_updates_use_the_experts_of_old(checkpointed: bool, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen3_moe")
    samples = annotated(policy, make_samples(SHAPES))
    turn_routers(policy)
    native = gradient(policy, [replace(s, experts=None) for s in samples], ROUTED)
    cuts: list[dict[str, Any]] = [{}, {"share_prompts": False}, {"token_budget": 24}]
    found = [gradient(policy, samples, ROUTED, checkpoint_activations=checkpointed, **cut) for cut in cuts]
    for each in found[1:]:
        assert_same(each, found[0])
    assert any((native[name] - found[0][name]).abs().max() > 1e-3 for name in native), "it makes a difference"
    assert any(value.abs().max() > 0 for name, value in found[0].items() if name.endswith("mlp.gate.weight"))


def test_what_was_not_annotated_is_routed_by_the_pass_itself() -> None:
    first, *rest = make_samples(SHAPES[:3])
    experts = np.arange(2 * 2 * (first.length - 1)).reshape(-1, 2, 2) % 4
    row = lay_out([replace(first, experts=experts), *rest])
    assert row.experts_TLK is not None and len(row.experts_TLK) == len(row.tokens_T)
    np.testing.assert_array_equal(row.experts_TLK[: first.length - 1], experts)
    assert (row.experts_TLK[first.length - 1 :] == NO_RECORD).all()
    assert lay_out(rest).experts_TLK is None


def test_a_critic_does_not_replay(tiny_policy: TinyPolicy) -> None:
    """It has experts of its own; a record with more of them than it has would be refused."""
    from test_learner import critic_of, with_values

    worker = critic_of(tiny_policy(), tiny_policy())
    samples = with_values(make_samples(SHAPES), 0.7)
    routed = [replace(s, experts=np.zeros((s.length - 1, 7, 3), dtype=np.int16)) for s in samples]
    rows = [lay_out(part) for part in pack(routed, 2048)]
    worker.forward_backward(rows, Conditions(), [Role.CRITIC])


def test_other_threads_are_left_alone(tiny_policy: TinyPolicy) -> None:
    """An engine samples from the same modules while the trainer records or replays."""
    policy = tiny_policy("qwen3_moe")
    tokens = torch.arange(5, 25)
    with torch.no_grad(), record_routing(policy.model) as record:
        expected = policy.score(tokens)
    other = record.experts_TLK.flip(0)
    for around in (record_routing(policy.model), replay_routing(policy.model, other), RouterLoad().watch(policy.model)):
        found: list[torch.Tensor] = []

        def sample(found: list[torch.Tensor] = found) -> None:
            with torch.no_grad():
                found.extend(policy.score(tokens) for _ in range(2))

        with torch.no_grad(), around:
            thread = threading.Thread(target=sample)
            thread.start()
            thread.join()
            policy.score(tokens)
        assert all(torch.equal(each, expected) for each in found) and len(found) == 2


def test_a_model_without_experts_is_refused_at_once(tiny_policy: TinyPolicy) -> None:
    with pytest.raises(ModelError, match="routing replay needs router modules, got"):
        make_worker(tiny_policy(), TRAINING, ROUTED)


def test_what_routers_do_is_measured(tiny_policy: TinyPolicy) -> None:
    policy, samples = tiny_policy("qwen3_moe"), make_samples(SHAPES)

    def numbers(*, share_prompts: bool = True, **training: Any) -> dict[str, float]:
        policy.plain = not share_prompts
        trainer = LocalTrainer(make_worker(policy, TRAINING.model_copy(update=training), AlgorithmConfig()))
        try:
            return asyncio.run(trainer.forward_backward(Batch(tuple(samples)))).numbers()
        finally:
            asyncio.run(trainer.close())

    whole, cut = numbers(checkpoint_activations=True), numbers(token_budget=24, share_prompts=False)
    experts = int(policy.base.config.num_experts)
    for found in (whole, cut):
        assert 0 < found["router_entropy"] <= 1 and 1 <= found["expert_load"] <= experts
        assert 0 <= found["experts_idle"] < 1
    load = RouterLoad()
    tokens = torch.tensor(np.asarray(samples[5].tokens_T))
    for _ in range(2):
        with torch.no_grad(), load.watch(policy.model), record_routing(policy.model) as record:
            policy.score(tokens)
    counts = torch.stack([torch.bincount(record.experts_TLK[:, n].flatten().long(), minlength=experts) for n in (0, 1)])
    expected = (counts.max(-1).values / counts.double().mean(-1)).mean()
    assert load.numbers()["expert_load"].item() == pytest.approx(expected.item())
    assert load.numbers()["experts_idle"].item() == pytest.approx((counts == 0).double().mean().item())


def test_nothing_is_measured_without_experts(tiny_policy: TinyPolicy) -> None:
    load, policy = RouterLoad(), tiny_policy()
    with load.watch(policy.model):
        policy.score(torch.arange(5, 9))
    assert load.numbers() == {}
