"""The journal: exact, never twice, and never deaf, whatever callers and disks do."""

import asyncio
import json
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.errors import CorruptError, DiskFullError, StoreError
from kitae.store.columns import ColumnFiles, ColumnWriter, LazyColumn, StoredText
from kitae.store.journal import LENGTH, TEXT, Journal, bound, open_reader
from kitae.types import Chain, FinishReason, Message, Prompt, Rollout, Runs, Score, Segment, ToolCall

PROMPT = Prompt("reverse/train/17", (Message("system", "Be brief."), Message("user", "Reverse 1, 2")), "2, 1", {"n": 2})


def rollout(group: int, index: int = 0, text: str = "2, 1") -> Rollout:
    segment = Segment("model", (5, 6), (-0.5, -0.25), (3, 4))
    return Rollout.of(group, index, (1, 2, 3), (segment,), "stop", text, Score(1.0))


def prompt(group: int) -> Prompt:
    return Prompt(f"p{group}", (Message("user", "2 + 2"),), "4")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


class Locked:
    """Hold the database's write lock, so that jobs gather in the journal's queue."""

    def __init__(self, journal: Journal) -> None:
        self._connection = sqlite3.connect(journal.path, isolation_level=None)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, *_: object) -> None:
        self._connection.execute("COMMIT")
        self._connection.close()


# Exactness.

ids = st.integers(0, 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False)


def segments(source: str) -> st.SearchStrategy[Segment]:
    tokens = st.lists(st.tuples(ids, float32, st.integers(-1, 10_000)), max_size=5)
    rewards = st.none() | st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(
        lambda rows, reward: Segment(source, *(map(tuple, zip(*rows, strict=True)) if rows else ((),) * 3), reward),
        tokens,
        rewards,
    )  # type: ignore[arg-type]


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
values = st.none() | st.booleans() | st.integers() | words
calls = st.builds(ToolCall, words, st.dictionaries(words, values, max_size=2), words)
messages = st.builds(
    Message,
    words,
    words,
    st.lists(calls, max_size=2).map(tuple),
    words,
    words,
    st.lists(st.dictionaries(words, values, max_size=2), max_size=2).map(tuple),
)


scores = st.builds(
    Score,
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
    detail=st.text(max_size=5),
) | st.text(max_size=5).map(Score.error)
chains = st.builds(
    Chain,
    st.lists(ids, max_size=5).map(tuple),
    st.lists(segments("model") | segments("environment"), max_size=4).map(tuple),
)
rollouts = st.builds(
    Rollout,
    group=st.integers(0, 2**62),
    index=st.integers(0, 1000),
    chains=st.lists(chains, min_size=1, max_size=3).map(tuple),
    finish=st.sampled_from(["stop", "length", "abort"]),
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    score=scores,
    status=st.sampled_from(["complete", "failed"]),
    transcript=st.lists(messages, max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(rollouts, min_size=1, max_size=6, unique_by=lambda r: (r.group, r.index)))
def test_rollouts_come_back_exactly(written: list[Rollout]) -> None:
    async def write(journal: Journal) -> None:
        await asyncio.gather(*map(journal.add_rollout, written))

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite")
        asyncio.run(write(journal))
        journal.close()
        reader = Journal(journal.path, read_only=True)
        for r in written:
            (found,) = [x for x in reader.rollouts(r.group) if x.index == r.index]
            assert _comparable(found) == _comparable(r)
        reader.close()


def _comparable(r: Rollout) -> tuple[Rollout, bytes, float | None]:
    """Log-probs equal bit by bit, and a value that is NaN equal to itself."""
    assert r.score is not None
    bits = [struct.pack("<f", x) for s in r.segments for x in s.logprobs]
    return replace(r, score=replace(r.score, value=0.0)), b"".join(bits), r.score.value if r.score.valid else None


def test_log_probs_are_kept_as_float32(journal: Journal) -> None:
    precise = Rollout.of(0, 0, (1,), (Segment("model", (5,), (-0.1,), (0,)),), "stop", "", Score(1.0))
    asyncio.run(journal.add_rollout(precise))
    (found,) = journal.rollouts(0)
    assert found.segments[0].logprobs == struct.unpack("<f", struct.pack("<f", -0.1))


def test_prompts_come_back(journal: Journal) -> None:
    async def write() -> None:
        await journal.add_prompt(17, PROMPT, version=3, slot=5)

    asyncio.run(write())
    assert journal.prompt(17) == PROMPT
    assert journal.prompt(18) is None
    assert journal.counts() == {"prompts": 1, "rollouts": 0, "suspended": 0, "fates": 0}


def test_what_is_pending_comes_back_by_slot(journal: Journal) -> None:
    async def write() -> None:
        for group, slot, version in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 2, 1), (4, 3, 1)):
            await journal.add_prompt(group, PROMPT, version, slot)
        await journal.add_fates(1, trained=[1], dropped=[])

    asyncio.run(write())
    slots = [(0, (0, 2)), (2, (3,)), (3, (4,))]
    assert [(s.number, s.groups) for s in journal.pending()] == slots, "group 2 is the refill of slot 0"
    assert journal.issued() == (5, 4)


