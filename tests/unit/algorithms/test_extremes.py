"""The edge of what floats hold and groups have: probabilities of 0, far log-ratios, huge rewards, empty responses."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixture_p import (
    PLAIN,
    as_group,
    bare_tokens,
    f32,
    loss_of,
    make_group,
    make_objective,
    make_rollout,
    with_kl,
    with_numbers,
)
from objective import GROUP_ADVANTAGES
from torch import Tensor

from kitae.algorithms.advantages import ADVANTAGES, GroupRewards, whiten
from kitae.algorithms.corrections import CORRECTIONS
from kitae.algorithms.filters import has_variance
from kitae.algorithms.loss_tokens import TokenBatch, log_ratio
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.regularisers import REGULARISERS, k3
from kitae.algorithms.reward_shaping import Moments
from kitae.algorithms.stages import STAGES, keyword_settings
from kitae.errors import ConfigError, VerifierError
from kitae.types import Chain, Segment

INF = float("inf")


def impossible_tokens(advantage: float = 1.0) -> TokenBatch:
    """The middle one of three tokens has probability 0 under every policy."""
    logp = torch.tensor([-1.0, -INF, -2.0]).requires_grad_()
    return bare_tokens(logp, [advantage] * 3, logp_ref_N=logp.detach().clone())


def slope(function: Callable[[TokenBatch], Tensor], tokens: TokenBatch) -> Tensor:
    (gradient_N,) = torch.autograd.grad(function(tokens).sum(), tokens.logp_N)
    return gradient_N


# Probability 0 on both sides of a ratio.


def test_the_log_ratio_of_two_impossible_tokens_is_zero() -> None:
    a = torch.tensor([-INF, -INF, -1.0, -1.0]).requires_grad_()
    b = torch.tensor([-INF, -1.0, -INF, -3.0])
    found = log_ratio(a, b)
    assert found.tolist() == [0.0, -INF, INF, 2.0]
    (gradient,) = torch.autograd.grad(found.sum(), a)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", REGULARISERS)
def test_a_penalty_on_an_impossible_token_is_zero(name: str) -> None:
    tokens = impossible_tokens()
    assert REGULARISERS[name](tokens).tolist() == [0.0, 0.0, 0.0]
    assert slope(REGULARISERS[name], tokens).isfinite().all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_of_an_impossible_token_is_one(name: str) -> None:
    settings = {"entropy_share": 1.0} if name == "high-entropy" else {}
    table = make_objective(correction=name, gate="mask", **settings).config.correction
    (function,) = STAGES["correction"].resolve(table, 8).values()
    assert function(impossible_tokens()).tolist() == [1.0, 1.0, 1.0]


RATIO_GATES = ("clip", "none", "divergence-mask", "sigmoid", "geometric-clip")


@pytest.mark.parametrize("gate", RATIO_GATES)
@pytest.mark.parametrize("anchor", ["old", "behaviour", "interpolated"])
def test_an_impossible_token_leaves_loss_gradient_and_metrics_finite(gate: str, anchor: str) -> None:
    correction = "none" if anchor == "behaviour" else "tis"
    objective = make_objective(
        **{**PLAIN, "correction": correction}, gate=gate, anchor=anchor, kl_coef=0.1, reference="frozen"
    )
    loss, gradient, metrics = loss_of(objective, impossible_tokens())
    assert loss == pytest.approx(-6.0 if gate == "sigmoid" else -3.0)  # as if the ratio were 1
    assert math.isfinite(loss) and gradient.isfinite().all()
    assert {name: x for name, x in metrics.items() if not math.isfinite(x)} == {}


def test_a_penalty_in_the_reward_of_an_impossible_token_is_zero() -> None:
    objective = make_objective(preset="rloo", kl_coef=0.5)
    samples = with_kl(objective.candidates([make_group([1.0, 0.0], lengths=[2, 2])]), [[0.0, 0.0], [0.0, 0.0]])
    for s in (s for c in samples for s in c.samples):
        s.columns["logp_old"][-1] = s.columns["logp_ref"][-1] = -INF
    first, second = objective.advantages(samples)
    assert (first.column("advantage")[-1], second.column("advantage")[-1]) == (1.0, -1.0)


# Far from 0, only exponentials are clamped.


def test_k1_and_k2_are_not_clamped() -> None:
    logp = torch.tensor([-30.0, -1.0]).requires_grad_()
    tokens = bare_tokens(logp, [1.0] * 2, logp_ref_N=torch.tensor([-1.0, -41.0]))
    assert REGULARISERS["k1"](tokens).tolist() == [-29.0, 40.0]
    assert REGULARISERS["k2"](tokens).tolist() == [29.0**2 / 2, 800.0]
    assert slope(REGULARISERS["k2"], tokens).tolist() == [-29.0, 40.0]
    assert slope(REGULARISERS["k1-ratio"], tokens).tolist() == [1.0 - 29.0, 1.0 + 40.0]


@pytest.mark.parametrize("d", [0.5, -0.02, 0.01, -0.01, 0.0099, -1e-3, 1e-4, -1e-6, 1e-8])
def test_k3_of_a_small_step_and_its_slope(d: float) -> None:
    """Not what rounding leaves of 1 − d − 1 + d."""
    x = torch.tensor(d, requires_grad=True)
    value = k3(x)
    value.backward()
    d = x.item()
    exact = sum((-d) ** n / math.factorial(n) for n in range(2, 20))
    assert value.item() == pytest.approx(exact, rel=1e-4)
    assert x.grad is not None and x.grad.item() == pytest.approx(-math.expm1(-d), rel=1e-4)


def test_k3_pulls_back_a_token_however_far_it_drifted() -> None:
    """Beyond 20 the exponential goes on as its tangent: the gradient neither overflows, nor vanishes, nor turns."""
    logp = torch.tensor([-1.0, -26.0, -501.0, -1.0]).requires_grad_()
    tokens = bare_tokens(logp, [1.0] * 4, logp_ref_N=torch.tensor([-2.0, -1.0, -1.0, -501.0]))
    top = math.exp(20)
    values = REGULARISERS["k3"](tokens).tolist()
    assert values == pytest.approx([math.exp(-1), top * 6 - 26, top * 481 - 501, 499.0], rel=1e-6)
    gradient = slope(REGULARISERS["k3"], tokens).tolist()
    assert gradient == pytest.approx([1 - math.exp(-1), 1 - top, 1 - top, 1.0], rel=1e-6)


def test_a_penalty_in_the_reward_is_not_clamped() -> None:
    objective = make_objective(preset="rloo", kl_coef=0.5)
    samples = with_kl(objective.candidates([make_group([1.0, 0.0], lengths=[1, 1])]), [[50.0], [0.0]])
    first, second = objective.advantages(samples)
    assert (first.column("advantage")[-1], second.column("advantage")[-1]) == (-24.0, 24.0)


def test_the_mismatch_is_clamped_where_it_is_an_exponent_and_not_before() -> None:
    tokens = bare_tokens(torch.tensor([-40.0, -1.0]), [1.0] * 2)
    tokens = replace(tokens, logp_mu_N=torch.tensor([-1.0, -38.0]))
    assert tokens.log_mismatch_N.tolist() == [-39.0, 37.0]
    assert CORRECTIONS["geometric-tis"](tokens, floor=0.0, cap=2.0).tolist() == pytest.approx([math.exp(-1)] * 2)
    assert CORRECTIONS["geometric"](tokens, geometric_low=0.36, geometric_high=2.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_token_that_drifted_without_bound_leaves_every_method_finite(preset: str) -> None:
    objective = make_objective(preset=preset)
    logp = torch.tensor([-1.0, -800.0, -1.0]).requires_grad_()
    near = torch.tensor([-1.0, -1.0, -800.0])
    tokens = bare_tokens(logp, [1.0, -1.0, 1.0], logp_old_N=near, logp_mu_N=near.clone(), logp_ref_N=near.clone())
    loss, gradient, metrics = loss_of(objective, tokens)
    assert math.isfinite(loss) and gradient.isfinite().all()
    assert {name: x for name, x in metrics.items() if not math.isfinite(x)} == {}


# Huge rewards: what float32 holds, its squares and sums need not.

HUGE = [2e38, -1e38, 3e38, 1e38]


def huge_group(scale: float = 1.0) -> GroupRewards:
    rewards = f32([x * scale for x in HUGE])
    return GroupRewards(rewards, f32([1, 0, 1, 0]), np.array([3, 1, 2, 4]), components={"only": rewards})


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
def test_group_statistics_of_huge_rewards_are_those_of_small_ones(name: str) -> None:
    """Scaled by a power of two, which floats do not round: the results are in proportion, bit for bit."""
    settings = {"ddof": 1, "epsilon": 0.0, "k": 2, "correct_above": 0.5, "rewards": (), "weights": (), "decay": 0.5}
    function = ADVANTAGES[name]
    read = {key: settings[key] for key in keyword_settings(function)}
    small, huge = (function(huge_group(scale), **read) for scale in (2.0**-100, 1.0))
    linear = ("reward", "group-centred", "leave-one-out", "length-weighted", "role-mean")
    factor = 2.0**100 if name in linear else 1.0
    assert np.isfinite(huge).all() and huge.dtype == np.float32
    assert huge.tolist() == pytest.approx((small.astype(np.float64) * factor).tolist(), rel=1e-6)


@pytest.mark.parametrize("kind", ["tokens", "samples", "scale"])
def test_whitening_of_huge_advantages(kind: str) -> None:
    rows = [f32([x] * (i + 1)) for i, x in enumerate(HUGE)]
    huge = whiten(rows, kind, 1)
    small = whiten([r / np.float32(2.0**100) for r in rows], kind, 1)
    for a, b in zip(huge, small, strict=True):
        assert a.tolist() == pytest.approx(b.tolist(), rel=1e-6)


def test_normalisation_of_huge_rewards() -> None:
    found = Moments().add(f32(HUGE)).normalise(f32(HUGE))
    expected = Moments().add(f32([2, -1, 3, 1])).normalise(f32([2, -1, 3, 1]))
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_huge_rewards_of_either_sign_vary() -> None:
    assert has_variance(f32([3e38, -3e38]))


def test_shaping_that_leaves_what_a_float_holds_is_refused_and_clipping_comes_first() -> None:
    group = make_group([3e38, 0.0])
    with pytest.raises(ConfigError, match="the shaping function must return 2 finite numbers"):
        make_objective(shaping_scale=2.0).candidates([group])
    first, second = make_objective(shaping_scale=2.0, shaping_clip=5.0).candidates([group])
    assert (first.reward, second.reward) == (5.0, 0.0)


def test_a_score_that_a_float_does_not_hold_is_refused() -> None:
    with pytest.raises(VerifierError, match=r"a score must be a number within ± 3.4e\+38, got 1e\+39"):
        make_objective().candidates([make_group([1e39, 0.0])])
    with pytest.raises(VerifierError, match="a score must be a number within"):
        make_objective().drop_reason(make_group([1e39, 0.0]))


# Little or nothing to train on.


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [1, 2])
def test_one_sample_and_equal_samples_are_finite_under_every_method(preset: str, size: int) -> None:
    greedy = make_rollout(1.0, group=0, index=-1)
    objective = make_objective(preset=preset)
    samples = objective.candidates([make_group([1.0] * size, lengths=[2] * size, greedy=greedy)])
    samples = with_numbers(
        samples, logp_old=[[-1.0] * 2] * size, logp_ref=[[-1.0] * 2] * size, value=[[0.5] * 2] * size,
        logp_teacher=[[-2.0] * 2] * size,
    )  # fmt: skip
    for s in objective.advantages(samples):
        assert np.isfinite(s.column("advantage")).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_empty_and_wholly_masked_responses_are_not_trained_on_and_spoil_nothing(preset: str) -> None:
    """A response without tokens, and one of which every token came from an environment."""
    observed = replace(make_rollout(0.0, index=1), chains=(Chain((1,), (Segment.observed((5, 6)),)),))
    good, bad = make_rollout(1.0, [-1.0] * 3, index=2), make_rollout(0.0, index=3)
    group = as_group([make_rollout(1.0, []), observed, good, bad], greedy=make_rollout(0.0, index=-1))
    objective = make_objective(preset=preset)
    samples = objective.candidates([group])
    assert [s.kept for s in samples][:2] == [False, False]
    samples = with_numbers(
        samples,
        **{
            name: [[-1.0] * s.loss_tokens for s in samples]
            for name in ("logp_old", "logp_ref", "logp_teacher", "value")
        },
    )
    trained = objective.weighted(objective.advantages(samples))
    assert all(np.isfinite(s.columns["advantage"]).all() and np.isfinite(s.weight_T).all() for s in trained)
    assert all(s.loss_tokens for s in trained)
