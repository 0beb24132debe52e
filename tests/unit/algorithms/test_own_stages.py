"""Stages of the user's own, named as file.py:function: they are found, filled with settings, and checked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_p import (
    PLAIN,
    RATIOS_P,
    advantages,
    as_tokens,
    flat,
    group_p,
    loss_of,
    make_group,
    make_objective,
    of_samples,
    token_losses,
    tokens_p,
    trainable,
)
from objective import Objective
from pydantic import ValidationError
from short_settings import algorithm_of

from kitae.algorithms.functions import Functions
from kitae.algorithms.stages import STAGES
from kitae.config.recipe import load_config, parse_config
from kitae.config.root import RLConfig
from kitae.errors import ConfigError

Write = Callable[[str], str]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    """`file(source)`: the path of a new file with this content."""

    def write(source: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "mine.py").write_text(source)
        return str(folder / "mine.py")

    return write


# Each of these is a built-in function or a variation that is easy to check.
EVERY_STAGE = """
import numpy as np

def shaping(step):
    return step.scores_B * 10 - step.lengths_B

def keep(scores_G):
    return scores_G > 0

def advantage(group):
    return group.rewards_G - group.rewards_G.max()

def ratio(log_ratio_N, tokens):
    return 1 + log_ratio_N

def gate(ratio_N, tokens):
    return -tokens.advantage_N * ratio_N ** 2

def correction(tokens):
    return tokens.logp_old_N * 0 + 0.5

def aggregation(lengths_B, groups_B):
    return np.arange(1.0, len(lengths_B) + 1)

def kl(tokens):
    return tokens.logp_N ** 2
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_true_is_no_number_where_the_function_says_number(file: Write, kind: str, future: str) -> None:
    source = f"def gate(ratio_N, tokens, *, power: {kind}, loud: bool = False):\n    return -ratio_N ** power\n"
    path = file(future + source)
    with pytest.raises(ConfigError, match="power must be a number, got True"):
        make_objective(gate={"name": f"{path}:gate", "power": True})
    make_objective(gate={"name": f"{path}:gate", "power": 1, "loud": True})


def test_shaping_of_ones_own(file: Write) -> None:
    objective = make_objective(shaping=file(EVERY_STAGE) + ":shaping", shaping_norm="none")
    samples = objective.candidates([make_group([1, 0], lengths=[2, 5])])
    assert [(s.score, s.reward) for s in samples] == [(1, 8), (0, -5)]


def test_filter_of_ones_own_is_the_reason_by_its_name(file: Write) -> None:
    name = file(EVERY_STAGE) + ":keep"
    objective = make_objective(filter=name, advantage="one")
    assert [s.index for s in objective.advantages(objective.candidates([make_group([1, 0, 1])]))] == [0, 2]
    assert objective.drop_reason(make_group([0, 0])) == name


def test_advantage_of_ones_own_sees_the_group(file: Write) -> None:
    objective = make_objective(advantage=file(EVERY_STAGE) + ":advantage")
    assert of_samples(advantages(objective, make_group([1, 0.25]))) == [0, -0.75]


def test_ratio_gate_and_correction_of_ones_own(file: Write) -> None:
    path = file(EVERY_STAGE)
    cases: list[tuple[dict[str, str], Callable[[float, float], float]]] = [
        ({"ratio": f"{path}:ratio", "gate": "none"}, lambda a, r: -a * (1 + np.log(r))),
        ({"gate": f"{path}:gate"}, lambda a, r: -a * r**2),
        ({"correction": f"{path}:correction", "gate": "none"}, lambda a, r: -a * r / 2),
        ({"ratio": f"{path}:ratio", "gate": f"{path}:gate"}, lambda a, r: -a * (1 + np.log(r)) ** 2),
    ]
    for choices, expected in cases:
        objective = make_objective(**{**PLAIN, **choices})
        found = token_losses(objective, tokens_p(objective))
        pairs = zip([1, 1, -1, -1, -1, -1], flat(RATIOS_P), strict=True)
        assert found == pytest.approx([expected(a, r) for a, r in pairs], abs=1e-5)


