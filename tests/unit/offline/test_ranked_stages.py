"""Stages whose trainer is spread over ranks learn what one process does, and export what it does."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_loop import rows_of, run_stage, stage_config, write_rows
from test_preference_runs import pairs

from kitae.config.recipe import override_config

pytestmark = pytest.mark.usefixtures("warm_posts")

RANKS = ("cluster.backend=local", "cluster.ranks=2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("dpo", 0),
        pytest.param("dpo", 4, marks=pytest.mark.slow),
        pytest.param("kto", 0, marks=pytest.mark.slow),
        pytest.param("reward", 0, marks=pytest.mark.slow),
        pytest.param("sft", 0, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_learn_what_one_process_does(kind: str, lora: int, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", pairs(12))
    write_rows(tmp_path / "held_out.jsonl", pairs(3, 90))
    alone = stage_config(tmp_path, f"model.lora_rank={lora}", kind=kind, lr=1e-3, steps=4, token_budget=24)
    if kind == "sft":
        alone = override_config(alone, ["data.columns.completion=chosen"])
    whole, spread = (run_stage(config).folder for config in (alone, override_config(alone, RANKS)))
    for x, y in zip(rows_of(spread), rows_of(whole), strict=True):
        for name in x.keys() & y.keys() & {"loss", "grad_norm", "avg", "accuracy", "reward_chosen"}:
            assert x[name] == pytest.approx(y[name], rel=1e-4, abs=1e-5), (x["step"], name)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (spread, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=2e-4)
