"""Server-sent events with the keys of the runs that have changed. The page then requests what it shows again."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from kitae.store.run_summary import RunView
from kitae.ui.library import Library

_WATCHED = ("config.json", "journal.sqlite", "journal.sqlite-wal", "metrics.jsonl", "timeline.jsonl", "console.log")
_HEARTBEAT = 15.0  # seconds without a change after which a comment is sent, so that a dead connection is noticed

Stamp = tuple[tuple[int, int], ...]


class RunWatcher:
    """The state of all runs, for one client. `changed` returns the runs whose state differs from the last call."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._seen: dict[str, tuple[Stamp, str]] = {}
        self.changed()

    def changed(self) -> list[str]:
        """The keys of runs that are new, gone, were written to, or whose process has ended."""
        before, self._seen = self._seen, {}
        for key, folder in self._library.runs().items():
            self._seen[key] = self._look(folder, before.get(key))
        return sorted(key for key in before.keys() | self._seen.keys() if before.get(key) != self._seen.get(key))

    def _look(self, folder: Path, before: tuple[Stamp, str] | None) -> tuple[Stamp, str]:
        """The lock of a running run is checked each time, because a process that is killed writes nothing."""
        stamp = tuple(_stamp(folder / name) for name in _WATCHED)
        if before is not None and before[0] == stamp and before[1] != "running":
            return before
        return stamp, RunView(folder).status


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


async def change_events(library: Library, every: float = 1.0) -> AsyncIterator[str]:
    """An endless stream of events: `data: {"runs": ["quickstart-001"]}`."""
    watcher = await asyncio.to_thread(RunWatcher, library)
    yield "retry: 2000\n\n"
    quiet = 0.0
    while True:
        await asyncio.sleep(every)
        quiet += every
        if keys := await asyncio.to_thread(watcher.changed):
            quiet = 0.0
            yield f"data: {json.dumps({'runs': keys})}\n\n"
        elif quiet >= _HEARTBEAT:
            quiet = 0.0
            yield ": still here\n\n"
