"""Objectives beside the algorithms: likelihood is cross entropy, and rows without loss tokens leave no trace."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from short_settings import algorithm_with
from test_gradient import SHAPES, assert_same, make_samples
from trainer_workers import make_worker, weighted
from transformers import AutoModelForCausalLM

from kitae.algorithms.config import AlgorithmConfig
from kitae.data.packing import Row, lay_out
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.base import Conditions, Role
from kitae.trainer.collective_ops import Alone
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.objectives import Likelihood
from kitae.trainer.trainable_model import TrainableModel
from kitae.types import Sample

TinyPolicy = Callable[..., Policy]


def weighed(sample: Sample) -> Sample:
    """With weights of its own, and without any column."""
    weights = np.linspace(0.1, 1.0, sample.loss_tokens).astype(np.float32) * (1 + sample.index)
    return replace(sample, weight_T=sample.spread(weights), columns={})


@pytest.mark.parametrize("budget", [40, 10_000])
def test_likelihood_is_plain_cross_entropy(
    budget: int, tiny_policy: TinyPolicy, tiny_folder: Callable[[str], Path]
) -> None:
    samples = [weighed(s) for s in make_samples(SHAPES, gaps=True)]
    policy, training = tiny_policy(), TrainingConfig(token_budget=budget)
    trained = TrainableModel(Likelihood(policy, training, 1.0), training, Alone(), total_updates=1)
    numbers = trained.forward_backward(
        pack_rows(samples, training, policy.device, policy.dtype)[1], Conditions()
    ).numbers()

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    total, entropies = torch.zeros(()), []
    for s in samples:
        logits = model(torch.tensor(s.tokens_T[None])).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(s.tokens_T[1:]), reduction="none")
        total = total + (each * torch.tensor(s.weight_T[1:])).sum()
        entropies.append(torch.distributions.Categorical(logits=logits.detach()).entropy()[s.mask_T[1:]])
    total.backward()
    found = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    assert_same(found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, 2e-5)
    assert numbers["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert numbers["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-4)


def unjudged(sample: Sample) -> Sample:
    """A chain in which the model said nothing."""
    return replace(sample, mask_T=np.zeros_like(sample.mask_T))


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("row", [Row.empty(), lay_out([unjudged(make_samples([(0, 4, 3)])[0])])], ids=["empty", "mute"])
def test_a_row_without_loss_tokens_has_no_gradient_and_no_metrics(
    row: Row, role: Role, tiny_policy: TinyPolicy
) -> None:
    algorithm = algorithm_with(preset="ppo", kl_coef=0.0)
    worker = make_worker(tiny_policy(), algorithm=algorithm, critic=ScalarModel(tiny_policy()))
    before = [p.detach().clone() for p in worker.trained[role].optimizer.parameters]
    numbers = worker.forward_backward([row], Conditions(), [role]).numbers()
    assert {name: x for name, x in numbers.items() if name != "threads"} == {
        f"{worker.trained[role].name}train_tokens": 0
    }
    grads = [p.grad for p in worker.trained[role].optimizer.parameters]
    assert all(g is not None and not g.any() for g in grads), "of every tensor: other ranks wait for all of them"
    assert worker.trained[role].pending and worker.optim_step().numbers()
    assert all(torch.equal(a, b) for a, b in zip(before, worker.trained[role].optimizer.parameters, strict=True))


def test_empty_rows_beside_others_change_nothing(tiny_policy: TinyPolicy) -> None:
    algorithm = AlgorithmConfig(preset="grpo")
    samples = weighted(make_samples(SHAPES), algorithm)
    found = []
    for extra in ([], [Row.empty()] * 3):
        worker = make_worker(tiny_policy(), TrainingConfig(token_budget=40), algorithm)
        _, rows = pack_rows(samples, worker.training, worker.policy.device, worker.policy.dtype)
        totals = worker.forward_backward([*extra, *rows], Conditions(1), [Role.POLICY])
        found.append((totals + worker.optim_step()).numbers())
    assert found[0] == found[1] and found[0]["grad_norm"] > 0
