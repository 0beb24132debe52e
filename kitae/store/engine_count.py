"""How many engines a run shall have: asked for from outside, while it goes on or before."""

from pathlib import Path

from kitae.errors import StoreError
from kitae.store.disk import write_whole

_FILE = "engines.txt"
MOST = 4096


def ask_for(folder: Path, engines: int) -> None:
    """The run looks at it every second; one that does not go on now will when it does."""
    if not 1 <= engines <= MOST:
        raise StoreError(f"a run must have from 1 to {MOST} engines, got {engines}")
    write_whole(folder / _FILE, f"{engines}\n")


def asked_for(folder: Path) -> int | None:
    """None: nobody has asked, or what is there is no number of engines."""
    try:
        engines = int((folder / _FILE).read_text())
    except (OSError, ValueError):
        return None
    return engines if 1 <= engines <= MOST else None
