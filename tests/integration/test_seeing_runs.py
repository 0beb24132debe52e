"""Whole runs of models that see, on pictures that are drawn."""

from pathlib import Path

import pytest
from harness import RECIPE, VERIFIER, assert_same_metrics, finish, kitae, rows, run_toy
from test_resume import SETTINGS, kill_when, rollouts_written

from kitae.models.tiny_seeing import make_seeing
from kitae.ui import samples

pytestmark = pytest.mark.usefixtures("warm_verifiers")

PICTURES = ("data.task=count-discs", "data.params={}", "model.dtype=float32", "model.device=cpu")


@pytest.mark.sentinel
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("smolvlm", ["model.train_vision=true", "training.checkpoint_activations=true"]),
        ("qwen2_5_vl", ["pipeline.max_staleness=1", "pipeline.in_flight=recompute"]),
        ("qwen3_vl", ["algorithm.kl.coef=0.001", "algorithm.reference=ema", "algorithm.reference.every=1"]),
    ],
)
def test_reward_rises(family: str, overrides: list[str], tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "model", family)
    result = run_toy(tmp_path, f"model.path={model}", *PICTURES, "training.steps=12", "training.lr=6e-3", *overrides)
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2, [round(r["reward"], 2) for r in steps]
    on_time = [r for r in steps if not r.get("staleness")]
    assert max(r["logp_gap_max"] for r in on_time) < 1e-3, "engine and trainer disagree"
    (turn,) = [turn for turn in samples.group(result.folder, 0).messages if turn.role == "user"]
    assert [url[:22] for url in turn.pictures] == ["data:image/png;base64,"]
    assert (result.folder / "model" / "preprocessor_config.json").is_file()
    again = run_toy(tmp_path / "again", f"model.path={result.folder / 'model'}", *PICTURES, "training.steps=1")
    assert rows(again.folder)


@pytest.mark.sentinel
def test_killed_runs_resume_to_the_same_numbers(tmp_path: Path) -> None:
    settings = (
        *SETTINGS,
        *PICTURES,
        f"model.path={make_seeing(tmp_path / 'model', 'qwen2_5_vl')}",
        "model.lora_rank=4",
    )
    whole = run_toy(tmp_path / "whole", *settings).folder
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path / 'killed'}", *settings)
    run = tmp_path / "killed" / "toy-001"
    kill_when(process, lambda: rollouts_written(run) >= 61)
    finish(kitae("resume", str(run)))
    assert_same_metrics(run, whole)


@pytest.mark.sentinel
def test_engines_in_processes_of_their_own_see_too(tmp_path: Path) -> None:
    settings = "engine.kind=process", "engine.count=2", "training.steps=3", "eval.prompts=0", "model.train_vision=true"
    result = run_toy(tmp_path, f"model.path={make_seeing(tmp_path / 'model', 'smolvlm')}", *PICTURES, *settings)
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert all(r["probe_gap"] < 1e-4 and r["logp_gap_max"] < 1e-3 for r in steps)
