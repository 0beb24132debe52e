"""The history of each training prompt: its mean score at every visit, and the kind of prompt that this makes it."""

import json
import sqlite3
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kitae.errors import KitaeError, StoreError
from kitae.ui.queries import brief_table, question, reading
from kitae.ui.records import PromptHistory, PromptPage, Visit

PAGE = 50
KINDS = ("flipping", "dead", "learning", "mastered")
_FLIP = 0.25  # a rate that moves by this much has moved
_DEAD_VISITS = 2  # a prompt is not given up after one try

Visits = dict[str, list[tuple[int, int | None, float]]]


def count_rollouts(run: Path) -> int:
    try:
        with reading(run) as db:
            return int(db.execute(f"SELECT count(*) FROM {brief_table(db)}").fetchone()[0])
    except KitaeError:  # damaged, or being made
        return 0


def history(run: Path, kind: str = "", at: int = 0, limit: int = PAGE) -> PromptPage:
    """The prompts of one kind, or all. Those that were asked most often come first."""
    if kind and kind not in KINDS:
        raise StoreError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    with reading(run) as db:
        visits = _visits(db)
        kinds = {prompt: kind_of([rate for _, _, rate in found]) for prompt, found in visits.items()}
        wanted = [prompt for prompt in visits if not kind or kinds[prompt] == kind]
        wanted.sort(key=lambda prompt: (-len(visits[prompt]), prompt))
        rows = [
            PromptHistory(
                prompt,
                _question(db, visits[prompt][-1][0]),
                kinds[prompt],
                [Visit(*visit) for visit in visits[prompt]],
            )
            for prompt in wanted[at : at + limit]
        ]
    counts = {name: sum(found == name for found in kinds.values()) for name in KINDS}
    return PromptPage(rows, at, len(wanted), counts)


def last_rates(run: Path) -> dict[str, float]:
    """The mean score of each prompt at its last visit; empty where the journal cannot be read."""
    try:
        with reading(run) as db:
            return {prompt: visits[-1][2] for prompt, visits in _visits(db).items()}
    except KitaeError:
        return {}


def kind_of(rates: Sequence[float]) -> str:
    """mastered: all right the last time; dead: never a point in several visits; flipping: it rose and fell, each
    time by a quarter or more."""
    moves = [now - then for then, now in pairwise(rates)]
    turned = [move for move in moves if abs(move) >= _FLIP]
    if any(a * b < 0 for a, b in pairwise(turned)):
        return "flipping"
    if rates[-1] >= 1:
        return "mastered"
    return "dead" if len(rates) >= _DEAD_VISITS and max(rates) <= 0 else "learning"


def _visits(db: sqlite3.Connection) -> Visits:
    """The group, step and mean score of each visit, in order, by prompt. Greedy answers do not count."""
    rates = dict(
        db.execute(
            f"SELECT r.group_id, avg(r.value) FROM {brief_table(db)} WHERE r.value IS NOT NULL AND r.sample >= 0 "
            "GROUP BY r.group_id"
        )
    )
    found: Visits = {}
    asked = "SELECT p.prompt_id, p.group_id, f.step FROM prompts p LEFT JOIN fates f USING (group_id) ORDER BY 2"
    for prompt, group, step in db.execute(asked):
        if group in rates:
            found.setdefault(prompt, []).append((group, step, rates[group]))
    return found


def _question(db: sqlite3.Connection, group: int) -> str:
    row = db.execute("SELECT messages FROM prompts WHERE group_id = ?", (group,)).fetchone()
    return question(row[0] if row else json.dumps([]))
