"""Answers in files: what comes out is what went in, nothing is read before somebody looks, and damage is said."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitae.errors import CorruptError, DiskFullError, StoreError
from kitae.store.columns import (
    ColumnFiles,
    ColumnWriter,
    Filed,
    LazyColumn,
    column_files,
    joined,
    record_of,
    stretches_of,
)
from kitae.types import LazyArray, Runs, spliced

TOKENS = (42, 7, 150_000, 2)
LOGPROBS = tuple(np.array([-0.1, -7.25, float("-inf"), -1e-9], dtype=np.float32).tolist())


def filed(folder: Path, *answers: tuple[tuple[int, ...], tuple[float, ...], str | None]) -> list[Filed]:
    async def write() -> list[Filed]:
        writer = ColumnWriter(folder, "engine-0")
        return list(await asyncio.gather(*(writer.add(*answer) for answer in answers)))

    return asyncio.run(write())


def kept(folder: Path, one: Filed) -> tuple[LazyColumn[int], LazyColumn[float]]:
    return column_files(folder).lazy(((one, 0, one.tokens),))


def unreadable(folder: Path) -> ColumnFiles:
    """Files that nobody may look into."""
    return ColumnFiles(folder / "nowhere")


def test_answers_come_back_exactly(tmp_path: Path) -> None:
    answers = [
        (TOKENS, LOGPROBS, "fünf"),
        ((), (), ""),
        (TOKENS[:1], LOGPROBS[:1], None),
        (TOKENS * 999, LOGPROBS * 999, "x"),
    ]
    places = filed(tmp_path / "columns", *answers)
    assert len({place.file for place in places}) == 1 and [place.letters for place in places] == [5, 0, -1, 1]
    for place, (tokens, logprobs, text) in zip(places, answers, strict=True):
        found, logp = kept(tmp_path / "columns", place)
        assert tuple(found) == tokens and tuple(logp) == logprobs
        assert (None if found.text is None else str(found.text)) == text
    assert stretches_of(record_of(found.stretches)) == found.stretches


def test_what_is_cut_and_joined_is_not_read_for_that(tmp_path: Path) -> None:
    one, two = (Filed(name, 0, 4, 10, 0) for name in ("a", "b"))
    first, second = (unreadable(tmp_path).lazy(((place, 0, 4),))[0] for place in (one, two))
    both = joined(first, second)
    assert len(both) == 8 and len(both[1:]) == 7 and len(joined((), first)) == 4
    middle = both[3:5]
    assert isinstance(middle, LazyColumn) and middle.stretches == ((one, 3, 4), (two, 0, 1))
    again = joined(first[:1], first[1:])
    assert isinstance(again, LazyColumn) and again.stretches == ((one, 0, 4),) and again.text is not None
    assert middle.text is None and first[:3].text is None
    assert first != (1, 2) and first == unreadable(tmp_path).lazy(((one, 0, 4),))[0]
    with pytest.raises(StoreError, match=r"nowhere/a: the answer at byte 0 \(4 tokens\) cannot be read"):
        list(both)


def test_parts_of_kept_columns_are_parts_of_their_values(tmp_path: Path) -> None:
    (place,) = filed(tmp_path, (TOKENS, LOGPROBS, None))
    tokens, logprobs = kept(tmp_path, place)
    assert tokens == TOKENS and tokens[1:3] == TOKENS[1:3] and (tokens[0], tokens[-1]) == (42, 2)
    assert joined(tokens[:2], tokens[2:]) == TOKENS and joined((9,), tokens) == (9, *TOKENS)
    assert hash(tokens) == hash(TOKENS) and np.asarray(logprobs, np.float32).tobytes() == np.float32(LOGPROBS).tobytes()


def test_an_array_with_an_unread_part_is_made_late(tmp_path: Path) -> None:
    (place,) = filed(tmp_path, (TOKENS, LOGPROBS, None))
    tokens, _ = kept(tmp_path, place)
    late = spliced([np.array([1, 2]), tokens, (5,)], np.int64)
    assert isinstance(late, LazyArray) and len(late) == 7
    assert np.asarray(late).tolist() == [1, 2, *TOKENS, 5] and late[2:4].tolist() == [42, 7]
    assert not isinstance(spliced([np.array([1]), (2,), Runs(((3, 2),))], np.int64), LazyArray)


@pytest.mark.parametrize("where", [0, 17, -1])
def test_a_damaged_answer_is_named_and_the_others_are_read(tmp_path: Path, where: int) -> None:
    good, bad = filed(tmp_path, (TOKENS, LOGPROBS, "good"), (TOKENS, LOGPROBS, "bad"))
    path = tmp_path / bad.file
    data = bytearray(path.read_bytes())
    data[where if where < 0 else bad.offset + where] ^= 1
    path.write_bytes(data)
    assert kept(tmp_path, good)[0] == TOKENS
    with pytest.raises(CorruptError, match=rf"{bad.file}: the answer at byte {bad.offset} .* must have the checksum"):
        tuple(kept(tmp_path, bad)[0])


def test_an_answer_that_is_not_all_there_is_named(tmp_path: Path) -> None:
    (place,) = filed(tmp_path, (TOKENS, LOGPROBS, "text"))
    os.truncate(tmp_path / place.file, 20)
    with pytest.raises(CorruptError, match="must have 36 bytes, got 20"):
        tuple(kept(tmp_path, place)[1])


def test_what_a_write_that_was_cut_off_left_harms_nobody(tmp_path: Path) -> None:
    async def write() -> tuple[Filed, Filed]:
        writer = ColumnWriter(tmp_path, "engine-0")
        before = await writer.add(TOKENS, LOGPROBS)
        with (tmp_path / writer.file).open("ab") as file:
            file.write(b"half of an answ")
        return before, await writer.add(TOKENS[::-1], LOGPROBS)

    before, after = asyncio.run(write())
    assert kept(tmp_path, before)[0] == TOKENS and kept(tmp_path, after)[0] == TOKENS[::-1]


def test_a_full_disk_is_said_to_those_it_concerns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write() -> Filed:
        writer = ColumnWriter(tmp_path, "engine-0")
        with monkeypatch.context() as patched:

            def full(*_: object) -> int:
                raise OSError(28, "No space left on device")

            patched.setattr(os, "write", full)
            with pytest.raises(DiskFullError, match="no space left to write"):
                await writer.add(TOKENS, LOGPROBS)
        return await writer.add(TOKENS, LOGPROBS)

    assert kept(tmp_path, asyncio.run(write()))[0] == TOKENS


def test_the_disk_is_waited_for_once_for_what_comes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (flushed.append(descriptor), fsync(descriptor)))
    places = filed(tmp_path, *[(TOKENS, LOGPROBS, None)] * 50)
    assert len({place.offset for place in places}) == 50
    assert len(flushed) <= 3  # the folder, and what came while the first was written


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "columns").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        ColumnWriter(tmp_path / "columns", "engine-0")


def test_runs_are_the_numbers_they_stand_for() -> None:
    runs = Runs.of((3, 3, 4, 4, 4, 3))
    assert runs.runs == ((3, 2), (4, 3), (3, 1)) and tuple(runs) == (3, 3, 4, 4, 4, 3) and len(runs) == 6
    assert runs[1:3].runs == ((3, 1), (4, 1)) and runs[-1] == 3 and runs == (3, 3, 4, 4, 4, 3)
    assert np.asarray(runs).tolist() == list(runs) and joined(runs, Runs(((3, 2),))).runs[-1] == (3, 3)  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=5), st.data())
def test_parts_of_runs_are_parts_of_the_numbers(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    found, numbers = Runs(runs), tuple(value for value, count in runs for _ in range(count))
    assert found == numbers and found == Runs.of(numbers) and Runs.of(numbers).runs == found.runs
    start, stop = (data.draw(st.none() | st.integers(-20, 20)) for _ in range(2))
    assert found[start:stop] == numbers[start:stop]
    if numbers:
        place = data.draw(st.integers(-len(numbers), len(numbers) - 1))
        assert found[place] == numbers[place]
    with pytest.raises(IndexError):
        found[len(numbers)]


def test_who_cuts_runs_does_not_look_at_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller does, of every answer in flight and every so often, and answers are long."""
    runs = Runs(((3, 30_000), (4, 20_000)))
    monkeypatch.setattr(Runs, "__iter__", None)
    assert runs[:31_000][29_000:].runs == ((3, 1_000), (4, 1_000)) and (runs[0], runs[-1]) == (3, 4)
    assert runs == Runs(((3, 30_000), (4, 20_000)))
