"""Settings of an algorithm: contradictions are refused, idle settings are refused, and what is resolved stays so."""

import itertools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from objective import GROUP_ADVANTAGES, NO_BASELINE, TOKEN_ADVANTAGES, Objective
from pydantic import ValidationError
from short_settings import algorithm_of, algorithm_with, spelled

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES, keyword_settings
from kitae.config.recipe import load_config, make_config, override_config, parse_config
from kitae.config.root import RLConfig
from kitae.errors import ConfigError

TAUGHT: dict[str, dict[str, Any]] = {
    "distil": {"kind": "distil", "teacher": "tiny"},
    "gkd": {"kind": "distil", "teacher": "tiny", "loss": "jsd"},
}
"""What a run is whose preset needs a teacher."""


def resolve(algorithm: Mapping[str, Any], **sections: Any) -> RLConfig:
    method = TAUGHT.get(str(algorithm.get("preset")), {})
    own = {"method": method, "env": {"name": "games"}, "data": {"task": "reverse"}}
    return parse_config({**own, "algorithm": spelled(algorithm), **sections})


def refused(algorithm: Mapping[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(algorithm, **sections)
    return str(caught.value)


# Contradictions: the message names the key, the rule and the value.

FROZEN = {"reference": "frozen"}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dual_clip": 1.2}, "algorithm.gate.dual_clip must exceed 1 + clip_high = 1.2, got 1.2"),
    ({"clip_high": 0.3, "dual_clip": 1.25}, "algorithm.gate.dual_clip must exceed 1 + clip_high = 1.3, got 1.25"),
    # A clip for tokens on the mean ratio of a sequence.
    (
        {"preset": "gspo", "clip_high": 0.2},
        "algorithm.gate.clip_high must be at most 0.05 with ratio 'sequence-mean', got 0.2",
    ),
    (
        {"preset": "gspo", "clip_low": 0.06},
        "algorithm.gate.clip_low must be at most 0.05 with ratio 'sequence-mean', got 0.06",
    ),
    (
        {"ratio": "sequence-mean-token"},
        "algorithm.gate.clip_low must be at most 0.05 with ratio 'sequence-mean-token', got 0.2",
    ),
    (
        {"ratio": "sequence-mean", "gate": "mask"},
        "algorithm.gate.clip_low must be at most 0.05 with ratio 'sequence-mean'",
    ),
    # A cap that is meant as 1 + ε.
    (
        {"preset": "cispo", "weight_cap": 0.2},
        "algorithm.gate.weight_cap must be at least 1, got 0.2: it is a ratio",
    ),
    (
        {"preset": "cispo", "weight_cap": 0.999},
        "algorithm.gate.weight_cap must be at least 1, got 0.999",
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
    ({"preset": "icepop", "correction_low": 5.0}, "algorithm.correction.low must be below high = 5, got 5"),
    (
        {"preset": "icepop", "correction_high": 0.4},
        "algorithm.correction.low must be below high = 0.4, got 0.5",
    ),
    (
        {"correction": "geometric", "geometric_low": 1.5},
        "algorithm.correction.geometric_low must be below geometric_high = 1.01, got 1.5",
    ),
    # Bands and ranges that have no place for a ratio of 1, which says that nothing is wrong.
    (
        {"preset": "icepop", "correction_low": 1.5},
        "algorithm.correction.low must be at most 1, got 1.5: where engine and trainer agree, the weight is 1",
    ),
    (
        {"preset": "icepop", "correction_high": 0.9},
        "algorithm.correction.high must be at least 1, got 0.9: where engine and trainer agree, the weight is 1",
    ),
    (
        {"correction": "geometric", "geometric_low": 1.001},
        "algorithm.correction.geometric_low must be at most 1, got 1.001",
    ),
    (
        {"correction": "geometric", "geometric_high": 0.999, "geometric_low": 0.5},
        "algorithm.correction.geometric_high must be at least 1, got 0.999",
    ),
    (
        {"preset": "stale-asymmetric", "reject_below": 0.5},
        "algorithm.gate.reject_below must be below weight_floor = 0.5, got 0.5: the floor would never act",
    ),
    (
        {"correction": "veto", "veto_low": 2.0, "veto_high": 3.0},
        "algorithm.correction.veto_low must be at most 1, got 2",
    ),
    ({"correction": "tis+geometric-tis"}, "algorithm.correction may contain one importance weight"),
    ({"anchor": "behaviour", "correction": "geometric-tis"}, "must be 'none' with anchor 'behaviour'"),
    *(
        ({"preset": gate, "ratio": "sequence-mean"}, f"algorithm.ratio must be 'token' with gate '{gate}'")
        for gate in ("clip-cov", "kl-cov")
    ),
    ({"correction": "total", "gate": "kl-cov"}, "'total' contains π_θ / π_old, and so does gate 'kl-cov'"),
    # Constant length without a length.
    (
        {"aggregation": "constant-length"},
        "algorithm.aggregation 'constant-length' needs the setting algorithm.aggregation.length: ",
    ),
    (
        {"preset": "dr-grpo", "aggregation_length": 0},
        "algorithm.aggregation.length must be a number of tokens, or 'max_tokens', got 0",
    ),
    # Statistics of samples on advantages of tokens.
    *(
        ({"preset": preset, "whiten": whiten}, f"algorithm.advantage.whiten '{whiten}' needs one advantage per sample")
        for preset in ("ppo", "remax", "reinforce++")
        for whiten in ("samples", "scale")
    ),
    # KL.
    ({"kl": "k1", "kl_coef": 0.1, **FROZEN}, "algorithm.kl 'k1' in the loss has an expected gradient of zero"),
    *(
        ({"preset": "rloo", "kl": kind}, f"algorithm.kl must be 'k1' with kl.into 'reward', got '{kind}'")
        for kind in ("k2", "k3", "k1-ratio", "k2-ratio", "k3-ratio")
    ),
    ({"preset": "maxrl", "shaping_bias": -0.5}, "algorithm.shaping.bias must not be negative"),
    (
        {"preset": "maxrl", "shaping_norm": "batch"},
        "algorithm.shaping.norm must be 'none' with advantage 'mean-scaled'",
    ),
    ({"preset": "dppo", "ratio": "sequence-mean"}, "algorithm.ratio must be 'token' with gate 'divergence-mask'"),
    ({"preset": "gmpo", "ratio": "sequence-mean"}, "algorithm.ratio must be 'token' with gate 'geometric-clip'"),
    ({"correction_cap": 0.5}, "algorithm.correction.cap must be at least 1, got 0.5"),
    (
        {"preset": "stale-asymmetric", "weight_cap": 0.5},
        "algorithm.gate.weight_cap must be at least 1, got 0.5",
    ),
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
            ("clip", "constant-length", {"aggregation_length": 8}),
        )
    ),
    (
        {"preset": "raft", "kl": "k1", "kl_into": "reward", "kl_coef": 5.0, **FROZEN},
        "algorithm.kl.into 'reward' does nothing with advantage 'one'",
    ),
    ({"preset": "raft", "overlong_buffer": 4}, "algorithm.shaping.overlong_buffer is set to 4, but nothing reads it"),
    (
        {"preset": "pass-at-k", "shaping_norm": "batch"},
        "algorithm.shaping.norm is set to 'batch', but nothing reads it",
    ),
    (
        {"aggregation": "constant-length", "aggregation_length": True},
        "algorithm.aggregation.length: must be a number, got true",
    ),
    ({"correction": "tis+mine.py:f"}, "a function of your own stands alone"),
    ({"kl_coef": 0.1}, "algorithm.kl.coef is 0.1, but algorithm.reference is 'none': a KL term needs a reference"),
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
        {"preset": "maxrl", "shaping_bias": 0.5},
        {"anchor": "behaviour", "correction": "opsm"},
        {"anchor": "behaviour", "correction": "geometric+opsm"},
        {"correction": "tis+geometric+opsm"},
        {"gate": "likelihood", "correction": "total"},
        {"aggregation": "constant-length", "aggregation_length": 1},
        {"aggregation": "constant-length", "aggregation_length": "max_tokens"},
        {"preset": "reinforce++", "whiten": "tokens"},
        {"kl": "k1-ratio", "kl_coef": 0.1, **FROZEN},
        {"kl": "k1", "kl_coef": 0.1, "kl_into": "reward", **FROZEN},
        {"kl_coef": 0.1, "reference": "ema", "reference_mix": 0.5, "reference_every": 10},
        {"reference": "none"},
        {"preset": "rloo", "kl_coef": 0.0, "reference": "none"},
        {"anchor": "interpolated"},
    ],
    ids=str,
)
def test_just_inside_the_rules_is_accepted(algorithm: dict[str, Any]) -> None:
    config = resolve(algorithm).algorithm
    given = {key: table for key, table in spelled(algorithm).items() if key not in ("preset", "reference")}
    for key, table in given.items():
        assert table.items() <= dict(getattr(config, key)).items()
    Objective(config, 64)


