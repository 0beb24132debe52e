"""Rollouts by page: questions to the journal that read no more of it than they must.

A row of the journal is wide: tokens, log-probs, text. The narrow columns behind them are in the index `rollouts_brief`,
so that filters and orders read that alone; lengths are in the heads of the rows. What a text contains can only be found
by reading it: such a search is done in pieces, each as long as `SEARCH_SECONDS`, and says where to go on.
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

from kitae.errors import StoreError
from kitae.store.journal import BRIEF, LENGTH, TEXT, open_reader
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
"""By what rollouts are ordered, smallest first, before the order of groups; nothing: by that alone."""

FATES = {
    "trained": "IN (SELECT group_id FROM fates WHERE fate = 'trained')",
    "dropped": "IN (SELECT group_id FROM fates WHERE fate = 'dropped')",
    "skipped": "IN (SELECT group_id FROM fates WHERE fate = 'skipped')",
    "pending": "NOT IN (SELECT group_id FROM fates)",
    "closed": "IN (SELECT group_id FROM fates WHERE fate != 'skipped')",
    "kept": "NOT IN (SELECT group_id FROM fates WHERE fate = 'skipped')",
}
"""What may have become of a group, and which ones that is. closed: trained or dropped; kept: that, or pending."""

Key = tuple[int, int]
Place = tuple[float, int, int]  # what a rollout is ordered by, and its key


@dataclass(frozen=True, slots=True)
class PageCursor:
    """Behind which rollout to go on, and how many came before: `PageCursor(-1.0, group=17, sample=3, position=50)`.

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
            return PageCursor(float(lead), int(group), int(sample), int(position))
        except ValueError:
            raise StoreError(f"a position in a list is what the page before gave as its next, got {text!r}") from None


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
        """Some filter or the order is by what only the index has."""
        bounds = (self.reward_min, self.reward_max)
        return (
            bounds != (None, None) or self.order in ("best", "worst") or bool(self.finish + self.verdict + self.status)
        )


@contextmanager
def reading(run: Path) -> Iterator[sqlite3.Connection]:
    """The journal of a run as it is now. A connection for each request: a run may end, or go on, in between."""
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
    """Page after page, each with how many pass all filters but the text."""
    after: PageCursor | None = None
    while True:
        page = rollouts(run, wanted, after)
        yield from ((row, page.total) for row in page.rows)
        if page.next is None:
            return
        after = PageCursor.read(page.next)


def count_groups(run: Path, wanted: RolloutFilter) -> int:
    """How many groups have a rollout that passes all filters but the text."""
    with reading(run) as db:
        source, values = _source(db, wanted)
        return int(db.execute(f"SELECT count(DISTINCT r.group_id) {source}", values).fetchone()[0])


def _ordered(
    db: sqlite3.Connection, order: str, source: str, values: Sequence[Any], after: PageCursor | None, limit: int
) -> list[Place]:
    """What a rollout is ordered by, and its key; so many of them behind a cursor."""
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
    """FROM and WHERE, and the values of their question marks."""
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
    """The table of rollouts as `r`, by its narrow index; a journal that was begun without it is read in full."""
    known = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = ?", (BRIEF,)).fetchone()
    return f"rollouts r INDEXED BY {BRIEF}" if known else "rollouts r"


def _search(
    db: sqlite3.Connection, text: str, ordered: Sequence[Place], limit: int, deadline: float
) -> tuple[list[Place], int]:
    """Of rollouts in order, those whose text, prompt or verdict holds the words, and how many were looked at: at least
    a few of them, however late it is."""
    pattern, written = _pattern(text), _pattern(json.dumps(text)[1:-1])
    holds = " OR ".join(
        [f"{column} LIKE ?3 ESCAPE '\\'" for column in (TEXT, "r.detail")]
        + [_SAID.format(column=column) for column in ("p.messages", "r.transcript")]
    )
    one = "SELECT 1 FROM rollouts r JOIN prompts p USING (group_id) WHERE r.group_id = ?1 AND r.sample = ?2"
    found = list[Place]()
    for count, row in enumerate(ordered):
        if len(found) == limit or (count >= _AT_LEAST and time.monotonic() > deadline):
            return found, count
        if db.execute(f"{one} AND ({holds})", (*row[1:], pattern, written)).fetchone():
            found.append(row)
    return found, len(ordered)


_SAID = (
    "({column} LIKE ?4 ESCAPE '\\' AND EXISTS (SELECT 1 FROM json_tree({column}) t WHERE t.type = 'text' AND "
    "t.key NOT IN ('role', 'id', 'call_id', 'type') AND t.atom LIKE ?3 ESCAPE '\\'))"
)
"""Messages are kept as JSON: what was said in them, not how they are written down. Most are refused at first sight."""


def _pattern(text: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", text) + "%"


_BRIEF_ROW = f"""
SELECT r.group_id, r.sample, f.step, coalesce(f.fate, ''), coalesce(f.reason, ''), r.value, r.outcome, r.finish,
    r.status, r.chains, coalesce(p.prompt_id, ''), coalesce(p.messages, '[]'), substr({TEXT}, 1, ?3),
    substr(r.detail, 1, ?3)
FROM rollouts r LEFT JOIN fates f USING (group_id) LEFT JOIN prompts p USING (group_id)
WHERE r.group_id = ?1 AND r.sample = ?2
"""


def _briefs(db: sqlite3.Connection, keys: Sequence[Key]) -> list[Brief]:
    return [_brief(db.execute(_BRIEF_ROW, (*key, _EXCERPT)).fetchone()) for key in keys]


def _brief(row: tuple[Any, ...]) -> Brief:
    group, sample, step, fate, reason, value, outcome, finish, status, chains, prompt_id, messages, text, detail = row
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
        text=text,
        detail=detail,
    )


def model_length(chains: str) -> int:
    """Tokens that the model sampled, of a rollout's shape as the journal has it."""
    return sum(length for _, segments in json.loads(chains) for source, length, *_ in segments if source == "model")


def question(messages: str) -> str:
    """The last thing that was said before the model's turn, cut to an excerpt."""
    said = json.loads(messages)
    return str(said[-1]["content"])[:_EXCERPT] if said else ""


def errors(run: Path) -> ErrorList:
    """Answers that could not be judged, by reason; numbers and quotations in it make no other one."""
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
