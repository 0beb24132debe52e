"""Pages of rollouts: queries that read no more of the journal than they need.

A row of the journal is wide: tokens, log-probs, text. The narrow columns behind them are in the index `rollouts_brief`,
so that filters and orders read only the index; lengths are in the heads of the rows. A search in texts must read them.
It works in pieces of `SEARCH_SECONDS` each, and returns where to continue.
"""

import json
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitae.data.data_files import clip
from kitae.errors import StoreError
from kitae.store.journal import BRIEF, LENGTH, TEXT, bound, open_reader
from kitae.ui.records import Brief, ErrorKind, ErrorList, RolloutPage

PAGE = 50
SEARCH_SECONDS = 0.12
_EXCERPT = 240  # characters of a text in a list
_EXAMPLES = 3
_MAPPED = 2**32  # bytes of the journal
_PIECE = 4000  # keys that are put in order for one piece of a search
_AT_LEAST = 200  # rollouts that a piece of a search looks at
_LAST = 1e300  # sorts behind every reward
_MOST_ERRORS = 5000  # the last ones; reasons must be read one by one
_QUOTED_OR_NUMBER = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")

ORDERS = {
    "newest": "",
    "oldest": "",
    "best": f"coalesce(-r.value, {_LAST})",
    "worst": f"coalesce(r.value, {_LAST})",
    "longest": "-n",
    "shortest": "n",
}
"""The expression by which rollouts are ordered, smallest first, before the order of groups; empty: groups alone."""

FATES = {
    "trained": "IN (SELECT group_id FROM fates WHERE fate = 'trained')",
    "dropped": "IN (SELECT group_id FROM fates WHERE fate = 'dropped')",
    "skipped": "IN (SELECT group_id FROM fates WHERE fate = 'skipped')",
    "pending": "NOT IN (SELECT group_id FROM fates)",
    "closed": "IN (SELECT group_id FROM fates WHERE fate != 'skipped')",
    "kept": "NOT IN (SELECT group_id FROM fates WHERE fate = 'skipped')",
}
"""The fates of a group as conditions on its id. closed: trained or dropped; kept: trained, dropped or pending."""

Key = tuple[int, int]
Place = tuple[float, int, int]  # what a rollout is ordered by, and its key


def whole(text: str) -> int:
    """A number that the journal can hold; `ValueError` for any other text."""
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"a number of 64 bits is needed, got {clip(text)}")
    return number


@dataclass(frozen=True, slots=True)
class PageCursor:
    """The rollout after which to continue, and its position: `PageCursor(-1.0, group=17, sample=3, position=50)`.

    A page finds its place by the values of its last row, not by counting: every page takes as long as the first.
    """

    lead: float
    group: int
    sample: int
    position: int

    def __str__(self) -> str:
        return f"{self.lead!r}_{self.group}_{self.sample}_{self.position}"

    @staticmethod
    def read(text: str) -> "PageCursor":
        try:
            lead, group, sample, position = text.split("_")
            return PageCursor(float(lead), whole(group), whole(sample), whole(position))
        except ValueError:
            got = clip(repr(text))
            raise StoreError(f"a position in a list is what the page before gave as its next, got {got}") from None


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts, in which order: `RolloutFilter(step=3, reward_max=0.5, finish="length", order="longest")`.

    length: tokens after the prompt, those of an environment included. verdict: "error", "scored" or "". fate: one of
    `FATES`, or "". prompt: its id.
    """

    step: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: int | None = None
    length_max: int | None = None
    finish: str = ""
    verdict: str = ""
    status: str = ""
    fate: str = ""
    prompt: str = ""
    text: str = ""
    order: str = "newest"

    def __post_init__(self) -> None:
        for name, value, known in (("order", self.order, ORDERS), ("fate", self.fate or "kept", FATES)):
            if value not in known:
                raise StoreError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    @property
    def needs_length(self) -> bool:
        return self.length_min is not None or self.length_max is not None or self.order in ("longest", "shortest")

    @property
    def needs_brief(self) -> bool:
        """Whether a filter or the order uses a column that only the index has."""
        bounds = (self.reward_min, self.reward_max)
        return (
            bounds != (None, None) or self.order in ("best", "worst") or bool(self.finish + self.verdict + self.status)
        )


@contextmanager
def reading(run: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the journal of a run. Each request has its own, because the run may end or go on in between."""
    connection = open_reader(run / "journal.sqlite")
    try:
        connection.execute(f"PRAGMA mmap_size = {_MAPPED}")  # pages are looked at, not copied, into a cache that is new
        yield connection
    except sqlite3.Error as error:
        raise StoreError(f"{run / 'journal.sqlite'}: {error}") from error
    finally:
        connection.close()


