"""Distillation on a file: the student comes closer on held-out examples, and stopping changes nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_loop import demonstrations, go_on, rows_of, run_stage, stage_config, write_rows
from transformers import AutoModelForCausalLM

from kitae.config.recipe import override_config, parse_config
from kitae.config.root import DistilFileConfig, StageConfig
from kitae.errors import ConfigError, ModelError
from kitae.models.tiny import make_tiny
from kitae.offline.example_batches import ExampleBatches
from kitae.offline.loop import OfflineLoop
from kitae.run.plan import make_plan


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("teacher") / "qwen2", "qwen2", seed=4, hidden=32)


@pytest.fixture
def config(tmp_path: Path, teacher: Path) -> StageConfig:
    demonstrations(tmp_path)
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": f"say {i}", "completion": "yes yes "} for i in (98, 99)])
    values = stage_config(tmp_path, epochs=4).given()
    method = {"kind": "distil-file", "teacher": str(teacher), "beta": 0.25, "temperature": 1.5}
    found = parse_config({**values, "method": method})
    assert isinstance(found, DistilFileConfig)
    return found


def divergence(logq_NV: torch.Tensor, logp_NV: torch.Tensor, beta: float) -> torch.Tensor:
    q, p = logq_NV.exp(), logp_NV.exp()
    m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (logp_NV - m)).sum(-1) + (1 - beta) * (q * (logq_NV - m)).sum(-1)


@pytest.mark.thorough
def test_the_student_comes_closer_and_what_is_reported_is_the_divergence(config: StageConfig, teacher: Path) -> None:
    assert config.measure == "divergence"
    result = run_stage(config)
    assert result.before is not None and result.after is not None
    assert result.after["avg"] < 0.7 * result.before["avg"]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (result.folder / "model", teacher)]
    expected = []
    for item in ExampleBatches(config).held_out:
        (sequence,) = item.sequences
        places = torch.tensor(np.flatnonzero(sequence.mask_T) - 1)
        with torch.no_grad():
            logits = [model(torch.tensor(sequence.tokens_T)[None]).logits[0][places] for model in models]
        logq_NV, logp_NV = ((x.double() / 1.5).log_softmax(-1) for x in logits)
        expected.append(float(divergence(logq_NV, logp_NV, 0.25).mean()))
    assert result.after["avg"] == pytest.approx(np.mean(expected), rel=1e-3)


@pytest.mark.thorough
def test_a_killed_run_goes_on_with_the_same_numbers(config: StageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_stage(config)
    learn = OfflineLoop._learn

    async def killed(self: OfflineLoop, step: int, items: list) -> object:  # type: ignore[type-arg]
        if step == 6:
            raise KeyboardInterrupt
        return await learn(self, step, items)

    with monkeypatch.context() as patch:
        patch.setattr(OfflineLoop, "_learn", killed)
        with pytest.raises(KeyboardInterrupt):
            run_stage(config)
    folder = whole.folder.with_name(whole.folder.name.replace("001", "002"))
    result = go_on(folder)
    assert rows_of(folder) == rows_of(whole.folder)
    left, right = (load_file(run / "model" / "model.safetensors") for run in (result.folder, whole.folder))
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_teacher_is_needed_and_must_fit(config: StageConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.kind = 'distil-file' needs method\.teacher, got none"):
        stage_config(tmp_path, kind="distil-file")
    absent = override_config(config, [f"method.teacher={tmp_path / 'nobody'}"])
    with pytest.raises(ModelError, match=r"method\.teacher: .*has no nobody"):
        make_plan(absent, print)
