"""Who watches a run: records of tokens over a crash, hooks, /metrics, the diagnosis of real runs."""

import json
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from harness import RECIPE, VERIFIER, finish, kitae, run_toy, toy_config
from test_going_on import crash_at, go_on, score_file

from kitae.cli import runs
from kitae.errors import ConfigError
from kitae.observe.attach_observers import watched
from kitae.observe.config import ObserveConfig
from kitae.observe.diagnosis import RULES, diagnose
from kitae.observe.observer import Bystander, Silent
from kitae.observe.step_report import StepReport
from kitae.observe.token_numbers import FOLDER, read_tokens, recorded_steps
from kitae.run import train_run
from kitae.store.journal import Journal
from kitae.store.run_folder import RunStore
from kitae.store.run_summary import look

SHORT = ("training.steps=6", "checkpoint.every=2", "eval.prompts=0", "sampling.max_tokens=6")
RECORDED = (*SHORT, "observe.tokens=0.3", "training.minibatches=2", "training.epochs=2")


class Listener(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_records_over_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is trained again writes the same; what is recorded agrees with the journal.

    But for the last digit: on a busy machine the engine's batches are others, and are added up in another order.
    """
    straight = run_toy(tmp_path / "straight", *RECORDED).folder
    with crash_at(monkeypatch, 6):
        run_toy(tmp_path / "crashed", *RECORDED)
    crashed = tmp_path / "crashed" / "toy-001"
    assert recorded_steps(crashed) == [1, 2, 3, 4, 5]
    (crashed / FOLDER / "step-000005.npz").write_bytes(b"as if cut off")
    (crashed / FOLDER / ".step-000006.partial").write_bytes(b"half")
    assert look(crashed).leftovers() == [crashed / FOLDER / ".step-000006.partial"]
    go_on(tmp_path / "crashed")
    assert recorded_steps(crashed) == recorded_steps(straight) == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        name = f"{FOLDER}/step-{step:06d}.npz"
        with np.load(crashed / name) as mine, np.load(straight / name) as expected:
            assert mine.files == expected.files
            for column in mine.files:
                np.testing.assert_allclose(mine[column], expected[column], rtol=2e-3, atol=1e-3, err_msg=column)
    journal = Journal(straight / "journal.sqlite", read_only=True)
    found = read_tokens(straight, 4)
    assert len(found) == round(0.3 * 32)
    for (group, index), columns in found.items():
        rollout = next(r for r in journal.rollouts(group) if r.index == index)
        assert {len(values) for values in columns.values()} == {rollout.response_length}
        mu = [x for s in rollout.segments for x in s.logprobs]
        np.testing.assert_allclose(columns["logp_mu"], mu, atol=4e-3)
        np.testing.assert_allclose(columns["logp_old"], mu, atol=4e-3)  # on-policy: engine and trainer agree
        np.testing.assert_allclose(columns["ratio"], np.exp(columns["logp"] - columns["logp_old"]), rtol=2e-2)
        assert set(columns["version"].tolist()) == {3}
    journal.close()


def test_records_of_steps_that_are_given_up(tmp_path: Path) -> None:
    folder = run_toy(tmp_path, *RECORDED, "checkpoint.keep=3").folder
    store = RunStore.open(folder, ["training.steps=4"])
    train_run.go_on(store, Bystander(Silent()), "step-000002", forget=True)
    assert recorded_steps(folder) == [1, 2, 3, 4]


def watch(folder: Path, *settings: str) -> tuple[Path, list[str]]:
    """A toy run as the command line watches it."""
    config = toy_config(folder, *settings)
    screen = Listener()
    return train_run.train(config, Bystander(screen)).folder, screen.notes


def test_the_diagnosis_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """One line when something turns bad, of which the hook hears; kitae diagnose finds it too."""
    heard = tmp_path / "heard"
    folder, notes = watch(
        tmp_path,
        "sampling.max_tokens=2",
        "training.steps=9",
        "eval.prompts=0",
        f"observe.on_diagnosis=cat >> {heard}",
        f"observe.on_finish=echo >> {heard}; cat >> {heard}",
    )
    lines = [text for text in notes if text.startswith("diagnosis: ")]
    assert len(lines) == 1 and lines[0].startswith("diagnosis: Answers are cut off (truncation): ")
    assert lines[0].endswith(f"kitae diagnose {folder}")
    told, end = map(json.loads, heard.read_text().splitlines())
    assert (told["event"], told["rule"], told["step"]) == ("diagnosis", "truncation", 5)
    assert end == {
        "event": "finish",
        "run": str(folder),
        "message": "finished after step 9",
        "step": 9,
        "status": "finished",
    }
    assert "truncation" in {found.rule for found in diagnose(folder)}


@pytest.mark.sentinel
def test_metrics_while_a_run_goes_on(tmp_path: Path) -> None:
    """Asked for from outside, over the port that the settings name; a port that is taken is no reason to stop."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = toy_config(tmp_path, *SHORT, f"observe.metrics_port={port}")
    pages: list[str] = []

    class Asks(Listener):
        def step(self, report: StepReport) -> None:
            if not pages:
                with watched(config, config.observe, tmp_path, self):
                    pass  # another run on the same port
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                pages.append(answer.read().decode())

    screen = Asks()
    store = RunStore.create(config)
    train_run.go_on(store, Bystander(screen))
    assert 'kitae_step{run="toy-001"} 5.0' in pages[-1] and "kitae_reward{" in pages[-1]
    assert sum("no /metrics for this run" in text for text in screen.notes) == 1


def test_a_tracker_that_hangs_does_not_slow_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kitae.observe import attach_observers, trackers

    class Hangs:
        def start(self, *_: object) -> str:
            threading.Event().wait(60)
            return ""

        def log(self, *_: object) -> None:
            raise AssertionError

        def finish(self, status: str) -> None:
            raise AssertionError

    monkeypatch.setitem(attach_observers.TRACKERS, "wandb", (Hangs, "json"))  # type: ignore[arg-type]
    monkeypatch.setattr(trackers.Tracked.close, "__defaults__", (0.2,))
    began = time.perf_counter()
    folder, notes = watch(tmp_path, *SHORT, 'observe.trackers=["wandb"]', "observe.tokens=0")
    assert any("wandb was left behind" in text for text in notes)
    assert not (folder / FOLDER).exists()  # no share, no records
    assert time.perf_counter() - began < 30


def test_the_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that crashes: the hook hears of it, kitae diagnose says why; then its records are removed."""
    heard = tmp_path / "heard"
    broken = score_file(tmp_path, "raise RuntimeError('service is down')")
    arguments = ["train", str(RECIPE), broken, f"run.dir={tmp_path}", "verifier.check_gold=false", *SHORT]
    output = finish(kitae(*arguments, f"observe.on_crash=cat > {heard}"), status=1)
    assert "service is down" in output
    event = json.loads(heard.read_text())
    assert event["event"] == "crash" and event["status"] == "crashed" and "service is down" in event["message"]
    run = str(tmp_path / "toy-001")
    runs.diagnose(Path(run), as_json=False)
    said = capsys.readouterr().out
    assert said.startswith(f"{run}: crashed, step 0 of 6\n\nbad      The run did not end by itself (crashed)\n")
    assert "service is down" in said and f"kitae resume {run}" in " ".join(said.split())


def test_the_command_line_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run that is too short to say anything of. Its records go when that is asked for."""
    own = score_file(tmp_path, "return 1.0 / (1 + len(response))")
    settings = (*SHORT, "training.steps=4", "training.prompts_per_step=1", "verifier.check_gold=false")
    run_toy(tmp_path, own, *settings)
    run = tmp_path / "toy-001"
    runs.diagnose(run, as_json=False)
    assert f"nothing is wrong, by {len(RULES)} rules" in capsys.readouterr().out
    runs.diagnose(run, as_json=True)
    assert json.loads(capsys.readouterr().out) == []
    runs.clean([run], weights_only=False, yes=False)
    assert "tokens" not in capsys.readouterr().out
    runs.clean([run], weights_only=False, yes=False, tokens=True)
    assert "--tokens --yes" in capsys.readouterr().out and recorded_steps(run)
    runs.clean([run], weights_only=False, yes=True, tokens=True)
    assert not (run / FOLDER).exists() and (run / "metrics.jsonl").exists()


def test_trackers_are_asked_for_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must name each tracker once, got wandb, wandb"):
        toy_config(tmp_path, 'observe.trackers=["wandb","wandb"]')
    assert ObserveConfig().trackers == ()
    script = (
        "import importlib.util as u; known = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'mlflow' else known(name, *rest); "
        "from kitae.cli.main import run; run()"
    )
    arguments = ("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path}", 'observe.trackers=["mlflow"]')
    output = finish(kitae(*arguments, script=script), status=1)
    assert "observe.trackers must be installed, got mlflow, which is not: pip install 'kitae[mlflow]'" in output
    assert not (tmp_path / "toy-001").exists()
