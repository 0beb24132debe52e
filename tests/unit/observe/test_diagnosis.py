"""What is wrong with a run. The runs are real: bad_runs.py has made them, and says how."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from bad_runs import BAD, DATA, kept

from kitae.algorithms.stages import STAGES
from kitae.config.recipe import _settings
from kitae.config.root import ROOTS, RLConfig
from kitae.observe.diagnosis import LIVE, RULES, LiveDiagnosis, findings
from kitae.observe.diagnosis.base import LOSSES, Finding, Rule, Seen
from kitae.observe.diagnosis.machinery_rules import last_error
from kitae.observe.step_report import StepReport

BY_NAME = {rule.name: rule for rule in RULES}
GOOD = ("quickstart", "lora", "ifeval", "knights-and-knaves", "sort", "arithmetic")
"""Recipes that come with Kitae, as they ran."""

REAL = sorted({path.stem for path in DATA.glob("*.json")} - {*GOOD})

ALTERED: dict[str, dict[str, Any]] = {
    "engine-gap": {"logp_gap": 0.2},
    "routing-flips": {"routing_flips": 0.3},
    "engine-restarts": {"engine_restarts": 1},
    "memory": {"memory_share": 0.97},
}
"""Where the run cannot be made on any machine: the quickstart, with other numbers in its last steps."""


def altered(name: str, steps: int = 6) -> Seen:
    seen = kept("quickstart")
    rows = [*seen.steps[:-steps], *({**row, **ALTERED[name]} for row in seen.steps[-steps:])]
    return replace(seen, steps=rows)


def test_every_rule_has_a_run() -> None:
    assert {*REAL, *ALTERED} == BY_NAME.keys() and set(BAD) <= set(REAL)


@pytest.mark.parametrize("name", REAL)
def test_a_run_that_shows_it(name: str) -> None:
    found = BY_NAME[name].find(kept(name))
    assert found is not None
    assert found.rule == name and found.title and found.advice
    assert re.search(r"\d", found.evidence), "evidence has numbers"


@pytest.mark.parametrize("name", ALTERED)
def test_numbers_that_show_it(name: str) -> None:
    assert [found.rule for found in findings(altered(name), RULES)] == [name]


@pytest.mark.parametrize("name", GOOD)
def test_no_false_alarm(name: str) -> None:
    """Neither at the end nor after any step on the way."""
    seen = kept(name)
    assert findings(seen, RULES) == []
    told: list[Finding] = []
    for step, found in replayed(seen):
        told += found
        assert told == [], step


def replayed(seen: Seen) -> list[tuple[int, list[Finding]]]:
    """What is told while a run goes on."""
    told: list[tuple[int, list[Finding]]] = []
    live = LiveDiagnosis(dict(seen.settings), (), lambda step, found: told.append((step, list(found))))
    evaluations = {row["step"]: dict(row) for row in seen.evaluations}
    if 0 in evaluations:
        live.evaluated(evaluations[0])
    for row in seen.steps:
        live.step(reported(row))
        if row["step"] in evaluations:
            live.evaluated(evaluations[row["step"]])
    return told


class reported(StepReport):
    """A report that makes this row."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        object.__setattr__(self, "step", row["step"])
        object.__setattr__(self, "_row", row)

    def row(self) -> dict[str, Any]:
        return dict(self._row)  # type: ignore[attr-defined]


def test_a_broken_policy_is_told_while_it_breaks_and_once() -> None:
    told = replayed(kept("lr-too-high"))
    assert len(told) == 1
    step, (found,) = told[0]
    assert found.rule == "lr-too-high" and step <= 8
    assert "reward 0.195 at steps 1 and 2, 0.000 over steps 3 to 7" in found.evidence
    assert "training.lr is 0.001" in found.evidence


def test_steps_that_are_given_up_count_no_more() -> None:
    """A resumed run knows the rows that are there; those of steps that are trained again are replaced."""
    rows = [{"kind": "step", "step": s, "truncated": 1.0} for s in range(1, 9)]
    told: list[int] = []
    live = LiveDiagnosis({}, rows, lambda step, found: told.append(step))
    live.step(reported({"kind": "step", "step": 3, "truncated": 0.0}))
    for step in (4, 5, 6):
        live.step(reported({"kind": "step", "step": step, "truncated": 1.0}))
    assert told == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_cope_with_what_is_missing(rule: Rule) -> None:
    """No step, few steps, and the rows of a kind of run that has no rewards."""
    bare = [{"kind": "step", "step": s, "loss": 2.0 / s, "entropy": None, "reward": float("nan")} for s in range(1, 40)]
    for seen in (Seen([]), Seen(bare[:1]), Seen(bare), Seen(bare, [{"kind": "eval", "step": 0, "avg": None}])):
        assert rule.find(seen) is None


@pytest.mark.parametrize("rule", LIVE, ids=lambda rule: rule.name)
def test_live_rules_need_metrics_alone(rule: Rule) -> None:
    seen = altered(rule.name) if rule.name in ALTERED else kept(rule.name)
    assert rule.find(Seen(seen.steps, seen.evaluations, seen.settings)) is not None


