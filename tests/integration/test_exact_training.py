"""A run in exact mode: the trainer finds the engine's own log-probs, so the ratio to the behaviour policy is 1."""

from pathlib import Path

import pytest
from harness import rows, run_toy


def assert_no_gap(folder: Path, *overrides: str) -> None:
    steps = ["training.steps=2", "eval.prompts=0", "model.exact=true"]
    result = run_toy(folder, *steps, *overrides)
    found = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert len(found) == 2 and all(r["samples_trained"] > 0 for r in found)
    assert found[0]["grad_norm"] > 0 and found[-1]["updates"] > 0
    for r in found:
        assert r["logp_gap"] == 0 and r["logp_gap_max"] == 0 and r["logp_missing"] == 0
        assert r["mismatch"] == 1 and r["mismatch_max"] == 1 and r["mismatch_k3"] == 0


@pytest.mark.sentinel
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.dtype=float32"],
        ["model.dtype=bfloat16", "training.token_budget=100", "training.checkpoint_activations=true"],
        ["model.dtype=bfloat16", "training.minibatches=2", "model.lora_rank=4"],
    ],
    ids=["fp32", "bf16-checkpointing", "lora-several-updates"],
)
def test_no_gap_at_all(overrides: list[str], tmp_path: Path) -> None:
    assert_no_gap(tmp_path, *overrides)


def test_without_exact_mode_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert_no_gap(tmp_path, "model.dtype=bfloat16", "model.exact=false")
