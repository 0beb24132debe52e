"""The journal: every prompt, rollout and score in SQLite, committed before anything uses them.

One writer thread commits what has gathered meanwhile in one transaction, so callers wait for the commit but never block
the event loop. WAL mode: a killed process loses nothing that was confirmed to a caller. A machine that loses power
may lose the last commits, never one before `sync` returned; a checkpoint is made only after that.

    prompts   what was asked, by group id; the slot of the buffer it was issued into, and the version served then
    rollouts  what was sampled and how it was scored; tokens, log-probs and versions exactly as the engine gave them, or
              where they lie in files beside the journal (`kitae.store.columns`); its experts, where they are wanted,
              and what its tokens could have been, where sampling left something out
    suspended    what was sampled of responses that are not complete, in pieces: each has the tokens from `start` on
    fates     what became of each group, one row per group, never two: trained at a step; sampled and dropped with a
              reason; or skipped with a reason, without having been sampled to the end
    marks     for each trained step, a running checksum of all that was trained and dropped up to it
    events    what happened to the run: starts, resumes, errors

Each row has a checksum of its values (`kitae.store.sealed`), which is compared whenever a row is read, and a rollout
has another one of its verdict, which comes later. A checkpoint names the mark of its step (`Journal.claim`), so a
journal that has lost what it had then is not gone on with.
"""