def test_a_reference_that_is_taken_away_from_a_kl_term_is_refused() -> None:
    assert "algorithm.reference is 'none'" in refused({"preset": "rloo", "reference": "none"})


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"clip_low": 1.0}, "algorithm.gate.clip_low: input should be less than 1, got 1.0"),
        ({"clip_high": 0}, "algorithm.gate.clip_high: input should be greater than 0, got 0"),
        ({"dual_clip": -1}, "algorithm.gate.dual_clip: input should be greater than or equal to 0, got -1"),
        (
            {"preset": "ppo", "gamma": 1.1},
            "algorithm.advantage.gamma: input should be less than or equal to 1, got 1.1",
        ),
        (
            {"preset": "ppo", "gae_lambda": -0.1},
            "algorithm.advantage.gae_lambda: input should be greater than or equal to 0",
        ),
        (
            {"preset": "stale-asymmetric", "weight_floor": 1.5},
            "algorithm.gate.weight_floor: input should be less than or equal",
        ),
        (
            {"preset": "stale-asymmetric", "reject_below": 1},
            "algorithm.gate.reject_below: input should be less than 1, got 1",
        ),
        ({"preset": "dppo", "tv_limit": 0}, "algorithm.gate.tv_limit: input should be greater than 0, got 0"),
        ({"preset": "sapo", "tau_positive": 0}, "algorithm.gate.tau_positive: input should be greater than 0, got 0"),
        ({"advantage_ddof": 2}, "algorithm.advantage.ddof: input should be 0 or 1, got 2"),
        ({"shaping_scale": 0}, "algorithm.shaping.scale: input should be greater than 0, got 0"),
        ({"kl_coef": -0.1}, "algorithm.kl.coef: input should be greater than or equal to 0, got -0.1"),
        ({"kl_coef": float("nan"), **FROZEN}, "algorithm.kl.coef: input should be a finite number, got NaN"),
        ({"truncation": "cut"}, "or 'keep', 'mask' or 'drop', got 'cut'"),
        ({"truncation": True}, "or 'keep', 'mask' or 'drop', got True"),
        (
            {"gate": {"clip": 0.2}},
            "but gate 'clip' has no such setting: it has clip_low, clip_high, dual_clip; did you",
        ),
        (
            {"whiten": "batch"},
            "algorithm.advantage.whiten: input should be 'none', 'tokens', 'samples', 'scale' or 'successes'",
        ),
        ({"anchor": "new"}, "algorithm.ratio.anchor: input should be 'old', 'behaviour' or 'interpolated'"),
        ({"correction_floor": 1.1}, "algorithm.correction.floor: input should be less than or equal to 1, got 1.1"),
        ({"preset": "kl-cov", "cov_share": 0}, "algorithm.gate.cov_share: input should be greater than 0, got 0"),
        ({"preset": "kl-cov", "cov_share": 1.5}, "algorithm.gate.cov_share: input should be less than or equal to 1"),
        ({"sft_coef": -1}, "algorithm.sft.coef: input should be greater than or equal to 0, got -1"),
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
            {"preset": "pass-at-k", "advantage_k": 9},
            training(group_size=8),
            "training.group_size = 8, got 9",
        ),
        (
            {"preset": "ppo", "critic_warmup": 4},
            training(),
            "algorithm.critic.warmup must be below training.steps = 4, got 4: the policy would never learn",
        ),
        (
            {"overlong_buffer": 65},
            {},
            "algorithm.shaping.overlong_buffer must be at most sampling.max_tokens = 64, got 65",
        ),
        (
            {"filter": "none"},
            {"pipeline": {"refill": 3}},
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
        assert resolve({"truncation": truncation}, pipeline={"refill": 3}).pipeline.refill.most


# Settings that nothing reads.


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("preset", PRESETS)
def test_settings_that_nothing_reads_are_unset_by_a_preset_and_refused_from_a_recipe(preset: str) -> None:
    config = AlgorithmConfig(preset=preset)
    idle = [key for key, value in config.leaves() if value is None]
    assert idle
    usual = {**dict(AlgorithmConfig.usual()), "ratio.name": "token", "kl.name": "k2", "shaping.name": "standard"}
    for path in idle:
        table, key = path.split(".")
        value = "frozen" if path == "reference.name" else usual[path]
        with pytest.raises(ValidationError) as caught:
            AlgorithmConfig.model_validate({"preset": preset, table: {key: value}})
        message = f"algorithm.{table}.{key} is set to {value!r}, but nothing reads it; it belongs to "
        assert message in str(caught.value)


def test_turns_are_compared_where_there_are_several_and_by_what_judges_tokens() -> None:
    several = "algorithm.advantage 'gigpo' is for environments with several turns, got env.name = "
    assert f"{several}'single'" in refused({"preset": "gigpo"}, env={})
    assert f"{several}'games' with env.turns = 1" in refused({"preset": "gigpo"}, env={"name": "games", "turns": 1})
    mixes = "must judge tokens, as '{}' does, with advantage 'turn-centred', got '{}', which mixes turns"
    assert mixes.format("token", "sequence-mean") in refused({"preset": "gspo", "advantage": "turn-centred"})
    assert mixes.format("clip", "geometric-clip") in refused({"preset": "gmpo", "advantage": "turn-centred"})
    assert resolve({"preset": "gspo-token", "advantage": "turn-centred"})
    message = (
        "algorithm.advantage.whiten 'scale' needs one advantage per sample, but advantage 'gigpo' gives one per turn"
    )
    assert message in refused({"preset": "gigpo", "whiten": "scale"})


def test_a_setting_of_another_function_is_refused_with_those_of_the_chosen_one() -> None:
    assert refused({"gate": {"name": "sigmoid", "clip_low": 0.1}}) == (
        "algorithm.gate.clip_low is set to 0.1, but gate 'sigmoid' has no such setting: it has tau_positive, "
        "tau_negative; clip_low belongs to gate 'clip', 'mask', 'geometric-clip', 'clip-cov'"
    )
    assert "it has none; cap belongs to correction 'tis', 'sequence-tis'" in refused({"correction": "none", "cap": 2.0})
    assert "it has clip_low, clip_high; did you mean 'clip_low'?" in refused({"gate": {"name": "mask", "clip_lo": 1}})
    assert "algorithm.kl.beta is set to 1, but kl 'k2' has no such setting: it has none" in refused({"kl": {"beta": 1}})


def test_who_would_read_a_setting_is_named() -> None:
    cases = {
        "kl_into": ("reward", "kl.coef above 0"),
        "entropy_rate": (0.01, "entropy.target above 0"),
        "critic_lr": (1e-5, "advantages 'gae' and 'turn-gae', or one of your own that needs values"),
        "sft_correct_above": (0.0, "sft.coef above 0"),
    }
    for key, (value, readers) in cases.items():
        assert f"nothing reads it; it belongs to {readers}" in refused({key: value}), key
    assert "it belongs to gates that read a ratio" in refused({"gate": "likelihood", "ratio": "token"})
    assert "it belongs to kl.target above 0" in refused({"kl_coef": 0.1, "kl_horizon": 5.0, **FROZEN})
    assert "reference 'ema' or 'reset'" in refused({"kl_coef": 0.1, "reference_every": 5, **FROZEN})
    assert "it belongs to reference 'ema'" in refused({"kl_coef": 0.1, "reference": "reset", "reference_mix": 0.5})


def test_what_is_resolved_is_exactly_what_the_chosen_functions_read() -> None:
    """Every setting in the signature of a chosen function is there, for every preset, and no other."""
    for preset in PRESETS:
        config = AlgorithmConfig(preset=preset)
        for key, stage in STAGES.items():
            table = config.choice(key)
            if table.name is None:
                assert (
                    (key, config.gate.name) in (("ratio", "likelihood"), ("ratio", "divergence"))
                    or (key == "kl" and not config.kl.coef)
                    or (key == "shaping" and config.advantage.name in ("one", "pass-at-k"))
                )
                continue
            read = {setting for name in stage.names(table.name) for setting in keyword_settings(stage.choices[name])}
            assert set(dict(table)) == read | set(stage.base.model_fields)
            assert all(table.setting(setting) is not None for setting in read)


@pytest.mark.parametrize("key", STAGES)
def test_every_setting_of_a_built_in_function_has_a_type_and_a_description(key: str) -> None:
    for name in STAGES[key].choices:
        for setting, info in STAGES[key].table(name).model_fields.items():
            assert setting == "name" or info.description, (name, setting)


def test_numbers_of_a_preset_hold_for_every_function_that_has_them() -> None:
    assert algorithm_with(preset="dapo", gate="mask").gate.setting("clip_high") == 0.28
    assert dict(algorithm_with(preset="dapo", gate="sigmoid").gate) == {
        "name": "sigmoid",
        "tau_positive": 1.0,
        "tau_negative": 1.05,
    }


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
    for key, table in spelled(algorithm).items():
        saved["algorithm"][key] = {**saved["algorithm"][key], **table} if isinstance(table, dict) else table
    with pytest.raises(ConfigError, match="must"):
        parse_config(saved)


# The preset on the command line.


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[data]\ntask = "sort"\n[training]\nlr = 3e-6\n'
        '[algorithm]\npreset = "dapo"\ngate.clip_high = 0.4\nshaping.overlong_buffer = 16\nentropy.coef = 0.01\n'
    )
    return file