def rollouts(run: Path, wanted: RolloutFilter, after: PageCursor | None = None, limit: int = PAGE) -> RolloutPage:
    start, deadline = after.position if after else 0, time.monotonic() + SEARCH_SECONDS
    with reading(run) as db:
        source, values = _source(db, wanted)
        total = int(db.execute(f"SELECT count(*) {source}", values).fetchone()[0])
        ordered = _ordered(db, wanted.order, source, values, after, _PIECE if wanted.text else limit)
        found, end = _search(db, wanted.text, ordered, limit, deadline) if wanted.text else (ordered, len(ordered))
        rows = _briefs(db, [(group, sample) for _, group, sample in found])
    is_last = start + end >= total or not end
    following = None if is_last else str(PageCursor(*ordered[end - 1], start + end))
    return RolloutPage(rows, start, following, total, start + end if wanted.text else total)


def all_rollouts(run: Path, wanted: RolloutFilter) -> Iterator[tuple[Brief, int]]:
    """The rows of all pages, each with the number of rollouts that pass all filters except the text."""
    after: PageCursor | None = None
    while True:
        page = rollouts(run, wanted, after)
        yield from ((row, page.total) for row in page.rows)
        if page.next is None:
            return
        after = PageCursor.read(page.next)


def count_groups(run: Path, wanted: RolloutFilter) -> int:
    """The number of groups that have a rollout which passes all filters except the text."""
    with reading(run) as db:
        source, values = _source(db, wanted)
        return int(db.execute(f"SELECT count(DISTINCT r.group_id) {source}", values).fetchone()[0])


def _ordered(
    db: sqlite3.Connection, order: str, source: str, values: Sequence[Any], after: PageCursor | None, limit: int
) -> list[Place]:
    """The order value and the key of the next `limit` rollouts behind a cursor."""
    lead, values = ORDERS[order] or "0.0", list(values)
    sense, sign = (">", "") if order == "oldest" else ("<", "-")
    if after is not None:
        bound = f"({lead}, {sign}r.group_id, r.sample) > (?, {sign}?, ?)"
        near = "" if ORDERS[order] else f"r.group_id {sense}= ? AND "  # so that the index begins there
        source += f" {'AND' if 'WHERE' in source else 'WHERE'} {near}{bound}"
        values += [*([] if ORDERS[order] else [after.group]), after.lead, after.group, after.sample]
    group = "r.group_id" if order == "oldest" else "r.group_id DESC"
    by = f"{ORDERS[order]}, {group}" if ORDERS[order] else group
    sql = f"SELECT {lead}, r.group_id, r.sample {source} ORDER BY {by}, r.sample LIMIT ?"
    return list(db.execute(sql, (*values, limit)))


