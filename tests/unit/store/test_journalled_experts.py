"""Experts of turns in the journal: as they were told, of complete rollouts and of those that are not, or not at all."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.errors import StoreError
from kitae.store.journal import Journal
from kitae.types import Chain, ExpertArray, FinishReason, Rollout, Segment
from kitae.workers.frames import pack_frame, unpack_frame

FIRST = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
LATER = (300 + np.arange(5 * 3 * 2)).astype(np.int16).reshape(5, 3, 2)


def turn(length: int, experts: ExpertArray | None = None) -> Segment:
    return Segment("model", (5,) * length, (-0.5,) * length, (3,) * length, experts=experts)


def rollout(*segments: Segment, finish: FinishReason = "stop", index: int = 0) -> Rollout:
    return Rollout.of(7, index, (1, 2, 3), segments, finish, "")


def experts_in(r: Rollout) -> list[ExpertArray | None]:
    return [s.experts for s in r.segments]


def assert_experts(r: Rollout, *expected: ExpertArray | None) -> None:
    for found, wanted in zip(experts_in(r), expected, strict=True):
        if wanted is None:
            assert found is None
        else:
            assert found is not None and found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


def test_a_rollout_has_them_turn_by_turn(journal: Journal) -> None:
    chains = (
        Chain((1, 2, 3), (turn(2, FIRST), Segment.observed((8, 9)), turn(1))),
        Chain((4,), (turn(3), Segment.observed((8,)), turn(2, LATER))),
    )
    r = Rollout(7, 0, chains, "stop", "")
    asyncio.run(journal.add_rollout(r))
    (found,) = journal.rollouts(7)
    assert found.chains == chains
    assert_experts(found, FIRST, None, None, None, None, LATER)


def test_what_is_suspended_has_them_and_may_grow(journal: Journal) -> None:
    """A turn is copied as it grows, without experts; its last piece has those of all of it."""
    began = rollout(turn(2, FIRST), Segment.observed((8, 9)), turn(1), finish="suspended")
    asyncio.run(journal.suspend(began))
    assert_experts(journal.suspended(7)[0], FIRST, None, None)
    asyncio.run(journal.extend_suspended((rollout(*began.segments[:2], turn(2), finish="suspended"), 1)))
    assert_experts(journal.suspended(7)[0], FIRST, None, None)
    asyncio.run(journal.extend_suspended((rollout(*began.segments[:2], turn(1, LATER)), 3)))
    (found,) = journal.suspended(7)
    assert [len(s.tokens) for s in found.segments] == [2, 2, 4] and found.finish == "stop"
    assert_experts(found, FIRST, None, LATER)
    asyncio.run(journal.extend_suspended((rollout(*found.segments, Segment.observed((8,))), 0)))
    assert_experts(journal.suspended(7)[0], FIRST, None, LATER, None)


def test_nothing_is_stored_where_there_are_none(journal: Journal) -> None:
    asyncio.run(journal.add_rollout(rollout(turn(2))))
    asyncio.run(journal.suspend(rollout(turn(2), finish="suspended", index=1)))
    connection = sqlite3.connect(journal.path)
    sizes = [connection.execute(f"SELECT length(experts) FROM {t}").fetchall() for t in ("rollouts", "suspended")]
    connection.close()
    assert sizes == [[(0,)], [(0,)]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["u1", "<i2"]), st.integers(0, 5), st.integers(1, 3)), max_size=4))
def test_a_frame_is_read_back_from_its_bytes(shapes: list[tuple[str, int, int]]) -> None:
    arrays = {str(n): np.arange(a * b).astype(kind).reshape(a, b, 1) for n, (kind, a, b) in enumerate(shapes)}
    found = unpack_frame(pack_frame({"some": ["thing"]}, arrays))
    assert found.header == {"some": ["thing"]} and found.arrays.keys() == arrays.keys()
    for name, values in arrays.items():
        assert found.arrays[name].dtype == values.dtype
        np.testing.assert_array_equal(found.arrays[name], values)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_journal_without_room_for_them_is_refused(read_only: bool, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE rollouts DROP COLUMN kept")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="last column is 'kept', got 'experts': another version of Kitae wrote it"):
        Journal(path, read_only=read_only)
