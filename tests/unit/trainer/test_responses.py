"""Objectives on pairs and single responses: gradients are those of a plain model, however a batch is cut into rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gradient import assert_same
from torch import Tensor
from transformers import AutoModelForCausalLM

from kitae.algorithms.preferences import PREFERENCE_LOSSES, PairBatch, RatedBatch, bradley_terry, chosen_nll, kto
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.trainer.base import Conditions
from kitae.trainer.collective_ops import Alone
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.responses import PLACE, Preference, Rated, ScoredPairs
from kitae.trainer.trainable_model import TrainableModel
from kitae.types import Sample

TinyPolicy = Callable[..., Policy]
Folder = Callable[[str], Path]

SHAPES = [(5, 7, 3), (9, 2, 11), (3, 6, 6)]
"""Tokens of prompt, chosen and rejected response."""


def make_pairs() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for p, (prompt, *responses) in enumerate(SHAPES):
        begin = rng.integers(3, 200, prompt)
        for side, length in enumerate(responses):
            tokens = np.concatenate([begin, rng.integers(3, 200, length)])
            mask = np.arange(len(tokens)) >= prompt
            sample = Sample(p, side, tokens, prompt, mask, np.zeros(len(tokens), np.float32), unit=p)
            weight, place = np.float32(0.2 + 0.1 * p), np.float32(2 * p + side)
            reference = rng.uniform(-6, -3, length).astype(np.float32)
            columns = {PLACE: sample.spread(place), "logp_ref": sample.spread(reference)}
            samples.append(replace(sample, weight_T=sample.spread(weight), columns=columns))
    return samples


def plain_logps(model: Any, samples: list[Sample]) -> Tensor:
    """Sums over the response of each, one after the other."""
    found = []
    for s in samples:
        logp = model(torch.tensor(s.tokens_T[None])).logits[0, :-1].log_softmax(-1)
        each = logp.gather(1, torch.tensor(s.tokens_T[1:, None]))[:, 0]
        found.append(each[torch.tensor(s.mask_T[1:])].sum())
    return torch.stack(found)


def gradients(module: torch.nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("budget", [20, 10_000])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_on_pairs(name: str, budget: int, tiny_policy: TinyPolicy, tiny_folder: Folder) -> None:
    loss, samples = PREFERENCE_LOSSES[name], make_pairs()
    policy, training = tiny_policy(), LearningConfig(token_budget=budget)
    coef = 0.0 if loss.has_sft else 0.3
    objective = Preference(policy, training, loss, loss.defaults, sft_coef=coef)
    trained = TrainableModel(objective, training, Alone(), total_updates=1)
    shuffled = [samples[i] for i in (3, 0, 4, 1, 2, 5)]  # nothing may depend on positions
    rows = pack_rows(shuffled, training, policy.device, policy.dtype)[1]
    assert len(rows) == (3 if budget == 20 else 1)
    numbers = trained.forward_backward(rows, Conditions()).numbers()

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    logp, ref = plain_logps(model, samples), torch.tensor([s.columns["logp_ref"].sum() for s in samples])
    length = torch.tensor([s.loss_tokens for s in samples])
    pairs = PairBatch(logp[0::2], logp[1::2], ref[0::2], ref[1::2], length[0::2], length[1::2])
    loss_P = loss.function(pairs, **loss.defaults) + coef * chosen_nll(pairs)
    total = (loss_P * torch.tensor([0.2, 0.3, 0.4])).sum()
    total.backward()
    assert_same(gradients(policy.model), gradients(model), 2e-5)
    assert numbers["loss"] == pytest.approx(total.item(), rel=1e-5)
    chosen, rejected = loss.implicit_rewards(pairs, loss.defaults["beta"])
    assert numbers["reward_chosen"] == pytest.approx(chosen.mean().item(), rel=1e-4)
    assert numbers["reward_rejected"] == pytest.approx(rejected.mean().item(), rel=1e-4)
    assert numbers["margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-3)
    assert numbers["accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert numbers["logp_chosen"] == pytest.approx(logp[0::2].mean().item(), rel=1e-5)
    assert numbers["logp_rejected"] == pytest.approx(logp[1::2].mean().item(), rel=1e-5)


@pytest.mark.parametrize("budget", [20, 10_000])
def test_single_responses(budget: int, tiny_policy: TinyPolicy, tiny_folder: Folder) -> None:
    good = [True, False, False, True, False, False]
    samples = [
        replace(s, unit=None).with_columns(desirable=s.spread(np.float32(g)), kl=s.spread(np.float32(0.4)))
        for s, g in zip(make_pairs(), good, strict=True)
    ]
    policy, training = tiny_policy(), LearningConfig(token_budget=budget)
    objective = Rated(policy, training, beta=0.1, desirable=1.0, undesirable=1.5)
    trained = TrainableModel(objective, training, Alone(), total_updates=1)
    rows = pack_rows(samples, training, policy.device, policy.dtype)[1]
    assert (len(rows) > 1) is (budget == 20)
    numbers = trained.forward_backward(rows, Conditions()).numbers()

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    logp, ref = plain_logps(model, samples), torch.tensor([s.columns["logp_ref"].sum() for s in samples])
    desirable = torch.tensor(good)
    loss_S = kto(RatedBatch(logp, ref, desirable), 0.4, beta=0.1, desirable=1.0, undesirable=1.5)
    total = (loss_S * torch.tensor([s.weight_T.max() for s in samples])).sum()
    total.backward()
    assert_same(gradients(policy.model), gradients(model), 2e-5)
    assert numbers["loss"] == pytest.approx(total.item(), rel=1e-5)
    reward = 0.1 * (logp - ref)
    assert numbers["reward_chosen"] == pytest.approx(reward[desirable].mean().item(), rel=1e-4)
    assert numbers["reward_rejected"] == pytest.approx(reward[~desirable].mean().item(), rel=1e-4)
    assert numbers["logp_rejected"] == pytest.approx(logp[~desirable].mean().item(), rel=1e-5)


def scored(sample: Sample, margin: float) -> Sample:
    """With one token more, whose number is read from the state of the last one."""
    tokens = np.append(sample.tokens_T, 0)
    mask = np.arange(len(tokens)) == sample.length
    made = replace(sample, tokens_T=tokens, mask_T=mask, weight_T=np.append(sample.weight_T, 0), columns={})
    weight, place = np.float32(sample.weight_T.max()), np.float32(sample.columns[PLACE].max())
    made = replace(made, weight_T=made.spread(weight))
    return made.with_columns(**{PLACE: made.spread(place), "margin": made.spread(np.float32(margin))})


@pytest.mark.parametrize("budget", [20, 10_000])
def test_scores_of_pairs_are_read_at_the_last_token(budget: int, tiny_policy: TinyPolicy, tiny_folder: Folder) -> None:
    plain = make_pairs()
    samples = [scored(s, 0.1 * s.group) for s in plain]
    training = LearningConfig(token_budget=budget)
    reward = ScalarModel(tiny_policy(), bias=False)
    assert [name for name, _ in reward.head.named_parameters()] == ["weight"]
    weight = torch.linspace(-1, 1, reward.head.weight.numel())[None]
    with torch.no_grad():
        reward.head.weight.copy_(weight)
    trained = TrainableModel(ScoredPairs(reward, centring=0.05), training, Alone(), total_updates=1)
    rows = pack_rows(samples, training, reward.policy.device, reward.policy.dtype)[1]
    assert len(rows) == (3 if budget == 20 else 1)
    numbers = trained.forward_backward(rows, Conditions()).numbers()

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32).model
    head = weight.clone().requires_grad_()
    score = torch.stack(
        [(model(torch.tensor(s.tokens_T[None])).last_hidden_state[0, -1] * head[0]).sum() for s in plain]
    )
    chosen, rejected = score[0::2], score[1::2]
    loss_P = bradley_terry(chosen, rejected, torch.tensor([0.0, 0.1, 0.2]), centring=0.05)
    total = (loss_P * torch.tensor([0.2, 0.3, 0.4])).sum()
    total.backward()
    assert_same(gradients(reward.decoder), gradients(model), 2e-5)
    assert_same({"head": reward.head.weight.grad}, {"head": head.grad}, 2e-5)
    assert numbers["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert numbers["accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert numbers["margin"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4)
    assert numbers["reward_chosen"] == pytest.approx(chosen.mean().item(), rel=1e-4)
