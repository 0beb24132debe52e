"""The named algorithms are the documented tuples of choices, and each of them is something else on fixture P."""

import itertools

import pytest
import torch
from fixture_p import EXAMPLES, RATIOS_P, as_tokens, group_p, loss_of, make_objective, tokens_p

from kitae.algorithms.presets import PRESETS
from kitae.config import AlgorithmConfig

COMMON = {
    "overlong_buffer": 0,
    "ratio": "token",
    "gate": "clip",
    "clip_low": 0.2,
    "dual_clip": 0.0,
    "correction": "tis",
    "correction_cap": 2.0,
    "constant_length": 0,
    "entropy_coef": 0.0,
}
DOCUMENTED = {
    "grpo": {
        "filter": "none",
        "advantage": "group-zscore",
        "clip_high": 0.2,
        "aggregation": "seq-mean-token-mean",
    },
    "dr-grpo": {
        "filter": "none",
        "advantage": "group-centred",
        "clip_high": 0.2,
        "aggregation": "constant-length",
    },
    "dapo": {
        "filter": "zero-variance",
        "advantage": "group-zscore",
        "clip_high": 0.28,
        "aggregation": "token-mean",
    },
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_preset_is_the_documented_choice(name: str) -> None:
    resolved = AlgorithmConfig.model_validate({"preset": name}).model_dump()
    documented = {"preset": name, **COMMON, **DOCUMENTED[name]}
    assert {key: resolved[key] for key in documented} == documented


@pytest.mark.parametrize("name", PRESETS)
def test_preset_fills_every_choice_and_says_where_it_is_from(name: str) -> None:
    assert None not in AlgorithmConfig.model_validate({"preset": name}).model_dump().values()
    assert PRESETS[name].title
    assert PRESETS[name].source


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(PRESETS, 2)])
def test_presets_differ_on_fixture_p(one: str, other: str) -> None:
    gradients = []
    for name in (one, other):
        objective = make_objective(max_tokens=8, preset=name)
        gradients.append(loss_of(objective, tokens_p(objective))[1])
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_what_a_recipe_says_beats_the_preset() -> None:
    config = AlgorithmConfig.model_validate({"preset": "dapo", "clip_high": 0.5, "filter": "none"})
    assert (config.clip_high, config.filter, config.clip_low, config.aggregation) == (0.5, "none", 0.2, "token-mean")


def test_dr_grpo_without_correction_is_the_worked_number() -> None:
    objective = make_objective(max_tokens=8, preset="dr-grpo", correction="none")
    loss, _, _ = loss_of(objective, tokens_p(objective))
    assert loss == pytest.approx(EXAMPLES["loss_ppo"]["const_L8"], abs=5e-6)


def test_zscore_presets_scale_fixture_p_by_the_groups_spread() -> None:
    """Rewards 1 and -1 have standard deviation √2, so A = ±.7071 instead of ±1."""
    for name, case, key in (
        ("grpo", "loss_ppo", "seq_mean_token_mean"),
        ("dapo", "loss_dapo", "token_mean"),
    ):
        objective = make_objective(max_tokens=8, preset=name, correction="none")
        tokens = as_tokens(objective.batch(objective.samples(group_p())).samples, RATIOS_P)
        assert tokens.advantage_N.tolist() == pytest.approx([2**-0.5] * 2 + [-(2**-0.5)] * 4, abs=1e-5)
        loss = loss_of(objective, tokens)[0]
        assert loss == pytest.approx(EXAMPLES[case][key] * 2**-0.5, abs=5e-6)
        assert torch.isfinite(tokens.weight_N).all()
