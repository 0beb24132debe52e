"""`kitae chain` and `kitae sample` as commands: killed for real, and gone on with."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from commands import Command
from harness import HERE, RECIPE, kitae
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

_LIMIT = 400  # seconds; a busy machine takes long to start

CHAIN = f"""
[[stage]]
name = "answers"
recipe = "{RECIPE}"
verifier.name = "{HERE / "toy.py"}:any_digit"
sample = {{ keep = "pairs", prompts = 12, n = 6, truncated = true }}

[[stage]]
name = "prefer"
method = {{ kind = "dpo", beta = 0.1 }}
model = {{ device = "cpu", dtype = "float32" }}
training = {{ lr = 1e-3, batch = 2 }}
checkpoint.every = 1
eval.examples = 0

[[stage]]
name = "practise"
recipe = "{RECIPE}"
verifier.name = "{HERE / "toy.py"}:any_digit"
training.steps = 2
eval.prompts = 0
checkpoint.every = 1
"""


def ended(process: Command, status: int = 0) -> str:
    output = process.ended(timeout=_LIMIT)
    assert process.returncode == status, output
    return output


def kill_when(arguments: list[str], folder: Path, there: Path) -> None:
    """Start the command, and kill it as soon as a path exists."""
    process = kitae(*arguments, cwd=folder, start_new_session=True)
    end = time.monotonic() + _LIMIT
    while not there.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert process.poll() is None, process.printed()
    os.killpg(process.pid, signal.SIGKILL)
    process.ended()


def test_a_chain_that_is_killed_at_every_stage_ends_where_it_would_have(tmp_path: Path) -> None:
    (tmp_path / "chain.toml").write_text(CHAIN)
    ended(kitae("chain", "chain.toml", "-o", "whole", cwd=tmp_path))
    arguments, broken = ["chain", "chain.toml", "-o", "broken"], tmp_path / "broken"
    kill_when(arguments, tmp_path, broken / ".01-answers.jsonl.partial" / "journal.sqlite")
    kill_when(arguments, tmp_path, broken / "02-prefer-001" / "metrics.jsonl")
    kill_when(arguments, tmp_path, broken / "03-practise-001" / "checkpoints" / "step-000001")
    output = ended(kitae(*arguments, cwd=tmp_path))
    assert "stage 02-prefer, " not in output and "stage 03-practise, 3 of 3" in output
    assert (broken / "01-answers.jsonl").read_text() == (tmp_path / "whole" / "01-answers.jsonl").read_text()
    ours, theirs = (load_file(tmp_path / f / "model" / "model.safetensors") for f in ("broken", "whole"))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
    again = ended(kitae(*arguments, cwd=tmp_path))
    assert "stage 0" not in again and "trained model  broken/03-practise-001/model" in again
    (tmp_path / "chain.toml").write_text(CHAIN.replace("beta = 0.1", "beta = 0.2"))
    refused = ended(kitae(*arguments, cwd=tmp_path), status=1)
    assert "stage 02-prefer: method.beta: was 0.1, is 0.2" in refused


def test_sampling_that_is_killed_goes_on(tmp_path: Path) -> None:
    judge = f"verifier.name={HERE / 'toy.py'}:digits"
    common = ["sample", str(RECIPE), judge, "sampling.max_tokens=64", "engine.max_batch=8"]
    more = ["--prompts", "40", "--n", "4", "--keep", "best", "--truncated", "--json"]
    ended(kitae(*common, *more, "-o", "whole.jsonl", cwd=tmp_path))
    journal = tmp_path / ".broken.jsonl.partial" / "journal.sqlite-wal"
    kill_when([*common, *more, "-o", "broken.jsonl"], tmp_path, journal)
    assert not (tmp_path / "broken.jsonl").exists()
    output = ended(kitae(*common, *more, "-o", "broken.jsonl", cwd=tmp_path))
    assert json.loads(output.splitlines()[-1])["rows"] == 40
    assert (tmp_path / "broken.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
