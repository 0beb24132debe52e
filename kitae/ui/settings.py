"""The settings of a run, of whatever kind and version it is."""

import json
from pathlib import Path
from typing import Any

from kitae.errors import KitaeError
from kitae.store.run_summary import RunView
from kitae.ui.library import file_of
from kitae.ui.records import Setting


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
