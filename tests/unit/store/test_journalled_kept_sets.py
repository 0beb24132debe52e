"""What tokens could have been is journalled with them: of complete rollouts, and piece by piece of others."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from kitae.engines.base import Sampled
from kitae.kept_sets import KeptLog, KeptSets, words_of
from kitae.store.journal import Journal
from kitae.types import Rollout, Segment


def turn(seed: int, length: int) -> Segment:
    rng, log = np.random.default_rng(seed), KeptLog(500)
    for i in range(length):
        log.add(None if i % 3 == 2 else words_of(np.flatnonzero(rng.random(500) < (0.01, 0.9)[i % 2]), 500))
    return Segment("model", (5,) * length, (-0.5,) * length, (3,) * length, kept=log.between(0, length))


def rollout(*segments: Segment) -> Rollout:
    return Rollout.of(7, 0, (1, 2, 3), segments, "stop", "")


def kept(r: Rollout) -> list[KeptSets | None]:
    return [s.kept for s in r.segments]


def test_turns_have_theirs(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    told = rollout(turn(0, 9), Segment.observed((8, 9)), replace(turn(1, 4), kept=None), turn(2, 40))
    asyncio.run(journal.add_rollout(told))
    (found,) = journal.rollouts(7)
    assert found.chains == told.chains and kept(found) == kept(told)
    journal.close()


def test_pieces_are_joined(tmp_path: Path) -> None:
    journal, whole = Journal(tmp_path / "journal.sqlite"), Sampled.of(turn(3, 30))
    first, second = (s.segment() for s in (whole.until(11), whole.after(11)))
    asyncio.run(journal.suspend(rollout(first)))
    asyncio.run(journal.extend_suspended((replace(rollout(second), finish="suspended"), 11)))
    (found,) = journal.suspended(7)
    assert kept(found) == [whole.kept]
    journal.close()
