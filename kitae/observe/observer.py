"""What the pipeline tells whoever watches. Observers never steer."""

from pathlib import Path
from typing import Any, Protocol


class Reported(Protocol):
    def row(self) -> dict[str, Any]: ...


class Observer(Protocol):
    def status(self, text: str) -> None:
        """What is being done right now: "generating 12/64"."""

    def note(self, text: str) -> None:
        """Something worth keeping on the screen: a warning, a saved checkpoint."""

    def step(self, report: Reported) -> None:
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

    def step(self, report: Reported) -> None:
        pass

    def evaluated(self, row: dict[str, Any]) -> None:
        pass

    def finished(self, folder: Path) -> None:
        pass
