"""The named algorithms: all are there, each is the documented tuple of choices, and has the worked numbers."""

from typing import Any

import pytest
import torch
from fixture_p import (
    AGGREGATIONS,
    EXAMPLES,
    RATIOS_P,
    advantages,
    as_tokens,
    flat,
    group_p,
    loss_of,
    make_group,
    make_objective,
    of_samples,
    tokens_p,
    trainable,
    unreduced_gradient,
)
from short_settings import algorithm_of, spelled

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.presets import BASE, PRESETS
from kitae.algorithms.stages import STAGES

REQUIRED = {
    "reinforce", "reinforce-mean-zero", "reinforce-drop-correct", "reinforce-drop-wrong", "reinforce-rej",
    "reinforce-rej-std", "raft", "raft++", "ppo", "grpo", "dr-grpo", "dapo", "gspo", "gspo-token", "rloo", "remax",
    "reinforce++", "reinforce++-baseline", "cispo", "sapo", "minirl", "olmorl", "decoupled-ppo", "stale-asymmetric",
}  # fmt: skip
"""Methods that users look for by name."""

PLUS_MINUS = {"shaping_bias": -0.5, "shaping_scale": 2.0}
CLIP = {"ratio": "token", "anchor": "old", "gate": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
TOKEN = {"ratio": "token", "anchor": "old"}
TIS = {"correction": "tis", "correction_cap": 2.0}
SEQ = {"aggregation": "seq-mean-token-mean"}
SUM = {"aggregation": "seq-mean-token-sum"}
ZSCORE = {"advantage": "group-zscore", "advantage_ddof": 1, "advantage_epsilon": 1e-6}
REINFORCE = {**PLUS_MINUS, **CLIP, **TIS, **SEQ, "advantage": "reward", "filter": "none"}
KL_IN_REWARD = {"kl": "k1", "kl_into": "reward", "reference": "frozen"}
LIKELIHOOD = {"gate": "likelihood", "ratio": None, "anchor": None}
BEST = {"filter": "keep-best", "filter_correct_above": 0.5, "advantage": "one"}
GSPO = {**ZSCORE, "gate": "clip", "clip_low": 3e-4, "clip_high": 4e-4, **SEQ}

DOCUMENTED: dict[str, dict[str, Any]] = {
    "reinforce": REINFORCE,
    "reinforce-mean-zero": {**REINFORCE, "advantage": "group-centred"},
    "reinforce-drop-correct": {**REINFORCE, "filter": "all-correct", "filter_correct_above": 0.5},
    "reinforce-drop-wrong": {**REINFORCE, "filter": "all-wrong", "filter_correct_above": 0.5},
    "reinforce-rej": {**REINFORCE, "filter": "all-correct+all-wrong"},
    "reinforce-rej-std": {**REINFORCE, "filter": "all-correct+all-wrong", "advantage": "group-scaled"},
    "raft": {**BEST, **LIKELIHOOD, "correction": "none", **SUM},
    "raft++": {**BEST, **CLIP, **SEQ},
    "ppo": {
        **KL_IN_REWARD, "kl_coef": 0.001, "advantage": "gae", "gamma": 1.0, "gae_lambda": 1.0, "whiten": "tokens",
        **CLIP, "aggregation": "token-mean", "critic_clip": 0.5, "critic_warmup": 0,
    },
    "grpo": {"filter": "none", **ZSCORE, **CLIP, **TIS, **SEQ, "kl_coef": 0.0},
    "dr-grpo": {
        "filter": "none", "advantage": "group-centred", **CLIP, **TIS,
        "aggregation": "constant-length", "aggregation_length": "max_tokens", "kl_coef": 0.0,
    },
    "dapo": {
        "filter": "zero-variance", **ZSCORE, **CLIP, "clip_high": 0.28, "aggregation": "token-mean", "kl_coef": 0.0,
    },
    "gspo": {**GSPO, "ratio": "sequence-mean"},
    "gspo-token": {**GSPO, "ratio": "sequence-mean-token"},
    "rloo": {**KL_IN_REWARD, "kl_coef": 0.05, "advantage": "leave-one-out", **LIKELIHOOD, **SUM},
    "remax": {**KL_IN_REWARD, "kl_coef": 0.001, "advantage": "greedy", **LIKELIHOOD, **SUM},
    "reinforce++": {
        **KL_IN_REWARD, "kl_coef": 0.001, "advantage": "returns", "gamma": 1.0, "whiten": "tokens", **CLIP,
        "aggregation": "token-mean",
    },
    "reinforce++-baseline": {
        "advantage": "group-centred", "whiten": "scale", **CLIP, "aggregation": "token-mean", "kl": "k2",
        "kl_into": "loss", "kl_coef": 0.001, "reference": "frozen",
    },
    "cispo": {
        "filter": "zero-variance", **ZSCORE, **TOKEN, "gate": "weight-clip", "weight_floor": 0.0, "weight_cap": 5.0,
        "aggregation": "token-mean",
    },
    "sapo": {**ZSCORE, **TOKEN, "gate": "sigmoid", "tau_positive": 1.0, "tau_negative": 1.05, **SEQ},
    "minirl": {
        "advantage": "group-centred", **TOKEN, "gate": "mask", "clip_low": 0.2, "clip_high": 0.27,
        "correction": "total", "correction_cap": 5.0, **SUM, "kl_coef": 0.0,
    },
    "olmorl": {
        "filter": "zero-variance", "advantage": "group-centred", **CLIP, "clip_high": 0.272, **TIS,
        "aggregation": "token-mean", "kl_coef": 0.0,
    },
    "decoupled-ppo": {**ZSCORE, "whiten": "scale", **CLIP, "correction": "tis", "correction_cap": 5.0,
                      "aggregation": "token-mean"},
    "stale-asymmetric": {
        "ratio": "sequence-product", "anchor": "behaviour", "gate": "asymmetric", "weight_floor": 0.5,
        "weight_cap": 10.0, "reject_below": 1e-3, "correction": "none",
    },
}  # fmt: skip


def test_every_method_that_users_look_for_is_there() -> None:
    assert len(REQUIRED) == 24
    assert REQUIRED - set(PRESETS) == set()
    assert set(DOCUMENTED) == REQUIRED


@pytest.mark.parametrize("name", DOCUMENTED)
def test_preset_is_the_documented_choice(name: str) -> None:
    resolved = AlgorithmConfig(preset=name).model_dump()
    for table, settings in spelled(DOCUMENTED[name]).items():
        assert settings.items() <= resolved[table].items()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_says_what_it_is_and_where_it_is_from(name: str) -> None:
    preset = PRESETS[name]
    for text in (preset.title, preset.source, preset.formula, preset.trap):
        assert len(text) > 5 and text == text.strip() and "\n" not in text
    assert len({p.title for p in PRESETS.values()}) == len(PRESETS)
    assert "=" in preset.formula
    assert set(preset.choices) <= set(AlgorithmConfig.model_fields)
    assert [key for key, value in preset.choices.items() if BASE.get(key) == value] == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_a_choice_for_every_stage_that_acts(name: str) -> None:
    config = AlgorithmConfig(preset=name)
    assert {key for key in STAGES if config.choice(key).name is None} <= {"ratio", "kl", "shaping"}
    assert (config.ratio.name is None) == (config.gate.name in ("likelihood", "divergence"))
    assert (config.kl.name is None) == (not config.kl.coef)
    assert make_objective(preset=name).config == config


def test_the_base_names_a_choice_for_every_stage() -> None:
    assert set(STAGES) <= set(BASE) <= set(AlgorithmConfig.model_fields)


def test_what_a_recipe_says_beats_the_preset() -> None:
    config = algorithm_of({"preset": "dapo", "clip_high": 0.5, "filter": "none"})
    assert dict(config.gate) == {"name": "clip", "clip_low": 0.2, "clip_high": 0.5, "dual_clip": 0.0}
    assert (config.filter.name, config.aggregation.name) == ("none", "token-mean")


# The worked numbers, by nothing but the name of the preset and what it says it does not contain.


@pytest.mark.parametrize(
    ("preset", "choices", "case", "key"),
    [
        ("dr-grpo", {"correction": "none"}, "loss_ppo", "const_L8"),
        ("olmorl", {}, "olmorl", "token_mean"),
        ("minirl", {}, "minirl", "seq_mean_token_sum"),
        ("decoupled-ppo", {"whiten": "none", "advantage": "group-centred"}, "decoupled_ppo", "token_mean"),
        ("reinforce++-baseline", {"kl_coef": 0.0, "whiten": "none", "correction": "none"}, "loss_ppo", "token_mean"),
        ("reinforce-mean-zero", {"correction": "none", "shaping_scale": 1.0}, "loss_ppo", "seq_mean_token_mean"),
        (
            "reinforce",
            {"correction": "none", "shaping_scale": 1.0, "shaping_bias": 0.0},
            "loss_ppo",
            "seq_mean_token_mean",
        ),
        ("cispo", {"advantage": "group-centred", "correction": "none"}, "cispo_scalerl_cap5", "token_mean"),
        ("sapo", {"advantage": "group-centred", "correction": "none"}, "sapo_1.0_1.05", "seq_mean_token_mean"),
        ("dapo", {"advantage": "group-centred", "correction": "none"}, "loss_dapo", "token_mean"),
        ("grpo", {"advantage": "group-centred"}, "tis_C2", "seq_mean_token_mean"),
        ("icepop", {"advantage": "group-centred"}, "icepop_0.5_5", "seq_mean_token_mean"),
        ("gspo", {"advantage": "group-centred", "correction": "none"}, "gspo_paper_eps", "loss"),
        ("gspo-token", {"advantage": "group-centred", "correction": "none"}, "gspo_paper_eps", "loss"),
    ],
)
def test_worked_numbers_by_the_name_of_the_preset(preset: str, choices: dict[str, Any], case: str, key: str) -> None:
    objective = make_objective(max_tokens=8, preset=preset, **choices)
    tokens = tokens_p(objective)
    loss, gradient, _ = loss_of(objective, tokens)
    assert loss == pytest.approx(EXAMPLES[case][key], abs=5e-6)
    if key in AGGREGATIONS and (unreduced := [k for k in EXAMPLES[case] if k.startswith(("grad", "dloss"))]):
        shares = [w * g for w, g in zip(tokens.weight_N.tolist(), flat(EXAMPLES[case][unreduced[0]]), strict=True)]
        assert gradient.tolist() == pytest.approx(shares, abs=5e-6)


@pytest.mark.parametrize(
    ("name", "case", "key"), [("grpo", "loss_ppo", "seq_mean_token_mean"), ("dapo", "loss_dapo", "token_mean")]
)
def test_zscore_presets_scale_fixture_p_by_the_groups_spread(name: str, case: str, key: str) -> None:
    """Rewards 1 and -1 have standard deviation √2, so A = ±.7071 instead of ±1."""
    objective = make_objective(max_tokens=8, preset=name, correction="none")
    tokens = tokens_p(objective)
    assert tokens.advantage_N.tolist() == pytest.approx([2**-0.5] * 2 + [-(2**-0.5)] * 4, abs=1e-5)
    assert loss_of(objective, tokens)[0] == pytest.approx(EXAMPLES[case][key] * 2**-0.5, abs=5e-6)


# What sets one method apart from its neighbour.


def gradient_of(**choices: Any) -> list[float]:
    objective = make_objective(max_tokens=8, **choices)
    return loss_of(objective, tokens_p(objective))[1].tolist()


def test_gspo_and_gspo_token_are_one_method_while_advantages_are_of_responses() -> None:
    assert gradient_of(preset="gspo", correction="none") == pytest.approx(
        gradient_of(preset="gspo-token", correction="none"), abs=1e-7
    )
    assert gradient_of(preset="gspo", correction="none") != pytest.approx(gradient_of(preset="grpo", correction="none"))


def test_decoupled_ppo_is_grpo_with_an_almost_open_weight() -> None:
    alike = {"whiten": "none", "aggregation": "token-mean"}
    decoupled = gradient_of(preset="decoupled-ppo", **alike)
    assert decoupled == pytest.approx(gradient_of(preset="grpo", correction_cap=5.0, **alike))
    assert decoupled != pytest.approx(gradient_of(preset="grpo", **alike)), "w = 3 is capped there"


def test_minirl_is_decoupled_ppo_with_the_cap_on_the_whole_ratio() -> None:
    """With both caps out of reach and the same clip they have one gradient, up to aggregation and advantage."""
    alike = {"advantage": "group-centred", "aggregation": "token-mean", "correction_cap": 1e6, "clip_high": 0.27}
    minirl = gradient_of(preset="minirl", **alike)
    assert minirl == pytest.approx(gradient_of(preset="decoupled-ppo", whiten="none", **alike), abs=1e-6)
    capped = {**alike, "correction_cap": 3.5}  # w is at most 3, ρ is 4.5
    assert gradient_of(preset="minirl", **capped) != pytest.approx(
        gradient_of(preset="decoupled-ppo", whiten="none", **capped), abs=1e-3
    )


def test_cispo_keeps_what_dapo_clips() -> None:
    alike = {"correction": "none"}
    clipped = [g == 0 for g in gradient_of(preset="dapo", **alike)]
    assert clipped == [True, False, True, False, False, False]
    kept = gradient_of(preset="cispo", **alike)
    assert 0 not in kept
    same = [i for i, stopped in enumerate(clipped) if not stopped]
    dapo = gradient_of(preset="dapo", **alike)
    assert [kept[i] for i in same] == pytest.approx([dapo[i] for i in same], abs=1e-6), "below the cap they agree"


def test_dr_grpo_removes_the_length_bias_and_the_difficulty_bias() -> None:
    """A token weighs the same in a short and in a long response, and in a hard and in a balanced group."""
    groups = [make_group([1, 0, 0, 0, 0, 0, 0, 0], lengths=[2] * 8), make_group([1, 1, 1, 1, 0, 0, 0, 0], group=1,
                                                                                lengths=[9] * 8)]  # fmt: skip
    weights = {name: {s.weight_T.max() for s in trainable(make_objective(64, preset=name), *groups)}
               for name in ("grpo", "dr-grpo")}  # fmt: skip
    assert (len(weights["dr-grpo"]), len(weights["grpo"])) == (1, 2)
    spread = {name: [max(map(abs, of_samples(advantages(make_objective(preset=name), g)))) for g in groups]
              for name in ("grpo", "dr-grpo")}  # fmt: skip
    assert spread["dr-grpo"] == pytest.approx([7 / 8, 1 / 2])
    assert spread["grpo"] == pytest.approx([2.474874, 0.935414], abs=1e-5)


def test_raft_and_raft_plus_plus_differ_by_the_ratio_only_off_policy() -> None:
    def gradient(preset: str, ratios: list[list[float]]) -> list[float]:
        objective = make_objective(preset=preset, correction="none", aggregation="seq-mean-token-mean")
        tokens = as_tokens(trainable(objective, group_p()), ratios)
        return loss_of(objective, tokens)[1].tolist()

    on_policy = [[1.0, 1.0]]
    assert gradient("raft", on_policy) == pytest.approx(gradient("raft++", on_policy))
    assert gradient("raft", RATIOS_P[:1]) == pytest.approx([-0.5, -0.5])
    assert gradient("raft++", RATIOS_P[:1]) == pytest.approx([0, -0.35], abs=1e-6)


def test_rloo_and_remax_are_the_plain_policy_gradient_of_whole_responses() -> None:
    for preset, expected in (("rloo", [-2, -2, 2, 2, 2, 2]), ("remax", None)):
        objective = make_objective(preset=preset, kl_coef=0.0, correction="none")
        if expected:
            tokens = tokens_p(objective)
            assert unreduced_gradient(objective, tokens) == pytest.approx(expected)
            assert tokens.weight_N.tolist() == [0.5] * 6
        # The ratio plays no part at all.
        config = objective.config
        assert (config.gate.name, config.ratio.name, config.ratio.anchor) == ("likelihood", None, None)


def test_stale_asymmetric_rejects_what_the_policy_has_given_up() -> None:
    objective = make_objective(preset="stale-asymmetric", advantage="group-centred")
    samples = trainable(objective, group_p())
    gone = as_tokens(samples, [[1.0, 1.0], [0.01, 0.01, 1.0, 1.0]])  # Π ρ of the second is 1e-4 × 1.08
    assert (unreduced_gradient(objective, gone)[2:]) == [0, 0, 0, 0]
    low = as_tokens(samples, [[1.0, 1.0], [0.1, 0.1, 1.0, 1.0]])  # 1e-2: lifted to the floor
    assert unreduced_gradient(objective, low)[2:] == pytest.approx([0.5] * 4)


def test_entropy_control_starts_with_a_gradient_of_the_entropy() -> None:
    objective = make_objective(preset="entropy-control")
    assert objective.wants_entropy_gradient
    assert objective.config.entropy.target and objective.config.entropy.rate


def test_geometric_mean_clips_inside_the_mean() -> None:
    """GMPO: each log-ratio is clipped by the sign of A, then averaged; GSPO clips the average."""
    objective = make_objective(preset="gmpo", advantage="group-centred", correction="none")
    tokens = tokens_p(objective)
    logs = torch.tensor(flat(RATIOS_P)).log()
    first = logs[:2].clamp(max=0.4).mean().exp().item()
    second = logs[2:].clamp(min=-0.4).mean().exp().item()
    loss, gradient, metrics = loss_of(objective, tokens)
    assert loss == pytest.approx((-first + second) / 2, abs=1e-5)
    expected = [0, -first / 4, 0, *[second / 8] * 3]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6)
    assert (metrics["clip_high"], metrics["clip_low"]) == pytest.approx((1 / 6, 1 / 6))


def test_divergence_mask_stops_tokens_that_move_away_too_far() -> None:
    """π_θ = [.3, .14 | .1, .22, .3, .8], μ = π_old / w = [.08, .2 | .5, .2, .0667, .2222]; limit .15."""
    objective = make_objective(preset="dppo", advantage="group-centred")
    tokens = tokens_p(objective)
    rho = flat(EXAMPLES["coupled_on_behaviour"]["ratio"])
    # Token 1: A > 0, up by .22: stopped. Token 3: A < 0, down by .4: stopped. The last two go up while A < 0: kept.
    expected = [0, -rho[1], 0, rho[3], rho[4], rho[5]]
    assert unreduced_gradient(objective, tokens) == pytest.approx(expected, abs=1e-5)
    assert 0 not in unreduced_gradient(make_objective(preset="dppo", advantage="group-centred", tv_limit=0.45), tokens)