def test_aggregation_of_ones_own(file: Write) -> None:
    objective = make_objective(aggregation=file(EVERY_STAGE) + ":aggregation")
    assert [s.weight_T.max() for s in trainable(objective, group_p())] == [1, 2]


def test_regulariser_of_ones_own_needs_no_reference(file: Write) -> None:
    path = file(EVERY_STAGE)
    objective = make_objective(**PLAIN, kl=f"{path}:kl", kl_coef=0.5)
    assert not objective.wants_reference
    tokens = as_tokens(trainable(objective, make_group([1, 1], lengths=[2, 4])), RATIOS_P)
    loss, _, _ = loss_of(objective, tokens)
    assert loss == pytest.approx(0.5 * (tokens.logp_N**2).mean().item(), abs=1e-6)


def test_a_resolved_config_with_ones_own_stage_reads_back_as_itself(file: Write) -> None:
    values = {
        "data": {"task": "sort"},
        "algorithm": {"gate": {"name": file("def gate(ratio_N, tokens, *, width): ...") + ":gate", "width": 3}},
    }
    config = parse_config(values)
    assert parse_config(config.model_dump(mode="json")) == config


def test_ones_own_stage_does_not_bring_in_settings_of_other_functions(file: Write) -> None:
    gate = file(EVERY_STAGE) + ":gate"
    values = {"data": {"task": "sort"}, "training": {"group_size": 2}, "algorithm": {"gate": gate}}
    assert parse_config(values).algorithm.gate.name == gate


# Settings.

WITH_SETTINGS = """
def gate(ratio_N, tokens, *, clip_low, strength, power=1.0):
    return -tokens.advantage_N * strength * clip_low * ratio_N ** power
"""


def first_loss(**choices: Any) -> float:
    objective = make_objective(**{**PLAIN, **choices})
    return token_losses(objective, tokens_p(objective))[0]


def test_keywords_are_settings(file: Write) -> None:
    """From the table of the stage, or from the function's own defaults; a preset's numbers are for built-in ones."""
    gate = {"name": file(WITH_SETTINGS) + ":gate", "clip_low": 0.5}
    assert first_loss(gate={**gate, "strength": 3}) == pytest.approx(-3 * 0.5 * 1.5, abs=1e-5)
    assert first_loss(gate={**gate, "strength": 1, "power": 2}) == pytest.approx(-0.5 * 1.5**2, abs=1e-5)
    with pytest.raises(ConfigError, match="needs the setting 'clip_low'"):
        make_objective(preset="dapo", gate={"name": gate["name"], "strength": 3})


def test_settings_of_ones_own_come_from_the_command_line(file: Write, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'[data]\ntask = "sort"\n[algorithm]\ngate = "{file(WITH_SETTINGS)}:gate"\n')
    config = load_config(recipe, ["algorithm.gate.strength=2", "algorithm.gate.clip_low=0.5"])
    assert isinstance(config, RLConfig)
    assert Functions(config.algorithm, 8).one("gate").keywords == {  # type: ignore[attr-defined]
        "clip_low": 0.5,
        "strength": 2,
        "power": 1.0,
    }
    assert parse_config(json.loads(config.to_json())) == config


def test_a_missing_setting_is_named(file: Write) -> None:
    with pytest.raises(ConfigError, match=r"needs the setting 'strength': .* algorithm\.gate\.strength"):
        make_objective(gate={"name": file(WITH_SETTINGS) + ":gate", "clip_low": 0.5})


