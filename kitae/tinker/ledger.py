"""What a training server must know after it was killed: sessions, models, requests with their answers, saved weights.

One SQLite file. A request is committed before its client is told that it was taken, and an answer before it is handed
out; a commit survives a killed process, though not a loss of power. Bodies are kept as long as they may be computed
again: those of a model until it was saved after them, those of samples until they are answered.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists sessions (id text primary key, at real not null, about text not null);
create table if not exists models (id text primary key, session text not null, at real not null, about text not null,
    saved integer not null default 0);
create table if not exists requests (id text primary key, owner text not null, number integer not null,
    kind text not null, at real not null, body blob, answer blob, form text not null default '');
create index if not exists by_owner on requests (owner, number);
create table if not exists samplers (id text primary key, session text not null, at real not null, path text not null);
create table if not exists saved (path text primary key, model text not null, kind text not null, at real not null,
    bytes integer not null, expires real, about text not null);
"""
PROTO, JSON, FAILED = "proto", "json", "failed"
"""Forms of an answer; a request without one is not answered yet."""
_KEPT = 1800.0  # seconds that an answer stays after it was given


@dataclass(frozen=True, slots=True)
class TinkerRequest:
    """`TinkerRequest("s:train:0/3", "s:train:0", 3, "optim_step", body)`: a request as it was sent."""

    id: str
    owner: str
    number: int
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """`Answered("json", b"{…}")`."""

    form: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """`SavedWeights("tinker://s:train:0/weights/a", "s:train:0", "training", at, bytes=1200)`."""

    path: str
    model: str
    kind: str
    at: float
    bytes: int
    expires: float | None = None
    about: Mapping[str, str] | None = None


class RequestLedger:
    """Synchronous; used by one thread."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(folder / "ledger.db", isolation_level=None)
        self._db.executescript("pragma journal_mode = wal; pragma synchronous = normal;" + _TABLES)

    def close(self) -> None:
        self._db.close()

    def fact(self, name: str, value: str | None = None) -> str:
        """A text that stays the same; value: what it is if nobody asked before, None: a random one."""
        value = secrets.token_hex(16) if value is None else value
        self._db.execute("insert or ignore into facts values (?, ?)", (name, value))
        return str(self._db.execute("select value from facts where name = ?", (name,)).fetchone()[0])

    def set_fact(self, name: str, value: str) -> None:
        self._db.execute("insert or replace into facts values (?, ?)", (name, value))

    def add_session(self, name: str, about: Mapping[str, Any]) -> None:
        self._db.execute("insert or ignore into sessions values (?, ?, ?)", (name, time.time(), json.dumps(about)))

    def sessions(self) -> list[str]:
        return [name for (name,) in self._db.execute("select id from sessions order by at desc")]

    def session(self, name: str) -> dict[str, Any] | None:
        row = self._db.execute("select about from sessions where id = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def add_model(self, name: str, session: str, about: Mapping[str, Any]) -> None:
        values = name, session, time.time(), json.dumps(about)
        self._db.execute("insert or replace into models (id, session, at, about) values (?, ?, ?, ?)", values)

    def forget_model(self, model: str) -> None:
        self._db.execute("delete from models where id = ?", (model,))
        self._db.execute("delete from requests where owner = ?", (model,))

    def models(self, session: str | None = None) -> dict[str, dict[str, Any]]:
        """What is known of each, the newest first."""
        found = self._db.execute("select id, session, at, about, saved from models order by at desc")
        return {
            name: {**json.loads(about), "session": of, "at": at, "saved": saved}
            for name, of, at, about, saved in found
            if session in (None, of)
        }

    def note_saved(self, model: str, number: int) -> None:
        """The model was saved after this request: it and those before will not be computed again."""
        with self._db:
            self._db.execute("begin")
            self._db.execute("update models set saved = ? where id = ?", (number, model))
            self._db.execute("update requests set body = null where owner = ? and number <= ?", (model, number))
        self._forget_old()

    def _forget_old(self) -> None:
        """Answers that clients have had the time to fetch, of requests that will not be computed again."""
        self._db.execute(
            "delete from requests where body is null and form != '' and at < ?", (time.time() - _KEPT,)
        )  # fmt: skip

    def take(self, asked: TinkerRequest) -> bool:
        """Note a request; False where it was taken before."""
        values = asked.id, asked.owner, asked.number, asked.kind, time.time(), asked.body
        found = self._db.execute(
            "insert or ignore into requests (id, owner, number, kind, at, body) values (?, ?, ?, ?, ?, ?)", values
        )
        return found.rowcount > 0

    def answer(self, request: str, answered: Answered, *, again: bool) -> None:
        """again: whether the request may have to be computed again, so that its body stays."""
        keep = "" if again else ", body = null"
        self._db.execute(
            f"update requests set answer = ?, form = ?, at = ?{keep} where id = ?",
            (answered.body, answered.form, time.time(), request),
        )

    def answered(self, request: str) -> Answered | None:
        """None: not yet, or the request is not known."""
        row = self._db.execute("select form, answer from requests where id = ?", (request,)).fetchone()
        return Answered(row[0], row[1]) if row and row[0] else None

    def known(self, request: str) -> bool:
        return self._db.execute("select 1 from requests where id = ?", (request,)).fetchone() is not None

    def kind(self, request: str) -> str:
        return str(self._db.execute("select kind from requests where id = ?", (request,)).fetchone()[0])

    def unfinished(self) -> Iterator[tuple[TinkerRequest, bool]]:
        """Requests whose bodies are kept, in order, and whether each is answered."""
        rows = self._db.execute(
            "select id, owner, number, kind, body, form != '' from requests where body is not null "
            "order by owner, number"
        ).fetchall()
        for name, owner, number, kind, body, done in rows:
            yield TinkerRequest(name, owner, number, kind, body), bool(done)

    def last_number(self, owner: str) -> int:
        row = self._db.execute("select max(number) from requests where owner = ?", (owner,)).fetchone()
        return int(row[0] or 0)

    def add_sampler(self, name: str, session: str, path: str) -> None:
        """path: of the weights; "": the base model."""
        values = name, session, time.time(), path
        self._db.execute("insert or replace into samplers values (?, ?, ?, ?)", values)

    def sampler(self, name: str) -> str | None:
        row = self._db.execute("select path from samplers where id = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def samplers(self, session: str) -> list[str]:
        return [name for (name,) in self._db.execute("select id from samplers where session = ?", (session,))]

    def add_saved(self, saved: SavedWeights) -> None:
        about = json.dumps(saved.about or {})
        values = saved.path, saved.model, saved.kind, saved.at, saved.bytes, saved.expires, about
        self._db.execute("insert or replace into saved values (?, ?, ?, ?, ?, ?, ?)", values)

    def saved(self, path: str) -> SavedWeights | None:
        row = self._db.execute("select * from saved where path = ?", (path,)).fetchone()
        return None if row is None else _saved(row)

    def all_saved(self, model: str | None = None) -> list[SavedWeights]:
        """The newest first."""
        rows = self._db.execute("select * from saved order by at desc")
        return [_saved(row) for row in rows if model in (None, row[1])]

    def forget_saved(self, path: str) -> None:
        self._db.execute("delete from saved where path = ?", (path,))


def _saved(row: Sequence[Any]) -> SavedWeights:
    path, model, kind, at, size, expires, about = row
    return SavedWeights(path, model, kind, at, size, expires, json.loads(about))
