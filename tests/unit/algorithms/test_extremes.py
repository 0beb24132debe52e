"""Numbers at the edge of what floats hold: probabilities of exactly 0, log-ratios far from 0."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fixture_p import PLAIN, bare_tokens, loss_of, make_group, make_objective, with_kl
from torch import Tensor

from kitae.algorithms.corrections import CORRECTIONS
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.regularisers import REGULARISERS
from kitae.algorithms.stages import STAGES
from kitae.algorithms.tokens import TokenBatch, log_ratio

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
    settings = {**make_objective(correction=name, gate="mask").config.model_dump(), "entropy_share": 1.0}
    (function,) = STAGES["correction"].resolve(name, settings).values()
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
    samples = with_kl(objective.samples([make_group([1.0, 0.0], lengths=[2, 2])]), [[0.0, 0.0], [0.0, 0.0]])
    for s in samples:
        assert s.logp_old_T is not None and s.logp_ref_T is not None
        s.logp_old_T[-1] = s.logp_ref_T[-1] = -INF
    first, second = objective.advantages(samples)
    assert (first.advantage_T[-1], second.advantage_T[-1]) == (1.0, -1.0)


# Far from 0, only exponentials are clamped.


def test_k1_and_k2_are_not_clamped() -> None:
    logp = torch.tensor([-30.0, -1.0]).requires_grad_()
    tokens = bare_tokens(logp, [1.0] * 2, logp_ref_N=torch.tensor([-1.0, -41.0]))
    assert REGULARISERS["k1"](tokens).tolist() == [-29.0, 40.0]
    assert REGULARISERS["k2"](tokens).tolist() == [29.0**2 / 2, 800.0]
    assert slope(REGULARISERS["k2"], tokens).tolist() == [-29.0, 40.0]
    assert slope(REGULARISERS["k1-ratio"], tokens).tolist() == [1.0 - 29.0, 1.0 + 40.0]


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
    samples = with_kl(objective.samples([make_group([1.0, 0.0], lengths=[1, 1])]), [[50.0], [0.0]])
    first, second = objective.advantages(samples)
    assert (first.advantage_T[-1], second.advantage_T[-1]) == (-24.0, 24.0)


def test_the_mismatch_is_clamped_where_it_is_an_exponent_and_not_before() -> None:
    tokens = bare_tokens(torch.tensor([-40.0, -1.0]), [1.0] * 2)
    tokens = replace(tokens, logp_mu_N=torch.tensor([-1.0, -38.0]))
    assert tokens.log_mismatch_N.tolist() == [-39.0, 37.0]
    assert CORRECTIONS["geometric-tis"](tokens, correction_floor=0.0, correction_cap=2.0).tolist() == pytest.approx(
        [math.exp(-1)] * 2
    )
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
