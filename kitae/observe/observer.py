"""What the pipeline tells whoever watches. Observers never steer."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kitae.config.root import Root


class Reported(Protocol):
    """What a step of a run of any kind has to say for itself."""

    @property
    def step(self) -> int: ...
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

    def step(self, report: Reported) -> None:
        for observer in self._observers:
            observer.step(report)

    def evaluated(self, row: dict[str, Any]) -> None:
        for observer in self._observers:
            observer.evaluated(row)

    def finished(self, folder: Path) -> None:
        for observer in self._observers:
            observer.finished(folder)
