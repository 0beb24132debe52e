"""Trackers: each for real where its package is installed, and some that fail, hang or are slow."""

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kitae.errors import ConfigError
from kitae.observe import trackers
from kitae.observe.step_report import StepReport
from kitae.observe.trackers import TRACKERS, Numbers, Tracked, check_installed, numbers_of

ROW = {"kind": "step", "step": 1, "reward": 0.25, "entropy": float("nan"), "first_error": "", "loss": None, "errors": 3}
EVAL = {"kind": "eval", "step": 1, "avg": 0.5, "pass@1": 0.5, "prompts": 16}
SETTINGS = {"training.lr": 1e-5, "model.path": "tiny", "observe.trackers": ["tensorboard"], "eval.prompts": 16}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'kitae[{package}]'")


def report(step: int, **numbers: float) -> StepReport:
    row = {**ROW, "step": step, **numbers}
    return cast(StepReport, SimpleNamespace(step=step, row=lambda: row))


def track(name: str, run: Path, steps: range, status: str = "finished") -> list[str]:
    """What is said while a real tracker gets these steps and an evaluation."""
    said: list[str] = []
    run.mkdir(parents=True, exist_ok=True)
    maker, _ = TRACKERS[name]  # type: ignore[index]
    tracked = Tracked(name, maker(), run, "kitae-tests", SETTINGS, said.append)
    for step in steps:
        tracked.step(report(step, reward=step / 10))
    tracked.evaluated({**EVAL, "step": steps[-1]})
    tracked.close(status, seconds=120)
    return said


def test_numbers_that_can_be_drawn() -> None:
    assert numbers_of(ROW) == {"reward": 0.25, "errors": 3.0}


def test_what_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("wandb", "mlflow") else object())
    check_installed(("tensorboard",))
    with pytest.raises(ConfigError, match=r"got wandb, mlflow, which are not: pip install 'kitae\[wandb,mlflow\]'"):
        check_installed(("wandb", "tensorboard", "mlflow"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    """A resumed run takes the place of steps that are there already."""
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "toy-001"
    assert track("tensorboard", run, range(1, 5)) == [f"tensorboard: tensorboard --logdir {run / 'tensorboard'}"]
    time.sleep(1.1)  # files are read in the order of their names, which have seconds
    track("tensorboard", run, range(3, 7))
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert [(e.step, round(e.value, 3)) for e in found.Scalars("reward")] == [(s, s / 10) for s in range(1, 7)]
    assert found.Scalars("eval/avg")[-1].value == 0.5


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "toy-001"
    said = track("wandb", run, range(1, 4))
    assert len(said) == 1 and said[0].startswith("wandb: wandb sync ")
    files = list(run.glob("wandb/offline-run-*/*.wandb"))
    deadline = time.monotonic() + 20  # a process of its own writes it
    while b"reward" not in files[0].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(files) == 1 and b"reward" in files[0].read_bytes() and b"training.lr" in files[0].read_bytes()
    name = trackers._known(run, "wandb")
    assert name is not None and name in files[0].name
    track("wandb", run, range(4, 6))
    assert trackers._known(run, "wandb") == name


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "toy-001"
    place = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert track("mlflow", run, range(1, 4), "crashed") == [f"mlflow: mlflow ui --backend-store-uri {place}"]
    from mlflow.tracking import MlflowClient

    client, name = MlflowClient(tracking_uri=place), trackers._known(run, "mlflow")
    assert client.get_run(name).info.status == "FAILED"
    track("mlflow", run, range(4, 6))
    found = client.get_run(name)
    assert found.info.status == "FINISHED" and found.data.params["training.lr"] == "1e-05"
    assert [(m.step, m.value) for m in client.get_metric_history(name, "reward")] == [(s, s / 10) for s in range(1, 6)]
    assert found.data.metrics["eval/pass_1"] == 0.5


@pytest.mark.filterwarnings("ignore")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    said = track("trackio", tmp_path / "toy-001", range(1, 4))
    assert said == ["trackio: trackio show --project kitae-tests"]
    import sqlite3

    (base,) = (tmp_path / "trackio").glob("*.db")
    connection = sqlite3.connect(base)
    logged = [str(row) for row in connection.execute("SELECT * FROM metrics")]
    connection.close()
    assert sum("reward" in row for row in logged) == 3


class Own:
    """A tracker that does what a test wants at each of its calls."""

    def __init__(self, start: float | Exception = 0.0, log: float | Exception = 0.0) -> None:
        self.at_start, self.at_log = start, log
        self.logged: list[int] = []
        self.ended = ""

    def start(self, run: Path, project: str, settings: Mapping[str, Any]) -> str:
        _do(self.at_start)
        return "somewhere"

    def log(self, step: int, numbers: Numbers) -> None:
        _do(self.at_log)
        self.logged.append(step)

    def finish(self, status: str) -> None:
        self.ended = status


def _do(what: float | Exception) -> None:
    if isinstance(what, Exception):
        raise what
    time.sleep(what)


def watch(own: Own, steps: int, seconds: float) -> tuple[list[str], float]:
    """What is said, and how long the run was held up."""
    said: list[str] = []
    began = time.perf_counter()
    tracked = Tracked("own", own, Path("runs/toy-001"), "kitae", {}, said.append)
    for step in range(1, steps + 1):
        tracked.step(report(step))
    held_up = time.perf_counter() - began
    tracked.close("stopped", seconds)
    return said, held_up


def test_a_good_one() -> None:
    own = Own()
    assert watch(own, 5, 10)[0] == ["own: somewhere"]
    assert own.logged == [1, 2, 3, 4, 5] and own.ended == "stopped"


def test_one_that_cannot_start_gets_nothing() -> None:
    own = Own(start=OSError("no network"))
    assert watch(own, 5, 10)[0] == ["own failed: OSError: no network"]
    assert own.logged == [] and own.ended == ""


def test_one_that_hangs_holds_nobody_up() -> None:
    own = Own(start=60.0)
    said, held_up = watch(own, 2000, 0.2)
    assert held_up < 30 and any("dropped" in text for text in said) and any("left behind" in text for text in said)


def test_a_slow_one_is_waited_for_only_at_the_end() -> None:
    own = Own(log=0.02)
    said, held_up = watch(own, 20, 10)
    assert held_up < 0.2 and own.logged == list(range(1, 21)) and said == ["own: somewhere"]


def test_one_that_fails_at_times_goes_on() -> None:
    own = Own(log=RuntimeError("busy"))
    said, _ = watch(own, 3, 10)
    assert said == ["own: somewhere", "own failed: RuntimeError: busy", "own: 0 pieces were dropped, 3 failed"]
    assert own.ended == "stopped"
