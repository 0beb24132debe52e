"""Every preset trains a tiny model to a high reward, through the whole pipeline; their state is saved."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import HERE, assert_same_metrics, rows, run_config, run_toy

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES
from kitae.cli.choices import settings
from kitae.config.recipe import load_config
from kitae.errors import ConfigError
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import go_on
from kitae.store.journal import Journal
from kitae.store.run_folder import RunStore

RIGHT_OR_WRONG = f"verifier.name={HERE / 'toy.py'}:any_digit"
SHORT = ("eval.prompts=0", "checkpoint.every=100")


REWARDED = [name for name in PRESETS if name not in ("distil", "gkd")]


SEEN = ("filter", "advantage.whiten", "ratio.anchor", "correction", "kl.into", "entropy.coef")  # by more than the loss


@cache
def chosen(preset: str) -> frozenset[tuple[str, Any]]:
    """What of a preset the parts around its functions see: what these need, and which of them there are."""
    config = AlgorithmConfig(preset=preset)
    traits = {(stage, config.traits(stage)) for stage in STAGES if config.choice(stage).name is not None}
    return frozenset(traits | {(key, value) for key, value in settings(preset).items() if key in SEEN})


def cover() -> list[str]:
    """Presets that together choose whatever any preset chooses, the one with most that is new first."""
    left, found = set[tuple[str, Any]]().union(*map(chosen, REWARDED)), list[str]()
    while left:
        found.append(max(REWARDED, key=lambda preset: len(chosen(preset) & left)))
        left -= chosen(found[-1])
    return found


COVER = cover()
QUICK = COVER[:8]  # most of it


@pytest.mark.sentinel(keep=2)
@pytest.mark.parametrize(
    "preset", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REWARDED if name not in QUICK)]
)
def test_every_preset_learns(preset: str, tmp_path: Path) -> None:
    """Whatever the pipeline must do for some preset, it does here; losses of all presets are held by test_golden.py.

    Two updates per batch where there is a ratio, so that gates and corrections have something to do.
    """
    updates = 1 if AlgorithmConfig(preset=preset).ratio.name is None else 2
    steps = 30 if preset == "raft++" else 17  # it learns from the right answers alone, one step at a time
    result = run_toy(
        tmp_path, RIGHT_OR_WRONG, *SHORT, f"algorithm.preset={preset}", f"training.steps={steps}",
        f"training.minibatches={updates}",
    )  # fmt: skip
    found = rows(result.folder)
    rewards = [r["reward"] for r in found]
    assert rewards[0] < 0.6
    assert np.mean(rewards[-4:]) >= 0.9, [round(r, 2) for r in rewards]
    assert all(r["skipped_updates"] == 0 for r in found if r["updates"])


@pytest.mark.parametrize(
    "choices",
    [
        ["algorithm.preset=ppo", "algorithm.critic.warmup=1", "algorithm.kl.target=0.5", "algorithm.reference=ema",
         "algorithm.reference.every=1"],
        ["algorithm.preset=reinforce++-baseline", "algorithm.reference=reset", "algorithm.reference.every=2",
         "algorithm.entropy.target=6", "algorithm.shaping.norm=running"],
        ["algorithm.preset=remax", "model.lora_rank=4"],
    ],
    ids=["critic-and-controllers", "reset-entropy-running", "greedy-and-adapters"],
)  # fmt: skip
def test_resumed_equals_uninterrupted_with_everything_that_moves(choices: list[str], tmp_path: Path) -> None:
    settings = [RIGHT_OR_WRONG, "eval.prompts=0", "training.steps=4", "checkpoint.every=2", *choices]
    whole = run_toy(tmp_path / "whole", *settings).folder
    copy = shutil.copytree(whole, tmp_path / "copy")
    store = RunStore.open(copy)
    go_on(store, Bystander(Silent()), "step-000002")
    assert_same_metrics(copy, whole)
    first, *_, last = rows(whole)
    if "algorithm.preset=ppo" in choices:
        assert "loss" not in first and first["value_loss"] > 0, "the first step warms the critic up"
        assert last["kl_coef"] != first["kl_coef"]
    if "algorithm.entropy.target=6" in choices:
        assert last["entropy_coef"] > first["entropy_coef"]


TERMS = ("algorithm.experts.z_coef=0.01", "algorithm.experts.balance_coef=0.1")


@pytest.mark.sentinel
@pytest.mark.parametrize("settings", [TERMS, ("pipeline.max_staleness=1", "model.lora_rank=4")], ids=["terms", "lora"])
def test_a_mixture_of_experts_is_trained_on_the_experts_of_old(
    settings: tuple[str, ...], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also while the engine samples from the same modules, and beside a reference, which chooses for itself."""
    result = run_toy(
        tmp_path, RIGHT_OR_WRONG, *SHORT, f"model.path={tiny_folder('qwen3_moe')}", "training.steps=4",
        "training.minibatches=2", "algorithm.experts.routing=old",
        "algorithm.kl.coef=0.01", "algorithm.reference=frozen",
        *settings,
    )  # fmt: skip
    found = rows(result.folder)
    assert [row["updates"] for row in found] == [2] * 4 and all(row["skipped_updates"] == 0 for row in found)
    assert all(0 < row["router_entropy"] <= 1 and row["expert_load"] >= 1 > row["experts_idle"] for row in found)
    if settings is TERMS:
        assert all(row["router_z"] > 0 and 0.9 < row["router_balance"] < 4 for row in found), (
            "1 is an even load, 4 all on one"
        )