def test_a_recipe_changes_single_choices_of_its_preset(recipe: Path) -> None:
    config = load_config(recipe).algorithm
    assert (config.preset, config.filter.name) == ("dapo", "zero-variance")
    assert dict(config.gate) == {"name": "clip", "clip_low": 0.2, "clip_high": 0.4, "dual_clip": 0.0}
    changed = load_config(recipe, ["algorithm.gate.clip_high=0.3"]).algorithm
    assert (changed.gate.setting("clip_high"), changed.shaping.setting("overlong_buffer")) == (0.3, 16)


def test_a_choice_on_the_command_line_keeps_the_settings_beside_it(recipe: Path) -> None:
    for overrides in (["algorithm.gate=mask"], ["algorithm.gate.name=mask"]):
        config = load_config(recipe, overrides).algorithm
        assert dict(config.gate) == {"name": "mask", "clip_low": 0.2, "clip_high": 0.4}
    with pytest.raises(ConfigError, match=r"clip_high is set to 0\.4, but gate 'sigmoid' has no such setting"):
        load_config(recipe, ["algorithm.gate=sigmoid"])
    whole = load_config(recipe, ['algorithm.gate={name="sigmoid", tau_positive=2}']).algorithm
    assert dict(whole.gate) == {"name": "sigmoid", "tau_positive": 2.0, "tau_negative": 1.05}


