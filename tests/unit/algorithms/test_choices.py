"""Choices beyond the worked examples, on fixture P, against numbers computed by hand.

w = [[2.5, 1], [0.4, 1, 3, 0.9]], r = [[1.5, 0.7], [0.5, 1.1, 1.5, 4]]; A is +1 for the first response, else −1.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fixture_p import (
    PLAIN,
    advantages,
    bare_tokens,
    f32,
    flat,
    group_p,
    loss_of,
    make_group,
    make_objective,
    of_samples,
    some_sequences,
    token_losses,
    tokens_p,
    trainable,
    unreduced_gradient,
)
from short_settings import algorithm_with

from kitae.algorithms.corrections import CORRECTIONS
from kitae.algorithms.group_stages import covariance_ranks
from kitae.algorithms.regularisers import REGULARISERS
from kitae.algorithms.reward_shaping import StepRewards
from kitae.algorithms.stages import STAGES

CLIPPED = [-1.2, -0.7, 0.8, 1.1, 1.5, 4.0]  # losses of PPO's clip at 0.2


def weights(correction: str, **settings: Any) -> list[float]:
    """What a correction gives on fixture P."""
    objective = make_objective(**{**PLAIN, "correction": correction, **settings})
    (function,) = STAGES["correction"].resolve(objective.config.correction, 8).values()
    found: list[float] = function(tokens_p(objective)).tolist()
    return found


# S1


def test_length_penalty_is_relative_to_the_longest_response_of_the_group() -> None:
    objective = make_objective(**{**PLAIN, "advantage": "reward"}, length_penalty=0.5, shaping_scale=2.0)
    groups = (
        make_group([1.0, 0.0, 1.0], lengths=[2, 4, 1]),
        make_group([1.0, 0.0], group=1, lengths=[8, 2]),
        make_group([1.0], group=2, lengths=[3]),
    )
    found = of_samples(advantages(objective, *groups))
    by_hand = [1 - 0.5 * 2 / 4, -0.5, 1 - 0.5 / 4, 0.5, -0.5 * 2 / 8, 0.5]
    assert found == pytest.approx([2 * x for x in by_hand])


def test_an_empty_response_has_no_length_to_pay_for() -> None:
    (function,) = STAGES["shaping"].resolve(algorithm_with(length_penalty=1.0).shaping, 8).values()
    step = StepRewards(f32([1, 0]), np.array([0, 0]), np.zeros(2, dtype=bool), np.array([3, 3]), 8)
    assert function(step).tolist() == [1.0, 0.0]


# S6


def test_tis_with_a_floor() -> None:
    assert weights("tis", correction_floor=0.5) == pytest.approx([2, 1, 0.5, 1, 2, 0.9])
    assert weights("tis") == pytest.approx([2, 1, 0.4, 1, 2, 0.9])
    assert weights("sequence-tis", correction_floor=1.0, correction_cap=1.05) == pytest.approx([1.05] * 6)


def test_geometric_mean_as_a_weight() -> None:
    first, second = 2.5**0.5, 1.08**0.25
    assert weights("geometric-tis") == pytest.approx([first] * 2 + [second] * 4)
    assert weights("geometric-tis", correction_cap=1.5) == pytest.approx([1.5] * 2 + [second] * 4)
    far = replace(tokens_p(make_objective(**PLAIN)), logp_mu_N=torch.zeros(6))  # w = 0.2 everywhere
    found = CORRECTIONS["geometric-tis"](far, floor=0.3, cap=2.0)
    assert found.tolist() == pytest.approx([0.3] * 6)


def test_a_response_with_one_outlier_is_dropped_whole() -> None:
    assert weights("veto", veto_low=0.5, veto_high=5.0) == [1, 1, 0, 0, 0, 0]
    assert weights("veto", veto_low=0.3, veto_high=2.6) == [1, 1, 0, 0, 0, 0]
    assert weights("veto", veto_low=0.3, veto_high=2.0) == [0] * 6
    assert weights("veto") == [1] * 6


def test_a_response_is_dropped_by_its_mean_k2_or_k3() -> None:
    k2 = [math.log(2.5) ** 2 / 4, (math.log(0.4) ** 2 + math.log(3) ** 2 + math.log(0.9) ** 2) / 8]
    k3 = [(1.5 - math.log(2.5)) / 2, (0.4 + 3 + 0.9 - 3 - math.log(0.4 * 3 * 0.9)) / 4]
    assert k2 == pytest.approx([0.209897, 0.257205], abs=1e-6)
    assert k3 == pytest.approx([0.291855, 0.305760], abs=1e-6)
    for name, (first, second) in (("k2-mask", k2), ("k3-mask", k3)):
        assert weights(name, drift_limit=first - 1e-4) == [0] * 6
        assert weights(name, drift_limit=(first + second) / 2) == [1, 1, 0, 0, 0, 0]
        assert weights(name, drift_limit=second + 1e-4) == [1] * 6


def test_only_tokens_of_high_entropy_are_trained_on() -> None:
    objective = make_objective(**{**PLAIN, "correction": "high-entropy"}, entropy_share=0.5)
    tokens = replace(tokens_p(objective), entropy_N=torch.tensor([0.3, 0.9, 1.0, 0.2, 0.5, 0.1]))
    high = CORRECTIONS["high-entropy"]
    assert high(tokens, entropy_share=0.5).tolist() == [0, 1, 1, 0, 1, 0]
    assert high(tokens, entropy_share=0.2).tolist() == [0, 1, 1, 0, 0, 0], "at least one of each response"
    assert high(tokens, entropy_share=1.0).tolist() == [1] * 6
    loss, gradient, _ = loss_of(objective, tokens)
    assert loss == pytest.approx((-0.7 + 0.8 + 1.5) / 6), "the others stay in the denominator"
    assert [g != 0 for g in gradient.tolist()] == [False, True, False, False, True, False]
    parts = [high(some_sequences(tokens, [i]), entropy_share=0.5).tolist() for i in (0, 1)]
    assert flat(parts) == [0, 1, 1, 0, 1, 0]


def test_equal_entropies_are_taken_in_order() -> None:
    tokens = bare_tokens(torch.zeros(5), [1.0] * 5)
    assert CORRECTIONS["high-entropy"](tokens, entropy_share=0.4).tolist() == [1, 1, 0, 0, 0]


# S7


def test_plain_sum_over_tokens() -> None:
    objective = make_objective(**{**PLAIN, "aggregation": "token-sum"})
    assert loss_of(objective, tokens_p(objective))[0] == pytest.approx(sum(CLIPPED))


# S8


def test_absolute_log_ratio() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0, -60.0]).requires_grad_()
    tokens = bare_tokens(logp, [1.0] * 4, logp_ref_N=torch.tensor([-1.5, -1.75, -3.0, -1.0]))
    penalty = REGULARISERS["abs"](tokens)
    assert penalty.tolist() == [0.5, 0.25, 0.0, 59.0]
    (gradient,) = torch.autograd.grad(penalty.sum(), logp)
    assert gradient.tolist() == [1.0, -1.0, 0.0, -1.0]


def test_the_expected_gradient_of_the_absolute_log_ratio_is_that_of_the_total_variation() -> None:
    logits = torch.tensor([0.3, -0.2, 1.0]).requires_grad_()
    ref = torch.tensor([0.2, 0.5, 0.3])
    logp = logits.log_softmax(0)
    penalty = REGULARISERS["abs"](bare_tokens(logp, [1.0] * 3, logp_ref_N=ref.log()))
    (got,) = torch.autograd.grad((penalty * logp.exp().detach()).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logp.exp() - ref).abs().sum(), logits)
    torch.testing.assert_close(got, expected)


def test_likelihood_of_correct_responses_beside_the_loss() -> None:
    objective = make_objective(**PLAIN, sft_coef=0.5)
    tokens = tokens_p(objective)
    loss, gradient, metrics = loss_of(objective, tokens)
    logp = [math.log(0.2 * 1.5), math.log(0.2 * 0.7)]
    assert loss == pytest.approx((sum(CLIPPED) - 0.5 * sum(logp)) / 6)
    without = loss_of(make_objective(**PLAIN), tokens)[1]
    assert (gradient - without).tolist() == pytest.approx([-0.5 / 6] * 2 + [0] * 4)
    assert metrics["sft_loss"] == pytest.approx(-sum(logp) / 2)
    both = make_objective(**PLAIN, sft_coef=0.5, sft_correct_above=-2.0)
    assert (loss_of(both, tokens)[1] - without).tolist() == pytest.approx([-0.5 / 6] * 6)


# The covariance of log-prob and advantage.

COVARIANCE = [-1.000998, 0.220723, -0.721222, -0.110361, 0.622047, -0.180602]
"""(log μ − mean) (A − mean) of fixture P, over all six tokens."""


def test_covariance_ranks_by_hand() -> None:
    logp = [[math.log(0.2 / w) for w in row] for row in ((2.5, 1.0), (0.4, 1.0, 3.0, 0.9))]
    mean, mean_a = sum(flat(logp)) / 6, -1 / 3
    by_hand = [(x - mean) * (a - mean_a) for x, a in zip(flat(logp), (1, 1, -1, -1, -1, -1), strict=True)]
    assert by_hand == pytest.approx(COVARIANCE, abs=1e-6)
    ranks = covariance_ranks([f32(row) for row in logp], [f32([1, 1]), f32([-1] * 4)])
    assert flat([r.tolist() for r in ranks]) == pytest.approx([1, 1 / 6, 1, 1, 0, 1])


def test_without_covariance_no_token_is_chosen() -> None:
    equal = covariance_ranks([f32([-1, -2]), f32([-3])], [f32([0.7, 0.7]), f32([0.7])])
    assert flat([r.tolist() for r in equal]) == [1, 1, 1]
    assert covariance_ranks([], []) == []
    missing = covariance_ranks([f32([-1, math.nan]), f32([-3, -math.inf])], [f32([1, 1]), f32([-1, -1])])
    assert flat([r.tolist() for r in missing]) == [0, 1, 0.25, 1], "missing log-probs take no part"


def test_clip_cov_stops_the_tokens_of_the_highest_covariance() -> None:
    for share, stopped in ((0.1, {4}), (0.3, {1, 4}), (1.0, {1, 4})):
        objective = make_objective(**PLAIN, gate="clip-cov", cov_share=share)
        tokens = tokens_p(objective)
        expected = [0.0 if i in stopped else x for i, x in enumerate(CLIPPED)]
        assert token_losses(objective, tokens) == pytest.approx(expected, abs=1e-6), share
        plain = unreduced_gradient(make_objective(**PLAIN), tokens)
        assert unreduced_gradient(objective, tokens) == [0.0 if i in stopped else g for i, g in enumerate(plain)]


def test_kl_cov_holds_the_tokens_of_the_highest_covariance() -> None:
    objective = make_objective(**PLAIN, gate="kl-cov", cov_share=0.3, cov_coef=2.0)
    tokens = tokens_p(objective)
    plain = [-1.5, -0.7, 0.5, 1.1, 1.5, 4.0]
    held = {1: 2 * -math.log(0.7), 4: 2 * math.log(1.5)}
    expected = [x + held.get(i, 0.0) for i, x in enumerate(plain)]
    assert token_losses(objective, tokens) == pytest.approx(expected, abs=1e-5)
    slopes = [x + {1: -2.0, 4: 2.0}.get(i, 0.0) for i, x in enumerate(plain)]
    assert unreduced_gradient(objective, tokens) == pytest.approx(slopes, abs=1e-5)


def test_covariance_is_that_of_the_whole_step() -> None:
    objective = make_objective(**PLAIN, gate="clip-cov", cov_share=0.1)
    tokens = tokens_p(objective)
    parts = [token_losses(objective, some_sequences(tokens, [i])) for i in (0, 1)]
    assert flat(parts) == pytest.approx(token_losses(objective, tokens))


def test_covariance_is_computed_only_where_it_is_read() -> None:
    assert all("cov_rank" not in s.columns for s in trainable(make_objective(**PLAIN), group_p()))
