"""The journal: every prompt, rollout and score in SQLite, committed before anything uses them.

One writer thread commits what has gathered meanwhile in one transaction, so callers wait for the disk but never block
the event loop. WAL mode: a killed process loses nothing that a caller was told is written.

    prompts   what was asked, by group id; the slot of the buffer it was issued into, and the version served then
    rollouts  what was sampled and how it was scored; tokens, log-probs and versions exactly as the engine gave them
    parked    what was sampled of responses that are not complete
    fates     what became of each group, one row per group, never two: trained at a step; sampled and dropped with a
              reason; or skipped with a reason, without having been sampled to the end
    events    what happened to the run: starts, resumes, errors
"""

import asyncio
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kitae.errors import DiskFullError, StoreError
from kitae.types import GREEDY, Group, Message, Prompt, Rollout, Score, Segment

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, messages TEXT NOT NULL, reference TEXT NOT NULL,
    context TEXT NOT NULL, version INTEGER NOT NULL, slot INTEGER NOT NULL, issued REAL NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    group_id INTEGER NOT NULL, sample INTEGER NOT NULL, prompt_tokens BLOB NOT NULL, segments TEXT NOT NULL,
    tokens BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, finish TEXT NOT NULL, text TEXT NOT NULL,
    value REAL, outcome TEXT NOT NULL, components TEXT NOT NULL, detail TEXT NOT NULL,
    PRIMARY KEY (group_id, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parked (
    group_id INTEGER NOT NULL, sample INTEGER NOT NULL, prompt_tokens BLOB NOT NULL, segments TEXT NOT NULL,
    tokens BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL,
    PRIMARY KEY (group_id, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fates (
    group_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, fate TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (time REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""

_CLOSE_LIMIT = 60.0  # seconds for what is still to be written

Statement = tuple[str, tuple[Any, ...]]
Job = tuple[list[Statement], Future[None]]


class Journal:
    """Open for writing by one process at a time; readers may look on (`read_only`)."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        try:
            if read_only:
                closed = not path.with_name(f"{path.name}-wal").exists()  # nobody writes: leave no files beside it
                address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if closed else ''}"
                self._reader = sqlite3.connect(address, uri=True, check_same_thread=False)
                self._reader.execute("PRAGMA schema_version")  # reads the file: says now if it is no database
            else:
                self._reader = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
                self._reader.execute("PRAGMA journal_mode=WAL")
                self._reader.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise _explain(error, path) from error
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        if not read_only:
            self._writer = threading.Thread(target=self._write_loop, name="kitae-journal", daemon=True)
            self._writer.start()

    # Writing. Each call returns after its commit; one that is cancelled may be written all the same.

    async def add_prompt(self, group: int, prompt: Prompt, version: int, slot: int) -> None:
        """Record that a prompt was issued; after a resume the same row may come again."""
        messages = json.dumps([asdict(m) for m in prompt.messages])
        context = json.dumps(dict(prompt.context))
        row = (group, prompt.id, messages, json.dumps(prompt.reference), context, version, slot, time.time())
        await self._write([("INSERT OR REPLACE INTO prompts VALUES (?,?,?,?,?,?,?,?)", row)])

    async def add_rollout(self, rollout: Rollout) -> None:
        """A complete rollout takes the place of what was parked of it."""
        where = (rollout.group, rollout.index)
        await self._write(
            [
                ("INSERT INTO rollouts VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", _rollout_row(rollout)),
                ("DELETE FROM parked WHERE group_id = ? AND sample = ?", where),
            ]
        )

    async def park(self, *rollouts: Rollout) -> None:
        """Keep what was sampled so far of rollouts that are not complete."""
        sql = "INSERT OR REPLACE INTO parked VALUES (?,?,?,?,?,?,?)"
        await self._write([(sql, _rollout_row(r)[:7]) for r in rollouts])

    async def update_score(self, rollout: Rollout) -> None:
        """Replace the score of a rollout that could not be judged before."""
        value, outcome, components, detail = _rollout_row(rollout)[9:]
        where = (rollout.group, rollout.index)
        sql = "UPDATE rollouts SET value=?, outcome=?, components=?, detail=? WHERE group_id=? AND sample=?"
        await self._write([(sql, (value, outcome, components, detail, *where))])

    async def add_fates(self, step: int, trained: Sequence[int], dropped: Sequence[tuple[int, str]]) -> None:
        """Close groups. A second fate for a group is a bug and violates the table's key."""
        rows = [(group, step, "trained", "") for group in trained]
        rows += [(group, step, "dropped", reason) for group, reason in dropped]
        await self._write([("INSERT INTO fates VALUES (?,?,?,?)", row) for row in rows])

    async def skip(self, step: int, groups: Sequence[tuple[int, str]]) -> None:
        """Close groups that will not be sampled to the end, each with its reason."""
        rows = [(group, step, "skipped", reason) for group, reason in groups]
        parked = [("DELETE FROM parked WHERE group_id = ?", (group,)) for group, _ in groups]
        await self._write([*(("INSERT INTO fates VALUES (?,?,?,?)", row) for row in rows), *parked])

    async def add_event(self, kind: str, detail: str = "") -> None:
        await self._write([("INSERT INTO events VALUES (?,?,?)", (time.time(), kind, detail))])

    async def set_meta(self, key: str, value: str) -> None:
        await self._write([("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, value))])

    async def rewind(self, step: int, cursor: int) -> None:
        """Forget what was trained after a checkpoint: those weights are gone. Rollouts stay usable.

        What was skipped stays skipped, if it had been issued by then: another group took its place.
        """
        sql = "DELETE FROM fates WHERE step > ? AND (fate != 'skipped' OR group_id >= ?)"
        await self._write([(sql, (step, cursor))])

    async def _write(self, statements: list[Statement]) -> None:
        assert self._writer is not None, "this journal is open for reading only"
        done: Future[None] = Future()
        self._queue.put(([(sql, tuple(map(_storable, values))) for sql, values in statements], done))
        await asyncio.wrap_future(done)

    def _write_loop(self) -> None:
        connection = sqlite3.connect(self.path, isolation_level=None)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA busy_timeout=10000")
        closing = False
        while not closing:
            taken = [self._queue.get()]
            while not self._queue.empty() and len(taken) < 512:
                taken.append(self._queue.get())
            closing = None in taken
            jobs = [job for job in taken if job is not None and job[1].set_running_or_notify_cancel()]
            try:
                _commit(connection, [s for statements, _ in jobs for s in statements])
                for _, done in jobs:
                    done.set_result(None)
            except Exception:
                self._commit_one_by_one(connection, jobs)  # so that a bad job takes no good one with it
        connection.close()

    def _commit_one_by_one(self, connection: sqlite3.Connection, jobs: list[Job]) -> None:
        for statements, done in jobs:
            try:
                _commit(connection, statements)
                done.set_result(None)
            except Exception as error:  # whatever it is, its caller must hear of it
                done.set_exception(_explain(error, self.path))

    def close(self) -> None:
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join(_CLOSE_LIMIT)
            self._writer = None
        self._reader.close()

    # Reading.

    def meta(self, key: str) -> str | None:
        row = self._reader.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def rollouts(self, group: int) -> list[Rollout]:
        rows = self._reader.execute("SELECT * FROM rollouts WHERE group_id = ? ORDER BY sample", (group,))
        return [_read_rollout(row) for row in rows]

    def parked(self, group: int) -> list[Rollout]:
        """What was sampled of incomplete rollouts; their finish is "parked"."""
        rows = self._reader.execute("SELECT * FROM parked WHERE group_id = ? ORDER BY sample", (group,))
        return [_read_rollout((*row, "parked", "", None, "error", "{}", "parked")) for row in rows]

    def pending(self, cursor: int) -> list[tuple[int, int, int]]:
        """`(slot, group, version)` of groups below the cursor that have no fate, by slot and order of issue."""
        return list(
            self._reader.execute(
                "SELECT slot, group_id, version FROM prompts WHERE group_id < ? "
                "AND group_id NOT IN (SELECT group_id FROM fates) ORDER BY slot, group_id",
                (cursor,),
            )
        )

    def prompt(self, group: int) -> Prompt | None:
        row = self._reader.execute("SELECT * FROM prompts WHERE group_id = ?", (group,)).fetchone()
        if row is None:
            return None
        messages = tuple(Message(**m) for m in json.loads(row[2]))
        return Prompt(row[1], messages, json.loads(row[3]), json.loads(row[4]))

    def group(self, group: int) -> Group:
        """A group that was issued, with the rollouts that are complete."""
        prompt, rollouts = self.prompt(group), self.rollouts(group)
        assert prompt is not None, f"group {group} was never issued"
        greedy = next((r for r in rollouts if r.index == GREEDY), None)
        return Group(group, prompt, tuple(r for r in rollouts if r.index != GREEDY), greedy)

    def groups(self, step: int | None = None) -> list[tuple[int, int, str, str]]:
        """`(group, step, fate, reason)` of closed groups, by id; of one step, if given."""
        where, values = ("WHERE step = ?", (step,)) if step is not None else ("", ())
        return list(self._reader.execute(f"SELECT * FROM fates {where} ORDER BY group_id", values))

    def samples(self) -> Iterator[tuple[int, int, int, float | None]]:
        """`(group, sample, step, value)` of the rollouts of closed groups; value None: it could not be judged."""
        yield from self._reader.execute(
            "SELECT r.group_id, r.sample, f.step, r.value FROM rollouts r JOIN fates f USING (group_id) "
            "ORDER BY r.group_id, r.sample"
        )

    def overdue_slots(self) -> int:
        """Slots whose groups were skipped because a batch would not wait for them."""
        sql = "SELECT count(DISTINCT slot) FROM prompts JOIN fates USING (group_id) WHERE fate='skipped' AND reason=?"
        return int(self._reader.execute(sql, ("overdue",)).fetchone()[0])

    def pass_rates(self) -> dict[str, float]:
        """By prompt id, the mean score the last time that it was asked and judged."""
        return dict(
            self._reader.execute(
                "SELECT p.prompt_id, avg(r.value) FROM prompts p JOIN rollouts r USING (group_id) "
                "WHERE r.value IS NOT NULL AND r.sample >= 0 GROUP BY p.group_id ORDER BY p.group_id"
            )
        )

    def counts(self) -> dict[str, int]:
        names = ("prompts", "rollouts", "parked", "fates")
        return {n: int(self._reader.execute(f"SELECT count(*) FROM {n}").fetchone()[0]) for n in names}

    def events(self) -> list[tuple[float, str, str]]:
        return list(self._reader.execute("SELECT * FROM events ORDER BY rowid"))


class NoJournal(Journal):
    """Of a run that nobody will resume: what is written is forgotten, so nothing is found."""

    def __init__(self) -> None:
        self.path = Path(":memory:")
        self._reader = sqlite3.connect(":memory:")
        self._reader.executescript(_SCHEMA)
        self._writer = None

    async def add_rollout(self, rollout: Rollout) -> None:
        pass  # without making a row of it first, which takes most of the time

    async def _write(self, statements: list[Statement]) -> None:
        pass


def _commit(connection: sqlite3.Connection, statements: list[Statement]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for sql, values in statements:
            connection.execute(sql, values)
        connection.execute("COMMIT")
    except Exception:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _storable(value: Any) -> Any:
    """Text that is no valid Unicode (half of a surrogate pair) gets question marks; everything else is as it was."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)  # disk, quota or size limit


def _explain(error: Exception, path: Path) -> StoreError:
    if getattr(error, "sqlite_errorcode", None) in _FULL:
        return DiskFullError(f"no space left to write {path} ({error}); what was written before is safe")
    return StoreError(f"{path}: {error}")


def _rollout_row(r: Rollout) -> tuple[Any, ...]:
    score = r.score or Score.error("not scored")
    return (
        r.group,
        r.index,
        np.array(r.prompt_tokens, dtype=np.int32).tobytes(),
        json.dumps([[s.source, len(s.tokens)] for s in r.segments]),
        np.array([t for s in r.segments for t in s.tokens], dtype=np.int32).tobytes(),
        np.array([x for s in r.segments for x in s.logprobs], dtype=np.float32).tobytes(),
        np.array([v for s in r.segments for v in s.versions], dtype=np.int32).tobytes(),
        r.finish,
        r.text,
        score.value if score.valid else None,
        score.outcome,
        json.dumps(dict(score.components)),
        score.detail,
    )


def _read_rollout(row: tuple[Any, ...]) -> Rollout:
    group, sample, prompt, segments, tokens, logprobs, versions, finish, text, value, outcome, components, detail = row
    all_tokens = np.frombuffer(tokens, dtype=np.int32).tolist()
    all_logprobs = np.frombuffer(logprobs, dtype=np.float32).tolist()
    all_versions = np.frombuffer(versions, dtype=np.int32).tolist()
    pieces = []
    start = 0
    for source, length in json.loads(segments):
        part = slice(start, start + length)
        pieces.append(Segment(source, tuple(all_tokens[part]), tuple(all_logprobs[part]), tuple(all_versions[part])))
        start += length
    score = Score(float("nan") if value is None else value, json.loads(components), outcome, detail)
    prompt_tokens = tuple(np.frombuffer(prompt, dtype=np.int32).tolist())
    return Rollout(group, sample, prompt_tokens, tuple(pieces), finish, text, score)
