"""Whole runs of adapters on weights in 4 bits (QLoRA)."""

import json
from pathlib import Path

import pytest
from harness import RECIPE, VERIFIER, assert_same_metrics, finish, kitae, rows, run_toy
from test_resume import SETTINGS, kill_when, rollouts_written

pytest.importorskip("peft")
pytestmark = [pytest.mark.usefixtures("warm_verifiers"), pytest.mark.sentinel]
QLORA = ("model.lora_rank=8", "model.lora_base=nf4", "training.lr=2e-2")
KL = ("algorithm.kl.coef=0.001", "algorithm.reference=frozen")


@pytest.mark.parametrize(
    "overrides", [KL, ("pipeline.max_staleness=1", "engine.kind=process", "engine.count=2")], ids=["kl", "processes"]
)
def test_reward_rises(overrides: tuple[str, ...], tmp_path: Path) -> None:
    result = run_toy(tmp_path, "training.steps=16", "algorithm.preset=grpo", *QLORA, *overrides)
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2, [round(r["reward"], 2) for r in steps]
    on_time = [r for r in steps if not r.get("staleness")]
    assert max(r["logp_gap_max"] for r in on_time) < 1e-4, "engine and trainer disagree"
    assert max(r.get("probe_gap", 0.0) for r in steps) < 1e-5
    adapter = json.loads((result.folder / "model/adapter/adapter_config.json").read_text())
    assert adapter["r"] == 8 and json.loads((result.folder / "model/config.json").read_text())


def test_a_killed_run_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    settings = (*SETTINGS, *QLORA, *KL)
    whole = run_toy(tmp_path / "whole", *settings).folder
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path / 'killed'}", *settings)
    run = tmp_path / "killed" / "toy-001"
    kill_when(process, lambda: rollouts_written(run) >= 61)
    finish(kitae("resume", str(run)))
    assert_same_metrics(run, whole)