def test_a_pending_slot_is_as_old_as_its_oldest_token(journal: Journal) -> None:
    async def write() -> None:
        for group, slot in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 3)):
            await journal.add_prompt(group, PROMPT, 9, slot)
        await journal.add_rollout(rollout(1))  # versions 3 and 4
        spoken = Segment("model", (5,), (-0.5,), (7,))
        await journal.add_rollout(replace(rollout(2), chains=(Chain((1, 2, 3), (spoken, Segment.observed((8, 9)))),)))
        await journal.suspend(
            replace(rollout(3), chains=(Chain((1, 2, 3), (spoken,)),), finish="suspended", score=None)
        )
        await journal.add_rollout(replace(rollout(4), chains=(Chain((1, 2, 3), (Segment("model", (), (), ()),)),)))

    asyncio.run(write())
    assert [s.oldest for s in journal.pending()] == [None, 3, 7, None]


def test_a_skipped_prompt_is_never_half_issued(journal: Journal) -> None:
    asyncio.run(journal.add_prompt(3, PROMPT, version=4, slot=2, skipped="mastered"))
    assert journal.pending() == [] and journal.groups() == [(3, 5, "skipped", "mastered")]


def test_unfinished_responses_are_kept_in_pieces(journal: Journal) -> None:
    """Each piece holds what is new; together they are the response, turns before it included."""
    before = (Segment("model", (1, 2), (-0.5, -1.0), (3, 3)), Segment.observed((9,)))
    whole = Segment("model", tuple(range(10, 20)), tuple(-0.25 * i for i in range(10)), (3,) * 4 + (4,) * 6)

    def piece(start: int, end: int) -> Rollout:
        part = Segment("model", whole.tokens[start:end], whole.logprobs[start:end], whole.versions[start:end])
        return Rollout.of(6, 1, (1, 2, 3), (*before, part), "suspended", "")

    async def write() -> None:
        await journal.extend_suspended((piece(0, 4), 0), (replace(piece(0, 2), index=0), 0))
        await journal.extend_suspended((piece(4, 5), 4))
        await journal.extend_suspended((piece(5, 10), 5))

    asyncio.run(write())
    short, found = journal.suspended(6)
    assert (
        found.segments == (*before, whole)
        and found.chains[0].prompt_tokens == (1, 2, 3)
        and found.finish == "suspended"
    )
    assert short.segments[-1].tokens == (10, 11)
    assert journal.counts()["suspended"] == 4
    asyncio.run(journal.suspend(piece(0, 7)))  # all of it at once takes the place of the pieces
    assert journal.suspended(6)[1].segments[-1].tokens == whole.tokens[:7] and journal.counts()["suspended"] == 2
    asyncio.run(journal.add_rollout(rollout(6, 1)))
    assert [r.index for r in journal.suspended(6)] == [0]


async def _filed(journal: Journal, tokens: int, version: int, text: str | None = None) -> Segment:
    """An answer that an engine has filed beside the journal."""
    writer = ColumnWriter(journal.columns.folder, "engine-0")
    place = await writer.add(range(tokens), [-0.5] * tokens, text)
    return Segment("model", *journal.columns.lazy(((place, 0, tokens),)), Runs.of((version,) * tokens))


