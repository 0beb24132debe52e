"""Send metrics to trackers. Each is imported in a thread of its own, when the run has begun.

    tensorboard   RUN/tensorboard, for: tensorboard --logdir runs
    wandb         Weights & Biases; with WANDB_MODE=offline into RUN/wandb, nothing is sent
    mlflow        at MLFLOW_TRACKING_URI, else mlflow.db beside the runs
    trackio       its own folder (TRACKIO_DIR), for: trackio show

A resumed run continues in the same place: RUN/trackers.json has each tracker's name for the run.
"""

import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kitae.errors import ConfigError
from kitae.observe.config import TrackerName
from kitae.observe.observer import Reported, Silent
from kitae.observe.side_thread import Aside, Note

CLOSE_SECONDS = 20.0
FILE = "trackers.json"

Numbers = Mapping[str, float]


class Tracker(Protocol):
    """All calls come from one thread: `start`, then `log` in the order of the run, then `finish`."""

    def start(self, run: Path, project: str, settings: Mapping[str, Any]) -> str:
        """Returns where the run can be seen: "tensorboard --logdir runs/quickstart-001/tensorboard"."""

    def log(self, step: int, numbers: Numbers) -> None: ...

    def finish(self, status: str) -> None:
        """`"finished"`, `"stopped"` or `"crashed"`."""


class TensorBoard:
    def start(self, run: Path, project: str, settings: Mapping[str, Any]) -> str:
        self._folder = run / "tensorboard"
        self._writer: Any = None
        self._settings = settings
        return f"tensorboard --logdir {self._folder}"

    def log(self, step: int, numbers: Numbers) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            again = self._folder.exists()  # steps from here on replace those that exist already
            self._writer = SummaryWriter(str(self._folder), purge_step=step if again else None)
            text = "\n".join(f"    {key} = {value!r}" for key, value in self._settings.items())
            self._writer.add_text("settings", text, step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    def start(self, run: Path, project: str, settings: Mapping[str, Any]) -> str:
        import wandb

        known = _known(run, "wandb")
        self._run = wandb.init(
            project=project,
            name=run.name,
            id=known,
            resume="allow" if known else None,
            dir=str(run),
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")  # steps may go back when a run is resumed
        _remember(run, "wandb", self._run.id)
        return f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log({"step": step, **numbers})

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    def start(self, run: Path, project: str, settings: Mapping[str, Any]) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.parent.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=place)
        known = _known(run, "mlflow")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project)
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            _remember(run, "mlflow", self._id)
            params = [Param(key, str(value)[:500]) for key, value in settings.items()]
            for i in range(0, len(params), 100):  # as many as one call may have
                self._client.log_batch(self._id, params=params[i : i + 100])
        return f"mlflow ui --backend-store-uri {place}"

    def log(self, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(re.sub(r"[^\w\-./ ]", "_", name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, status: str) -> None:
        ended = {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED")
        self._client.set_terminated(self._id, status=ended)


class Trackio:
    def start(self, run: Path, project: str, settings: Mapping[str, Any]) -> str:
        import trackio

        plain = {key: value if isinstance(value, int | float | bool) else str(value) for key, value in settings.items()}
        self._run = trackio.init(project=project, name=run.name, config=plain, resume="allow", embed=False)
        return f"trackio show --project {project}"

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, status: str) -> None:
        self._run.finish()


TRACKERS: Mapping[TrackerName, tuple[Callable[[], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "trackio": (Trackio, "trackio"),
}
"""How to make each tracker, and the package that it needs."""


def check_installed(names: tuple[TrackerName, ...]) -> None:
    """Raise if a tracker's package is missing, before anything is loaded."""
    missing = [name for name in names if importlib.util.find_spec(TRACKERS[name][1]) is None]
    if missing:
        raise ConfigError(
            f"observe.trackers must be installed, got {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not: pip install 'kitae[{','.join(missing)}]'"
        )


class Tracked(Silent):
    """Passes the metrics of a run to a tracker, through a queue."""

    def __init__(
        self, name: str, tracker: Tracker, run: Path, project: str, settings: Mapping[str, Any], note: Note
    ) -> None:
        self._tracker = tracker
        self._started = False
        self._note = note
        self._aside = Aside(name, note)
        self._aside.do(lambda: self._start(run, project, settings))

    def step(self, report: Reported) -> None:
        self._log(report.step, numbers_of(report.row()))

    def evaluated(self, row: dict[str, Any]) -> None:
        found = numbers_of(row)
        self._log(int(row["step"]), {f"eval/{name}": value for name, value in found.items()})

    def close(self, status: str, seconds: float = CLOSE_SECONDS) -> None:
        self._aside.do(lambda: self._tracker.finish(status) if self._started else None)
        self._aside.close(seconds)

    def _start(self, run: Path, project: str, settings: Mapping[str, Any]) -> None:
        place = self._tracker.start(run, project, settings)
        self._started = True
        self._note(f"{self._aside.name}: {place}")

    def _log(self, step: int, numbers: Numbers) -> None:
        self._aside.do(lambda: self._tracker.log(step, numbers) if self._started else None)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, which trackers can draw."""
    found = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k != "step"}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _known(run: Path, tracker: str) -> str | None:
    try:
        found = json.loads((run / FILE).read_text()).get(tracker)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _remember(run: Path, tracker: str, name: str) -> None:
    path = run / FILE
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        names = {}
    path.write_text(json.dumps({**names, tracker: name}))
