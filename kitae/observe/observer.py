"""What the pipeline tells whoever watches. Observers never steer."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kitae.config.root import Root


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


@runtime_checkable
class Audience(Protocol):
    """Who must know a run before it can be watched: a screen that draws its table, a log in its folder."""

    def note(self, text: str) -> None:
        """Something worth keeping, before there is a run folder."""

    def watch(self, config: Root, folder: Path) -> AbstractContextManager[Observer]:
        """The observer of a run that is about to begin, or to go on; it is left when the run ends, however it does."""
