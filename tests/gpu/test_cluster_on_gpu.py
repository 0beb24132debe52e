"""Ranks and engines in processes of their own on the GPUs of this machine; where there is one, they share it."""

from pathlib import Path

import pytest
import torch
from harness import rows, run_toy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SETTINGS = ("model.device=cuda", "eval.prompts=0", "training.steps=12", "engine.memory_gb=0.5")
RANKS = ("cluster.backend=local", "cluster.ranks=2", "engine.count=2")


@pytest.mark.parametrize("transport", ["memory", "broadcast", "ipc"])
def test_two_ranks_and_two_engines_learn(tmp_path: Path, transport: str) -> None:
    run = run_toy(tmp_path, *SETTINGS, *RANKS, f"cluster.transport={transport}").folder
    rewards = [row["reward"] for row in rows(run) if row["kind"] == "step"]
    assert len(rewards) == 12 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
