"""The runs that may be read, those that were named and those in folders that were named; and their settings."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kitae.errors import KitaeError, StoreError
from kitae.store.run_folder import is_run
from kitae.store.run_summary import RunView
from kitae.ui.records import Setting


class Library:
    """Runs by key. A key is looked up and never joined to a path, so no key leads to another folder.

    Every call of `runs` searches the folders again, so runs that start later appear.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        for place in places:
            if not place.is_dir() and place != Path("runs"):  # where runs will be: the page is empty until then
                raise StoreError(f"kitae ui takes run folders and folders that hold them, got {place}: no such folder")
        self._places = [place.resolve() for place in places]
        self._lock = threading.Lock()
        self._keys: dict[Path, str] = {}  # a run keeps its key while the page is open

    def runs(self) -> dict[str, Path]:
        """`{"quickstart-001": Path("/home/me/runs/quickstart-001")}`."""
        found = [folder for place in self._places for folder in _runs_of(place)]
        with self._lock:
            for folder in found:
                if folder not in self._keys:
                    self._keys[folder] = self._free_key(folder)
            return {self._keys[folder]: folder for folder in dict.fromkeys(found)}

    def find(self, key: str) -> Path:
        try:
            return self.runs()[key]
        except KeyError:
            raise StoreError(f"no run {key!r} in {', '.join(map(str, self._places))}") from None

    def _free_key(self, folder: Path) -> str:
        taken, name = set(self._keys.values()), folder.name
        names = (name if number == 1 else f"{name}~{number}" for number in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)


def _runs_of(place: Path) -> list[Path]:
    """The runs in a folder. A symbolic link that leads out of the folder is not followed."""
    if is_run(place):
        return [place]
    if not place.is_dir():
        return []
    children = (child.resolve() for child in sorted(place.iterdir()) if is_run(child))
    return [child for child in children if child.is_relative_to(place)]


def file_of(run: Path, name: str) -> Path | None:
    """A file of a run folder; None where it is missing or a link to another place."""
    path = run / name
    return path if path.is_file() and path.resolve().is_relative_to(run.resolve()) else None


def raw_settings(run: Path) -> dict[str, Any]:
    """config.json with flat keys, without validation: the settings may be of another version or kind of run."""
    path = file_of(run, "config.json")
    values = json.loads(path.read_text()) if path else {}
    flat: dict[str, Any] = {}
    for section, keys in values.items() if isinstance(values, dict) else ():
        if isinstance(keys, dict):
            flat |= {f"{section}.{key}": value for key, value in keys.items()}
        else:
            flat[section] = keys
    return flat


def settings_of(run: Path) -> list[Setting]:
    """The settings, first those that differ from their defaults. If that cannot be known, none counts as changed."""
    try:
        config = RunView(run).config
        flat, changed = config.flat(), set(config.changed())
    except (KitaeError, OSError):
        flat, changed = _as_they_are(run), set()
    found = [Setting(key, value, key in changed) for key, value in flat.items()]
    return sorted(found, key=lambda setting: not setting.changed)


def _as_they_are(run: Path) -> dict[str, Any]:
    """The settings of a run whose file cannot be read as settings of this version."""
    try:
        return raw_settings(run)
    except (OSError, ValueError):
        return {}