def test_an_answer_in_files_is_kept_by_its_place(journal: Journal) -> None:
    async def body() -> None:
        segment = await _filed(journal, 500, 3, "words")
        text = segment.tokens.text  # type: ignore[attr-defined]
        await journal.add_rollout(Rollout.of(0, 0, (1, 2), (segment,), "stop", text, Score(1.0)))
        talk = (segment, Segment.observed((7, 8)), replace(segment, reward=0.5))
        await journal.add_rollout(Rollout.of(0, 1, (1, 2), talk, "stop", "words\n\nwords", Score(0.0)))

    asyncio.run(body())
    first, second = journal.rollouts(0)
    assert isinstance(first.text, StoredText) and str(first.text) == "words" and second.text == "words\n\nwords"
    for segment in (first.segments[0], second.segments[2]):
        assert isinstance(segment.tokens, LazyColumn) and segment.tokens == tuple(range(500))
        assert segment.logprobs == (-0.5,) * 500 and segment.versions == (3,) * 500
    assert second.segments[1] == Segment.observed((7, 8)) and second.segments[2].reward == 0.5
    sizes = "SELECT length(tokens) + length(logprobs) + length(versions), length(text), length(chains) FROM rollouts"
    (kept, *_), (mixed, *_) = journal._reader.execute(sizes)
    assert (kept, mixed) == (0, 24)
    with closing(open_reader(journal.path)) as reader:
        found = list(reader.execute(f"SELECT {TEXT}, {LENGTH} FROM rollouts r"))
    assert found == [("words", 500), ("words\n\nwords", 1002)]


def test_a_place_is_known_by_its_folder(journal: Journal) -> None:
    """Not by who reads there: those are forgotten where there are many."""

    async def body() -> None:
        segment = await _filed(journal, 5, 3, "words")
        assert isinstance(segment.tokens, LazyColumn)
        tokens, logprobs = ColumnFiles(journal.columns.folder).lazy(segment.tokens.stretches)
        there = replace(segment, tokens=tokens, logprobs=logprobs)
        await journal.add_rollout(Rollout.of(0, 0, (1,), (there,), "stop", "words", Score(1.0)))

    asyncio.run(body())
    (found,) = journal.rollouts(0)
    assert isinstance(found.segments[0].tokens, LazyColumn) and found.segments[0].tokens == tuple(range(5))


def test_it_knows_the_files_that_it_refers_to(journal: Journal) -> None:
    async def body() -> list[str]:
        empty, half, whole = [await _filed(journal, n, 3, "") for n in (0, 4, 5)]
        await journal.add_rollout(Rollout.of(0, 0, (1,), (empty,), "stop", "", Score(1.0)))
        await journal.add_rollout(rollout(0, 1))
        await journal.add_rollout(
            Rollout.of(0, 2, (1,), (whole, Segment.observed((7,)), whole), "stop", "", Score(1.0))
        )
        await journal.suspend(Rollout.of(0, 3, (1,), (half,), "suspended", "", None, "suspended"))
        await _filed(journal, 3, 3)
        return [_file(s) for s in (empty, half, whole)]

    names = asyncio.run(body())
    assert journal.files() == set(names) and len(set(names)) == 3
    assert len(list(journal.columns.folder.iterdir())) == 4


def _file(segment: Segment) -> str:
    assert isinstance(segment.tokens, LazyColumn)
    return segment.tokens.stretches[0][0].file


def test_what_lies_elsewhere_is_kept_with_its_values(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "evaluations").mkdir()
    other = Journal(tmp_path / "evaluations" / "of-a-run.sqlite")

    async def body() -> None:
        segment = await _filed(journal, 5, 3, "words")
        text = segment.tokens.text  # type: ignore[attr-defined]
        await other.add_rollout(Rollout.of(0, 0, (1,), (segment,), "stop", text, Score(1.0)))

    asyncio.run(body())
    (found,) = other.rollouts(0)
    assert found.text == "words" and found.segments[0].tokens == (0, 1, 2, 3, 4)
    assert isinstance(found.segments[0].tokens, tuple)
    other.close()


