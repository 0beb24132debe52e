"""Settings of an algorithm: contradictions are refused, idle settings are refused, and what is resolved stays so."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from objective import GROUP_ADVANTAGES, NO_BASELINE, TOKEN_ADVANTAGES, Objective
from pydantic import ValidationError

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.presets import BASE, PRESETS
from kitae.algorithms.stages import STAGES, keyword_settings
from kitae.config.recipe import load_config, override_config, parse_config
from kitae.config.root import RLConfig
from kitae.errors import ConfigError

TAUGHT: dict[str, dict[str, Any]] = {
    "distil": {"kind": "distil", "teacher": "tiny"},
    "gkd": {"kind": "distil", "teacher": "tiny", "loss": "jsd"},
}
"""What a run is whose preset needs a teacher."""


def resolve(algorithm: Mapping[str, Any], **sections: Any) -> RLConfig:
    method = TAUGHT.get(str(algorithm.get("preset")), {})
    return parse_config({"method": method, "data": {"task": "reverse"}, "algorithm": dict(algorithm), **sections})


def refused(algorithm: Mapping[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(algorithm, **sections)
    return str(caught.value)


# Contradictions: the message names the key, the rule and the value.

FROZEN = {"reference": "frozen"}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dual_clip": 1.2}, "algorithm.dual_clip must exceed 1 + clip_high = 1.2, got 1.2"),
    ({"clip_high": 0.3, "dual_clip": 1.25}, "algorithm.dual_clip must exceed 1 + clip_high = 1.3, got 1.25"),
    # A clip for tokens on the mean ratio of a sequence.
    (
        {"preset": "gspo", "clip_high": 0.2},
        "algorithm.clip_high must be at most 0.05 with ratio 'sequence-mean', got 0.2",
    ),
    (
        {"preset": "gspo", "clip_low": 0.06},
        "algorithm.clip_low must be at most 0.05 with ratio 'sequence-mean', got 0.06",
    ),
    (
        {"ratio": "sequence-mean-token"},
        "algorithm.clip_low must be at most 0.05 with ratio 'sequence-mean-token', got 0.2",
    ),
    ({"ratio": "sequence-mean", "gate": "mask"}, "algorithm.clip_low must be at most 0.05 with ratio 'sequence-mean'"),
    # A cap that is meant as 1 + ε.
    (
        {"preset": "cispo", "weight_cap": 0.2},
        "algorithm.weight_cap must be at least 1 with gate 'weight-clip', got 0.2",
    ),
    (
        {"preset": "cispo", "weight_cap": 0.999},
        "algorithm.weight_cap must be at least 1 with gate 'weight-clip', got 0.999",
    ),
    # The mismatch counted twice.
    *(
        ({"anchor": "behaviour", "correction": name}, f"must be 'none' with anchor 'behaviour', got '{name}'")
        for name in ("tis", "icepop", "sequence-tis", "sequence-mask", "tis+opsm")
    ),
    ({"anchor": "behaviour"}, "algorithm.correction must be 'none' with anchor 'behaviour', got 'tis'"),
    ({"anchor": "behaviour", "correction": "total", "gate": "mask"}, "algorithm.correction must be 'none' with anchor"),
    *(
        ({"gate": gate, "correction": "total"}, f"'total' contains π_θ / π_old, and so does gate '{gate}'")
        for gate in ("clip", "none", "weight-clip", "sigmoid", "asymmetric", "geometric-clip", "divergence-mask")
    ),
    ({"correction": "tis+icepop"}, "algorithm.correction may contain one importance weight, got 'tis+icepop'"),
    ({"correction": "none+opsm"}, "algorithm.correction 'none' cannot be combined, got 'none+opsm'"),
    # Bounds the wrong way round.
    ({"preset": "icepop", "correction_low": 5.0}, "algorithm.correction_low must be below correction_high = 5, got 5"),
    (
        {"preset": "icepop", "correction_high": 0.4},
        "algorithm.correction_low must be below correction_high = 0.4, got 0.5",
    ),
    (
        {"correction": "geometric", "geometric_low": 1.5},
        "algorithm.geometric_low must be below geometric_high = 1.01, got 1.5",
    ),
    # Bands and ranges that have no place for a ratio of 1, which says that nothing is wrong.
    (
        {"preset": "icepop", "correction_low": 1.5},
        "algorithm.correction_low must be at most 1, got 1.5: where engine and trainer agree, the weight is 1",
    ),
    (
        {"preset": "icepop", "correction_high": 0.9},
        "algorithm.correction_high must be at least 1, got 0.9: where engine and trainer agree, the weight is 1",
    ),
    (
        {"correction": "geometric", "geometric_low": 1.001},
        "algorithm.geometric_low must be at most 1, got 1.001",
    ),
    (
        {"correction": "geometric", "geometric_high": 0.999, "geometric_low": 0.5},
        "algorithm.geometric_high must be at least 1, got 0.999",
    ),
    (
        {"preset": "stale-asymmetric", "reject_below": 0.5},
        "algorithm.reject_below must be below weight_floor = 0.5, got 0.5: the floor would never act",
    ),
    (
        {"correction": "veto", "veto_low": 2.0, "veto_high": 3.0},
        "algorithm.veto_low must be at most 1, got 2",
    ),
    ({"correction": "tis+geometric-tis"}, "algorithm.correction may contain one importance weight"),
    ({"anchor": "behaviour", "correction": "geometric-tis"}, "must be 'none' with anchor 'behaviour'"),
    *(
        ({"preset": gate, "ratio": "sequence-mean"}, f"algorithm.ratio must be 'token' with gate '{gate}'")
        for gate in ("clip-cov", "kl-cov")
    ),
    ({"correction": "total", "gate": "kl-cov"}, "'total' contains π_θ / π_old, and so does gate 'kl-cov'"),
    # Constant length without a length.
    ({"aggregation": "constant-length"}, "'constant-length' needs algorithm.constant_length: a number of tokens, or"),
    (
        {"preset": "dr-grpo", "constant_length": 0},
        "algorithm.constant_length must be a number of tokens, or 'max_tokens', got 0",
    ),
    # Statistics of samples on advantages of tokens.
    *(
        ({"preset": preset, "whiten": whiten}, f"algorithm.whiten '{whiten}' needs one advantage per sample")
        for preset in ("ppo", "remax", "reinforce++")
        for whiten in ("samples", "scale")
    ),
    # KL.
    ({"kl": "k1", "kl_coef": 0.1, **FROZEN}, "algorithm.kl 'k1' in the loss has an expected gradient of zero"),
    *(
        ({"preset": "rloo", "kl": kind}, f"algorithm.kl must be 'k1' with kl_in 'reward', got '{kind}'")
        for kind in ("k2", "k3", "k1-ratio", "k2-ratio", "k3-ratio")
    ),
    ({"preset": "maxrl", "reward_bias": -0.5}, "algorithm.reward_bias must not be negative"),
    ({"preset": "maxrl", "reward_norm": "batch"}, "algorithm.reward_norm must be 'none' with advantage 'mean-scaled'"),
    ({"preset": "dppo", "ratio": "sequence-mean"}, "algorithm.ratio must be 'token' with gate 'divergence-mask'"),
    ({"preset": "gmpo", "ratio": "sequence-mean"}, "algorithm.ratio must be 'token' with gate 'geometric-clip'"),
    ({"correction_cap": 0.5}, "algorithm.correction_cap must be at least 1, got 0.5"),
    ({"preset": "stale-asymmetric", "weight_cap": 0.5}, "algorithm.weight_cap must be at least 1 with gate 'asymm"),
    # The one ratio of a response counted once for each of its tokens.
    *(
        (
            {"ratio": "sequence-product", "gate": gate, "aggregation": aggregation, **length},
            f"algorithm.aggregation must be 'seq-mean-token-mean' with ratio 'sequence-product', got '{aggregation}'",
        )
        for gate, aggregation, length in (
            ("clip", "seq-mean-token-sum", {}),
            ("none", "token-sum", {}),
            ("none", "token-mean", {}),
            ("sigmoid", "prompt-mean", {}),
            ("clip", "constant-length", {"constant_length": 8}),
        )
    ),
    (
        {"preset": "raft", "kl": "k1", "kl_in": "reward", "kl_coef": 5.0, **FROZEN},
        "algorithm.kl_in 'reward' does nothing with advantage 'one'",
    ),
    ({"preset": "raft", "overlong_buffer": 4}, "algorithm.overlong_buffer is set to 4, but nothing reads it"),
    ({"preset": "pass-at-k", "reward_norm": "batch"}, "algorithm.reward_norm is set to 'batch', but nothing reads it"),
    (
        {"aggregation": "constant-length", "constant_length": True},
        "algorithm.constant_length must be a number of tokens, or 'max_tokens', got True",
    ),
    ({"correction": "tis+mine.py:f"}, "a function of your own stands alone"),
    ({"kl_coef": 0.1}, "algorithm.kl_coef is 0.1, but algorithm.reference is 'none': a KL term needs a reference"),
]


@pytest.mark.parametrize(("algorithm", "message"), CONTRADICTIONS, ids=lambda x: str(x)[:60])
def test_contradictions_are_refused(algorithm: dict[str, Any], message: str) -> None:
    assert message in refused(algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"dual_clip": 1.21},
        {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        {"ratio": "sequence-product", "aggregation": "seq-mean-token-mean"},
        {"preset": "cispo", "weight_cap": 1.0},
        {"preset": "stale-asymmetric", "weight_cap": 1.0},
        {"preset": "maxrl", "reward_bias": 0.5},
        {"anchor": "behaviour", "correction": "opsm"},
        {"anchor": "behaviour", "correction": "geometric+opsm"},
        {"correction": "tis+geometric+opsm"},
        {"gate": "likelihood", "correction": "total"},
        {"aggregation": "constant-length", "constant_length": 1},
        {"aggregation": "constant-length", "constant_length": "max_tokens"},
        {"preset": "reinforce++", "whiten": "tokens"},
        {"kl": "k1-ratio", "kl_coef": 0.1, **FROZEN},
        {"kl": "k1", "kl_coef": 0.1, "kl_in": "reward", **FROZEN},
        {"kl_coef": 0.1, "reference": "ema", "reference_mix": 0.5, "reference_every": 10},
        {"reference": "none"},
        {"preset": "rloo", "kl_coef": 0.0, "reference": "none"},
        {"anchor": "interpolated"},
    ],
    ids=str,
)
def test_just_inside_the_rules_is_accepted(algorithm: dict[str, Any]) -> None:
    config = resolve(algorithm).algorithm
    assert {key: getattr(config, key) for key in algorithm if key != "reference"} == {
        key: value for key, value in algorithm.items() if key != "reference"
    }
    Objective(config, 64)


def test_a_reference_that_is_taken_away_from_a_kl_term_is_refused() -> None:
    assert "algorithm.reference is 'none'" in refused({"preset": "rloo", "reference": "none"})


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"clip_low": 1.0}, "algorithm.clip_low: input should be less than 1, got 1.0"),
        ({"clip_high": 0}, "algorithm.clip_high: input should be greater than 0, got 0"),
        ({"dual_clip": -1}, "algorithm.dual_clip: input should be greater than or equal to 0, got -1"),
        ({"preset": "ppo", "gamma": 1.1}, "algorithm.gamma: input should be less than or equal to 1, got 1.1"),
        ({"preset": "ppo", "gae_lambda": -0.1}, "algorithm.gae_lambda: input should be greater than or equal to 0"),
        (
            {"preset": "stale-asymmetric", "weight_floor": 1.5},
            "algorithm.weight_floor: input should be less than or equal",
        ),
        (
            {"preset": "stale-asymmetric", "reject_below": 1},
            "algorithm.reject_below: input should be less than 1, got 1",
        ),
        ({"preset": "dppo", "tv_limit": 0}, "algorithm.tv_limit: input should be greater than 0, got 0"),
        ({"preset": "sapo", "tau_positive": 0}, "algorithm.tau_positive: input should be greater than 0, got 0"),
        ({"advantage_ddof": 2}, "algorithm.advantage_ddof: input should be 0 or 1, got 2"),
        ({"reward_scale": 0}, "algorithm.reward_scale: input should be greater than 0, got 0"),
        ({"kl_coef": -0.1}, "algorithm.kl_coef: input should be greater than or equal to 0, got -0.1"),
        ({"kl_coef": float("nan"), **FROZEN}, "algorithm.kl_coef: input should be a finite number, got NaN"),
        (
            {"truncation": "cut"},
            "algorithm.truncation: input should be 'keep', 'reward', 'mask' or 'drop', got \"cut\"",
        ),
        ({"whiten": "batch"}, "algorithm.whiten: input should be 'none', 'tokens', 'samples' or 'scale'"),
        ({"anchor": "new"}, "algorithm.anchor: input should be 'old', 'behaviour' or 'interpolated'"),
        ({"correction_floor": 1.1}, "algorithm.correction_floor: input should be less than or equal to 1, got 1.1"),
        ({"preset": "kl-cov", "cov_share": 0}, "algorithm.cov_share: input should be greater than 0, got 0"),
        ({"preset": "kl-cov", "cov_share": 1.5}, "algorithm.cov_share: input should be less than or equal to 1"),
        ({"sft_coef": -1}, "algorithm.sft_coef: input should be greater than or equal to 0, got -1"),
        ({"clip": 0.2}, "unknown key algorithm.clip; did you mean algorithm.clip_low?"),
    ],
)
def test_values_out_of_bounds_are_refused(algorithm: dict[str, Any], message: str) -> None:
    assert message in refused(algorithm)


@pytest.mark.parametrize("key", STAGES)
def test_unknown_choices_name_the_stage_the_choices_and_the_nearest(key: str) -> None:
    stage = STAGES[key]
    known = next(iter(stage.choices))
    base = {"kl_coef": 0.1, **FROZEN} if key == "kl" else {}
    message = refused({**base, key: known + "x"})
    listed = ", ".join(stage.choices)
    joined = ", several joined by +" if stage.combines else ""
    assert f"algorithm.{key} must be one of {listed}{joined}, or file.py:function, got '{known}x'" in message
    assert "did you mean" in message
    for bad in ("", "+", "xyzzy"):
        assert f"algorithm.{key} must be one of" in refused({**base, key: bad})
    if stage.combines:
        assert "got 'xyzzy'" in refused({**base, key: f"{known}+xyzzy"})
    else:
        assert f"got '{known}+{known}'" in refused({**base, key: f"{known}+{known}"}), "one choice only"


@pytest.mark.parametrize("algorithm", [{"gate": 5}, {"filter": ["all-wrong"]}, {"preset": ["grpo"]}], ids=str)
def test_a_choice_that_is_no_text_is_a_config_error(algorithm: dict[str, Any]) -> None:
    assert "algorithm." in refused(algorithm)


# Contradictions with other sections.


def training(**values: Any) -> dict[str, Any]:
    return {"training": {"steps": 4, "prompts_per_step": 4, **values}}


@pytest.mark.parametrize("advantage", [*GROUP_ADVANTAGES, *TOKEN_ADVANTAGES])
def test_a_group_baseline_needs_two_samples(advantage: str) -> None:
    choices = {"advantage": advantage}
    if advantage in NO_BASELINE:
        assert resolve(choices, **training(group_size=1)).training.group_size == 1
    else:
        message = f"training.group_size must be at least 2 for advantage '{advantage}', got 1"
        assert message in refused(choices, **training(group_size=1))


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        (
            {"preset": "reinforce", "filter": "zero-variance"},
            training(group_size=1),
            "training.group_size must be at least 2 for filter 'zero-variance', got 1: it would drop every group",
        ),
        (
            {"preset": "pass-at-k", "pass_k": 9},
            training(group_size=8),
            "training.group_size = 8, got 9",
        ),
        (
            {"preset": "ppo", "critic_warmup": 4},
            training(),
            "algorithm.critic_warmup must be below training.steps = 4, got 4: the policy would never learn",
        ),
        (
            {"overlong_buffer": 65},
            {},
            "algorithm.overlong_buffer must be at most sampling.max_tokens = 64, got 65",
        ),
        (
            {"filter": "none"},
            {"pipeline": {"refill": True}},
            "pipeline.refill replaces dropped groups, but algorithm.filter = 'none' drops none",
        ),
        (
            {"kl_coef": 0.1, "reference": "ema"},
            {"model": {"lora_rank": 4}},
            "algorithm.reference must be 'frozen' or 'reset' with model.lora_rank, got 'ema'",
        ),
    ],
)
def test_contradictions_with_other_sections(algorithm: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    assert message in refused(algorithm, **sections)


def test_a_combined_filter_that_would_drop_everything_is_refused() -> None:
    for name in ("zero-variance+all-wrong", "all-correct+all-wrong"):
        message = refused({"preset": "reinforce", "filter": name}, **training(group_size=1))
        assert f"training.group_size must be at least 2 for filter '{name}', got 1: it would drop" in message
    assert resolve({"preset": "reinforce-drop-wrong"}, **training(group_size=1)).training.group_size == 1


def test_truncation_that_drops_groups_may_be_refilled() -> None:
    for truncation in ("drop", "mask"):
        assert resolve({"truncation": truncation}, pipeline={"refill": True}).pipeline.refill


# Settings that nothing reads.


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("preset", PRESETS)
def test_settings_that_nothing_reads_are_unset_by_a_preset_and_refused_from_a_recipe(preset: str) -> None:
    resolved = AlgorithmConfig(preset=preset).model_dump()
    idle = [key for key, value in resolved.items() if value is None]
    assert idle
    for key in idle:
        value = {"constant_length": 64, "reference": "frozen"}.get(key, BASE.get(key))
        with pytest.raises(ValidationError) as caught:
            AlgorithmConfig.model_validate({"preset": preset, key: value})
        message = str(caught.value)
        assert f"algorithm.{key} is set to {value!r}, but nothing reads it; it belongs to " in message


def test_who_would_read_a_setting_is_named() -> None:
    cases = {
        "tau_positive": "gate 'sigmoid'",
        "pass_k": "advantage 'pass-at-k'",
        "geometric_low": "correction 'geometric'",
        "constant_length": "aggregation 'constant-length'",
        "truncation_reward": "truncation = 'reward'",
        "kl_in": "kl_coef above 0",
        "reference_mix": "reference = 'ema'",
        "entropy_rate": "entropy_target above 0",
        "critic_lr": "advantage = 'gae'",
        "weight_cap": "gate 'weight-clip', gate 'asymmetric'",
    }
    for key, readers in cases.items():
        value = 64 if key == "constant_length" else BASE[key]
        assert f"nothing reads it; it belongs to {readers}" in refused({key: value}), key
    assert "it belongs to gates other than 'likelihood'" in refused({"gate": "likelihood", "ratio": "token"})
    assert "it belongs to kl_target above 0" in refused({"kl_coef": 0.1, "kl_horizon": 5.0, **FROZEN})
    assert "reference = 'ema' or 'reset'" in refused({"kl_coef": 0.1, "reference_every": 5, **FROZEN})


def test_what_is_resolved_is_exactly_what_the_chosen_functions_read() -> None:
    """Every setting in the signature of a chosen function is there, for every preset."""
    for preset in PRESETS:
        config = AlgorithmConfig(preset=preset)
        for key, stage in STAGES.items():
            value = getattr(config, key)
            if value is None:
                assert (
                    (key, config.gate) in (("ratio", "likelihood"), ("ratio", "divergence"))
                    or (key == "kl" and not config.kl_coef)
                    or (key == "shaping" and config.advantage in ("one", "pass-at-k"))
                )
                continue
            for name in stage.names(value):
                for setting in keyword_settings(stage.choices[name]):
                    assert getattr(config, setting) is not None, (preset, key, setting)


# A resolved config is a config.


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_config_reads_back_as_itself(preset: str) -> None:
    config = resolve({"preset": preset})
    again = parse_config(json.loads(config.to_json()))
    assert again == config
    assert again.flat() == config.flat()
    assert AlgorithmConfig.model_validate(config.algorithm.model_dump()) == config.algorithm
    assert AlgorithmConfig.model_validate(config.algorithm.model_dump(exclude_none=True)) == config.algorithm
    Objective(again.algorithm, 64)


@pytest.mark.parametrize(("algorithm", "message"), CONTRADICTIONS[:3], ids=lambda x: str(x)[:40])
def test_a_saved_config_is_checked_again(algorithm: dict[str, Any], message: str) -> None:
    saved = json.loads(resolve({"preset": algorithm.get("preset", "grpo")}).to_json())
    saved["algorithm"] |= algorithm
    with pytest.raises(ConfigError, match="must"):
        parse_config(saved)


# The preset on the command line.


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[data]\ntask = "sort"\n[training]\nlr = 3e-6\n'
        '[algorithm]\npreset = "dapo"\nclip_high = 0.4\noverlong_buffer = 16\nentropy_coef = 0.01\n'
    )
    return file


def test_a_recipe_changes_single_choices_of_its_preset(recipe: Path) -> None:
    config = load_config(recipe).algorithm
    assert (config.preset, config.clip_low, config.clip_high, config.filter) == ("dapo", 0.2, 0.4, "zero-variance")
    assert load_config(recipe, ["algorithm.clip_high=0.3"]).algorithm.clip_high == 0.3
    assert load_config(recipe, ["algorithm.clip_high=0.3"]).algorithm.overlong_buffer == 16


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_on_the_command_line_replaces_the_recipes_choices(recipe: Path, preset: str) -> None:
    method = [f"method.{key}={value}" for key, value in TAUGHT.get(preset, {}).items()]
    config = load_config(recipe, [f"algorithm.preset={preset}", *method])
    assert config.algorithm == AlgorithmConfig(preset=preset)
    assert config.training.lr == 3e-6, "other sections stay"


@pytest.mark.parametrize(
    "overrides",
    [*itertools.permutations(["algorithm.preset=cispo", "algorithm.weight_cap=2.0", "algorithm.filter=none"])],
)
def test_choices_given_with_a_preset_are_kept_in_any_order(recipe: Path, overrides: list[str]) -> None:
    config = load_config(recipe, overrides).algorithm
    assert config == AlgorithmConfig.model_validate({"preset": "cispo", "weight_cap": 2.0, "filter": "none"})
    assert (config.overlong_buffer, config.entropy_coef) == (0, 0)


def test_a_preset_replaces_the_choices_of_a_resolved_config_too(recipe: Path) -> None:
    config = override_config(load_config(recipe), ["algorithm.preset=gspo"])
    assert config.algorithm == AlgorithmConfig(preset="gspo")


def test_a_single_choice_of_a_resolved_config_may_be_changed(recipe: Path) -> None:
    config = override_config(resolve({"preset": "grpo"}), ["algorithm.gate=sigmoid"])
    assert config.algorithm == AlgorithmConfig.model_validate({"preset": "grpo", "gate": "sigmoid"})
