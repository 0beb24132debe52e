"""Rollouts by page: filters, orders, cursors, searches, errors; and that the narrow index is what is read."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from written_runs import WrittenRun, rollout

from kitae.errors import StoreError
from kitae.store.journal import BRIEF
from kitae.types import Message, Prompt, ToolCall
from kitae.ui import queries
from kitae.ui.queries import PageCursor, RolloutFilter, errors, reading, rollouts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """3 steps of 2 groups of 4; rewards 0, 1, 0.5, and one that could not be judged."""
    made = WrittenRun(tmp_path)
    for _ in range(3):
        made.step([[0.0, 1.0, 0.5, None], [1.0, 1.0, 0.0, 0.0]])
    return made.finish()


def keys(run: Path, wanted: RolloutFilter) -> list[tuple[int, int]]:
    return [(row.group, row.sample) for row in rollouts(run, wanted).rows]


def test_the_newest_group_comes_first_and_its_samples_in_order(run: Path) -> None:
    page = rollouts(run, RolloutFilter())
    assert [(row.group, row.sample) for row in page.rows[:5]] == [(5, 0), (5, 1), (5, 2), (5, 3), (4, 0)]
    assert (page.total, page.next, page.at) == (24, None, 0)
    first = page.rows[0]
    assert (first.step, first.fate, first.value, first.length) == (3, "trained", 1.0, 3)
    assert (first.prompt_id, first.question, first.text) == ("reverse/2", "Reverse 5", "answer 5.0")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (RolloutFilter(step=2, finish="length"), {(2, 3), (3, 3)}),
        (RolloutFilter(reward_min=0.4, reward_max=0.6), {(0, 2), (2, 2), (4, 2)}),
        (RolloutFilter(verdict="error"), {(0, 3), (2, 3), (4, 3)}),
        (RolloutFilter(length_min=6), {(g, 3) for g in range(6)}),
        (RolloutFilter(length_max=3, reward_max=0), {(0, 0), (2, 0), (4, 0)}),
        (RolloutFilter(length_min=4, length_max=4, step=1), {(0, 1), (1, 1)}),
        (RolloutFilter(text="answer 3."), {(3, i) for i in range(4)}),
        (RolloutFilter(text="REVERSE 3"), {(3, i) for i in range(4)}),
        (RolloutFilter(text="exit 4"), {(4, 3)}),
        (RolloutFilter(text="%"), set()),
        (RolloutFilter(text="_nswer"), set()),
        (RolloutFilter(fate="pending"), set()),
        (RolloutFilter(fate="dropped"), set()),
        (
            RolloutFilter(fate="trained", reward_min=1),
            {(0, 1), (2, 1), (4, 1), *((g, i) for g in (1, 3, 5) for i in (0, 1))},
        ),
    ],
)
def test_filters_keep_what_they_say(run: Path, wanted: RolloutFilter, expected: set[tuple[int, int]]) -> None:
    found = keys(run, wanted)
    assert set(found) == expected and len(found) == len(expected)


@pytest.mark.parametrize("filters", [{}, {"text": "answer"}, {"length_min": 4, "reward_min": 0.0}])
@pytest.mark.parametrize("order", queries.ORDERS)
def test_pages_are_the_whole_cut_into_pieces(run: Path, order: str, filters: dict[str, object]) -> None:
    wanted = RolloutFilter(order=order, **filters)  # type: ignore[arg-type]
    whole = keys(run, wanted)
    found, after = list[tuple[int, int]](), None
    for _ in range(len(whole) + 1):
        page = rollouts(run, wanted, after, limit=5)
        assert page.at == len(found)
        found += [(row.group, row.sample) for row in page.rows]
        if page.next is None:
            break
        after = PageCursor.read(page.next)
    assert found == whole and len(set(whole)) == len(whole) > 5


def test_orders_are_by_what_they_say(run: Path) -> None:
    def column(order: str, name: str) -> list[float | None]:
        return [getattr(row, name) for row in rollouts(run, RolloutFilter(order=order)).rows]

    best, worst = column("best", "value"), column("worst", "value")
    assert best == [*[1.0] * 9, *[0.5] * 3, *[0.0] * 9, *[None] * 3]
    assert worst == [*[0.0] * 9, *[0.5] * 3, *[1.0] * 9, *[None] * 3]
    assert column("longest", "length") == sorted(column("longest", "length"), reverse=True)
    assert column("shortest", "length") == sorted(column("shortest", "length"))
    assert column("oldest", "group") == sorted(column("oldest", "group"))


def test_a_search_that_runs_out_of_time_says_where_to_go_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(queries, "_AT_LEAST", 7)
    page = rollouts(run, RolloutFilter(text="answer 0."))
    assert page.rows == [] and page.searched == 7 and page.next is not None
    found, after = [], page.next
    while after is not None:
        page = rollouts(run, RolloutFilter(text="answer 0."), PageCursor.read(after))
        found += [row.sample for row in page.rows]
        after = page.next
    assert found == [0, 1, 2, 3] and page.searched == page.total == 24


def test_filters_and_orders_read_the_narrow_index_alone(run: Path) -> None:
    with reading(run) as db:
        source, values = queries._source(db, RolloutFilter(step=1, reward_min=0, finish="stop", verdict="scored"))
        plan = str(list(db.execute(f"EXPLAIN QUERY PLAN SELECT count(*), sum(value) {source}", values)))
    assert f"COVERING INDEX {BRIEF}" in plan


def test_a_journal_without_the_index_is_read_all_the_same(tmp_path: Path) -> None:
    import sqlite3

    made = WrittenRun(tmp_path).step([[0.0, 1.0]])
    run = made.finish()
    with sqlite3.connect(run / "journal.sqlite") as db:
        db.execute(f"DROP INDEX {BRIEF}")
    db.close()
    assert keys(run, RolloutFilter(reward_min=1)) == [(0, 1)]


def test_what_is_no_order_and_no_cursor_is_refused() -> None:
    with pytest.raises(StoreError, match=r"order must be one of newest, .* got 'random'"):
        RolloutFilter(order="random")
    with pytest.raises(StoreError, match="got '1_2'"):
        PageCursor.read("1_2")


def test_errors_are_gathered_by_reason_whatever_numbers_they_hold(run: Path) -> None:
    found = errors(run)
    assert found.total == 3
    (kind,) = found.kinds
    assert (kind.count, kind.first_step, kind.last_step) == (3, 1, 3)
    assert kind.detail == "exit 4 in 'x3'" and [row.group for row in kind.examples] == [0, 2, 4]


def test_a_run_without_rollouts_has_empty_pages(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path).finish()
    assert (
        rollouts(run, RolloutFilter()).rows == []
        and rollouts(run, RolloutFilter(text="x", order="longest")).next is None
    )
    assert errors(run).kinds == []


def test_lengths_are_those_of_the_model(tmp_path: Path) -> None:
    assert (
        queries.model_length('[[3, [["model", 5, 0.5], ["environment", 9], ["model", 4]]], [2, [["model", 1]]]]') == 10
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('say "é"', 1),
        ("Ünder_line", 1),
        ("100 %", 1),
        ("\\frac", 1),
        ("two\nlines", 1),
        ("role", 0),
        ("u00e9", 0),
        ("tool_n", 1),
    ],
)
def test_a_search_reads_what_was_said_and_not_how_it_is_kept(tmp_path: Path, text: str, found: int) -> None:
    """Messages are JSON in the journal, with its own quotations and keys."""
    made = WrittenRun(tmp_path).step([[1.0]])
    said = Message("user", 'Please say "é" and Ünder_line, 100 %, \\frac,\ntwo\nlines')
    answer = Message("assistant", "", (ToolCall("tool_name", {"code": "x"}),))
    asyncio.run(made.store.journal.add_prompt(1, Prompt("p", (said,), ""), 0, 1))
    asyncio.run(made.store.journal.add_rollout(replace(rollout(1, 0, 1.0), transcript=(answer,))))
    page = queries.rollouts(made.close(), queries.RolloutFilter(text=text))
    assert len(page.rows) == found