import asyncio
import json
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from kitae.errors import CorruptError, DiskFullError, StoreError
from kitae.store.columns import FOLDER, LazyColumn, column_files
from kitae.store.disk import flush
from kitae.store.journal_rows import (
    arrays_of,
    experts_to_blob,
    extended,
    filed_length,
    filed_text,
    files_of,
    kept_to_blob,
    last_of_piece,
    messages_of_text,
    messages_to_text,
    problem_of,
    rollout_of_row,
    rollout_to_row,
    shape_of,
    verdict,
    versions_of,
)
from kitae.store.sealed import seal
from kitae.types import GREEDY, Group, Prompt, Rollout, Segment

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, seal BLOB NOT NULL, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    group_id INTEGER PRIMARY KEY, seal BLOB NOT NULL, prompt_id TEXT NOT NULL, messages TEXT NOT NULL,
    reference TEXT NOT NULL, context TEXT NOT NULL, version INTEGER NOT NULL, slot INTEGER NOT NULL,
    issued REAL NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    group_id INTEGER NOT NULL, sample INTEGER NOT NULL, seal BLOB NOT NULL, verdict_seal BLOB NOT NULL,
    prompt_tokens BLOB NOT NULL, chains TEXT NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL,
    versions BLOB NOT NULL, finish TEXT NOT NULL, text TEXT NOT NULL,
    value REAL, outcome TEXT NOT NULL, components TEXT NOT NULL, detail TEXT NOT NULL, status TEXT NOT NULL,
    transcript TEXT NOT NULL, experts BLOB NOT NULL, kept BLOB NOT NULL,
    PRIMARY KEY (group_id, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS suspended (
    group_id INTEGER NOT NULL, sample INTEGER NOT NULL, start INTEGER NOT NULL, seal BLOB NOT NULL,
    prompt_tokens BLOB NOT NULL, chains TEXT NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL,
    versions BLOB NOT NULL, finish TEXT NOT NULL, transcript TEXT NOT NULL, experts BLOB NOT NULL,
    kept BLOB NOT NULL, PRIMARY KEY (group_id, sample, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fates (
    group_id INTEGER PRIMARY KEY, seal BLOB NOT NULL, step INTEGER NOT NULL, fate TEXT NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS marks (step INTEGER PRIMARY KEY, seal BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (time REAL NOT NULL, seal BLOB NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS fates_by_step ON fates (step);
CREATE INDEX IF NOT EXISTS rollouts_brief ON rollouts (
    group_id, sample, value, outcome, finish, status, seal, verdict_seal);
"""

BRIEF = "rollouts_brief"
"""The index for those who browse: the columns that come after the long ones, in the order of groups, so that it grows
at its end as the table does."""

TEXT = "CASE r.text WHEN '' THEN filed_text(r.chains) ELSE r.text END"
"""Of a rollout `r`, for readers (`open_reader`): what it said, also where that lies in files."""

LENGTH = "(length(tokens) / 4 + filed_length(chains))"
"""Tokens after the prompt."""

_KEYS = {"rollouts": 2, "suspended": 3}  # columns before the seal, in other tables 1
_CLOSE_LIMIT = 60.0  # seconds for what is still to be written
_VERDICT = slice(9, 13)  # columns of a rollout, counted without its seals: value, outcome, components, detail


def _adding(table: str, columns: int, how: str = "INSERT") -> str:
    """The statement that adds a row with its seal, which comes after the keys."""
    keys, names = _KEYS.get(table, 1), [f"?{i + 1}" for i in range(columns)]
    seals = [f"seal('{table}', {', '.join(names)})"]
    if table == "rollouts":
        apart, verdict = names[: _VERDICT.start] + names[_VERDICT.stop :], names[:keys] + names[_VERDICT]
        seals = [f"seal('rollouts', {', '.join(apart)})", f"seal('verdict', {', '.join(verdict)})"]
    return f"{how} INTO {table} VALUES ({', '.join([*names[:keys], *seals, *names[keys:]])})"


_ADD_PROMPT = _adding("prompts", 8)
_ADD_ROLLOUT = _adding("rollouts", 17)
_ADD_PIECE = _adding("suspended", 12)
_ADD_FATE = _adding("fates", 4)
_ADD_EVENT = _adding("events", 3)
_PUT_META = _adding("meta", 2, how="INSERT OR REPLACE")
_SET_VERDICT = (
    "UPDATE rollouts SET value=?3, outcome=?4, components=?5, detail=?6, "
    "verdict_seal=seal('verdict', ?1, ?2, ?3, ?4, ?5, ?6) WHERE group_id=?1 AND sample=?2"
)
_SKIP_SLOT = (
    "INSERT INTO fates SELECT group_id, seal('fates', group_id, ?1, 'skipped', ?2), ?1, 'skipped', ?2 FROM prompts "
    "WHERE slot = ?3 AND group_id NOT IN (SELECT group_id FROM fates)"
)
_SEALS = (
    "SELECT f.seal FROM fates f WHERE f.step = ?1 AND f.fate != 'skipped' "
    "UNION ALL SELECT p.seal FROM fates f JOIN prompts p USING (group_id) WHERE f.step = ?1 AND f.fate != 'skipped' "
    "UNION ALL SELECT CAST(r.seal || r.verdict_seal AS BLOB) FROM fates f JOIN rollouts r INDEXED BY rollouts_brief "
    "USING (group_id) WHERE f.step = ?1 AND f.fate != 'skipped' UNION ALL SELECT x''"
)
"""The seals of all that a step was made of, and an empty one."""

_MARK = (
    "INSERT OR REPLACE INTO marks SELECT ?1, mark(?1, (SELECT seal FROM marks WHERE step < ?1 ORDER BY step DESC LIMIT "
    f"1), seal) FROM ({_SEALS})"
)

Statement = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Job:
    """What one caller wants written; `lasting`: not before it has reached the disk is it done."""

    statements: list[Statement]
    done: Future[None]
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class PendingSlot:
    """A slot that was issued and not trained: `PendingSlot(5, groups=(17, 21), oldest=3, asked=4)`.

    groups: in the order of issue, those without a fate. oldest: the version of the oldest token that was sampled for
    them; None: there is none. asked: how many groups the slot has had, those that became spare among them.
    """

    number: int
    groups: tuple[int, ...]
    oldest: int | None
    asked: int


class Journal:
    """Open for writing by one process at a time; readers may look on (`read_only`)."""

    lasts: ClassVar[bool] = True
    """Whether what is written can be read after the run."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.columns = column_files(path.parent.absolute() / FOLDER)
        try:
            if read_only:
                self._reader = open_reader(path)
            else:
                self._reader = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
                self._reader.execute("PRAGMA journal_mode=WAL")
                _check_columns(self._reader, path)
                self._reader.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise _explain(error, path) from error
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        if not read_only:
            self._writer = threading.Thread(target=self._write_loop, name="kitae-journal", daemon=True)
            self._writer.start()

    # Writing. Each call returns after its commit; one that is cancelled may be written all the same.

    async def add_prompt(self, group: int, prompt: Prompt, version: int, slot: int, skipped: str = "") -> None:
        """Record that a prompt was issued, or in the same moment that it was skipped, with the reason."""
        messages = messages_to_text(prompt.messages)
        context = json.dumps(dict(prompt.context))
        row = (group, prompt.id, messages, json.dumps(prompt.reference), context, version, slot, time.time())
        fate = [(_ADD_FATE, (group, version + 1, "skipped", skipped))] if skipped else []
        await self._write([(_ADD_PROMPT, row), *fate])

    async def add_rollout(self, rollout: Rollout) -> None:
        """A complete rollout takes the place of what was suspended of it."""
        where = (rollout.group, rollout.index)
        await self._write(
            [
                (_ADD_ROLLOUT, rollout_to_row(self._own(rollout))),
                ("DELETE FROM suspended WHERE group_id = ? AND sample = ?", where),
            ]
        )

    async def suspend(self, *rollouts: Rollout) -> None:
        """Keep what was sampled so far of rollouts that are not complete, instead of what was kept before."""
        await self._write([statement for r in rollouts for statement in _suspend(self._own(r))])

    async def extend_suspended(self, *news: tuple[Rollout, int]) -> None:
        """Add to what is kept of rollouts. Each is given without the first tokens of its last turn, and their number;
        where that is 0, all of it is new and takes the place of what was kept."""
        found = [_extend(self._own(r), known) if known else _suspend(self._own(r)) for r, known in news]
        await self._write([statement for statements in found for statement in statements])

    async def update_score(self, rollout: Rollout) -> None:
        """The verdict on a rollout that had none, or that could not be judged before."""
        await self._write([(_SET_VERDICT, (rollout.group, rollout.index, *verdict(rollout)))])

    async def add_fates(self, step: int, trained: Sequence[int], dropped: Sequence[tuple[int, str]]) -> None:
        """Close groups. A second fate for a group is a bug and violates the table's key."""
        rows = [(group, step, "trained", "") for group in trained]
        rows += [(group, step, "dropped", reason) for group, reason in dropped]
        await self._write([*((_ADD_FATE, row) for row in rows), (_MARK, (step,))])

    async def skip(self, step: int, groups: Sequence[int], reason: str) -> None:
        """Close groups that will not be trained on, or not even sampled to the end."""
        fates = [(_ADD_FATE, (group, step, "skipped", reason)) for group in groups]
        suspended = [("DELETE FROM suspended WHERE group_id = ?", (group,)) for group in groups]
        await self._write([*fates, *suspended])

    async def skip_slot(self, step: int, slot: int, reason: str) -> None:
        """Close all that was issued into a slot and has no fate."""
        suspended = "DELETE FROM suspended WHERE group_id IN (SELECT group_id FROM prompts WHERE slot = ?)"
        await self._write([(_SKIP_SLOT, (step, reason, slot)), (suspended, (slot,))])

    async def add_event(self, kind: str, detail: str = "") -> None:
        await self._write([_event(kind, detail)])

    async def begin(self, config: str, events: Sequence[tuple[str, str]], forget_after: int | None = None) -> None:
        """A process takes up the run with these settings; kinds and details of what there is to record about that.

        forget_after: give up what was trained after this step, and what was sampled by those weights. What was issued
        stays issued into the same slot, and what was skipped stays skipped. All of this happens, or nothing.
        """
        statements = [(_PUT_META, ("config", config))]
        statements += [_event(kind, detail) for kind, detail in events]
        if forget_after is not None:
            statements += self._forgetting(forget_after)
        await self._write(statements)

    def _forgetting(self, step: int) -> list[Statement]:
        statements: list[Statement] = [
            ("DELETE FROM fates WHERE step > ? AND fate != 'skipped'", (step,)),
            ("DELETE FROM marks WHERE step > ?", (step,)),
        ]
        for table in ("rollouts", "suspended"):
            sql = (
                f"SELECT group_id, sample, chains, versions FROM {table} WHERE group_id NOT IN "
                "(SELECT group_id FROM fates WHERE step <= ? OR fate = 'skipped')"
            )
            for group, sample, chains, versions in self._query(sql, (step,)):
                if _newest(chains, versions) > step:
                    statements.append((f"DELETE FROM {table} WHERE group_id = ? AND sample = ?", (group, sample)))
        return statements

    def check_answers(self, step: int) -> None:
        """`CorruptError` if an answer cannot be read that was trained after this step, and is to be once more."""
        for id, at, fate, _ in self.groups():
            if at > step and fate != "skipped":
                problem = self._problem_in(id, fate)
                if problem:
                    raise CorruptError(
                        f"step {at} comes after the checkpoint and is trained again as it was, but {problem}. Nothing "
                        "was changed. Give the steps after the checkpoint up with --forget"
                    )

    def _problem_in(self, group: int, fate: str) -> str:
        """Of what a step needs of a group to be trained again; what was dropped only counts."""
        try:
            found = self.group(group)
        except CorruptError as error:
            return str(error)
        return next((p for r in found.valid if fate == "trained" and (p := problem_of(r))), "")

    async def drop_unreadable(self) -> list[str]:
        """Give up what lies in files and cannot be read, of groups without a fate: it is sampled again. What is wrong
        with each."""
        found = [pair for slot in self.pending() for group in slot.groups for pair in self._unreadable(group)]
        if found:
            events = [_event("unreadable", problem) for _, problem in found]
            await self._write([*(statement for statement, _ in found), *events])
        return [problem for _, problem in found]

    def _unreadable(self, group: int) -> Iterator[tuple[Statement, str]]:
        """Of rollouts, complete or not, that cannot be read: how each is deleted, and what is wrong with it."""
        keys = "FROM rollouts WHERE group_id = ?"
        for (sample,) in list(self._query(f"SELECT sample {keys}", (group,))):
            try:
                (row,) = self._rows("rollouts", "WHERE group_id = ? AND sample = ?", (group, sample))
                problem = problem_of(rollout_of_row(row, self.columns))
            except CorruptError as error:
                problem = str(error)
            if problem:
                yield (f"DELETE {keys} AND sample = ?", (group, sample)), problem
        keys = "FROM suspended WHERE group_id = ?"
        try:
            suspended = self.suspended(group)
        except StoreError as error:  # pieces that were put together had to be read
            yield (f"DELETE {keys}", (group,)), str(error)
            return
        for r in suspended:
            if problem := problem_of(r):
                yield (f"DELETE {keys} AND sample = ?", (group, r.index)), problem

    async def forget_rollouts(self, rollouts: Collection[tuple[int, int]]) -> int:
        """Give up rollouts, by group and sample, complete or not, where the group has no fate: they are sampled again.
        How many were complete."""
        pending = {group for slot in self.pending() for group in slot.groups}
        found = [where for where in rollouts if where[0] in pending]
        complete = sum(r.index == sample for group, sample in found for r in self.rollouts(group))
        tables = ("rollouts", "suspended")
        deletions = [f"DELETE FROM {table} WHERE group_id = ? AND sample = ?" for table in tables]
        await self._write([(sql, where) for where in found for sql in deletions])
        return complete

    async def sync(self) -> None:
        """Return when all that was written before is on the disk, and would survive a loss of power."""
        await self._write([], lasting=True)

    def _own(self, r: Rollout) -> Rollout:
        """With the values of what lies in files that are not beside this journal."""

        def own(s: Segment) -> Segment:
            if not isinstance(s.tokens, LazyColumn) or s.tokens.files.folder == self.columns.folder:
                return s
            return replace(s, tokens=tuple(s.tokens), logprobs=tuple(s.logprobs), versions=tuple(s.versions))

        return replace(r, chains=tuple(replace(c, segments=tuple(map(own, c.segments))) for c in r.chains))

    async def _write(self, statements: list[Statement], lasting: bool = False) -> None:
        assert self._writer is not None, "this journal is open for reading only"
        done: Future[None] = Future()
        storable = [(sql, tuple(map(_storable, values))) for sql, values in statements]
        self._queue.put(_Job(storable, done, lasting))
        await asyncio.wrap_future(done)

    def _write_loop(self) -> None:
        connection = sqlite3.connect(self.path, isolation_level=None)
        connection.create_function("seal", -1, seal, deterministic=True)
        connection.create_aggregate("mark", 3, _Mark)  # type: ignore[arg-type]
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA busy_timeout=10000")
        closing = False
        while not closing:
            taken = [self._queue.get()]
            while not self._queue.empty() and len(taken) < 512:
                taken.append(self._queue.get())
            closing = None in taken
            jobs = [job for job in taken if job is not None and job.done.set_running_or_notify_cancel()]
            try:
                _commit(connection, [s for job in jobs for s in job.statements])
                for job in jobs:
                    self._settle(job)
            except Exception:
                self._commit_one_by_one(connection, jobs)  # so that a bad job takes no good one with it
        connection.close()

    def _commit_one_by_one(self, connection: sqlite3.Connection, jobs: list[_Job]) -> None:
        for job in jobs:
            try:
                _commit(connection, job.statements)
                self._settle(job)
            except Exception as error:  # whatever it is, it is raised in its caller
                job.done.set_exception(_explain(error, self.path))

    def _settle(self, job: _Job) -> None:
        """A job is committed."""
        try:
            if job.lasting:
                self._flush()
            job.done.set_result(None)
        except OSError as error:
            job.done.set_exception(_explain(error, self.path))

    def _flush(self) -> None:
        """The database's own commits do not wait for the disk (`synchronous = NORMAL`): most need not."""
        for path in (self.path.with_name(f"{self.path.name}-wal"), self.path, self.path.parent):
            if path.exists():
                flush(path)

    def close(self) -> None:
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join(_CLOSE_LIMIT)
            self._writer = None
        self._reader.close()

    # Reading.

    def _query(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._reader.execute(sql, bound(sql, values))
        except sqlite3.Error as error:
            raise CorruptError(f"{self.path} cannot be read: {error}") from error

    def _rows(self, table: str, rest: str = "", values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows without their seals, which were compared."""
        for row in self._query(f"SELECT * FROM {table} {rest}", values):
            found = _unsealed(table, row)
            if found is None:
                raise CorruptError(f"{self.path}: {_what(table, row)} is damaged: its checksum is another one")
            yield found

    def meta(self, key: str) -> str | None:
        row = next(self._rows("meta", "WHERE key = ?", (key,)), None)
        return None if row is None else str(row[1])

    def rollouts(self, group: int) -> list[Rollout]:
        rows = self._rows("rollouts", "WHERE group_id = ? ORDER BY sample", (group,))
        return [rollout_of_row(row, self.columns) for row in rows]

    def suspended(self, group: int) -> list[Rollout]:
        """What there is of incomplete rollouts. Their finish is "suspended" where the last turn has not ended."""
        rows = self._rows("suspended", "WHERE group_id = ? ORDER BY sample, start", (group,))
        found: dict[int, Rollout] = {}
        for _, sample, start, *piece, finish, transcript, experts, kept in rows:
            known = sum(len(s.tokens) for s in found[sample].segments) if sample in found else 0
            if start != known:
                raise CorruptError(f"{self.path}: of sample {sample} of group {group}, a piece from {known} is missing")
            if not start:
                row = (
                    group,
                    sample,
                    *piece,
                    finish,
                    "",
                    None,
                    "error",
                    "{}",
                    "suspended",
                    "suspended",
                    transcript,
                    experts,
                    kept,
                )
                found[sample] = rollout_of_row(row, self.columns)
            else:
                found[sample] = extended(found[sample], last_of_piece(piece, experts, kept, self.columns), finish)
        return list(found.values())

    def pending(self) -> list[PendingSlot]:
        """What was issued and has no fate, by slot."""
        slots: dict[int, list[int]] = {}
        sql = "SELECT slot, group_id FROM prompts WHERE group_id NOT IN (SELECT group_id FROM fates) ORDER BY 1, 2"
        for slot, group in self._query(sql):
            slots.setdefault(slot, []).append(group)
        sql = "SELECT slot, count(*) FROM prompts JOIN fates USING (group_id) WHERE reason = 'spare' GROUP BY slot"
        spare = dict(self._query(sql))
        return [
            PendingSlot(slot, tuple(groups), self._oldest(groups), len(groups) + spare.get(slot, 0))
            for slot, groups in slots.items()
        ]

    def _oldest(self, groups: Sequence[int]) -> int | None:
        """The version of the oldest token that a model sampled for these groups."""
        found = set[int]()
        for table in ("rollouts", "suspended"):
            marks = ",".join("?" * len(groups))
            sql = f"SELECT chains, versions FROM {table} WHERE group_id IN ({marks})"
            for chains, blob in self._query(sql, tuple(groups)):
                found |= versions_of(chains, blob)
        return min((version for version in found if version >= 0), default=None)

    def issued(self) -> tuple[int, int]:
        """The next group id, and the next number of a slot."""
        ((group, slot),) = self._query("SELECT max(group_id), max(slot) FROM prompts")
        return (0, 0) if group is None else (group + 1, slot + 1)

    def prompt(self, group: int) -> Prompt | None:
        row = next(self._rows("prompts", "WHERE group_id = ?", (group,)), None)
        if row is None:
            return None
        return Prompt(row[1], messages_of_text(row[2]), json.loads(row[3]), json.loads(row[4]))

    def group(self, group: int) -> Group:
        """A group that was issued, with the rollouts that are complete."""
        prompt, rollouts = self.prompt(group), self.rollouts(group)
        assert prompt is not None, f"group {group} was never issued"
        greedy = next((r for r in rollouts if r.index == GREEDY), None)
        return Group(group, prompt, tuple(r for r in rollouts if r.index != GREEDY), greedy)

    def groups(self, step: int | None = None) -> list[tuple[int, int, str, str]]:
        """`(group, step, fate, reason)` of closed groups, by id; of one step, if given."""
        where, values = ("WHERE step = ?", (step,)) if step is not None else ("", ())
        return [(id, at, fate, why) for id, at, fate, why in self._rows("fates", f"{where} ORDER BY group_id", values)]

    def last_step(self) -> int:
        """The last step whose groups were trained; 0: none."""
        ((last,),) = self._query("SELECT coalesce(max(step), 0) FROM fates WHERE fate != 'skipped'")
        return int(last)

    def batch(self, step: int) -> tuple[list[Group], list[tuple[Group, str]]]:
        """What a step was trained on, and what was dropped from it with the reasons; by id."""
        trained, dropped = list[Group](), list[tuple[Group, str]]()
        for id, _, fate, reason in self.groups(step):
            if fate == "trained":
                trained.append(self.group(id))
            elif fate == "dropped":
                dropped.append((self.group(id), reason))
        return trained, dropped

    def samples(self) -> Iterator[tuple[int, int, int, float | None]]:
        """`(group, sample, step, value)` of the rollouts of groups that were trained or dropped; value None: it could
        not be judged."""
        yield from self._query(
            "SELECT r.group_id, r.sample, f.step, r.value FROM rollouts r JOIN fates f USING (group_id) "
            "WHERE f.fate != 'skipped' ORDER BY r.group_id, r.sample"
        )

    def pass_rates(self) -> dict[str, tuple[int, float]]:
        """By prompt id, the group in which it was asked and judged the last time, and its mean score. Groups that were
        called off do not count: some of their answers may be missing."""
        values: dict[str, tuple[int, list[float]]] = {}
        for prompt, group, sealed, *judged in self._query(
            "SELECT p.prompt_id, p.group_id, r.verdict_seal, r.sample, r.value, r.outcome, r.components, r.detail "
            "FROM prompts p JOIN rollouts r NOT INDEXED USING (group_id) "
            "WHERE r.value IS NOT NULL AND r.sample >= 0 AND NOT EXISTS "
            "(SELECT 1 FROM fates f WHERE f.group_id = p.group_id AND f.fate = 'skipped') ORDER BY p.group_id"
        ):
            if seal("verdict", group, *judged) != sealed:
                raise CorruptError(f"{self.path}: the verdict on sample {judged[0]} of group {group} is damaged")
            value = judged[1]
            if values.get(prompt, (-1,))[0] != group:
                values[prompt] = (group, [])
            values[prompt][1].append(value)
        return {prompt: (group, fmean(scores)) for prompt, (group, scores) in values.items()}

    def counts(self) -> dict[str, int]:
        names = ("prompts", "rollouts", "suspended", "fates")
        return {n: next(self._query(f"SELECT count(*) FROM {n}"))[0] for n in names}

    def files(self) -> set[str]:
        """Names of those beside this journal (`kitae.store.columns`) that it refers to."""
        rows = self._query("SELECT chains FROM rollouts UNION ALL SELECT chains FROM suspended")
        return {name for (chains,) in rows for name in files_of(chains)}

    def events(self) -> list[tuple[float, str, str]]:
        return [(at, kind, detail) for at, kind, detail in self._rows("events", "ORDER BY rowid")]

    # What a checkpoint may rely on.

    def claim(self, step: int = 0) -> str:
        """What this journal must still have where somebody goes on from this step: all that was trained up to it.
        Without a step, that it is this journal; an empty text: it is nobody's."""
        rows = self._query("SELECT seal FROM marks WHERE step = ?", (step,)) if step else self._identity()
        return next((sealed.hex() for (sealed,) in rows), "")

    def _identity(self) -> Iterator[tuple[Any, ...]]:
        return self._query("SELECT seal FROM events ORDER BY rowid LIMIT 1")

    def meets(self, claim: str, step: int) -> bool:
        """Whether it has what it had when a checkpoint of this step was saved."""
        return not claim or claim in (self.claim(step), self.claim())

    def check(self) -> None:
        """`CorruptError` if what was issued and what became of it is not what was written. Answers are compared where
        they are read."""
        for (problem,) in self._query("PRAGMA quick_check(1)"):
            if problem != "ok":
                raise CorruptError(f"{self.path} is damaged: {' '.join(problem.split())}")
        for table in ("meta", "events", "prompts", "fates"):
            deque(self._rows(table), 0)
        before = None
        for step, mark in list(self._query("SELECT * FROM marks ORDER BY step")):
            if mark != _mark(step, before, [each for (each,) in self._query(_SEALS, (step,))]):
                raise CorruptError(f"{self.path} is damaged: what step {step} was trained on is not all there")
            before = mark


class NoJournal(Journal):
    """The journal of a run that nobody will resume: what is written is forgotten, so nothing is found."""

    lasts = False

    def __init__(self) -> None:
        self.path = Path(":memory:")
        self.columns = column_files(Path(FOLDER))
        self._reader = sqlite3.connect(":memory:")
        self._reader.executescript(_SCHEMA)
        self._writer = None

    async def add_rollout(self, rollout: Rollout) -> None:
        pass  # without making a row of it first, which takes most of the time

    async def _write(self, statements: list[Statement], lasting: bool = False) -> None:
        pass


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection to a journal that writes nothing, neither into it nor beside it."""
    closed = not path.with_name(f"{path.name}-wal").exists()  # nobody writes: leave no files beside it
    address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if closed else ''}"
    try:
        connection = sqlite3.connect(address, uri=True, check_same_thread=False)
        if not connection.execute("PRAGMA schema_version").fetchone()[0]:  # says now if it is no database
            connection.close()
            raise StoreError(f"{path} is empty: the run ended while it was made")
        _check_columns(connection, path)
    except sqlite3.Error as error:
        raise _explain(error, path) from error
    files = column_files(path.parent.absolute() / FOLDER)
    connection.create_function("filed_text", 1, lambda chains: filed_text(chains, files), deterministic=True)
    connection.create_function("filed_length", 1, filed_length, deterministic=True)
    return connection


def _check_columns(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a journal whose rows this version cannot read."""
    for table, expected in _columns().items():
        names = tuple(name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})"))
        if names in ((), expected):
            continue
        connection.close()
        if names[-1] != expected[-1]:
            wanted, got = f"whose last column is {expected[-1]!r}", repr(names[-1])
        else:
            wanted, got = f"with the columns {', '.join(expected)}", ", ".join(names)
        raise StoreError(
            f"{path} must have {table} {wanted}, got {got}: another version of Kitae wrote it, which can read it"
        )


@cache
def _columns() -> dict[str, tuple[str, ...]]:
    """Of each table, as this version makes them."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_SCHEMA)
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {t: tuple(name for _, name, *_ in connection.execute(f"PRAGMA table_info({t})")) for t in names}


class _Mark:
    """`_mark` as an aggregate of SQL."""

    def __init__(self) -> None:
        self._seals: list[bytes] = []
        self._place: tuple[int, bytes | None] = 0, None

    def step(self, step: int, before: bytes | None, sealed: bytes) -> None:
        self._place = step, before
        self._seals.append(sealed)

    def finalize(self) -> bytes:
        return _mark(*self._place, self._seals)


def _mark(step: int, before: bytes | None, seals: Sequence[bytes]) -> bytes:
    """Of a step and all before it: `before` is the mark of the last of them."""
    return seal("mark", step, before, *sorted(seals))


def _unsealed(table: str, row: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The row without its seals; None: it is not what was written."""
    keys = _KEYS.get(table, 1)
    if table != "rollouts":
        found = row[:keys] + row[keys + 1 :]
        return found if seal(table, *found) == row[keys] else None
    found = row[:keys] + row[keys + 2 :]
    apart, judged = found[: _VERDICT.start] + found[_VERDICT.stop :], found[:keys] + found[_VERDICT]
    return found if (seal(table, *apart), seal("verdict", *judged)) == row[keys : keys + 2] else None


def _what(table: str, row: tuple[Any, ...]) -> str:
    keys = ", ".join(str(key) for key in row[: _KEYS.get(table, 1)])
    return f"the row {keys} of {table}"


def bound(sql: str, values: tuple[Any, ...]) -> tuple[Any, ...] | dict[str, Any]:
    """Values as sqlite3 takes them: numbered parameters (?1, ?2) are names to it, which from Python 3.14 on need a
    mapping."""
    return {str(number): value for number, value in enumerate(values, 1)} if "?1" in sql else values


def _commit(connection: sqlite3.Connection, statements: list[Statement]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for sql, values in statements:
            connection.execute(sql, bound(sql, values))
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


def _event(kind: str, detail: str) -> Statement:
    return _ADD_EVENT, (time.time(), kind, detail)


def _newest(chains: str, versions: bytes) -> float:
    """The newest version of a row that may be damaged: then nobody knows, and it is given up with the newest."""
    try:
        return max(versions_of(chains, versions), default=-1)
    except (ValueError, TypeError, LookupError):
        return float("inf")


def _suspend(r: Rollout) -> list[Statement]:
    beside = messages_to_text(r.transcript), experts_to_blob(r.segments), kept_to_blob(r.segments)
    piece = (r.group, r.index, 0, *rollout_to_row(r)[2:8], *beside)
    return [
        ("DELETE FROM suspended WHERE group_id = ? AND sample = ?", (r.group, r.index)),
        (_ADD_PIECE, piece),
    ]


def _extend(r: Rollout, known: int) -> list[Statement]:
    """A piece with the tokens of the last turn that come after the first `known` ones."""
    *before, last = r.segments
    start = sum(len(s.tokens) for s in before) + known
    piece = (r.group, r.index, start, b"", json.dumps([[0, [shape_of(last)]]]), *arrays_of([last]), r.finish, "")
    return [(_ADD_PIECE, (*piece, experts_to_blob([last]), kept_to_blob([last])))]
