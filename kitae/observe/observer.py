"""The interface of observers, which receive the progress of a run and never influence it."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kitae.config.root import Root


class Reported(Protocol):
    """The report of a step, for any kind of run."""

    @property
    def step(self) -> int: ...
    def row(self) -> dict[str, Any]: ...


class Observer(Protocol):
    """Receives the progress of a run."""

    def status(self, text: str) -> None:
        """What the run is doing now: "generating 12/64"."""

    def note(self, text: str) -> None:
        """A message to keep on the screen: a warning, a saved checkpoint."""

    def step(self, report: Reported) -> None:
        """A training step ended; `report.row()` is its line in metrics.jsonl."""

    def evaluated(self, row: dict[str, Any]) -> None:
        """A held-out evaluation ended."""

    def finished(self, folder: Path) -> None:
        """The run is over."""


class Silent:
    """Ignores everything; a base for observers that need only a part."""

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
    """Makes observers for runs: a screen with a table of the run, a log in its folder."""

    def note(self, text: str) -> None:
        """A message to keep, before there is a run folder."""

    def watch(self, config: Root, folder: Path) -> AbstractContextManager[Observer]:
        """The observer of a run that is about to start or resume. The context is left when the run ends in any way."""


class Bystander:
    """An observer that needs to know nothing of a run beforehand, as an audience."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def note(self, text: str) -> None:
        self._observer.note(text)

    def watch(self, config: Root, folder: Path) -> AbstractContextManager[Observer]:
        return nullcontext(self._observer)


def audience_of(observer: Observer | Audience | None) -> Audience:
    if isinstance(observer, Audience):
        return observer
    return Bystander(observer or Silent())


class Several:
    """Passes everything to several observers, one after the other."""

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