def test_advice_names_settings_that_exist() -> None:
    known = {f"{name}.{key}" for name, section in RLConfig.tables().items() for key in section.model_fields}
    inner = {f"{name}.{key}" for name, section in _settings(RLConfig).items() for key in section if "." in name}
    for rule in RULES:
        text = f"{rule.when} {rule.advice}"
        named = set(re.findall(r"\b([a-z]+\.[a-z_]+)\b", text)) - {"console.log", "timeline.jsonl"}
        assert named <= known, (rule.name, named - known)
        deeper = set(re.findall(r"\b([a-z]+\.[a-z_]+\.[a-z_]+)\b", text))
        assert deeper <= inner, (rule.name, deeper - inner)
        for stage, choice in re.findall(r'algorithm\.(\w+) = "([\w-]+)"', text):
            assert choice in STAGES[stage].choices, (rule.name, stage, choice)


def test_the_worst_comes_first() -> None:
    found = findings(replace(kept("truncation"), status="crashed"), RULES)
    assert [f.severity for f in found] == ["bad", "warning"]


def test_what_the_console_last_says() -> None:
    stamp = "2026-01-02 03:04:05  "
    assert last_error([f"{stamp}$ kitae train x", f"{stamp}error: 54% of it could not be judged"]) == (
        "54% of it could not be judged"
    )
    trace = [f"{stamp}Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no", ""]
    assert last_error(trace) == "ValueError: no"
    assert last_error([f"{stamp}step 1/15  reward 0.3"]) == ""


def test_a_run_that_was_killed_has_no_last_words() -> None:
    seen = replace(kept("quickstart"), status="crashed", steps=kept("quickstart").steps[:7])
    assert BY_NAME["crashed"].check(seen) == "after step 7: it was ended without a word"
    assert BY_NAME["crashed"].check(replace(seen, status="stopped")) is None


def test_files_name_their_command() -> None:
    for path in DATA.glob("*.json"):
        assert json.loads(path.read_text())["command"].startswith("kitae train "), path.name


def held_out(kind: str, *means: float) -> Seen:
    rows = [
        {"kind": "eval", "step": step, "avg": avg, "avg_low": avg - 0.1, "avg_high": avg + 0.1}
        for step, avg in enumerate(means)
    ]
    return Seen([], rows, {"method.kind": kind, "training.lr": 1e-3})


@pytest.mark.parametrize("kind", ["sft", "distil-file"])
def test_a_loss_that_falls_is_no_fall(kind: str) -> None:
    assert BY_NAME["lr-too-high"].find(held_out(kind, 5.5, 4.8)) is None
    found = BY_NAME["lr-too-high"].find(held_out(kind, 4.8, 5.5))
    assert found is not None and found.evidence.startswith(
        f"held-out {'loss' if kind == 'sft' else 'divergence'} 4.800 at step 0, 5.500 at step 1"
    )


def test_the_measures_of_the_rules_are_those_of_the_kinds() -> None:
    losses = {kind: root.measure.fget(root) for kind, root in ROOTS.items() if root.measure.fget(root) != "accuracy"}
    assert losses == LOSSES


def test_another_suite_is_not_the_runs_own_task() -> None:
    seen = held_out("rl", 0.9, 0.1)
    assert BY_NAME["lr-too-high"].find(seen) is not None
    others = [{**row, "suite": "svamp"} for row in seen.evaluations]
    assert BY_NAME["lr-too-high"].find(replace(seen, evaluations=others)) is None


def test_scores_that_run_away_are_noticed_although_every_pair_is_in_order() -> None:
    def seen(margin: float) -> Seen:
        rows = [{"step": step, "margin": margin, "accuracy": 1.0, "loss": 0.0} for step in range(1, 9)]
        return Seen(rows, settings={"method.kind": "reward", "training.lr": 1e30})

    found = BY_NAME["scores-run-away"].find(seen(8e31))
    assert found is not None and found.evidence == "margin 8e+31 over steps 4 to 8; training.lr is 1e+30"
    assert BY_NAME["scores-run-away"].find(seen(12.0)) is None


def steps(count: int, **numbers: float) -> list[dict[str, Any]]:
    return [
        {"kind": "step", "step": i + 1, "updates": 1.0, "groups": 8, "rollouts": 64, **numbers} for i in range(count)
    ]


def names(seen: Seen) -> list[str]:
    return [finding.rule for finding in findings(seen, RULES)]


def test_a_run_that_begins_slowly_is_left_alone_while_it_goes_on() -> None:
    """Few answers are right, and some groups teach: that may still become something. At the end it has not."""
    slow = steps(5, reward=0.01, groups_with_signal=1)
    assert names(Seen(slow)) == [] and names(Seen(slow, status="finished")) == ["all-wrong"]
    assert names(Seen(steps(5, reward=0.0, groups_with_signal=0))) == ["all-wrong"]
    few = steps(5, reward=0.5, groups_with_signal=1)
    assert names(Seen(few)) == [] and names(Seen(few, status="finished")) == ["dead-groups"]
    assert names(Seen(steps(5, reward=0.5, groups_with_signal=0))) == ["dead-groups"]


def test_groups_that_agree_teach_a_critic_all_the_same() -> None:
    seen = Seen(steps(5, reward=0.5, groups_with_signal=0), status="finished")
    assert names(seen) == ["dead-groups"]
    assert names(replace(seen, settings={"algorithm.advantage.name": "gae"})) == []
    assert names(replace(seen, settings={"algorithm.advantage.name": "group-zscore"})) == ["dead-groups"]
    assert names(replace(seen, settings={"algorithm.advantage.name": "no_such_file.py:f"})) == ["dead-groups"]
    assert names(replace(seen, settings={"training.group_size": 1})) == []