def test_a_parameter_that_no_function_has_is_refused(file: Write) -> None:
    path = file(WITH_SETTINGS)
    with pytest.raises(ConfigError, match=r"algorithm\.gate\.powre is set to 2, but .*; did you mean 'power'"):
        make_objective(gate={"name": f"{path}:gate", "strength": 1, "powre": 2})
    with pytest.raises(ValidationError, match=r"algorithm\.gate\.strength is set to 1, but gate 'clip' has no such"):
        make_objective(gate={"strength": 1})
    # Settings stand after a star: a default before it is the function's own affair.
    gate = file("def gate(ratio_N, tokens, cap=2.0):\n    return -tokens.advantage_N * ratio_N.clamp(max=cap)\n")
    assert first_loss(gate=f"{gate}:gate") == pytest.approx(-1.5, abs=1e-6)
    with pytest.raises(ConfigError, match=r"algorithm\.gate\.cap is set to 1\.1, but .* it has none"):
        first_loss(gate={"name": f"{gate}:gate", "cap": 1.1})


def test_a_setting_that_every_table_of_the_stage_has_is_not_for_ones_own(file: Write) -> None:
    path = file("def ratio(log_ratio_N, tokens, *, anchor): ...\n")
    with pytest.raises(ConfigError, match=r"must not have a setting 'anchor': every table algorithm\.ratio has"):
        make_objective(ratio=f"{path}:ratio")


def test_limits_and_rules_of_ones_own_hold(file: Write) -> None:
    source = """
from typing import Annotated
from pydantic import Field
from kitae.algorithms.requirements import refuses

def ordered(s):
    if s["low"] >= s["high"]:
        yield f"low must be below high, got {s['low']} and {s['high']}"

@refuses(ordered)
def gate(ratio_N, tokens, *, low: Annotated[float, Field(ge=0)] = 0.5, high: float = 2.0):
    return -tokens.advantage_N * ratio_N.clamp(low, high)
"""
    name = file(source) + ":gate"
    make_objective(gate={"name": name, "low": 1})
    with pytest.raises(ConfigError, match=r"algorithm\.gate\.low: input should be greater than or equal to 0, got -1"):
        make_objective(gate={"name": name, "low": -1})
    with pytest.raises(ConfigError, match=r"algorithm\.gate\.low must be below high, got 3\.0 and 2\.0"):
        make_objective(gate={"name": name, "low": 3})


# What is refused before a model loads.


@pytest.mark.parametrize("stage", STAGES)
def test_a_missing_file_is_named(stage: str, tmp_path: Path) -> None:
    choices: dict[str, Any] = {stage: str(tmp_path / "nowhere.py") + ":f"}
    if stage == "kl":
        choices["kl_coef"] = 0.1
    config = algorithm_of(choices)  # reading settings touches no file
    with pytest.raises(ConfigError, match=rf"the file of the {stage} function must exist, got '.*nowhere\.py'"):
        Objective(config, 8)


def test_a_missing_function_points_to_the_nearest(file: Write) -> None:
    with pytest.raises(
        ConfigError, match=r"gate function .* needs a function 'gaet' in .*mine\.py; did you mean 'gate'"
    ):
        make_objective(gate=file(EVERY_STAGE) + ":gaet")
    with pytest.raises(ConfigError, match="needs a function 'np'"):
        make_objective(gate=file(EVERY_STAGE) + ":np")


@pytest.mark.parametrize("source", ["def gate(:", "1 / 0", "import no_such_module_at_all"])
def test_a_file_that_does_not_import_says_why(file: Write, source: str) -> None:
    with pytest.raises(ConfigError, match=r"the file of the gate function must import, but .*mine\.py raised \w+Error"):
        make_objective(gate=file(source) + ":gate")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("parameters", ["", "a, b, c, d", "*args", "**kw", "*, a"])
def test_a_wrong_signature_is_refused_with_the_right_one(stage: str, parameters: str, file: Write) -> None:
    choices: dict[str, Any] = {stage: file(f"def f({parameters}): ...") + ":f"}
    if stage == "kl":
        choices["kl_coef"] = 0.1
    wanted = ", ".join(STAGES[stage].arguments)
    with pytest.raises(ConfigError) as caught:
        make_objective(**choices)
    assert f"{stage} function '{choices[stage]}' must take ({wanted})" in str(caught.value)


# What is refused when it is called.

