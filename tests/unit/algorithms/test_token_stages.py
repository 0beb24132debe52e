"""S4 to S8 on tokens: values and gradients of fixture P through `Objective`, and the laws behind them."""

import math

import pytest
import torch
from fixture_p import (
    EXAMPLES,
    PLAIN,
    RATIOS_P,
    P,
    as_tokens,
    flat,
    group_p,
    loss_of,
    make_group,
    make_objective,
    part,
    tokens_p,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kitae.algorithms.corrections import effective_sample_size, mismatch_ratio, truncated
from kitae.algorithms.losses import clip_loss, clip_shares
from kitae.algorithms.objective import TokenBatch
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.ratios import token_ratio
from kitae.observe.meter import Meter

fast = settings(deadline=None, max_examples=60)
TOLERANCE = 5e-6

TIS = {"correction": "tis", "correction_cap": 2.0}
CASES = {
    "loss_ppo": {},
    "loss_dual": {"dual_clip": 3.0},
    "loss_dapo": {"clip_high": 0.28},
    "loss_olmo": {"clip_high": 0.272},
    "tis_C2": TIS,
    "olmorl": {"clip_high": 0.272, **TIS},
    "decoupled_ppo": {"correction": "tis", "correction_cap": 1e9},
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "constant-length": "const_L8",
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
def test_fixture_p_losses(case: str, aggregation: str) -> None:
    objective = make_objective(max_tokens=8, **{**PLAIN, **CASES[case], "aggregation": aggregation})
    loss, _, metrics = loss_of(objective, tokens_p(objective))
    assert loss == pytest.approx(EXAMPLES[case][AGGREGATIONS[aggregation]], abs=TOLERANCE)
    assert metrics["loss"] == pytest.approx(loss)


@pytest.mark.parametrize("case", CASES)
def test_fixture_p_tokens(case: str) -> None:
    objective = make_objective(**{**PLAIN, **CASES[case]})
    tokens = tokens_p(objective)
    each = [loss_of(objective, part(tokens, [i]))[0] for i in range(6)]
    assert [x * 6 for x in each] == pytest.approx(flat(EXAMPLES[case]["tok_loss"]), abs=TOLERANCE)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
def test_fixture_p_gradients(case: str, aggregation: str) -> None:
    objective = make_objective(max_tokens=8, **{**PLAIN, **CASES[case], "aggregation": aggregation})
    example = EXAMPLES["olmorl" if case == "tis_C2" else case]  # the same gradient: they differ in a clipped token
    expected = next(example[k] for k in ("dloss_dlogp_unreduced", "grad_unreduced", "grad") if k in example)
    tokens = tokens_p(objective)
    _, gradient, _ = loss_of(objective, tokens)
    assert (gradient / tokens.weight_N).tolist() == pytest.approx(flat(expected), abs=2e-5)
    assert [g == 0 for g in gradient.tolist()] == [g == 0 for g in flat(expected)], "a clipped token has none at all"


def test_constant_length_is_a_setting_and_not_the_width_of_the_batch() -> None:
    for max_tokens, constant_length in ((8, 0), (100, 8)):
        objective = make_objective(
            max_tokens, **{**PLAIN, "aggregation": "constant-length", "constant_length": constant_length}
        )
        loss, _, _ = loss_of(objective, tokens_p(objective))
        assert loss == pytest.approx(EXAMPLES["loss_ppo"]["const_L8"], abs=TOLERANCE)


@pytest.mark.parametrize(("aggregation", "key"), [("prompt-mean", "prompt_mean"), ("token-mean", "token_mean")])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["by group", "interleaved"])
def test_prompt_mean(aggregation: str, key: str, order: tuple[int, ...]) -> None:
    """A second prompt with losses [.5, .5, .5] and [-.5]: rewards 0 and 1, centred, at ratio 1."""
    objective = make_objective(**{**PLAIN, "aggregation": aggregation})
    samples = objective.samples(group_p()) + objective.samples(make_group([0, 1], group=1, lengths=[3, 1]))
    ratios = [*RATIOS_P, [1.0, 1.0, 1.0], [1.0]]
    batch = objective.batch([samples[i] for i in order])
    loss, _, _ = loss_of(objective, as_tokens(batch.samples, [ratios[i] for i in order]))
    assert loss == pytest.approx(EXAMPLES["prompt_mean"][key], abs=TOLERANCE)


def test_ungated_loss_keeps_every_gradient() -> None:
    objective = make_objective(**PLAIN, gate="none")
    tokens = tokens_p(objective)
    loss, gradient, metrics = loss_of(objective, tokens)
    expected = [-a * r for a, row in zip(P["adv"], RATIOS_P, strict=True) for r in row]
    assert loss == pytest.approx(sum(expected) / 6, abs=TOLERANCE)
    assert (gradient * 6).tolist() == pytest.approx(expected, abs=2e-5)
    assert "clip_low" not in metrics


def test_metrics_of_fixture_p() -> None:
    objective = make_objective(**{**PLAIN, **TIS, "dual_clip": 3.0})
    _, _, metrics = loss_of(objective, tokens_p(objective))
    weights = flat(P["pi_old_over_mu"])
    assert metrics["clip_high"] == pytest.approx(1 / 6)
    assert metrics["clip_low"] == pytest.approx(1 / 6)
    assert metrics["clip_dual"] == pytest.approx(1 / 6)
    assert metrics["correction_capped"] == pytest.approx(2 / 6)
    assert metrics["ratio"] == pytest.approx(sum(flat(RATIOS_P)) / 6, abs=TOLERANCE)
    assert metrics["ess"] == pytest.approx(EXAMPLES["ess"], abs=TOLERANCE)
    assert metrics["mismatch_k3"] == pytest.approx(sum(w - 1 - math.log(w) for w in weights) / 6, abs=TOLERANCE)
    assert metrics["logp_gap"] == pytest.approx(sum(abs(math.log(w)) for w in weights) / 6, abs=TOLERANCE)
    assert metrics["logp_gap_max"] == pytest.approx(math.log(3), abs=TOLERANCE)


def test_entropy_bonus_is_aggregated_like_the_loss() -> None:
    objective = make_objective(**{**PLAIN, "aggregation": "seq-mean-token-mean", "entropy_coef": 0.1})
    plain = tokens_p(objective)
    entropy = torch.tensor([EXAMPLES["entropy"]] * 2 + [0.0] * 4).requires_grad_()
    tokens = TokenBatch(plain.logp_N, entropy, plain.logp_old_N, plain.logp_mu_N, plain.advantage_N, plain.weight_N)
    loss = objective.loss(tokens, Meter())
    # Half of the batch, one of two sequences, has entropy .801819.
    assert loss.item() == pytest.approx(EXAMPLES["loss_ppo"]["seq_mean_token_mean"] - 0.1 * 0.801819 / 2, abs=TOLERANCE)
    (gradient,) = torch.autograd.grad(loss, entropy)
    assert gradient.tolist() == pytest.approx((-0.1 * plain.weight_N).tolist())


# Correction weights.


def test_tis_and_decoupled_weights() -> None:
    objective = make_objective(**PLAIN)
    tokens = tokens_p(objective)
    ratio = mismatch_ratio(tokens.logp_old_N, tokens.logp_mu_N)
    assert ratio.tolist() == pytest.approx(flat(P["pi_old_over_mu"]), abs=TOLERANCE)
    assert truncated(ratio, 2.0).tolist() == pytest.approx(flat(EXAMPLES["tis_C2"]["w"]), abs=TOLERANCE)
    assert effective_sample_size(ratio).item() == pytest.approx(EXAMPLES["ess"], abs=1e-6)


def test_a_missing_engine_logprob_weighs_one_and_spoils_no_metric() -> None:
    objective = make_objective(**{**PLAIN, **TIS})
    tokens = tokens_p(objective)
    tokens.logp_mu_N[0] = float("nan")
    tokens.logp_mu_N[4] = float("-inf")
    assert mismatch_ratio(tokens.logp_old_N, tokens.logp_mu_N).tolist() == pytest.approx(
        [1, 1, 0.4, 1, 1, 0.9], abs=TOLERANCE
    )
    loss, gradient, metrics = loss_of(objective, tokens)
    assert loss * 6 == pytest.approx(-1.2 - 0.7 + 0.32 + 1.1 + 1.5 + 3.6, abs=2e-5)
    assert gradient.isfinite().all()
    assert {name: x for name, x in metrics.items() if not math.isfinite(x)} == {}


def test_correction_weights_are_never_differentiated() -> None:
    logp_old = torch.zeros(3).requires_grad_()
    assert not mismatch_ratio(logp_old, torch.ones(3)).requires_grad
    objective = make_objective(**{**PLAIN, **TIS})
    tokens = tokens_p(objective)
    # If w carried gradient, that of a token with w < cap would not be w times the plain one.
    _, corrected, _ = loss_of(objective, tokens)
    _, plain, _ = loss_of(make_objective(**PLAIN), tokens)
    weights = truncated(mismatch_ratio(tokens.logp_old_N, tokens.logp_mu_N), 2.0)
    torch.testing.assert_close(corrected, plain * weights)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_effective_sample_size_lies_between_one_of_n_and_one(weights: list[float]) -> None:
    size = effective_sample_size(torch.tensor(weights, dtype=torch.float64)).item()
    assert 1 / len(weights) - 1e-9 <= size <= 1 + 1e-9
    assert effective_sample_size(torch.full((len(weights),), weights[0])).item() == pytest.approx(1)


def test_log_ratios_are_clamped_before_the_exponential() -> None:
    ratio = token_ratio(torch.tensor([500.0, -500.0, 1.0]), torch.zeros(3))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.e])


