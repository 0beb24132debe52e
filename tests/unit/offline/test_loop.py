"""Runs of stages on the tiny model: what they learn, and that stopping changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kitae.config.recipe import override_config, parse_config
from kitae.config.root import StageConfig
from kitae.errors import ConfigError, DataError
from kitae.observe.observer import Bystander, Silent
from kitae.offline.example_batches import ExampleBatches
from kitae.offline.loop import OfflineLoop
from kitae.run import train_run
from kitae.run.train_run import train
from kitae.store.checkpoints import START
from kitae.store.run_folder import Result, RunStore


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def demonstrations(folder: Path, count: int = 12) -> Path:
    rows = [{"prompt": f"say {i}", "completion": "yes " * (1 + i % 3)} for i in range(count)]
    return write_rows(folder / "train.jsonl", rows)


def stage_config(folder: Path, *overrides: str, kind: str = "sft", **training: Any) -> StageConfig:
    values = {
        "run": {"name": "stage", "dir": str(folder)},
        "method": {"kind": kind},
        "model": {"path": "tiny", "device": "cpu", "dtype": "float32"},
        "data": {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "held_out.jsonl")},
        "training": {"lr": 1e-2, "batch": 4, **training},
        "checkpoint": {"every": 2},
    }
    config = override_config(parse_config(values), overrides)
    assert isinstance(config, StageConfig)
    return config


def run_stage(config: StageConfig) -> Result:
    return train(config, Bystander(Silent()))


def go_on(folder: Path) -> Result:
    return train_run.go_on(RunStore.open(folder), Bystander(Silent()))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith(("_seconds", "_per_second", "_idle"))} for row in rows]


@pytest.fixture
def sft(tmp_path: Path) -> StageConfig:
    demonstrations(tmp_path)
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": "say 99", "completion": "yes yes "}])
    return stage_config(tmp_path, epochs=4)


@pytest.mark.thorough
def test_the_likelihood_of_demonstrations_rises(sft: StageConfig) -> None:
    result = run_stage(sft)
    steps = [row for row in rows_of(result.folder) if row["kind"] == "step"]
    assert result.step == len(steps) == 12  # four passes over twelve examples, four a step
    assert steps[-1]["epoch"] == 4
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert result.before is not None and result.after is not None
    assert result.after["avg"] < 0.5 * result.before["avg"]
    assert (result.folder / "model" / "config.json").is_file()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("lora", [0, 4])
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    sft: StageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: int
) -> None:
    sft = override_config(sft, [f"model.lora_rank={lora}"])
    whole = run_stage(sft).folder
    learn = OfflineLoop._learn

    async def crash(self: OfflineLoop, step: int, items: Any) -> Any:
        if step == 8:
            raise KeyboardInterrupt
        return await learn(self, step, items)

    with monkeypatch.context() as patch:
        patch.setattr(OfflineLoop, "_learn", crash)
        with pytest.raises(KeyboardInterrupt):
            run_stage(sft)
    broken = tmp_path / "stage-002"
    go_on(broken)
    assert rows_of(broken) == rows_of(whole)
    ours, theirs = (load_file(f / "model" / "model.safetensors") for f in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_stage_refuses_what_belongs_to_another_kind(sft: StageConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown section 'algorithm'; it belongs to method\.kind = rl"):
        override_config(sft, ["algorithm.preset=grpo"])
    with pytest.raises(ConfigError, match=r"method\.kind must be one of rl, sft"):
        parse_config({"method": {"kind": "sfd"}})
    with pytest.raises(ConfigError, match=r"method\.kind cannot be changed"):
        override_config(sft, ["method.kind=rl"])


def test_bad_rows_are_named(sft: StageConfig, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": 3}])
    with pytest.raises(DataError, match=r"train\.jsonl:2"):
        ExampleBatches(sft)


@pytest.mark.thorough
def test_an_evaluation_that_was_cut_off_is_made_up_for(
    sft: StageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft = override_config(sft, ["eval.every=2", "training.steps=6"])
    whole = run_stage(sft).folder
    evaluate = OfflineLoop.evaluate

    async def crash(self: OfflineLoop, step: int) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return await evaluate(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(OfflineLoop, "evaluate", crash)
        with pytest.raises(KeyboardInterrupt):
            run_stage(sft)
    broken = tmp_path / "stage-002"
    go_on(broken)
    assert rows_of(broken) == rows_of(whole)


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["train.jsonl", "held_out.jsonl"])
def test_a_run_goes_on_with_the_examples_that_it_began_with(sft: StageConfig, tmp_path: Path, file: str) -> None:
    folder = run_stage(override_config(sft, ["training.steps=2"])).folder
    whole = (tmp_path / file).read_text()
    (tmp_path / file).write_text(whole.replace("yes", "no"))
    store = RunStore.open(folder, ["training.steps=4"])
    with pytest.raises(DataError, match="the examples must be those that the run began with"):
        train_run.go_on(store, Bystander(Silent()))
    (tmp_path / file).write_text(whole)
    store = RunStore.open(folder, ["training.steps=4"])
    assert train_run.go_on(store, Bystander(Silent())).step == 4
    (tmp_path / file).write_text(whole.replace("yes", "no"))
    assert train_run.go_on(RunStore.open(folder), Bystander(Silent()), START).step == 4


def test_a_run_that_goes_on_has_steps_to_train(sft: StageConfig) -> None:
    folder = run_stage(override_config(sft, ["training.steps=2"])).folder
    store = RunStore.open(folder, ["training.steps=0"])
    with pytest.raises(ConfigError, match=r"training\.steps must be at least 1 for a run that goes on, got 0"):
        train_run.go_on(store, Bystander(Silent()), START)
    assert (folder / "checkpoints" / "step-000002").is_dir()


def test_a_run_ends_with_the_step_that_reaches_its_time_and_goes_on_with_more(sft: StageConfig) -> None:
    whole = run_stage(sft)
    short = run_stage(override_config(sft, ["training.minutes=1e-6", "training.steps=12"]))  # no step is as short
    assert (short.step, short.stopped_by) == (1, None)
    assert short.model.is_dir() and (short.folder / "checkpoints" / "step-000001").is_dir()
    assert short.after is not None and [row["step"] for row in rows_of(short.folder)] == [0, 1, 1]
    assert train_run.resume(short.folder, Bystander(Silent())).step == 1  # nothing is left to do
    assert train_run.resume(short.folder, Bystander(Silent()), ["training.minutes=60"]).step == 12
    ours, theirs = (load_file(r.model / "model.safetensors") for r in (short, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("minutes", ["-1", "inf", "nan", "soon"])
def test_minutes_are_a_number(sft: StageConfig, minutes: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.minutes"):
        override_config(sft, [f"training.minutes={minutes}"])