def test_pieces_in_files_come_back_as_one_answer(journal: Journal) -> None:
    async def body() -> None:
        first, second = await _filed(journal, 40, 3), await _filed(journal, 70, 4)
        suspended = Rollout.of(7, 0, (1, 2), (first,), "suspended", "", None, "suspended")
        await journal.extend_suspended((suspended, 0))
        await journal.extend_suspended((replace(suspended, chains=(Chain((1, 2), (second,)),)), 40))
        values = Segment("model", (9,), (-1.0,), (5,))
        await journal.extend_suspended((replace(suspended, chains=(Chain((1, 2), (values,)),), finish="stop"), 110))

    asyncio.run(body())
    (found,) = journal.suspended(7)
    assert found.finish == "stop" and found.chains[0].prompt_tokens == (1, 2)
    assert found.segments[0].tokens == (*range(40), *range(70), 9)
    assert tuple(found.segments[0].versions) == (3,) * 40 + (4,) * 70 + (5,)


def test_age_and_forgetting_know_versions_without_reading(journal: Journal) -> None:
    async def body() -> None:
        await journal.add_prompt(0, PROMPT, 2, 0)
        for index, version in enumerate((2, 6)):
            segment = await _filed(journal, 5, version, "")
            await journal.add_rollout(Rollout.of(0, index, (1,), (segment,), "stop", "", Score(1.0)))
        await journal.suspend(
            Rollout.of(0, 2, (1,), (await _filed(journal, 5, 7),), "suspended", "", None, "suspended")
        )
        for path in journal.columns.folder.iterdir():
            path.unlink()
        assert journal.pending()[0].oldest == 2
        await journal.begin("{}", (), forget_after=5)

    asyncio.run(body())
    assert [r.index for r in journal.rollouts(0)] == [0] and not journal.suspended(0)


def test_answers_that_cannot_be_read_are_given_up_before_they_are_trained(journal: Journal) -> None:
    async def body() -> list[str]:
        for group in (0, 1, 2):
            await journal.add_prompt(group, PROMPT, 2, group)
            for index in (0, 1):
                segment = await _filed(journal, 5, 2, "")
                await journal.add_rollout(Rollout.of(group, index, (1,), (segment,), "stop", "", Score(1.0)))
        await journal.add_fates(3, [0], [])
        for index in (2, 3):
            await journal.suspend(_suspended(2, index, await _filed(journal, 5, 2)))
        longer = await _filed(journal, 5, 2)
        await journal.suspend(_suspended(1, 2, longer))
        await journal.extend_suspended((_suspended(1, 2, Segment("model", (9,), (-1.0,), (3,))), 5))  # not in a file
        for lost in (*journal.rollouts(0)[:1], *journal.rollouts(1)[1:], *journal.suspended(2)[:1]):
            (journal.columns.folder / _file(lost.segments[0])).unlink()
        path = journal.columns.folder / _file(longer)  # of the answer that goes on elsewhere
        path.write_bytes(b"x" * path.stat().st_size)
        journal.columns.read.cache_clear()  # type: ignore[attr-defined]
        with pytest.raises(CorruptError, match=r"step 3 .* trained again as it was, but .*engine-0.* --forget"):
            journal.check_answers(step=2)
        journal.check_answers(step=3)
        return await journal.drop_unreadable()

    problems = asyncio.run(body())
    assert len(problems) == 3 and "cannot be read" in problems[0] and "must have the checksum" in problems[1]
    assert [len(journal.rollouts(group)) for group in (0, 1, 2)] == [2, 1, 2], "what was trained stays in the books"
    assert [[r.index for r in journal.suspended(group)] for group in (1, 2)] == [[], [3]]
    assert [detail for _, kind, detail in journal.events() if kind == "unreadable"] == problems
    assert asyncio.run(journal.drop_unreadable()) == []


def _suspended(group: int, index: int, segment: Segment) -> Rollout:
    return Rollout.of(group, index, (1,), (segment,), "suspended", "", None, "suspended")