# Laws.

signed = st.floats(0.05, 4).flatmap(lambda a: st.sampled_from([a, -a]))


@fast
@given(
    st.lists(st.tuples(signed, st.integers(1, 5)), min_size=1, max_size=6),
    st.sampled_from([*AGGREGATIONS, "prompt-mean"]),
    st.sampled_from([{}, {"dual_clip": 3.0}, TIS, {"gate": "none"}, {"clip_high": 0.28, **TIS}]),
)
def test_on_policy_gradient_is_minus_advantage_times_weight(
    rows: list[tuple[float, int]], aggregation: str, choices: dict[str, object]
) -> None:
    """r = w = 1: every objective is plain policy gradient. Rewards are turned into any advantages we like."""
    objective = make_objective(**{**PLAIN, **choices, "aggregation": aggregation})
    # Two rollouts with rewards ±a centre to ±a.
    groups = [make_group([a, -a], group=g, lengths=[n, 1]) for g, (a, n) in enumerate(rows)]
    batch = objective.batch([s for g in groups for s in objective.samples(g)])
    ratios = [[1.0] * s.loss_tokens for s in batch.samples]
    tokens = as_tokens(batch.samples, ratios, logp_old=-1.0)  # what the engine sampled with, in make_group
    _, gradient, _ = loss_of(objective, tokens)
    torch.testing.assert_close(gradient, -tokens.advantage_N * tokens.weight_N, rtol=1e-5, atol=1e-7)
    assert gradient.abs().min() > 0


