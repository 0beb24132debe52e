"""Answers of servers that are kept: a folder with a database, for any number of processes."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

from kitae.errors import RemoteError

_LOG = logging.getLogger(__name__)
_FILE = "replies.sqlite3"
_PATIENCE = 10.0  # seconds to wait for another process that writes


def recall(folder: Path, key: str) -> str | None:
    """The cached text. A folder that cannot be made is a mistake; a cache that fails later is only a miss."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RemoteError(f"the cache must be a folder, got {str(folder)!r}: {error.strerror}") from None
    try:
        with closing(_connect(folder)) as database:
            row = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
    except sqlite3.Error as error:
        _LOG.warning("the cache in %s cannot be read and is passed over: %s", folder, error)
        return None
    return str(row[0]) if row else None


def remember(folder: Path, key: str, reply: str) -> None:
    try:
        with closing(_connect(folder)) as database, database:
            database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
    except sqlite3.Error as error:
        _LOG.warning("the cache in %s cannot be written: %s", folder, error)


def _connect(folder: Path) -> sqlite3.Connection:
    """A connection per use: safe in any thread and after a fork. No WAL: it fails on network drives."""
    database = sqlite3.connect(folder / _FILE, timeout=_PATIENCE)
    try:
        database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID")
    except sqlite3.Error:
        database.close()
        raise
    return database