def test_a_choice_and_its_settings_may_be_given_in_any_order(recipe: Path) -> None:
    for overrides in itertools.permutations(["algorithm.filter=all-wrong", "algorithm.filter.correct_above=0.7"]):
        config = load_config(recipe, overrides).algorithm
        assert dict(config.filter) == {"name": "all-wrong", "correct_above": 0.7}


def test_settings_of_a_python_caller_are_tables_too(recipe: Path) -> None:
    values = tomllib.loads(recipe.read_text())
    config = make_config(values, settings={"algorithm": {"gate": {"clip_low": 0.1}, "filter": "none"}})
    assert isinstance(config, RLConfig)
    assert dict(config.algorithm.gate) == {"name": "clip", "clip_low": 0.1, "clip_high": 0.4, "dual_clip": 0.0}
    assert config.algorithm.filter.name == "none"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_on_the_command_line_replaces_the_recipes_choices(recipe: Path, preset: str) -> None:
    method = [f"method.{key}={value}" for key, value in TAUGHT.get(preset, {}).items()]
    method += ["env.name=games"]
    config = load_config(recipe, [f"algorithm.preset={preset}", *method])
    assert config.algorithm == AlgorithmConfig(preset=preset)
    assert config.training.lr == 3e-6, "other sections stay"


@pytest.mark.parametrize(
    "overrides",
    [*itertools.permutations(["algorithm.preset=cispo", "algorithm.gate.weight_cap=2.0", "algorithm.filter=none"])],
)
def test_choices_given_with_a_preset_are_kept_in_any_order(recipe: Path, overrides: list[str]) -> None:
    config = load_config(recipe, overrides).algorithm
    assert config == algorithm_of({"preset": "cispo", "weight_cap": 2.0, "filter": "none"})
    assert (config.shaping.setting("overlong_buffer"), config.entropy.coef) == (0, 0)


def test_a_preset_replaces_the_choices_of_a_resolved_config_too(recipe: Path) -> None:
    config = override_config(load_config(recipe), ["algorithm.preset=gspo"])
    assert config.algorithm == AlgorithmConfig(preset="gspo")


def test_a_single_choice_of_a_resolved_config_may_be_changed(recipe: Path) -> None:
    config = override_config(resolve({"preset": "grpo"}), ["algorithm.gate=sigmoid"])
    assert config.algorithm == algorithm_of({"preset": "grpo", "gate": "sigmoid"})