def test_a_conversation_is_suspended_with_all_that_was_said(journal: Journal) -> None:
    said = Segment("model", (1, 2, 3, 4), (-0.5,) * 4, (3,) * 4, reward=0.5)
    answer = Segment.observed((9,))
    before = (Message("user", "2 + 2"), Message("assistant", "4"), Message("tool", "go on", name="t"))

    def suspended(segments: tuple[Segment, ...], finish: FinishReason) -> Rollout:
        return Rollout(6, 1, (Chain((1, 2), segments),), finish, "", None, "suspended", before)

    async def write() -> None:
        await journal.extend_suspended((suspended((said, answer), "stop"), 0))
        (found,) = journal.suspended(6)
        assert (found.segments, found.finish, found.transcript) == ((said, answer), "stop", before)
        turn = replace(said, reward=None)
        await journal.extend_suspended((suspended((said, answer, cut(turn, 0, 3)), "suspended"), 0))
        await journal.extend_suspended((suspended((said, answer, cut(turn, 3, 4)), "stop"), 3))  # the end of the turn
        (found,) = journal.suspended(6)
        assert (found.segments, found.finish, found.transcript) == ((said, answer, turn), "stop", before)

    asyncio.run(write())


def cut(s: Segment, start: int, end: int) -> Segment:
    return Segment(s.source, s.tokens[start:end], s.logprobs[start:end], s.versions[start:end])


def test_what_was_synced_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of the log after the last sync is lost, what was written before it is there, in order."""
    sizes = list[int]()
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    monkeypatch.setattr("kitae.store.journal.flush", lambda file: sizes.append(log.stat().st_size))
    journal = Journal(path)

    async def write() -> None:
        for group in range(6):
            await journal.add_rollout(rollout(group))
        await journal.sync()
        for group in range(6, 12):
            await journal.add_rollout(rollout(group))

    asyncio.run(write())
    assert len(sizes) == 3, "log, database and folder"
    rng = random.Random(1)
    for cut in (sizes[0], *(rng.randrange(sizes[0], log.stat().st_size) for _ in range(20))):
        lost = tmp_path / f"cut-{cut}"
        lost.mkdir()
        shutil.copy(path, lost)
        (lost / log.name).write_bytes(log.read_bytes()[:cut])
        again = Journal(lost / path.name)
        there = [g for g in range(12) if again.rollouts(g)]
        again.close()
        assert there == list(range(max(6, len(there)))), "something before the cut is missing"
    journal.close()


def test_a_suspended_rollout_is_kept_until_it_is_complete(journal: Journal) -> None:
    async def write() -> None:
        await journal.suspend(replace(rollout(3, 1), finish="suspended", score=None))
        longer = (Segment("model", (5, 6), (-0.5, -0.25), (0, 1)),)
        await journal.suspend(
            replace(rollout(3, 1), chains=(Chain((1, 2, 3), longer),), finish="suspended", score=None)
        )

    asyncio.run(write())
    (found,) = journal.suspended(3)
    assert (found.index, found.finish, found.segments[0].tokens) == (1, "suspended", (5, 6))
    assert found.segments[0].versions == (0, 1) and journal.rollouts(3) == []
    asyncio.run(journal.add_rollout(rollout(3, 1)))
    assert journal.suspended(3) == [] and len(journal.rollouts(3)) == 1


def test_an_unscored_rollout_is_an_error_and_never_a_zero(journal: Journal) -> None:
    asyncio.run(journal.add_rollout(replace(rollout(1), score=None)))
    (found,) = journal.rollouts(1)
    assert found.score is not None and not found.score.valid
    asyncio.run(journal.add_fates(1, trained=[1], dropped=[]))
    assert list(journal.samples()) == [(1, 0, 1, None)]


def test_text_that_is_no_unicode_is_kept_with_question_marks(journal: Journal) -> None:
    """Half a surrogate pair: bytes that a model made up, or a verifier's JSON."""
    bad = replace(rollout(1, text="a\ud800b"), score=Score(1.0, detail="c\udfffd"))

    async def write() -> None:
        await journal.add_rollout(bad)
        await journal.add_prompt(1, replace(PROMPT, id="e\ud800"), 0, 0)
        await journal.add_event("note", "f\ud800")

    asyncio.run(asyncio.wait_for(write(), 10))
    (found,) = journal.rollouts(1)
    assert (found.text, found.score and found.score.detail) == ("a?b", "c?d")
    assert [(kind, detail) for _, kind, detail in journal.events()] == [("note", "f?")]