@fast
@given(st.data())
def test_the_cut_into_micro_batches_changes_nothing(data: st.DataObject) -> None:
    aggregation = data.draw(st.sampled_from([*AGGREGATIONS, "prompt-mean"]))
    objective = make_objective(**{**PLAIN, **TIS, "aggregation": aggregation, "dual_clip": 3.0, "entropy_coef": 0.1})
    tokens = tokens_p(objective)
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5), max_size=5)))
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    meter = Meter()
    total = sum(objective.loss(part(tokens, piece), meter) for piece in pieces)
    assert isinstance(total, torch.Tensor)
    (gradient,) = torch.autograd.grad(total, tokens.logp_N)
    whole, whole_gradient, whole_metrics = loss_of(objective, tokens)
    assert total.item() == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-6)
    metrics = meter.result()
    for name in ("loss", "ratio", "clip_low", "clip_high", "clip_dual", "logp_gap", "logp_gap_max", "mismatch_k3"):
        assert metrics[name] == pytest.approx(whole_metrics[name], abs=1e-6), name


def test_two_ranks_that_average() -> None:
    example = EXAMPLES["microbatch"]
    objective = make_objective(**PLAIN)
    tokens = tokens_p(objective)
    ranks = [2 * loss_of(objective, part(tokens, rows))[0] for rows in (slice(0, 2), slice(2, 6))]
    assert ranks == pytest.approx(example["dp2_scaled"], abs=TOLERANCE)
    assert sum(ranks) / 2 == pytest.approx(example["true_token_mean"], abs=TOLERANCE)
    assert sum(ranks) / 2 != pytest.approx(example["mean_of_means"], abs=0.1)


