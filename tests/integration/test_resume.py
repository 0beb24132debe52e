"""kill -9 at any moment, then resume: nothing lost, nothing trained twice, the same numbers."""

import json
import re
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from benchmark_scripts import load_script
from harness import (
    RECIPE,
    VERIFIER,
    assert_ledger_balances,
    assert_same_metrics,
    finish,
    kitae,
    rows,
    run_toy,
    toy_config,
)

SETTINGS = ("training.steps=6", "checkpoint.every=2", "eval.every=3", "training.prompts_per_step=3")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_toy(tmp_path_factory.mktemp("whole"), *SETTINGS).folder


def start(folder: Path, *settings: str) -> "tuple[object, Path]":
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={folder}", *SETTINGS, *settings)
    return process, folder / "toy-001"


def rollouts_written(run: Path) -> int:
    path = run / "journal.sqlite"
    if not path.exists():
        return -1
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error:
        return -1


def kill_when(process: object, reached: object) -> None:
    """The run stands still while we look: on a busy machine it could end before we look again."""
    deadline = time.time() + 200
    while True:
        assert process.poll() is None, process.printed()  # type: ignore[attr-defined]
        process.send_signal(signal.SIGSTOP)  # type: ignore[attr-defined]
        if reached():  # type: ignore[operator]
            break
        process.send_signal(signal.SIGCONT)  # type: ignore[attr-defined]
        assert time.time() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
    process.ended()  # type: ignore[attr-defined]


# In the middle of the first batch, between checkpoints, right after a step's last rollout, late in the run.
@pytest.mark.sentinel
@pytest.mark.parametrize("moment", [61, *(pytest.param(other, marks=pytest.mark.slow) for other in (7, 24, 96, 130))])
def test_killed_runs_resume_to_the_same_numbers(moment: int, uninterrupted: Path, tmp_path: Path) -> None:
    process, run = start(tmp_path)
    kill_when(process, lambda: rollouts_written(run) >= moment)
    before = rollouts_written(run)
    output = finish(kitae("resume", str(run)))
    assert "held-out accuracy" in output
    assert_same_metrics(run, uninterrupted)
    assert_ledger_balances(run, toy_config(tmp_path, *SETTINGS))
    assert before >= moment, "rollouts of the killed process must still be there"


def test_a_killed_run_of_a_model_with_latents_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    """DeepSeek-V3 made small: latents in the cache, groups of experts, a bias that is not trained."""
    model = f"model.path={load_script('small_models').make_small('deepseek_v3', tmp_path / 'model')}"
    whole = run_toy(tmp_path / "whole", *SETTINGS, model).folder
    process, run = start(tmp_path / "killed", model)
    kill_when(process, lambda: rollouts_written(run) >= 61)
    finish(kitae("resume", str(run)))
    assert_same_metrics(run, whole)


def test_killed_twice_also_while_saving(uninterrupted: Path, tmp_path: Path) -> None:
    process, run = start(tmp_path)
    kill_when(
        process,
        lambda: any((run / "checkpoints").glob(".partial-step-000002*")) or (run / "checkpoints/step-000002").exists(),
    )
    again = kitae("resume", str(run))
    kill_when(again, lambda: rollouts_written(run) >= 100)
    finish(kitae("resume", str(run)))
    assert_same_metrics(run, uninterrupted)
    assert_ledger_balances(run, toy_config(tmp_path, *SETTINGS))


@pytest.mark.sentinel
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(number: signal.Signals, uninterrupted: Path, tmp_path: Path) -> None:
    process, run = start(tmp_path)
    while rollouts_written(run) < 60:
        assert process.poll() is None, process.printed()
        time.sleep(0.002)
    process.send_signal(number)
    output = finish(process, status=128 + number)
    found = re.search(r"stopped after step (\d+); everything is saved. Go on with:\n    kitae resume (\S+)", output)
    assert found and found[2] == str(run), output
    assert (run / "checkpoints" / f"step-{int(found[1]):06d}").is_dir()
    finish(kitae("resume", str(run)))
    assert_same_metrics(run, uninterrupted)
    seen = (run / "console.log").read_text()
    assert seen.count("$ kitae") == 2 and seen.count("step 6/6") == 1
    assert seen.index("stopped after step") < seen.index("$ kitae resume") < seen.index("trained model")


def test_a_finished_run_says_so_and_how_to_train_it_further(uninterrupted: Path) -> None:
    before = rows(uninterrupted)
    output = finish(kitae("resume", str(uninterrupted)))
    assert "is finished: 6 of 6 steps" in output
    assert f"kitae resume {uninterrupted} training.steps=12" in output
    assert rows(uninterrupted) == before


def test_refusals_leave_the_run_untouched(uninterrupted: Path, tmp_path: Path) -> None:
    import shutil

    def failed(run: Path, *arguments: str) -> str:
        process = kitae("resume", str(run), *arguments)
        output = process.ended(timeout=120)
        assert process.returncode == 1 and "Traceback" not in output, output
        return output

    run = shutil.copytree(uninterrupted, tmp_path / "run")
    weights = run / "checkpoints" / "step-000006" / "state.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    message = failed(run, "--from", "step-000006")
    assert "state.safetensors has checksum" in message and "--from step-000004" in message
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    assert rows(run) == rows(uninterrupted)
    weights.write_bytes(original)

    config = json.loads((run / "config.json").read_text())
    config["training"]["group_size"] = 16
    (run / "config.json").write_text(json.dumps(config))
    assert "training.group_size: was 8, is 16" in failed(run)
    assert "training.steps must be at least 6, the steps that the run has trained, got 5" in failed(
        shutil.copytree(uninterrupted, tmp_path / "other"), "training.steps=5"
    )
    assert "is not a run folder" in failed(tmp_path)
    (run / "config.json").write_text((uninterrupted / "config.json").read_text())

    finish(kitae("resume", str(run), "--from", "step-000004"))
    assert_same_metrics(run, uninterrupted)