# Fates.


def test_a_group_has_one_fate(journal: Journal) -> None:
    async def write() -> None:
        await journal.add_fates(1, trained=[0, 2], dropped=[(1, "zero-variance")])
        with pytest.raises(StoreError, match="UNIQUE"):
            await journal.add_fates(2, trained=[3, 2], dropped=[])
        with pytest.raises(StoreError, match="UNIQUE"):
            await journal.add_fates(2, trained=[], dropped=[(0, "errors")])

    asyncio.run(write())
    fates = [(0, 1, "trained", ""), (1, 1, "dropped", "zero-variance"), (2, 1, "trained", "")]
    assert journal.groups() == fates, "a refused call changes nothing, not even its good rows"
    assert journal.groups(step=2) == []


def test_a_sample_is_written_once(journal: Journal) -> None:
    async def write() -> None:
        await journal.add_rollout(rollout(4))
        with pytest.raises(StoreError, match="UNIQUE"):
            await journal.add_rollout(rollout(4, text="another"))

    asyncio.run(write())
    assert [r.text for r in journal.rollouts(4)] == ["2, 1"]


def test_forgotten_steps_take_what_their_weights_sampled_with_them(journal: Journal) -> None:
    def sampled_by(version: int, group: int) -> Rollout:
        return replace(rollout(group), chains=(Chain((1, 2, 3), (Segment("model", (5,), (-0.5,), (version,)),)),))

    async def write() -> None:
        for group, version in enumerate((0, 1, 1, 2, 2)):
            await journal.add_rollout(sampled_by(version, group))
        await journal.suspend(sampled_by(1, 5), sampled_by(2, 6))
        await journal.add_fates(1, trained=[0], dropped=[])
        await journal.add_fates(2, trained=[1], dropped=[(2, "errors")])
        assert journal.last_step() == 2
        await journal.begin("{}", [("forgot", "after step 1")], forget_after=1)
        assert journal.last_step() == 1
        await journal.add_fates(2, trained=[1, 2], dropped=[])

    asyncio.run(write())
    assert journal.groups(step=2) == [(1, 2, "trained", ""), (2, 2, "trained", "")]
    assert [len(journal.rollouts(g)) for g in range(5)] == [1, 1, 1, 0, 0]
    assert [len(journal.suspended(g)) for g in (5, 6)] == [1, 0]