RETURNS = {
    "one too few": "x[:-1]",
    "a number": "1.0",
    "nothing": "None",
    "a table": "x[:, None] * x",
}


def run(stage: str, name: str) -> None:
    choices = {**PLAIN, stage: name, **({"kl_coef": 0.1} if stage == "kl" else {})}
    objective = make_objective(**choices)
    group = group_p()
    objective.drop_reason(group)
    loss_of(objective, as_tokens(trainable(objective, group), RATIOS_P))


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_shape_is_refused_and_shown(stage: str, returned: str, file: Write) -> None:
    source = {
        "shaping": "def f(step):\n    x = step.scores_B",
        "filter": "def f(scores_G):\n    x = scores_G > -5",
        "advantage": "def f(group):\n    x = group.rewards_G",
        "ratio": "def f(log_ratio_N, tokens):\n    x = log_ratio_N.exp()",
        "gate": "def f(ratio_N, tokens):\n    x = -tokens.advantage_N * ratio_N",
        "correction": "def f(tokens):\n    x = tokens.logp_old_N.exp()",
        "aggregation": "def f(lengths_B, groups_B):\n    x = 1.0 / lengths_B",
        "kl": "def f(tokens):\n    x = tokens.logp_N",
    }[stage]
    run(stage, file(f"{source}\n    return x\n") + ":f")
    with pytest.raises(ConfigError, match=rf"the {stage} function must return .* got"):
        run(stage, file(f"{source}\n    return {RETURNS[returned]}\n") + ":f")


def test_what_a_function_raises_says_whose_it_is(file: Write) -> None:
    with pytest.raises(ConfigError, match="the gate function f raised IndexError"):
        run("gate", file("def f(ratio_N, tokens):\n    return ratio_N[999]\n") + ":f")


def test_a_gate_without_a_gradient_is_refused(file: Write) -> None:
    with pytest.raises(ConfigError, match=r"must depend on tokens\.logp_N with a gradient"):
        run("gate", file("def f(ratio_N, tokens):\n    return ratio_N.detach()\n") + ":f")


def test_functions_of_one_file_share_its_module(file: Write) -> None:
    """What one stage leaves there another can read: the file is executed once."""
    path = file(
        "SEEN = []\n"
        "def shaping(step):\n    SEEN.append(len(step.scores_B))\n    return step.scores_B\n"
        "def gate(ratio_N, tokens):\n    return -tokens.advantage_N * ratio_N * SEEN[-1]\n"
    )
    assert first_loss(shaping=f"{path}:shaping", gate=f"{path}:gate") == pytest.approx(-1.5 * 2, abs=1e-5)


@pytest.mark.parametrize("stage", ["shaping", "advantage", "aggregation"])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused(stage: str, bad: str, file: Write) -> None:
    parameters = ", ".join(STAGES[stage].arguments)
    source = f"def f({parameters}):\n    return [float('{bad}')] * 2\n"
    with pytest.raises(ConfigError, match=rf"the {stage} function must return 2 finite numbers"):
        run(stage, file(source) + ":f")


def test_what_no_function_reads_is_refused_once_they_are_known(file: Write) -> None:
    gate = file(WITH_SETTINGS) + ":gate"
    choices: dict[str, Any] = {**PLAIN, "gate": {"name": gate, "strength": 1, "clip_low": 0.3}}
    make_objective(**choices)
    with pytest.raises(ConfigError, match=r"algorithm\.gate\.clip_high is set to 0\.9, but .* has no such setting"):
        make_objective(**choices, clip_high=0.9)
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.lr is set to 0\.9, but nothing reads it"):
        make_objective(**choices, critic_lr=0.9)


def test_a_function_of_ones_own_may_read_the_reference(file: Write) -> None:
    correction = file("def f(tokens):\n    return (tokens.logp_ref_N - tokens.logp_ref_N).exp()\n") + ":f"
    assert make_objective(**{**PLAIN, "correction": correction, "reference": "frozen"}).wants_reference
    assert not make_objective(**{**PLAIN, "correction": correction}).wants_reference
