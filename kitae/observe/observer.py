"""What the pipeline tells whoever watches. Observers never steer."""

from pathlib import Path
from typing import Any, Protocol

from kitae.observe.report import StepReport


class Observer(Protocol):
    def status(self, text: str) -> None:
        """What is being done right now: "generating 12/64"."""

    def note(self, text: str) -> None:
        """Something worth keeping on the screen: a warning, a saved checkpoint."""

    def step(self, report: StepReport) -> None:
        """A training step ended; `report.row()` is its line in metrics.jsonl."""

    def evaluated(self, row: dict[str, Any]) -> None:
        """A held-out evaluation ended."""

    def finished(self, folder: Path) -> None:
        """The run is over."""


class Silent:
    """An observer that looks away."""

    def status(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def step(self, report: StepReport) -> None:
        pass

    def evaluated(self, row: dict[str, Any]) -> None:
        pass

    def finished(self, folder: Path) -> None:
        pass


class Several:
    """Tells several observers everything, one after the other."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def status(self, text: str) -> None:
        for observer in self._observers:
            observer.status(text)

    def note(self, text: str) -> None:
        for observer in self._observers:
            observer.note(text)

    def step(self, report: StepReport) -> None:
        for observer in self._observers:
            observer.step(report)

    def evaluated(self, row: dict[str, Any]) -> None:
        for observer in self._observers:
            observer.evaluated(row)

    def finished(self, folder: Path) -> None:
        for observer in self._observers:
            observer.finished(folder)