@fast
@given(
    st.lists(st.tuples(st.floats(0.01, 20), signed), min_size=1, max_size=12),
    st.floats(0.05, 0.6),
    st.floats(0.05, 0.9),
    st.sampled_from([0.0, 2.0, 3.0]),
)
def test_clipped_tokens_have_exactly_no_gradient_and_are_counted(
    tokens: list[tuple[float, float]], low: float, high: float, dual: float
) -> None:
    edges = (1 - low, 1 + high, dual)
    assume(all(abs(r - edge) > 1e-3 for r, _ in tokens for edge in edges))
    ratio = torch.tensor([r for r, _ in tokens]).requires_grad_()
    advantage = torch.tensor([a for _, a in tokens])
    (gradient,) = torch.autograd.grad(clip_loss(ratio, advantage, low, high, dual).sum(), ratio)
    clipped = torch.tensor(
        [
            (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) or (a < 0 and 0 < dual < r)
            for r, a in tokens
        ]
    )  # fmt: skip
    assert torch.equal(gradient == 0, clipped)
    torch.testing.assert_close(gradient[~clipped], -advantage[~clipped])
    shares = clip_shares(ratio.detach(), advantage, low, high, dual)
    assert torch.equal(torch.stack(list(shares.values())).any(0), clipped)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("reward", [0.0, 0.7, 1.0])
def test_zero_variance_groups_give_no_gradient_and_only_change_the_denominator(preset: str, reward: float) -> None:
    objective = make_objective(preset=preset, filter="none", aggregation="token-mean", correction="none")
    samples = objective.samples(group_p())
    equal = objective.samples(make_group([reward] * 3, group=1, lengths=[2, 2, 2]))
    both = as_tokens(objective.batch(samples + equal).samples, [*RATIOS_P, *[[1.3, 0.6]] * 3])
    _, gradient, _ = loss_of(objective, both)
    alone = as_tokens(objective.batch(samples).samples, RATIOS_P)
    _, without, _ = loss_of(objective, alone)
    assert not gradient[6:].any()
    torch.testing.assert_close(gradient[:6] * 12, without * 6)


def test_tis_with_a_huge_cap_is_decoupled_ppo_and_a_cap_of_every_weight_is_the_same_factor() -> None:
    tokens = tokens_p(make_objective(**PLAIN))
    decoupled, _, _ = loss_of(make_objective(**{**PLAIN, "correction": "tis", "correction_cap": 1e9}), tokens)
    barely, _, _ = loss_of(make_objective(**{**PLAIN, "correction": "tis", "correction_cap": 3.0001}), tokens)
    assert decoupled == barely == pytest.approx(EXAMPLES["decoupled_ppo"]["token_mean"], abs=TOLERANCE)


def test_samples_are_their_groups_wherever_they_stand() -> None:
    """Order of groups in a batch changes the order of the results only."""
    objective = make_objective(**{**PLAIN, "aggregation": "prompt-mean"})
    groups = [make_group([1, 0, 0], group=4, lengths=[1, 2, 3]), make_group([0, 1], group=2, lengths=[5, 1])]
    samples = [s for g in groups for s in objective.samples(g)]
    there = {(s.group, s.index): s.weight_T[-1] for s in objective.batch(samples).samples}
    back = {(s.group, s.index): s.weight_T[-1] for s in objective.batch(samples[::-1]).samples}
    assert there == back
    assert there[4, 0] == pytest.approx(1 / (2 * 6))
    assert there[2, 0] == pytest.approx(1 / (2 * 6))