def test_what_was_skipped_stays_skipped(journal: Journal) -> None:
    async def write() -> None:
        for group in range(6):
            await journal.add_prompt(group, prompt(group), 0, slot=group // 2)
        await journal.suspend(rollout(1), rollout(2))
        await journal.skip_slot(3, 0, "overdue")
        await journal.skip(3, [4], "spare")
        await journal.add_fates(5, trained=[3, 5], dropped=[])
        await journal.begin("{}", [], forget_after=4)

    asyncio.run(write())
    assert journal.groups() == [(0, 3, "skipped", "overdue"), (1, 3, "skipped", "overdue"), (4, 3, "skipped", "spare")]
    assert [(s.number, s.groups) for s in journal.pending()] == [(1, (2, 3)), (2, (5,))]
    assert journal.suspended(1) == [] and len(journal.suspended(2)) == 1


def test_pass_rates_are_those_of_the_last_visit(journal: Journal) -> None:
    async def write() -> None:
        for group, name in enumerate(["a", "b", "a", "c"]):
            await journal.add_prompt(group, replace(prompt(group), id=name), 0, group)
        for group, index, value in ((0, 0, 0.0), (1, 0, 0.5), (1, 1, 1.0), (2, 0, 1.0), (2, -1, 0.0)):
            await journal.add_rollout(replace(rollout(group, index), score=Score(value)))
        await journal.add_rollout(replace(rollout(2, 1), score=Score.error("died")))

    asyncio.run(write())
    assert journal.pass_rates() == {"a": (2, 1.0), "b": (1, 0.75)}, "neither greedy answers nor errors count"


def test_samples_are_those_of_closed_groups(journal: Journal) -> None:
    async def write() -> None:
        await journal.add_rollout(rollout(0, 1))
        await journal.add_rollout(rollout(0, 0))
        await journal.add_rollout(replace(rollout(0, 2), score=Score.error("died")))
        await journal.add_rollout(replace(rollout(1), score=Score(0.25)))
        await journal.add_rollout(rollout(2))
        await journal.add_fates(5, trained=[0], dropped=[(1, "errors")])

    asyncio.run(write())
    assert list(journal.samples()) == [(0, 0, 5, 1.0), (0, 1, 5, 1.0), (0, 2, 5, None), (1, 0, 5, 0.25)]


def test_a_second_verdict_replaces_the_score_and_nothing_else(journal: Journal) -> None:
    failed = replace(rollout(3), score=Score.error("died"))
    judged = replace(rollout(3), score=Score(0.5, {"style": 1.0}, detail="fine"))

    async def write() -> None:
        await journal.add_rollout(failed)
        await journal.add_rollout(replace(failed, index=1))
        await journal.update_score(replace(judged, text="not this"))

    asyncio.run(write())
    first, second = journal.rollouts(3)
    assert first == judged
    assert second.score is not None and second.score.detail == "died"


def test_meta_is_replaced(journal: Journal) -> None:
    async def write() -> None:
        await journal.begin("a", [])
        await journal.begin("b", [])

    asyncio.run(write())
    assert (journal.meta("config"), journal.meta("other")) == ("b", None)


# Many callers.


def test_what_gathers_is_committed_together(journal: Journal) -> None:
    async def write() -> None:
        with Locked(journal):
            jobs = [asyncio.create_task(journal.add_event("e", str(i))) for i in range(300)]
            await asyncio.sleep(0.05)
            assert not any(job.done() for job in jobs), "a caller must not go on before its commit"
        await asyncio.gather(*jobs)

    asyncio.run(write())
    assert [detail for _, _, detail in journal.events()] == [str(i) for i in range(300)]
    # A commit of its own would take each job at least one 4096-byte page of the log.
    assert journal.path.with_name("journal.sqlite-wal").stat().st_size < 100 * 4096


def test_a_bad_job_takes_no_good_one_with_it(journal: Journal) -> None:
    async def write() -> list[BaseException | None]:
        with Locked(journal):
            jobs = [asyncio.create_task(journal.add_rollout(rollout(i % 5))) for i in range(6)]
            await asyncio.sleep(0.05)
        return await asyncio.gather(*jobs, return_exceptions=True)

    results = asyncio.run(write())
    assert results[:5] == [None] * 5
    assert isinstance(results[5], StoreError)
    assert journal.counts()["rollouts"] == 5


def test_a_cancelled_caller_harms_nobody(journal: Journal) -> None:
    async def write() -> None:
        with Locked(journal):
            jobs = [asyncio.create_task(journal.add_event("e", str(i))) for i in range(4)]
            await asyncio.sleep(0.05)
            for job in jobs[:2]:
                job.cancel()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*jobs, return_exceptions=True)
            assert [type(r) for r in results[:2]] == [asyncio.CancelledError] * 2
            assert results[2:] == [None, None]
            await journal.add_event("after")

    asyncio.run(write())
    assert [d for _, kind, d in journal.events() if kind == "e"][-2:] == ["2", "3"]
    assert journal.events()[-1][1] == "after"


def test_a_job_that_cannot_be_written_at_all_is_an_error_of_its_caller(journal: Journal) -> None:
    async def write() -> None:
        async with asyncio.timeout(5):
            with pytest.raises(StoreError):
                await journal.add_fates(1, trained=[2**70], dropped=[])
            await journal.add_event("after")

    asyncio.run(write())
    assert len(journal.events()) == 1


def test_close_waits_for_what_was_asked_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    closing = threading.Thread(target=journal.close, daemon=True)

    async def write() -> None:
        with Locked(journal):
            jobs = [asyncio.create_task(journal.add_event("e", str(i))) for i in range(3)]
            await asyncio.sleep(0.05)
            closing.start()
            await asyncio.sleep(0.05)
        await asyncio.gather(*jobs)

    asyncio.run(write())
    closing.join(5)
    assert not closing.is_alive(), "close() hangs"
    reader = Journal(journal.path, read_only=True)
    assert len(reader.events()) == 3
    reader.close()