def test_the_greedy_baseline_is_journalled_and_never_trained_on(tmp_path: Path) -> None:
    result = run_toy(tmp_path, RIGHT_OR_WRONG, *SHORT, "algorithm.preset=remax", "training.steps=2")
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    indices = [r.index for r in journal.rollouts(0)]
    journal.close()
    assert indices == [-1, *range(8)]
    assert [(r["rollouts"], r["samples_trained"]) for r in rows(result.folder)] == [(32, 32), (32, 32)]


def test_a_kl_term_holds_the_policy_back(tmp_path: Path) -> None:
    """A strong pull towards the reference keeps the divergence small; with adapters the reference is free."""
    distance = {}
    for name, choices in {
        "free": ["algorithm.kl.coef=1e-9"],
        "held": ["algorithm.kl.coef=10"],
        "adapters": ["algorithm.kl.coef=10", "model.lora_rank=8"],
    }.items():
        settings = [*choices, "algorithm.reference=frozen", "training.steps=6"]
        found = rows(run_toy(tmp_path / name, RIGHT_OR_WRONG, *SHORT, *settings).folder)
        assert abs(found[0]["kl_k3"]) < 1e-6, "before the first update the policy is its reference"
        distance[name] = found[-1]["kl_k3"]
    assert distance["free"] > 0.1
    assert distance["held"] < 0.2 * distance["free"] and distance["adapters"] < 0.2 * distance["free"]


@pytest.mark.sentinel
def test_a_stage_of_the_users_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def bonus(group, *, size=1.0):\n"
        "    return (group.rewards_G - group.rewards_G.mean()) * size\n"
        "def soft(ratio_N, tokens, *, width):\n"
        "    return -tokens.advantage_N * ratio_N.clamp(1 - width, 1 + width)\n"
    )
    own = [f"algorithm.advantage={mine}:bonus", f"algorithm.gate={mine}:soft", "algorithm.advantage.size=2.0"]
    steps = ["training.steps=15", "training.minibatches=2", "algorithm.gate.width=0.3"]
    result = run_toy(tmp_path, RIGHT_OR_WRONG, *SHORT, *own, *steps)
    assert np.mean([r["reward"] for r in rows(result.folder)][-4:]) >= 0.9
    with pytest.raises(ConfigError, match="needs the setting 'width'"):
        run_toy(tmp_path, RIGHT_OR_WRONG, *SHORT, *own, "model.path=/does/not/exist")


def test_the_example_of_ones_own_algorithm_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE.parent.parent)
    config = load_config(Path("examples/custom_algorithm.toml"), [f"run.dir={tmp_path}", "model.device=cpu"])
    result = run_config(config)
    assert result.before and result.after
    assert result.before["avg"] < 0.6 and result.after["avg"] >= 0.9
