"""What readers write about a run: tags and a note, in `notes.json` of its folder. No other file is ever changed."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError
from kitae.ui.library import file_of

FILE = "notes.json"
_TAGS, _TAG, _NOTE = 20, 40, 10_000  # so many, and characters
LONGEST = 100_000  # bytes of a request


@dataclass(frozen=True, slots=True)
class Notes:
    """`Notes(tags=["baseline"], note="too high a rate")`"""

    tags: list[str]
    note: str


def read_notes(run: Path) -> Notes:
    """What was written; nothing where the file is missing, or is not what this program writes."""
    path = file_of(run, FILE)
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8"))) if path else Notes([], "")
    except (OSError, ValueError, ConfigError):
        return Notes([], "")


def write_notes(run: Path, body: bytes) -> Notes:
    """Keep what a request says; raises `ConfigError` where it says something else."""
    try:
        notes = _checked(json.loads(body))
    except ValueError as error:
        raise ConfigError(f"notes must be JSON with tags and a note, got {error}") from None
    scratch = run / f".{FILE}.{os.getpid()}"
    scratch.write_text(json.dumps(asdict(notes), ensure_ascii=False, indent=1), encoding="utf-8")
    scratch.replace(run / FILE)  # also in the place of a link
    return notes


def _checked(given: Any) -> Notes:
    tags, note = (given.get("tags", []), given.get("note", "")) if isinstance(given, dict) else (None, None)
    if not isinstance(tags, list) or not isinstance(note, str) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError(f"notes must be a list of tags and a text, got {str(given)[:80]!r}")
    named = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    if len(named) > _TAGS or len(note) > _NOTE or any(len(tag) > _TAG for tag in named):
        raise ConfigError(f"notes may have {_TAGS} tags of {_TAG} characters, and {_NOTE} of text")
    return Notes(named, note)
