"""Whole runs of models in which every other layer carries a state from token to token."""

from pathlib import Path

import pytest
from harness import RECIPE, VERIFIER, assert_same_metrics, finish, kitae, rows, run_toy
from test_resume import SETTINGS, kill_when, rollouts_written

from kitae.models.tiny import HYBRIDS, make_tiny

pytestmark = pytest.mark.usefixtures("warm_verifiers")


@pytest.mark.sentinel
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3_5", ["training.steps=30"]),
        ("lfm2", ["training.checkpoint_activations=true"]),
        ("bamba", ["pipeline.max_staleness=1", "pipeline.in_flight=recompute"]),
        (
            "jamba",  # learns later than the others
            ["algorithm.kl.coef=0.001", "algorithm.reference=ema", "algorithm.reference.every=1", "training.steps=28"],
        ),
        ("minimax", ["model.plain=true"]),
    ],
)
def test_reward_rises(architecture: str, overrides: list[str], tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", architecture)
    result = run_toy(tmp_path, f"model.path={model}", "training.steps=12", "training.lr=6e-3", *overrides)
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert steps[-1]["reward"] > 0.6 > steps[0]["reward"] + 0.3, [round(r["reward"], 2) for r in steps]
    on_time = [r for r in steps if not r.get("staleness")]
    assert max(r["logp_gap_max"] for r in on_time) < 1e-3, "engine and trainer disagree"


@pytest.mark.sentinel
def test_adapters_of_the_projections_of_mixers_learn(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", "qwen3_5")
    targets = "in_proj_qkv, in_proj_z, out_proj, q_proj, v_proj, gate_proj, up_proj, down_proj"
    settings = f"model.path={model}", "model.lora_rank=8", f"model.lora_targets={targets}"
    result = run_toy(tmp_path, *settings, "training.lr=2e-2", "training.steps=12")
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert steps[-1]["reward"] > 2 * steps[0]["reward"], [round(r["reward"], 2) for r in steps]


@pytest.mark.sentinel
@pytest.mark.parametrize("architecture", HYBRIDS[:1])
def test_killed_runs_resume_to_the_same_numbers(architecture: str, tmp_path: Path) -> None:
    model = f"model.path={make_tiny(tmp_path / 'model', architecture)}"
    whole = run_toy(tmp_path / "whole", *SETTINGS, model).folder
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path / 'killed'}", *SETTINGS, model)
    run = tmp_path / "killed" / "toy-001"
    kill_when(process, lambda: rollouts_written(run) >= 61)
    finish(kitae("resume", str(run)))
    assert_same_metrics(run, whole)


@pytest.mark.sentinel
def test_engines_in_processes_of_their_own(tmp_path: Path) -> None:
    settings = "engine.kind=process", "engine.count=2", "training.steps=3", "eval.prompts=0"
    result = run_toy(tmp_path, f"model.path={make_tiny(tmp_path / 'model', 'bamba')}", *settings)
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert all(r["probe_gap"] < 1e-4 and r["logp_gap_max"] < 1e-3 for r in steps)
