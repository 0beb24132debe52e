"""Whole runs of the examples with credit by turn and by role, with what else a run may have."""

import json
from pathlib import Path

import pytest

import kitae
from kitae.store.journal import Journal
from kitae.trainer.learner import STATE_FILE

pytestmark = [pytest.mark.usefixtures("warm_verifiers")]

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = (
    "model.path=tiny", "model.dtype=float32", "sampling.max_tokens=24", "training.prompts_per_step=2",
    "training.group_size=3", "eval.prompts=0", "engine.memory_gb=0.05", "checkpoint.every=1",
)  # fmt: skip


def run(tmp_path: Path, example: str, *settings: str) -> Path:
    overrides = [*TINY, f"run.dir={tmp_path}", *settings]
    return kitae.train(EXAMPLES / example, overrides=overrides, quiet=True).folder


def learnt(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


def test_credit_by_turn_with_adapters_running_ahead_and_a_resume(tmp_path: Path) -> None:
    """A random model talks past its turns: each game is cut off, its turns are journalled, and steps follow."""
    settings = [
        "model.lora_rank=2",
        "pipeline.max_staleness=1",
        "env.params.options={ moves = 2 }",
        "sampling.stop=['a']",
    ]
    folder = run(tmp_path, "keys.toml", "training.steps=2", *settings)
    assert len(learnt(folder)) == 2
    again = kitae.resume(folder, overrides=["training.steps=3"], quiet=True).folder
    assert len(learnt(again)) == 3
    journal = Journal(again / "journal.sqlite", read_only=True)
    turns = [s for id, *_ in journal.groups() for r in journal.rollouts(id) for s in r.segments if s.source == "model"]
    journal.close()
    assert {s.reward for s in turns} <= {0.0, 1.0, None} and any(s.state for s in turns)


def test_roles_are_trained_and_their_means_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    folder = run(tmp_path, "proposer_solver.toml", "training.steps=2")
    state = json.loads(next(folder.glob(f"checkpoints/*2/**/{STATE_FILE}")).read_text())
    assert -1 <= state["moving"]["proposer"] < 0, "its words are no sums"
    assert [row["samples_trained"] for row in learnt(folder)] == [6, 6]


def test_self_play_of_one_role(tmp_path: Path) -> None:
    settings = ["env.params.game=kuhn", "env.params.options={}", "algorithm.preset=rae", "algorithm.roles=['second']"]
    folder = run(tmp_path, "keys.toml", "training.steps=1", *settings)
    state = json.loads(next(folder.glob(f"checkpoints/*1/**/{STATE_FILE}")).read_text())
    assert list(state["moving"]) in ([], ["second"])
