"""Losses on pairs and single responses: worked numbers with their gradients, limits, and the symmetries behind them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitae.algorithms.preferences import (
    PREFERENCE_LOSSES,
    PairBatch,
    RatedBatch,
    accuracy,
    bradley_terry,
    chosen_nll,
    hinge,
    ipo,
    ipo_token,
    kto,
    mismatch_kl,
    orpo,
    preference_complaints,
    robust,
    sigmoid,
    sigmoid_token,
    simpo,
    smoothed,
)
from kitae.algorithms.stages import keyword_settings

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "algorithm_examples.json").read_text())
DPO, BT = EXAMPLES["dpo"], EXAMPLES["bt_rm"]

fast = settings(deadline=None, max_examples=60)
logps = st.floats(-50, 0)
scores = st.floats(-20, 20)


def close(value: Tensor, expected: float) -> None:
    assert value.item() == pytest.approx(expected, abs=1e-6)


def pair(chosen: float, rejected: float, ref_chosen: float, ref_rejected: float, lengths: tuple[int, int]) -> PairBatch:
    values = (torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected, ref_chosen, ref_rejected, *lengths))
    return PairBatch(*values)


def swapped(p: PairBatch) -> PairBatch:
    return PairBatch(
        p.logp_rejected_P,
        p.logp_chosen_P,
        p.logp_ref_rejected_P,
        p.logp_ref_chosen_P,
        p.length_rejected_P,
        p.length_chosen_P,
    )


WORKED = pair(-10, -14, -11, -13, (20, 40))
pairs = st.builds(pair, logps, logps, logps, logps, st.tuples(st.integers(1, 99), st.integers(1, 99)))


def test_dpo_worked_example() -> None:
    chosen, rejected = WORKED.ratios
    close(chosen - rejected, DPO["h"])
    chosen, rejected = PREFERENCE_LOSSES["sigmoid"].implicit_rewards(WORKED, 0.1)
    close(chosen, DPO["rew_c"])
    close(rejected, DPO["rew_r"])
    close(smoothed(WORKED, beta=0.1, label_smoothing=0.1), DPO["ls01"])
    close(sigmoid_token(WORKED, beta=5.0), DPO["len_norm_beta5_lc20_lr40"])
    close(ipo(WORKED, beta=0.1), DPO["ipo"])


def test_values_by_hand() -> None:
    """h⁺ = 1, h⁻ = −1, lengths 20 and 40, A⁺ = −0.5, A⁻ = −0.35."""
    close(hinge(WORKED, beta=0.1), 0.8)
    close(hinge(WORKED, beta=1.0), 0.0)
    close(ipo_token(WORKED, beta=0.5), (1 / 20 + 1 / 40 - 1) ** 2)
    # −log σ(2 · (−0.15) − 0.5) = log(1 + e^0.8)
    close(simpo(WORKED, beta=2.0, target_margin=0.5), math.log1p(math.exp(0.8)))
    # (0.9 log(1 + e^−0.2) − 0.1 log(1 + e^0.2)) / 0.8
    close(robust(WORKED, beta=0.1, label_smoothing=0.1), (0.9 * 0.5981388693 - 0.1 * 0.7981388693) / 0.8)
    odds = [math.exp(a) / (1 - math.exp(a)) for a in (-0.5, -0.35)]
    close(orpo(WORKED, beta=0.1), 0.5 + 0.1 * math.log1p(odds[1] / odds[0]))
    close(chosen_nll(WORKED), 0.5)


def test_kto_by_hand() -> None:
    """h = 1 and −1, kl = 0.5, β = 0.2: 1 − σ(0.1) and 1 − σ(0.3)."""
    batch = RatedBatch(torch.tensor([-10.0, -14]), torch.tensor([-11.0, -13]), torch.tensor([True, False]))
    losses = kto(batch, 0.5, beta=0.2, desirable=1.0, undesirable=2.0)
    expected = [1 / (1 + math.exp(0.1)), 2 / (1 + math.exp(0.3))]
    assert losses.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_kl_of_kto_is_a_mean_that_is_not_negative_and_carries_no_gradient() -> None:
    logp = torch.tensor([-3.0, -4.0], requires_grad=True)
    above = mismatch_kl(logp, torch.tensor([-4.0, -4.5]))
    assert above.item() == 0.75 and not above.requires_grad
    assert mismatch_kl(logp, torch.tensor([-2.0, -4.5])).item() == 0.0  # the mean is clamped, not each of them


def test_dpo_worked_gradient() -> None:
    leaves = WORKED.logp_chosen_P.clone().requires_grad_(), WORKED.logp_rejected_P.clone().requires_grad_()
    loss = sigmoid(replace(WORKED, logp_chosen_P=leaves[0], logp_rejected_P=leaves[1]), beta=0.1)
    close(loss, DPO["loss"])
    chosen, rejected = torch.autograd.grad(loss.sum(), leaves)
    close(chosen, DPO["dloss_dlogp_chosen"])
    close(rejected, DPO["dloss_dlogp_rejected"])


def test_bradley_terry_worked_example() -> None:
    chosen, rejected = torch.tensor([1.2]).requires_grad_(), torch.tensor([0.4]).requires_grad_()
    loss = bradley_terry(chosen, rejected)
    close(loss, BT["loss"])
    gradients = torch.autograd.grad(loss.sum(), (chosen, rejected))
    close(gradients[0], BT["dc"])
    close(gradients[1], -BT["dc"])
    close(bradley_terry(chosen, rejected, margin_P=0.5), BT["margin05"])
    close(bradley_terry(chosen, rejected, centring=0.01) - loss, BT["center_001"])
    close(accuracy(chosen, rejected), BT["acc"])


def test_centring_pulls_the_sum_of_a_pair_not_each_score() -> None:
    opposite = torch.tensor([3.0]), torch.tensor([-3.0])
    assert bradley_terry(*opposite, centring=1.0).equal(bradley_terry(*opposite))


def test_margins_may_differ_between_pairs() -> None:
    chosen, rejected = torch.tensor([1.2, 1.2]), torch.tensor([0.4, 0.4])
    both = bradley_terry(chosen, rejected, margin_P=torch.tensor([0.0, 0.5]))
    assert both.tolist() == pytest.approx([BT["loss"], BT["margin05"]], abs=1e-6)


def test_a_tie_is_not_in_the_right_order() -> None:
    close(accuracy(torch.tensor([1.0, 2.0, 0.0, 5.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])), 0.5)


@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_extreme_margins_stay_finite(margin: float) -> None:
    score = torch.tensor([margin]).requires_grad_()
    loss = bradley_terry(score, torch.zeros(1))
    (gradient,) = torch.autograd.grad(loss.sum(), score)
    close(loss, max(-margin, 0.0))
    close(gradient, -1.0 if margin < 0 else 0.0)


@fast
@given(pairs, st.floats(0.01, 5), st.sampled_from(["sigmoid", "sigmoid-token"]))
def test_the_rewards_of_a_swapped_pair_are_swapped(p: PairBatch, beta: float, name: str) -> None:
    loss = PREFERENCE_LOSSES[name]
    chosen, rejected = loss.implicit_rewards(p, beta)
    assert loss.implicit_rewards(swapped(p), beta) == (rejected, chosen)
    # −log σ(m) and −log σ(−m) differ by −m: the loss is antisymmetric up to a part that both orders share.
    difference = loss.function(p, beta=beta) - loss.function(swapped(p), beta=beta)
    assert difference.item() == pytest.approx((rejected - chosen).item(), abs=1e-9)


@fast
@given(pairs, st.floats(0.01, 5))
def test_smoothing_of_one_half_knows_no_preference(p: PairBatch, beta: float) -> None:
    loss = smoothed(p, beta=beta, label_smoothing=0.5)
    assert loss.item() == pytest.approx(smoothed(swapped(p), beta=beta, label_smoothing=0.5).item())
    assert loss.item() >= math.log(2) - 1e-12


@fast
@given(pairs, st.floats(0.01, 5), st.floats(0, 0.45))
def test_robust_is_unbiased_under_wrong_labels(p: PairBatch, beta: float, wrong: float) -> None:
    right, flipped = (robust(x, beta=beta, label_smoothing=wrong) for x in (p, swapped(p)))
    clean = sigmoid(p, beta=beta)
    assert ((1 - wrong) * right + wrong * flipped).item() == pytest.approx(clean.item(), abs=1e-8)


@fast
@given(pairs, st.floats(0.01, 5))
def test_without_smoothing_the_noisy_forms_are_the_plain_one(p: PairBatch, beta: float) -> None:
    plain = sigmoid(p, beta=beta).item()
    assert smoothed(p, beta=beta, label_smoothing=0.0).item() == pytest.approx(plain)
    assert robust(p, beta=beta, label_smoothing=0.0).item() == pytest.approx(plain)


@fast
@given(logps, logps, st.floats(0, 1), st.floats(0.01, 5))
def test_a_policy_that_is_its_reference_loses_log_2(chosen: float, rejected: float, eps: float, beta: float) -> None:
    same = pair(chosen, rejected, chosen, rejected, (3, 7))
    assert smoothed(same, beta=beta, label_smoothing=eps).item() == pytest.approx(math.log(2))
    assert hinge(same, beta=beta).item() == pytest.approx(1)
    assert ipo(same, beta=beta).item() == pytest.approx(1 / (4 * beta * beta))
    assert ipo_token(same, beta=beta).item() == pytest.approx(1 / (4 * beta * beta))


@fast
@given(pairs, st.floats(0.01, 5), st.integers(1, 50))
def test_length_normalisation_divides_each_side_by_its_own_length(p: PairBatch, beta: float, n: int) -> None:
    lengths = {"length_chosen_P": torch.tensor([n]), "length_rejected_P": torch.tensor([n])}
    of_equal_length = replace(p, **lengths)
    assert sigmoid_token(of_equal_length, beta=beta).item() == pytest.approx(sigmoid(p, beta=beta / n).item())
    one = replace(p, length_chosen_P=torch.tensor([1]), length_rejected_P=torch.tensor([1]))
    assert ipo_token(one, beta=beta).item() == pytest.approx(ipo(p, beta=beta).item())


@fast
@given(pairs, st.floats(0.01, 5))
def test_simpo_without_a_margin_is_dpo_per_token_under_a_flat_reference(p: PairBatch, beta: float) -> None:
    """A reference that gives every token one probability cancels in means."""
    flat = replace(p, logp_ref_chosen_P=-0.7 * p.length_chosen_P, logp_ref_rejected_P=-0.7 * p.length_rejected_P)
    assert simpo(p, beta=beta, target_margin=0.0).item() == pytest.approx(sigmoid_token(flat, beta=beta).item())


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_take_none(name: str) -> None:
    loss = PREFERENCE_LOSSES[name]
    bare = replace(WORKED, logp_ref_chosen_P=None, logp_ref_rejected_P=None)
    assert loss.function(bare, **loss.defaults).equal(loss.function(WORKED, **loss.defaults))
    assert not loss.reference
    chosen, rejected = loss.implicit_rewards(bare, 2.0)
    close(chosen, -1.0)
    close(rejected, -0.7)


@pytest.mark.parametrize("name", [n for n, loss in PREFERENCE_LOSSES.items() if loss.reference])
def test_losses_with_a_reference_read_it(name: str) -> None:
    loss = PREFERENCE_LOSSES[name]
    moved = replace(WORKED, logp_ref_chosen_P=torch.tensor([-20.0]))
    assert not loss.function(moved, **loss.defaults).equal(loss.function(WORKED, **loss.defaults))


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_whether_a_loss_reads_lengths_is_declared(name: str) -> None:
    loss = PREFERENCE_LOSSES[name]
    longer = replace(WORKED, length_chosen_P=torch.tensor([77.0]))
    same = loss.function(longer, **loss.defaults).equal(loss.function(WORKED, **loss.defaults))
    assert same is not loss.per_token


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_gradients_by_finite_differences(name: str) -> None:
    loss = PREFERENCE_LOSSES[name]
    generator = torch.Generator().manual_seed(1)
    chosen, rejected, ref_c, ref_r = (-30 * torch.rand(5, generator=generator, dtype=torch.float64) for _ in range(4))
    lengths = torch.tensor([3, 9, 20, 1, 7]), torch.tensor([4, 9, 2, 30, 7])

    def function(c: Tensor, r: Tensor) -> Tensor:
        return loss.function(PairBatch(c, r, ref_c, ref_r, *lengths), **loss.defaults)

    assert torch.autograd.gradcheck(function, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_the_gradient_of_kto_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    logp, ref = (-30 * torch.rand(6, generator=generator, dtype=torch.float64) for _ in range(2))
    desirable = torch.tensor([True, False, False, True, True, False])

    def function(logp: Tensor) -> Tensor:
        return kto(RatedBatch(logp, ref, desirable), 0.3, beta=0.1, desirable=1.0, undesirable=1.5)

    assert torch.autograd.gradcheck(function, (logp.requires_grad_(),))


@fast
@given(logps, logps, st.floats(0, 5), st.floats(0.01, 5))
def test_kto_of_good_and_bad_adds_up_to_one(logp: float, ref: float, kl: float, beta: float) -> None:
    two = torch.tensor([logp, logp], dtype=torch.float64), torch.tensor([ref, ref], dtype=torch.float64)
    losses = kto(RatedBatch(*two, torch.tensor([True, False])), kl, beta=beta, desirable=1.0, undesirable=1.0)
    assert losses.sum().item() == pytest.approx(1)


def test_a_certain_response_has_finite_odds() -> None:
    sure = pair(0.0, -3.0, 0.0, 0.0, (2, 3))
    leaf = sure.logp_chosen_P.requires_grad_()
    loss = orpo(sure, beta=1.0)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_declares_its_settings_and_where_it_is_from(name: str) -> None:
    loss = PREFERENCE_LOSSES[name]
    assert set(loss.defaults) == set(keyword_settings(loss.function))
    assert loss.title and loss.source and "β" in loss.formula
    assert loss.settings({"beta": 0.7, "label_smoothing": None})["beta"] == 0.7


def complaints(name: str, **given: float | None) -> list[str]:
    return list(preference_complaints(name, given, "dpo"))


def test_settings_that_a_loss_does_not_read_are_refused() -> None:
    assert complaints("sigmoid", beta=0.1, label_smoothing=None) == []
    assert complaints("sigmoid", label_smoothing=0.1) == [
        "dpo.label_smoothing is set to 0.1, but loss 'sigmoid' does not read it; it belongs to 'smoothed', 'robust'"
    ]
    assert complaints("simpo", target_margin=0.5, sft_coef=0.1) == []
    assert complaints("orpo", sft_coef=1.0) == [
        "dpo.sft_coef must be 0 with loss 'orpo', which has that term already, got 1"
    ]
    assert complaints("robust", label_smoothing=0.5) == [
        "dpo.label_smoothing must be below 0.5 with loss 'robust', got 0.5"
    ]
    (unknown,) = complaints("sigmiod")
    assert unknown.startswith("dpo.loss must be one of sigmoid, ") and "did you mean 'sigmoid'?" in unknown


@fast
@given(scores, scores, scores)
def test_bradley_terry_is_blind_to_a_shift_unless_it_centres(chosen: float, rejected: float, shift: float) -> None:
    c, r = torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64)
    shifted = bradley_terry(c + shift, r + shift)
    assert shifted.item() == pytest.approx(bradley_terry(c, r).item(), abs=1e-9)
    centred = bradley_terry(c + shift, r + shift, centring=0.1) - bradley_terry(c, r)
    assert centred.item() == pytest.approx(0.1 * (chosen + rejected + 2 * shift) ** 2, abs=1e-9)
