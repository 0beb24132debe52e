"""Worked examples of S4 to S8: values, and the gradient of every token, through `Objective` wherever it allows them.

A loss as such is easy to get right by accident; d loss / d log π is the quantity that trains.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fixture_p import (
    AGGREGATIONS,
    EXAMPLES,
    PLAIN,
    RATIOS_P,
    SIGNS_P,
    TIS,
    as_group,
    as_tokens,
    bare_tokens,
    covers,
    flat,
    group_p,
    loss_of,
    make_group,
    make_objective,
    make_rollout,
    some_sequences,
    token_losses,
    tokens_p,
    trainable,
    unreduced_gradient,
)
from objective import as_candidates
from pydantic import ValidationError

from kitae.algorithms.control import Signal
from kitae.algorithms.corrections import CORRECTIONS, sequence_drift
from kitae.algorithms.gates import asymmetric, clip, sigmoid, weight_clip
from kitae.algorithms.ratios import RATIOS, interpolated, proximal_share
from kitae.algorithms.regularisers import REGULARISERS, adapt_kl
from kitae.models.logprobs import Head, HeadTransform, token_logprobs
from kitae.observe.meter import Meter

TOLERANCE = 2e-6
"""The examples have six decimals; the rest is fp32."""


def close(expected: Any) -> Any:
    return pytest.approx(expected, abs=TOLERANCE)


def plain(**choices: Any) -> Any:
    return make_objective(**{**PLAIN, **choices})


def weights_left(**choices: Any) -> list[float]:
    """What the stages leave of each token of fixture P: the gradient over −A, before aggregation."""
    objective = plain(**choices)
    return [-g / a for g, a in zip(unreduced_gradient(objective, tokens_p(objective)), SIGNS_P, strict=True)]


@covers("fixtureP")
def test_fixture_p_is_what_the_examples_say() -> None:
    example = EXAMPLES["fixtureP"]
    tokens = tokens_p(plain())
    assert tokens.logp_old_N.tolist() == close([example["logp_old"]] * 6)
    assert tokens.logp_old_N.exp().tolist() == close([example["p_old"]] * 6)
    assert tokens.logp_N.tolist() == close(flat(example["logp_new"]))
    assert tokens.logp_mu_N.tolist() == close(flat(example["logp_mu"]))
    assert tokens.log_mismatch_N.exp().tolist() == close(flat(example["pi_old_over_mu"]))
    assert RATIOS["token"](tokens.logp_N - tokens.logp_old_N, tokens).tolist() == close(flat(example["ratio"]))
    assert tokens.advantage_N.tolist() == [example["adv"][i] for i in tokens.sample_N.tolist()]


# Losses that act on tokens: the value and the gradient of each, and every way to average them.

CISPO = {"gate": "weight-clip", "weight_floor": 0.0}
STALE = {"anchor": "behaviour", "gate": "asymmetric", "weight_floor": 0.5, "weight_cap": 10.0, "reject_below": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "loss_ppo": {},
    "loss_dual": {"dual_clip": 3.0},
    "loss_dapo": {"clip_high": 0.28},
    "loss_olmo": {"clip_high": 0.272},
    "cispo_upper1.28_no_lower": {**CISPO, "weight_cap": 1.28},
    "cispo_verl_default_0.8_1.2": {**CISPO, "weight_floor": 0.8, "weight_cap": 1.2},
    "cispo_scalerl_cap5": {**CISPO, "weight_cap": 5.0},
    "sapo_1.0_1.05": {"gate": "sigmoid"},
    "tis_C2": TIS,
    "icepop_0.5_5": {"correction": "icepop", "correction_low": 0.5, "correction_high": 5.0},
    "olmorl": {"clip_high": 0.272, **TIS},
    "decoupled_ppo": {"correction": "tis", "correction_cap": 1e9},
    "coupled_on_behaviour": {"anchor": "behaviour"},
    "minirl": {"gate": "mask", "clip_high": 0.27, "correction": "total", "correction_cap": 5.0},
    "asym_stale_token": STALE,
}
GRADIENTS = ("dloss_dlogp_unreduced", "grad_unreduced", "grad")
NO_GRADIENT = {  # the value of a correction is all that these examples record; the gradient follows from it
    "tis_C2": [[0, -0.7], [0, 1.1, 3.0, 3.6]],
    "icepop_0.5_5": [[0, -0.7], [0, 1.1, 4.5, 3.6]],
}
# Further numbers of an example: what remains of each token when only a part of the stages acts.
PARTS: dict[str, dict[str, Callable[[], list[float]]]] = {
    **{
        name: {"w": lambda choices=choices: weights_left(**choices)}  # type: ignore[misc]
        for name, choices in CASES.items()
        if name.startswith("cispo")
    },
    "tis_C2": {"w": lambda: weights_left(gate="likelihood", **TIS)},
    "icepop_0.5_5": {"w": lambda: weights_left(gate="likelihood", **CASES["icepop_0.5_5"])},
    "coupled_on_behaviour": {"ratio": lambda: weights_left(gate="none", anchor="behaviour")},
    "minirl": {
        "M": lambda: weights_left(gate="mask", clip_high=0.27),
        "W": lambda: weights_left(gate="likelihood", correction="total", correction_cap=5.0),
    },
    "asym_stale_token": {
        "rho": lambda: weights_left(gate="none", anchor="behaviour"),
        "W": lambda: weights_left(**STALE),
    },
}


@covers(*CASES)
@pytest.mark.parametrize("case", CASES)
def test_fixture_p(case: str) -> None:
    example = EXAMPLES[case]
    objective = plain(**CASES[case])
    tokens = tokens_p(objective)
    assert token_losses(objective, tokens) == close(flat(example["tok_loss"]))

    key = next((k for k in GRADIENTS if k in example), None)
    expected = flat(example[key] if key else NO_GRADIENT[case])
    found = unreduced_gradient(objective, tokens)
    assert found == pytest.approx(expected, abs=4e-6)
    assert [g == 0 for g in found] == [g == 0 for g in expected], "a stopped token has exactly no gradient"

    for name, aggregation in AGGREGATIONS.items():
        averaged = plain(**CASES[case], **aggregation)
        batch = tokens_p(averaged)
        loss, gradient, metrics = loss_of(averaged, batch)
        assert loss == close(example[name]), name
        assert metrics["loss"] == pytest.approx(loss)
        shares = [w * g for w, g in zip(batch.weight_N.tolist(), expected, strict=True)]
        assert gradient.tolist() == pytest.approx(shares, abs=4e-6), name

    for name, part in PARTS.get(case, {}).items():
        assert part() == close(flat(example[name])), name
    if "gate" in example:  # SAPO's is the loss over −A
        assert [x / -a for x, a in zip(token_losses(objective, tokens), SIGNS_P, strict=True)] == close(
            flat(example["gate"])
        )
    if "grad_seq_mean_token_sum" in example:
        summed = plain(**CASES[case], **AGGREGATIONS["seq_mean_token_sum"])
        _, gradient, _ = loss_of(summed, tokens_p(summed))
        assert gradient.tolist() == close(flat(example["grad_seq_mean_token_sum"]))
    if "token_mean_over_kept" in example:  # masked tokens stay in the denominator; without them it would be this
        loss, _, metrics = loss_of(objective, tokens)
        assert loss * 6 / 5 == close(example["token_mean_over_kept"])
        assert loss == close(example["token_mean"])


@covers("cispo_trl_default_cap0.2")
def test_a_weight_cap_read_as_an_epsilon_shrinks_every_update_and_is_refused() -> None:
    example = EXAMPLES["cispo_trl_default_cap0.2"]
    with pytest.raises(ValidationError, match=r"algorithm\.gate\.weight_cap must be at least 1, got 0\.2"):
        plain(gate="weight-clip", weight_cap=0.2)
    tokens = tokens_p(plain())
    ratio_N = RATIOS["token"](tokens.logp_N - tokens.logp_old_N, tokens)
    loss_N = weight_clip(ratio_N, tokens, weight_floor=0.0, weight_cap=0.2)
    assert loss_N.tolist() == close(flat(example["tok_loss"]))
    (gradient,) = torch.autograd.grad(loss_N.sum(), tokens.logp_N)
    assert gradient.tolist() == close(flat(example["grad_unreduced"]))
    assert [-g / a for g, a in zip(gradient.tolist(), SIGNS_P, strict=True)] == close(flat(example["w"]))
    for name, aggregation in AGGREGATIONS.items():
        assert (loss_N * tokens_p(plain(**aggregation)).weight_N).sum().item() == close(example[name])


# Ratios of whole sequences.

GSPO = {"ratio": "sequence-mean", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}


@covers("gspo_paper_eps")
@pytest.mark.parametrize("ratio", ["sequence-mean", "sequence-mean-token"])
def test_gspo(ratio: str) -> None:
    example = EXAMPLES["gspo_paper_eps"]
    objective = plain(**{**GSPO, "ratio": ratio})
    tokens = tokens_p(objective)
    open_ = plain(ratio=ratio, gate="none")
    means = [-x * a for x, a in zip(token_losses(open_, tokens), SIGNS_P, strict=True)]
    assert means == close([example["s"][0]] * 2 + [example["s"][1]] * 4)
    assert token_losses(objective, tokens) == close([example["seq_loss"][0]] * 2 + [example["seq_loss"][1]] * 4)
    loss, gradient, _ = loss_of(objective, tokens)
    assert loss == close(example["loss"])
    assert gradient.tolist() == close(flat(example["grad_seqmean"]))
    assert gradient.tolist()[:2] == [0, 0]
    # Averaged over tokens, long sequences count more: another algorithm.
    by_token = plain(**{**GSPO, "ratio": ratio, "aggregation": "token-mean"})
    assert loss_of(by_token, tokens_p(by_token))[0] == close(example["token_mean_loss"])


@covers("gspo_eps0.2")
def test_a_clip_for_tokens_never_acts_on_a_sequence_and_is_refused() -> None:
    example = EXAMPLES["gspo_eps0.2"]
    with pytest.raises(ValidationError, match=r"algorithm\.gate\.clip_low must be at most 0\.05 .* got 0\.2"):
        plain(ratio="sequence-mean", clip_low=0.2, clip_high=0.2)
    tokens = tokens_p(plain(aggregation="seq-mean-token-mean"))
    for name in ("sequence-mean", "sequence-mean-token"):
        ratio_N = RATIOS[name](tokens.logp_N - tokens.logp_old_N, tokens)
        loss_N = clip(ratio_N, tokens, clip_low=0.2, clip_high=0.2, dual_clip=0.0)
        assert loss_N.tolist() == close([example["seq_loss"][0]] * 2 + [example["seq_loss"][1]] * 4)
        loss = (loss_N * tokens.weight_N).sum()
        assert loss.item() == close(example["loss"])
        (gradient,) = torch.autograd.grad(loss, tokens.logp_N)
        assert gradient.tolist() == close(flat(example["grad_seqmean"]))


@covers("rloo_trl_seq_product_ratio")
def test_product_of_a_sequences_ratios() -> None:
    products = EXAMPLES["rloo_trl_seq_product_ratio"]
    objective = plain(ratio="sequence-product", gate="none", aggregation="seq-mean-token-mean")
    tokens = tokens_p(objective)
    each = [-x * a for x, a in zip(token_losses(objective, tokens), SIGNS_P, strict=True)]
    assert each == close([products[0]] * 2 + [products[1]] * 4)
    # Averaged over sequences this is −A Π r / B, and so is its gradient at every token.
    loss, gradient, _ = loss_of(objective, tokens)
    assert loss == close((-products[0] + products[1]) / 2)
    assert gradient.tolist() == close([-products[0] / 2] * 2 + [products[1] / 2] * 4)


@covers("asym_stale_traj")
def test_asymmetric_weights_of_whole_responses() -> None:
    example = EXAMPLES["asym_stale_traj"]
    both = {"anchor": "behaviour", "gate": "none", "aggregation": "seq-mean-token-mean"}
    for ratio, key in (("sequence-product", "rho_prod"), ("sequence-mean", "rho_geo")):
        objective = plain(ratio=ratio, **{**both, "aggregation": "seq-mean-token-mean"})
        each = [-x * a for x, a in zip(token_losses(objective, tokens_p(objective)), SIGNS_P, strict=True)]
        assert each == close([example[key][0]] * 2 + [example[key][1]] * 4)
    left = weights_left(preset="stale-asymmetric")
    assert left == close([example["W"][0]] * 2 + [example["W"][1]] * 4)


@covers("asym_table")
def test_asymmetric_weights_by_sign() -> None:
    for name, advantage in (("A+", 1.0), ("A-", -1.0)):
        rows = {float(ratio): weight for ratio, weight in EXAMPLES["asym_table"][name].items()}
        logp = torch.full((len(rows),), -1.0, requires_grad=True)
        tokens = bare_tokens(logp, [advantage] * len(rows))
        ratio_N = torch.tensor(list(rows))
        loss_N = asymmetric(ratio_N, tokens, weight_floor=0.5, weight_cap=10.0, reject_below=0.0)
        (gradient,) = torch.autograd.grad(loss_N.sum(), logp)
        assert (-gradient / advantage).tolist() == close(list(rows.values()))
        # With a rejection threshold, what the floor would lift is dropped instead.
        loss_N = asymmetric(ratio_N, tokens, weight_floor=0.5, weight_cap=10.0, reject_below=1e-3)
        (gradient,) = torch.autograd.grad(loss_N.sum(), logp)
        assert gradient[0] == 0 and (gradient[1:] != 0).all()


# SAPO.


def sapo_weights(ratios: torch.Tensor, advantage: float) -> list[float]:
    """d loss / d logp over −A of the soft gate."""
    logp = ratios.log().requires_grad_()
    tokens = bare_tokens(logp, [advantage] * len(ratios), logp_old_N=torch.zeros_like(ratios))
    loss_N = sigmoid((logp - tokens.logp_old_N).exp(), tokens, tau_positive=1.0, tau_negative=1.05)
    (gradient,) = torch.autograd.grad(loss_N.sum(), logp)
    return (-gradient / advantage).tolist()


@covers("sapo_at_r1")
def test_sapo_is_the_plain_gradient_at_ratio_one() -> None:
    example = EXAMPLES["sapo_at_r1"]
    objective = plain(gate="sigmoid")
    samples = trainable(objective, group_p())
    tokens = as_tokens(samples, [[1.0] * 2, [1.0] * 4])
    assert token_losses(objective, tokens) == close([-example["gate_tau1"]] * 2 + [example["gate_tau105"]] * 4)
    assert unreduced_gradient(objective, tokens) == close([-a * example["weight"] for a in SIGNS_P])


@covers("sapo_weight_table_tau1")
def test_sapo_weights() -> None:
    table = {float(ratio): weight for ratio, weight in EXAMPLES["sapo_weight_table_tau1"].items()}
    assert sapo_weights(torch.tensor(list(table)), 1.0) == close(list(table.values()))


@covers("sapo_peak")
def test_sapo_still_grows_until_a_ratio_of_two() -> None:
    grid = torch.linspace(1.9, 2.2, 30001, dtype=torch.float64)
    for key, advantage in (("tau1", 1.0), ("tau105", -1.0)):
        at, peak = EXAMPLES["sapo_peak"][key]
        weights = sapo_weights(grid, advantage)
        assert max(weights) == close(peak)
        assert grid[weights.index(max(weights))].item() == pytest.approx(at, abs=2e-4)


# Correction weights.


@covers("seq_weights")
def test_weights_of_whole_responses() -> None:
    example = EXAMPLES["seq_weights"]
    cases: dict[str, dict[str, Any]] = {
        "product": {"correction": "sequence-tis", "correction_cap": 1e9},
        "trl_seq_mask_cap3": {"correction": "sequence-mask", "correction_cap": 3.0},
        "verl_seq_trunc_2": {"correction": "sequence-tis", "correction_cap": 2.0},
    }
    for key, choices in cases.items():
        expected = [example[key][0]] * 2 + [example[key][1]] * 4
        assert weights_left(gate="likelihood", **choices) == close(expected), key
    # A lower cap removes the first response whole, and leaves its tokens in the denominator.
    masked = plain(correction="sequence-mask", correction_cap=2.0)
    loss, gradient, _ = loss_of(masked, tokens_p(masked))
    assert gradient.tolist()[:2] == [0, 0]
    assert loss == close(example["product"][1] * (0.8 + 1.1 + 1.5 + 4) / 6)
    first, second = example["geomean"]
    left = weights_left(gate="likelihood", correction="geometric", geometric_low=1.0, geometric_high=1.5)
    assert left == [0, 0, 1, 1, 1, 1]
    for mean, kept in ((first, [1, 0]), (second, [0, 1])):
        near = CORRECTIONS["geometric"](tokens_p(plain()), geometric_low=mean - 1e-5, geometric_high=mean + 1e-5)
        assert near.tolist() == [kept[0]] * 2 + [kept[1]] * 4


@covers("ess")
def test_effective_sample_size() -> None:
    objective = plain()
    tokens = tokens_p(objective)
    assert loss_of(objective, tokens)[2]["ess"] == close(EXAMPLES["ess"])


@covers("opsm_k1")
def test_drift_of_a_response_may_be_negative_and_then_nothing_is_masked() -> None:
    first, second = EXAMPLES["opsm_k1"]
    tokens = tokens_p(plain())
    assert sequence_drift(tokens, tokens.logp_old_N).tolist() == close([first] * 2 + [second] * 4)
    # With the engine's log-probs at π_old the mask decides by these numbers; only the second response is a wrong one.
    on_old = bare_tokens(tokens.logp_N, SIGNS_P, logp_old_N=tokens.logp_old_N, logp_mu_N=tokens.logp_old_N,
                         sample_N=tokens.sample_N, sequences=2)  # fmt: skip
    for limit, kept in ((0.0, 1.0), (second + 1e-4, 1.0), (second - 1e-4, 0.0), (first - 1e-4, 1.0)):
        assert CORRECTIONS["opsm"](on_old, opsm_limit=limit).tolist() == [1, 1, *[kept] * 4], limit


def test_old_tokens_are_dropped_by_age() -> None:
    tokens = bare_tokens(torch.zeros(4), [1.0] * 4, lag_N=torch.tensor([1, 2, 3, 4]))
    assert CORRECTIONS["age"](tokens, age_limit=1).tolist() == [1, 1, 0, 0]
    assert CORRECTIONS["age"](tokens, age_limit=0).tolist() == [1, 0, 0, 0]


@covers("a3po_alpha_vtheta10")
def test_share_of_the_way_that_the_proximal_policy_has_come() -> None:
    shares = {10 - int(sampled): share for sampled, share in EXAMPLES["a3po_alpha_vtheta10"].items()}
    lag_N = torch.tensor(list(shares))
    assert proximal_share(lag_N).tolist() == close(list(shares.values()))
    logp = torch.full((4,), -1.0, requires_grad=True)
    tokens = bare_tokens(logp, [1.0] * 4, logp_mu_N=torch.full((4,), -3.0), lag_N=lag_N)
    assert interpolated(tokens).tolist() == close([-3 + 2 * share for share in shares.values()])
    # As an anchor: the ratio is e to the rest of the way, and no gradient goes through the anchor.
    objective = make_objective(**{**PLAIN, "gate": "none", "anchor": "interpolated"})
    expected = [-math.exp(2 - 2 * share) for share in shares.values()]
    assert token_losses(objective, tokens) == pytest.approx(expected, rel=1e-5)
    assert unreduced_gradient(objective, tokens) == pytest.approx(expected, rel=1e-5)


# What others do wrong.


@covers("minimalist_eq5_literal_vs_ppo_Aneg")
def test_the_minimum_is_taken_after_multiplying_by_the_reward() -> None:
    example = EXAMPLES["minimalist_eq5_literal_vs_ppo_Aneg"]
    ratio = torch.tensor(RATIOS_P[1], requires_grad=True)
    literal = -torch.minimum(ratio, ratio.clamp(0.8, 1.2))
    assert literal.tolist() == close(example["literal"])
    (gradient,) = torch.autograd.grad(literal.sum(), ratio)
    assert (gradient != 0).float().tolist() == example["literal_grad_mask"]
    objective = plain()
    tokens = tokens_p(objective)
    assert [-x for x in token_losses(objective, tokens)[2:]] == close(example["ppo"])
    assert [float(g != 0) for g in unreduced_gradient(objective, tokens)[2:]] == example["ppo_grad_mask"]


@covers("raft_seq1_only")
def test_raft_trains_on_what_it_accepts_and_on_nothing_else() -> None:
    example = EXAMPLES["raft_seq1_only"]
    for aggregation, key in (
        ("seq-mean-token-mean", "seq_mean_token_mean_accepted"),
        ("token-mean", "token_mean_accepted"),
    ):
        objective = make_objective(preset="raft", aggregation=aggregation)
        (sample,) = trainable(objective, group_p())
        tokens = as_tokens([sample], RATIOS_P[:1])
        assert token_losses(objective, tokens) == close(flat(example["tok_loss"]))
        loss, gradient, _ = loss_of(objective, tokens)
        assert loss == close(example[key])
        assert gradient.tolist() == close([-0.5, -0.5])
    # An advantage of 0 instead would leave the rejected tokens in the denominator.
    for aggregation, key in (("token-mean", "token_mean_mask_kept"), ("seq-mean-token-mean", "seq_mean_mask_kept")):
        zeroed = make_objective(preset="raft", filter="none", aggregation=aggregation)
        tokens = as_tokens(trainable(zeroed, group_p()), RATIOS_P)
        tokens.advantage_N[2:] = 0
        assert loss_of(zeroed, tokens)[0] == close(example[key])
    # The preset is the paper's log-likelihood of the whole response.
    preset = make_objective(preset="raft")
    loss, gradient, _ = loss_of(preset, as_tokens(trainable(preset, group_p()), RATIOS_P[:1]))
    assert loss == close(sum(flat(example["tok_loss"])))
    assert gradient.tolist() == [-1, -1]


@covers("raftpp_seq1")
def test_raft_plus_plus() -> None:
    example = EXAMPLES["raftpp_seq1"]
    objective = make_objective(preset="raft++", correction="none")
    tokens = as_tokens(trainable(objective, group_p()), RATIOS_P[:1])
    assert token_losses(objective, tokens) == close(example["tok_loss"])
    loss, gradient, _ = loss_of(objective, tokens)
    assert loss == close(example["accepted_seq_mean"])
    assert gradient.tolist() == close([0, -0.35])
    zeroed = make_objective(preset="raft++", correction="none", filter="none", aggregation="token-mean")
    both = as_tokens(trainable(zeroed, group_p()), RATIOS_P)
    both.advantage_N[2:] = 0
    assert loss_of(zeroed, both)[0] == close(example["minimalrl_token_mean_with_rejected_tokens"])


# Aggregation over micro-batches, ranks and prompts.


@covers("microbatch")
def test_micro_batches_and_ranks() -> None:
    example = EXAMPLES["microbatch"]
    objective = plain()
    tokens = tokens_p(objective)
    parts = [loss_of(objective, some_sequences(tokens, [i]))[0] for i in range(2)]
    assert sum(parts) == close(example["true_token_mean"])
    assert [2 * x for x in parts] == close(example["dp2_scaled"]), "each rank, where gradients are averaged"
    assert sum(2 * x for x in parts) / 2 == close(example["dp_avg"])
    means = []  # what a mean over each micro-batch would be
    for i in range(2):
        alone = as_tokens(objective.weighted(as_candidates([trainable(objective, group_p())[i]])), [RATIOS_P[i]])
        means.append(loss_of(objective, alone)[0])
    assert sum(means) / 2 == close(example["mean_of_means"])


@covers("prompt_mean")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["by group", "interleaved"])
def test_prompt_mean(order: tuple[int, ...]) -> None:
    """A second prompt with losses [.5, .5, .5] and [-.5]: scores 0 and 1, centred, at ratio 1."""
    ratios = [*RATIOS_P, [1.0, 1.0, 1.0], [1.0]]
    for aggregation, key in (("prompt-mean", "prompt_mean"), ("token-mean", "token_mean")):
        objective = plain(aggregation=aggregation)
        samples = objective.advantages(objective.candidates([group_p(), make_group([0, 1], group=1, lengths=[3, 1])]))
        weighted = objective.weighted([samples[i] for i in order])
        loss, _, _ = loss_of(objective, as_tokens(weighted, [ratios[i] for i in order]))
        assert loss == close(EXAMPLES["prompt_mean"][key])


# Regularisers.


@covers("kl_values")
def test_kl_estimators() -> None:
    example = EXAMPLES["kl_values"]
    for kind in ("k2", "k3"):
        objective = plain(kl=kind, kl_coef=1.0, reference="frozen")
        # Equal scores: no advantage, so that the KL term is all there is.
        samples = trainable(objective, make_group([1, 1], lengths=[2, 3]))
        tokens = as_tokens(samples, [[1.0] * 2, [1.0] * 3], d_ref=example["d"])
        assert token_losses(objective, tokens) == close(example[kind])
        assert unreduced_gradient(objective, tokens) == close(example[f"d{kind}"])
    with pytest.raises(ValidationError, match="regularises nothing"):
        plain(kl="k1", kl_coef=1.0, reference="frozen")
    penalty_N = REGULARISERS["k1"](tokens)
    assert penalty_N.tolist() == close(example["k1"])
    (gradient,) = torch.autograd.grad(penalty_N.sum(), tokens.logp_N)
    assert gradient.tolist() == close(example["dk1"])


@covers("kl_expect")
def test_what_each_kl_estimator_optimises() -> None:
    """Expectations over the vocabulary: every token is there once, weighted by its probability."""
    example = EXAMPLES["kl_expect"]
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(example["ref"], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    pi = logp.exp()
    assert pi.tolist() == close(example["pi"])
    kl, forward = (pi * (logp - ref.log())).sum(), (ref * (ref.log() - logp)).sum()
    assert (kl.item(), forward.item()) == close((example["KL"], example["forwardKL"]))
    for divergence, key in ((kl, "grad_true"), (forward, "grad_forward")):
        assert torch.autograd.grad(divergence, logits, retain_graph=True)[0].tolist() == close(example[key])

    def expected(kind: str) -> tuple[float, list[float]]:
        tokens = bare_tokens(logp, [0.0] * 3, logp_ref_N=ref.log(), weight_N=pi.detach())
        if kind == "k1":  # refused by the settings
            loss = (REGULARISERS["k1"](tokens) * tokens.weight_N).sum()
        else:
            loss = plain(kl=kind, kl_coef=1.0, reference="frozen").loss(tokens, Meter())
        return loss.item(), torch.autograd.grad(loss, logits, retain_graph=True)[0].tolist()

    for kind, value, gradient in (
        ("k1", "E_k1", "grad_k1_loss"),
        ("k2", "E_k2", "grad_k2_loss"),
        ("k3", "E_k3", "grad_k3_loss"),
        ("k1-ratio", "E_k1", "grad_ratio_times_k1"),
        ("k3-ratio", "E_k3", "grad_ratio_times_k3"),
        ("k2-ratio", "E_k2", "grad_true"),
    ):
        found = expected(kind)
        assert found[0] == close(example[value]), kind
        assert found[1] == close(example[gradient]), kind


@covers("kl_ctrl")
def test_kl_controller() -> None:
    example = EXAMPLES["kl_ctrl"]
    assert example["raw_err"] == 9 / 6 - 1  # more than .2, so it is clipped
    assert adapt_kl(0.2, 9.0, 6.0, 256, 10_000) == close(example["beta"])
    objective = plain(kl="k2", kl_coef=0.2, kl_target=6.0, kl_horizon=10_000.0, reference="frozen")
    assert objective.finish_step({Signal.KL: 9.0}, 256) == {"kl_coef": 0.2}
    assert objective.kl_coef == close(example["beta"])


@covers("entropy")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_of_the_head(temperature: float) -> None:
    """A head of one hidden unit whose logits are temperature × log p."""
    p = torch.tensor([0.7, 0.2, 0.1])
    head = torch.nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        head.weight[:, 0] = p.log() * temperature
    logp, entropy = token_logprobs(
        Head(head.weight, None, HeadTransform(), exact=False),
        torch.ones(2, 1),
        torch.tensor([0, 2]),
        temperature=temperature,
        chunk=1,
        entropy_grad=True,
    )
    assert entropy.tolist() == close([EXAMPLES["entropy"]] * 2)
    assert logp.tolist() == close([math.log(0.7), math.log(0.1)])
    (gradient,) = torch.autograd.grad(entropy[0], head.weight)
    by_hand = -p * (p.log() + EXAMPLES["entropy"]) / temperature
    assert gradient[:, 0].tolist() == close(by_hand.tolist())
    # In the loss: a bonus that is averaged as the loss is.
    objective = plain(entropy_coef=0.1, aggregation="seq-mean-token-mean")
    tokens = tokens_p(objective)
    h_N = torch.tensor([EXAMPLES["entropy"]] * 2 + [0.0] * 4).requires_grad_()
    tokens = bare_tokens(tokens.logp_N, SIGNS_P, entropy_N=h_N, logp_old_N=tokens.logp_old_N,
                         weight_N=tokens.weight_N, sample_N=tokens.sample_N, sequences=2)  # fmt: skip
    loss = objective.loss(tokens, Meter())
    assert loss.item() == close(EXAMPLES["loss_ppo"]["seq_mean_token_mean"] - 0.1 * EXAMPLES["entropy"] / 2)
    (gradient,) = torch.autograd.grad(loss, h_N)
    assert gradient.tolist() == close((-0.1 * tokens.weight_N).tolist())


@covers("sft")
def test_supervised_fine_tuning() -> None:
    """Advantage 1 and plain likelihood are the cross-entropy of the given answers."""
    example = EXAMPLES["sft"]
    probabilities = [[0.5], [0.25, 0.8, 0.1]]
    rollouts = [make_rollout(1.0, [math.log(p) for p in row], index=i) for i, row in enumerate(probabilities)]
    for aggregation, key in (("token-mean", "token_mean"), ("seq-mean-token-mean", "seq_mean")):
        objective = plain(advantage="one", gate="likelihood", aggregation=aggregation)
        samples = trainable(objective, as_group(rollouts))
        assert [s.loss_tokens for s in samples] == example["L"]
        tokens = as_tokens(samples, probabilities, logp_old=0.0)
        assert token_losses(objective, tokens) == close(example["tok"])
        loss, gradient, _ = loss_of(objective, tokens)
        assert loss == close(example[key])
        assert gradient.tolist() == close((-tokens.weight_N).tolist())
