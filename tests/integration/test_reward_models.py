"""From preferences to a reward model to a policy that it likes: the whole way, on the tiny model."""

import json
import signal
from pathlib import Path

import pytest
from harness import RECIPE, finish, kitae, rows, run_toy

from kitae.config.recipe import load_config
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import train


@pytest.fixture(scope="module")
def reward_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt to prefer digits to letters."""
    folder = tmp_path_factory.mktemp("reward")
    pairs = [
        {"prompt": f"{n} + 1 =", "chosen": str(n * 7919 % 10_000), "rejected": chr(97 + n % 26) * 4} for n in range(64)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:48]))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[48:]))
    (folder / "reward.toml").write_text(
        f"""
        method.kind = "reward"
        model = {{path = "tiny", dtype = "float32", device = "cpu"}}
        data = {{path = "{folder}/pairs.jsonl", eval_path = "{folder}/held_out.jsonl"}}
        training = {{steps = 12, batch = 16, lr = 3e-3}}
        run.dir = "{folder}"
        """
    )
    result = train(load_config(folder / "reward.toml", []), Bystander(Silent()))
    assert result.after is not None and result.after["avg_low"] > 0.5
    return result.folder


def settings(reward_run: Path, *more: str) -> tuple[str, ...]:
    params = f'{{model = "{reward_run}", device = "cpu", dtype = "float32"}}'
    return "verifier.name=reward_model", f"verifier.params={params}", "eval.prompts=0", *more


@pytest.mark.sentinel
def test_the_score_rises(reward_run: Path, tmp_path: Path) -> None:
    run = run_toy(tmp_path, *settings(reward_run, "training.steps=12")).folder
    rewards = [row["reward"] for row in rows(run)]
    assert sum(row["errors"] for row in rows(run)) == 0
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5, rewards


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["reinforce++", "ppo"])
def test_other_methods_learn_from_it(preset: str, reward_run: Path, tmp_path: Path) -> None:
    more = f"algorithm.preset={preset}", "training.steps=12"
    rewards = [row["reward"] for row in rows(run_toy(tmp_path, *settings(reward_run, *more)).folder)]
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_scores(reward_run: Path, tmp_path: Path) -> None:
    """Up to rounding: the company in which an answer is scored is another one."""
    more = settings(reward_run, "training.steps=6", "checkpoint.every=2")
    whole = run_toy(tmp_path / "whole", *more).folder
    process = kitae("train", str(RECIPE), *more, f"run.dir={tmp_path}")
    metrics = tmp_path / "toy-001" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None, process.printed()
    process.send_signal(signal.SIGKILL)
    process.ended()
    finish(kitae("resume", str(tmp_path / "toy-001")))
    assert [row["reward"] for row in rows(tmp_path / "toy-001")] == pytest.approx(
        [row["reward"] for row in rows(whole)], abs=1e-4
    )