# Readers, other processes, disks.


@pytest.mark.parametrize("folder", ["plain", "odd #1 100%?x=y"])
def test_a_reader_looks_on_while_the_writer_writes(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    journal = Journal(tmp_path / folder / "journal.sqlite")
    reader = Journal(journal.path, read_only=True)
    for i in range(3):
        asyncio.run(journal.add_rollout(rollout(i)))
        assert reader.counts()["rollouts"] == i + 1
    with pytest.raises(AssertionError, match="reading only"):
        asyncio.run(reader.add_event("no"))
    journal.close()
    assert reader.rollouts(2) == [rollout(2)]
    reader.close()


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open"):
        Journal(tmp_path / "none.sqlite", read_only=True)
    garbage = tmp_path / "garbage.sqlite"
    garbage.write_bytes(b"not a database at all" * 100)
    for read_only in (True, False):
        with pytest.raises(StoreError, match="not a database"):
            Journal(garbage, read_only=read_only)
    with pytest.raises(StoreError):
        Journal(tmp_path / "no" / "folder" / "journal.sqlite")


def child(body: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import asyncio, os, resource, signal, sys\nfrom pathlib import Path\n" + body
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_killed_writer_loses_nothing_it_was_told_is_written(tmp_path: Path) -> None:
    killed = child(
        """
from kitae.store.journal import Journal
journal = Journal(Path(sys.argv[1]))
async def main():
    for i in range(20):
        await journal.add_event("e", str(i))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
""",
        tmp_path / "journal.sqlite",
    )
    assert killed.returncode == -9, killed.stderr
    journal = Journal(tmp_path / "journal.sqlite")
    assert [d for _, _, d in journal.events()] == [str(i) for i in range(20)]
    asyncio.run(journal.add_event("after"))
    journal.close()


def test_a_full_disk_is_said_so_and_what_was_written_stays(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's: the system refuses the write in the same place."""
    ran = child(
        """
import json
from kitae.errors import KitaeError
from kitae.store.journal import Journal
journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
async def main():
    written = 0
    try:
        while written < 1000:
            await journal.add_event("e", str(written) + "x" * 5000)
            written += 1
    except KitaeError as error:
        print(json.dumps([written, type(error).__name__, str(error), len(journal.events())]))
asyncio.run(main())
journal.close()
""",
        tmp_path / "journal.sqlite",
    )
    assert ran.returncode == 0, ran.stderr
    written, kind, message, readable = json.loads(ran.stdout)
    assert kind == DiskFullError.__name__
    assert str(tmp_path / "journal.sqlite") in message
    assert "safe" in message
    assert readable == written > 10
    journal = Journal(tmp_path / "journal.sqlite")
    assert len(journal.events()) == written
    asyncio.run(journal.add_event("space again"))
    journal.close()


def test_rollouts_of_groups_without_a_fate_are_forgotten(journal: Journal) -> None:
    async def write() -> int:
        for group in (0, 1):
            await journal.add_prompt(group, prompt(group), 0, group)
            for sample in (0, 1):
                await journal.add_rollout(rollout(group, sample))
        await journal.suspend(replace(rollout(1, 2), status="suspended", finish="suspended", score=None))
        await journal.add_fates(1, [0], [])
        return await journal.forget_rollouts([(0, 0), (1, 1), (1, 2), (1, 7)])

    assert asyncio.run(write()) == 1
    assert [r.index for r in journal.rollouts(0)] == [0, 1], "it was trained on"
    assert [r.index for r in journal.rollouts(1)] == [0] and journal.suspended(1) == []


@pytest.mark.filterwarnings("error")
def test_numbered_parameters_are_bound_by_name() -> None:
    """As a sequence they are a warning from Python 3.12 on, and an error from 3.14 on."""
    sql = "SELECT ?2, ?1, ?2"
    assert sqlite3.connect(":memory:").execute(sql, bound(sql, ("a", "b"))).fetchone() == ("b", "a", "b")
    assert bound("SELECT ?, ?", ("a", "b")) == ("a", "b")
