"""Attach all observers of a run: the progress on the screen, and those that the settings ask for."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from kitae.config.root import Root
from kitae.errors import ConfigError
from kitae.observe.config import ObserveConfig
from kitae.observe.diagnosis import LiveDiagnosis
from kitae.observe.diagnosis.base import Finding
from kitae.observe.hooks import Hooks
from kitae.observe.machine import note_machine
from kitae.observe.observer import Observer, Reported, Several, Silent
from kitae.observe.prometheus import MetricsServer
from kitae.observe.trackers import TRACKERS, Tracked
from kitae.store.run_folder import Metrics


@contextmanager
def watched(config: Root, observe: ObserveConfig, run: Path, screen: Observer) -> Iterator[Observer]:
    """The observers of a run. When the block ends, trackers, server and hooks are notified how the run ended."""
    note_machine(run)
    end = _End()
    hooks = Hooks(observe, run, screen.note)
    observers: list[Observer] = [screen, end]
    with ExitStack() as stack:
        stack.callback(hooks.close)
        server = _server(observe, run, screen)
        if server is not None:
            stack.callback(server.close)
            observers.append(server)
        trackers = [
            Tracked(name, TRACKERS[name][0](), run, observe.project, config.flat(), screen.note)
            for name in observe.trackers
        ]
        observers += trackers

        def report(step: int, found: Sequence[Finding]) -> None:
            more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
            screen.note(f"diagnosis: {found[0].line}{more}. Advice: kitae diagnose {run}")
            for finding in found:
                hooks.notify("diagnosis", finding.line, step=step, **asdict(finding))
                if server is not None:
                    server.found(finding.rule)

        if observe.diagnose:
            rows = Metrics(run / "metrics.jsonl").rows()
            observers.append(LiveDiagnosis(config.flat(), rows, report))
        try:
            yield Several(*observers)
        except Exception as error:
            end.how = "crashed"
            message = f"{type(error).__name__}: {error}"
            hooks.notify("crash", message, step=end.last, status=end.how)
            raise
        else:
            hooks.notify("finish", f"{end.how} after step {end.last}", step=end.last, status=end.how)
        finally:
            for tracker in trackers:
                tracker.close(end.how)


def _server(observe: ObserveConfig, run: Path, screen: Observer) -> MetricsServer | None:
    if not observe.metrics_port:
        return None
    key = os.environ.get(observe.metrics_key_env, "")
    if observe.metrics_key_env and not key:
        raise ConfigError(f"observe.metrics_key_env: the variable {observe.metrics_key_env} must hold a key, got none")
    try:
        server = MetricsServer(run, observe.metrics_host, observe.metrics_port, key)
    except OSError as error:
        screen.note(f"no /metrics for this run: observe.metrics_port {observe.metrics_port} cannot be used: {error}")
        return None
    screen.note(f"metrics for Prometheus: http://{observe.metrics_host}:{server.port}/metrics")
    return server


class _End(Silent):
    """How far the run came, and how it ended. A run that ends without an event was stopped by its user."""

    def __init__(self) -> None:
        self.last = 0
        self.how = "stopped"

    def step(self, report: Reported) -> None:
        self.last = report.step

    def finished(self, folder: Path) -> None:
        self.how = "finished"
