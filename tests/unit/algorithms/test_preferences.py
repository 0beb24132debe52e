"""Pair losses: the worked numbers with their gradients, and the symmetries behind them."""

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
    PairBatch,
    accuracy,
    bradley_terry_loss,
    dpo_loss,
    implicit_rewards,
    ipo_loss,
)

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
    chosen, rejected = implicit_rewards(WORKED, beta=1.0)
    close(chosen - rejected, DPO["h"])
    chosen, rejected = implicit_rewards(WORKED, beta=0.1)
    close(chosen, DPO["rew_c"])
    close(rejected, DPO["rew_r"])
    close(dpo_loss(WORKED, beta=0.1, label_smoothing=0.1), DPO["ls01"])
    close(dpo_loss(WORKED, beta=5.0, length_normalised=True), DPO["len_norm_beta5_lc20_lr40"])
    close(ipo_loss(WORKED, beta=0.1), DPO["ipo"])


def test_dpo_worked_gradient() -> None:
    leaves = WORKED.logp_chosen_P.clone().requires_grad_(), WORKED.logp_rejected_P.clone().requires_grad_()
    loss = dpo_loss(replace(WORKED, logp_chosen_P=leaves[0], logp_rejected_P=leaves[1]), beta=0.1)
    close(loss, DPO["loss"])
    chosen, rejected = torch.autograd.grad(loss.sum(), leaves)
    close(chosen, DPO["dloss_dlogp_chosen"])
    close(rejected, DPO["dloss_dlogp_rejected"])


def test_bradley_terry_worked_example() -> None:
    chosen, rejected = torch.tensor([1.2]).requires_grad_(), torch.tensor([0.4]).requires_grad_()
    loss = bradley_terry_loss(chosen, rejected)
    close(loss, BT["loss"])
    gradients = torch.autograd.grad(loss.sum(), (chosen, rejected))
    close(gradients[0], BT["dc"])
    close(gradients[1], -BT["dc"])
    close(bradley_terry_loss(chosen, rejected, margin=0.5), BT["margin05"])
    close(bradley_terry_loss(chosen, rejected, centring=0.01) - loss, BT["center_001"])
    close(accuracy(chosen, rejected), BT["acc"])


def test_centring_pulls_the_sum_of_a_pair_not_each_score() -> None:
    opposite = torch.tensor([3.0]), torch.tensor([-3.0])
    assert bradley_terry_loss(*opposite, centring=1.0).equal(bradley_terry_loss(*opposite))


def test_margins_may_differ_between_pairs() -> None:
    chosen, rejected = torch.tensor([1.2, 1.2]), torch.tensor([0.4, 0.4])
    both = bradley_terry_loss(chosen, rejected, margin=torch.tensor([0.0, 0.5]))
    assert both.tolist() == pytest.approx([BT["loss"], BT["margin05"]], abs=1e-6)


def test_a_tie_is_not_in_the_right_order() -> None:
    close(accuracy(torch.tensor([1.0, 2.0, 0.0, 5.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])), 0.5)


@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_extreme_margins_stay_finite(margin: float) -> None:
    score = torch.tensor([margin]).requires_grad_()
    loss = bradley_terry_loss(score, torch.zeros(1))
    (gradient,) = torch.autograd.grad(loss.sum(), score)
    close(loss, max(-margin, 0.0))
    close(gradient, -1.0 if margin < 0 else 0.0)


@fast
@given(pairs, st.floats(0.01, 5), st.booleans())
def test_the_rewards_of_a_swapped_pair_are_swapped(p: PairBatch, beta: float, length_normalised: bool) -> None:
    chosen, rejected = implicit_rewards(p, beta=beta, length_normalised=length_normalised)
    assert implicit_rewards(swapped(p), beta=beta, length_normalised=length_normalised) == (rejected, chosen)
    # −log σ(m) and −log σ(−m) differ by −m: the loss is antisymmetric up to a part that both orders share.
    difference = dpo_loss(p, beta=beta, length_normalised=length_normalised) - dpo_loss(
        swapped(p), beta=beta, length_normalised=length_normalised
    )
    assert difference.item() == pytest.approx((rejected - chosen).item(), abs=1e-9)


@fast
@given(pairs, st.floats(0.01, 5))
def test_smoothing_of_one_half_knows_no_preference(p: PairBatch, beta: float) -> None:
    loss = dpo_loss(p, beta=beta, label_smoothing=0.5)
    assert loss.item() == pytest.approx(dpo_loss(swapped(p), beta=beta, label_smoothing=0.5).item())
    assert loss.item() >= math.log(2) - 1e-12


@fast
@given(logps, logps, st.floats(0, 1), st.floats(0.01, 5))
def test_a_policy_that_is_its_reference_loses_log_2(chosen: float, rejected: float, eps: float, beta: float) -> None:
    same = pair(chosen, rejected, chosen, rejected, (3, 7))
    assert dpo_loss(same, beta=beta, label_smoothing=eps).item() == pytest.approx(math.log(2))
    assert ipo_loss(same, beta=beta).item() == pytest.approx(1 / (4 * beta * beta))


@fast
@given(pairs, st.floats(0.01, 5), st.integers(1, 50))
def test_length_normalisation_divides_each_side_by_its_own_length(p: PairBatch, beta: float, n: int) -> None:
    of_equal_length = replace(p, length_chosen_P=torch.tensor([n]), length_rejected_P=torch.tensor([n]))
    normalised = dpo_loss(of_equal_length, beta=beta, length_normalised=True)
    assert normalised.item() == pytest.approx(dpo_loss(p, beta=beta / n).item())


@fast
@given(scores, scores, scores)
def test_bradley_terry_is_blind_to_a_shift_unless_it_centres(chosen: float, rejected: float, shift: float) -> None:
    c, r = torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64)
    shifted = bradley_terry_loss(c + shift, r + shift)
    assert shifted.item() == pytest.approx(bradley_terry_loss(c, r).item(), abs=1e-9)
    centred = bradley_terry_loss(c + shift, r + shift, centring=0.1) - bradley_terry_loss(c, r)
    assert centred.item() == pytest.approx(0.1 * (chosen + rejected + 2 * shift) ** 2, abs=1e-9)