def _source(db: sqlite3.Connection, wanted: RolloutFilter) -> tuple[str, list[Any]]:
    """The FROM and WHERE clauses, and the values of their parameters."""
    tables, conditions, values = brief_table(db), list[str](), list[Any]()
    if wanted.needs_length:
        lengths = f"(SELECT group_id, sample, {LENGTH} AS n FROM rollouts NOT INDEXED)"
        joined = f"{lengths} w CROSS JOIN {tables} ON r.group_id = w.group_id AND r.sample = w.sample"
        tables = joined if wanted.needs_brief else f"{lengths} r"
    for condition, value in (
        ("r.value >= ?", wanted.reward_min),
        ("r.value <= ?", wanted.reward_max),
        ("n >= ?", wanted.length_min),
        ("n <= ?", wanted.length_max),
        ("r.finish = ?", wanted.finish or None),
        ("r.outcome = ?", wanted.verdict or None),
        ("r.status = ?", wanted.status or None),
        ("r.group_id IN (SELECT group_id FROM fates WHERE step = ?)", wanted.step),
        ("r.group_id IN (SELECT group_id FROM prompts WHERE prompt_id = ?)", wanted.prompt or None),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if wanted.fate:
        conditions.append(f"r.group_id {FATES[wanted.fate]}")
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    if wanted.needs_length and wanted.needs_brief:  # the one slow walk, done once for the count and the page
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute(f"CREATE TEMP TABLE found AS SELECT r.group_id, r.sample, r.value, n FROM {tables} {where}", values)
        return "FROM found r", []
    return f"FROM {tables} {where}", values


def brief_table(db: sqlite3.Connection) -> str:
    """The table of rollouts as `r`, read through its narrow index; without the index it is read in full."""
    known = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = ?", (BRIEF,)).fetchone()
    return f"rollouts r INDEXED BY {BRIEF}" if known else "rollouts r"


def _search(
    db: sqlite3.Connection, text: str, ordered: Sequence[Place], limit: int, deadline: float
) -> tuple[list[Place], int]:
    """The rollouts whose text, prompt or verdict contains the text, in order, and how many were searched. At least
    `_AT_LEAST` are searched, even after the deadline."""
    pattern, written = _pattern(text), _pattern(json.dumps(text)[1:-1])
    holds = " OR ".join(
        [f"{column} LIKE ?3 ESCAPE '\\'" for column in (TEXT, "r.detail")]
        + [_SAID.format(column=column) for column in ("p.messages", "r.transcript")]
    )
    one = "SELECT 1 FROM rollouts r JOIN prompts p USING (group_id) WHERE r.group_id = ?1 AND r.sample = ?2"
    sql = f"{one} AND ({holds})"
    found = list[Place]()
    for count, row in enumerate(ordered):
        if len(found) == limit or (count >= _AT_LEAST and time.monotonic() > deadline):
            return found, count
        if db.execute(sql, bound(sql, (*row[1:], pattern, written))).fetchone():
            found.append(row)
    return found, len(ordered)


_SAID = (
    "({column} LIKE ?4 ESCAPE '\\' AND EXISTS (SELECT 1 FROM json_tree({column}) t WHERE t.type = 'text' AND "
    "t.key NOT IN ('role', 'id', 'call_id', 'type') AND t.atom LIKE ?3 ESCAPE '\\'))"
)
"""A condition on messages, which are stored as JSON: it compares the texts in them. The first part is a fast test."""


def _pattern(text: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", text) + "%"


_BRIEF_ROW = f"""
SELECT r.group_id, r.sample, f.step, coalesce(f.fate, ''), coalesce(f.reason, ''), r.value, r.outcome, r.finish,
    r.status, r.chains, coalesce(p.prompt_id, ''), coalesce(p.messages, '[]'),
    substr(coalesce(p.reference, ''), 1, ?3), substr({TEXT}, 1, ?3), substr(r.detail, 1, ?3)
FROM rollouts r LEFT JOIN fates f USING (group_id) LEFT JOIN prompts p USING (group_id)
WHERE r.group_id = ?1 AND r.sample = ?2
"""


def _briefs(db: sqlite3.Connection, keys: Sequence[Key]) -> list[Brief]:
    return [_brief(db.execute(_BRIEF_ROW, bound(_BRIEF_ROW, (*key, _EXCERPT))).fetchone()) for key in keys]


def _brief(row: tuple[Any, ...]) -> Brief:
    group, sample, step, fate, reason, value, outcome, finish, status, chains, prompt_id, messages, *texts = row
    reference, text, detail = texts
    return Brief(
        group=group,
        sample=sample,
        step=step,
        fate=fate,
        reason=reason,
        value=value,
        outcome=outcome,
        finish=finish,
        status=status,
        length=model_length(chains),
        prompt_id=prompt_id,
        question=question(messages),
        reference=_said(reference),
        text=text,
        detail=detail,
    )


def _said(reference: str) -> str:
    """A reference as a reader knows it: the text that its JSON is, or the JSON; "": there is none."""
    try:
        found = json.loads(reference)
    except ValueError:  # cut off
        return reference.removeprefix('"')
    return "" if found is None else found if isinstance(found, str) else reference


def model_length(chains: str) -> int:
    """The number of tokens that the model sampled, from the shape of a rollout in the journal."""
    return sum(length for _, segments, *_ in json.loads(chains) for source, length, *_ in segments if source == "model")


def question(messages: str) -> str:
    """The last message before the turn of the model, cut to an excerpt."""
    said = json.loads(messages)
    return str(said[-1]["content"])[:_EXCERPT] if said else ""


def errors(run: Path) -> ErrorList:
    """The answers that could not be judged, by reason, whatever numbers and quotations the reason has."""
    kinds: dict[str, list[tuple[int, int, int | None, str]]] = {}
    with reading(run) as db:
        keys = list(
            db.execute(
                f"SELECT r.group_id, r.sample, f.step FROM {brief_table(db)} LEFT JOIN fates f USING (group_id) "
                "WHERE r.outcome = 'error' ORDER BY r.group_id, r.sample"
            )
        )
        for group, sample, step in keys[-_MOST_ERRORS:]:
            where = "SELECT detail FROM rollouts WHERE group_id = ? AND sample = ?"
            detail = str(db.execute(where, (group, sample)).fetchone()[0])
            kinds.setdefault(_QUOTED_OR_NUMBER.sub("#", detail[:_EXCERPT]), []).append((group, sample, step, detail))
        found = [_error_kind(db, rows) for rows in kinds.values()]
    return ErrorList(len(keys), sorted(found, key=lambda kind: -kind.count))


def _error_kind(db: sqlite3.Connection, rows: Sequence[tuple[int, int, int | None, str]]) -> ErrorKind:
    steps = [step for _, _, step, _ in rows if step is not None]
    examples = _briefs(db, [(group, sample) for group, sample, _, _ in rows[-_EXAMPLES:]])
    return ErrorKind(rows[-1][3], len(rows), min(steps, default=None), max(steps, default=None), examples)
