"""What goes to ranks and comes back is what it was."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_gradient import make_samples

from kitae.algorithms.control import Coefficients, Signal
from kitae.algorithms.group_stages import sample_of
from kitae.data.packing import lay_out, pack
from kitae.errors import CorruptError
from kitae.observe.meter import Kind, Sum, Totals
from kitae.store.columns import ColumnWriter, column_files
from kitae.trainer.base import Conditions, Mark
from kitae.trainer.sample_wire import conditions_of, samples_of_wire, samples_to_wire, totals_of_wire, totals_to_wire
from kitae.types import Chain, LazyArray, Rollout, Runs, Sample, Score, Segment, spliced
from kitae.workers.frames import Frame, pack_frame, read_frame


def sent(frame: bytes) -> Frame:
    async def body() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        found = await read_frame(reader)
        assert found is not None
        return found

    return asyncio.run(body())


def test_rows_are_laid_out_there_as_they_would_be_here() -> None:
    samples = make_samples([(0, 5, 3), (0, 5, 9), (1, 12, 1), (2, 30, 20), (3, 1, 4)], gaps=True)
    samples[1] = samples[1].with_columns(extra=samples[1].spread(np.float32(-0.0)))
    observed = {s.key for s in samples[::2]}
    parts = [*pack(samples, 30, multiple=4), []]
    frame = sent(pack_frame(*samples_to_wire(parts, observed)))
    received, watched = samples_of_wire(frame.header, frame.arrays)
    assert watched == observed and [[s.key for s in part] for part in received] == [[s.key for s in p] for p in parts]
    rows, found = ([lay_out(part, observed=watched) for part in some] for some in (parts, received))
    assert sum(len(row.observed) for row in rows) == len(observed)
    for a, b in zip(found, rows, strict=True):
        assert (a.spans, a.lengths, a.observed, a.columns.keys()) == (b.spans, b.lengths, b.observed, b.columns.keys())
        for name in ("tokens_T", "positions_T", "source_N", "target_N", "weight_N"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
            assert getattr(a, name).dtype == getattr(b, name).dtype
        for name, values in b.columns.items():
            assert a.columns[name].tobytes() == values.tobytes()
    kept = next(s for part in received for s in part if s.key == samples[1].key)
    assert np.signbit(kept.columns["extra"][kept.mask_T]).all()


def test_what_is_one_number_over_an_answer_travels_as_one() -> None:
    def size(length: int) -> int:
        (sample,) = make_samples([(0, 5, length)])
        flat = {name: sample.spread(np.float32(0.1)) for name in ("advantage", "score", "version")}
        sample = replace(sample, weight_T=sample.spread(np.float32(0.3)), columns=flat)
        return len(pack_frame(*samples_to_wire([[sample]])))

    tokens = 4 * (4096 - 64)
    assert size(4096) - size(64) - tokens <= 16  # digits of lengths


def filed(folder: Path, samples: Sequence[Sample]) -> list[Sample]:
    """The same, with their answers in files; where there are gaps, in several segments."""

    async def one(s: Sample, writer: ColumnWriter) -> Sample:
        cuts = [
            s.prompt_length,
            *(np.flatnonzero(np.diff(s.mask_T[s.prompt_length :])) + s.prompt_length + 1),
            s.length,
        ]
        tokens, logprobs = [s.prompt_T], [np.zeros(s.prompt_length)]
        for start, stop in pairwise(cuts):
            own = np.asarray(s.tokens_T)[start:stop], np.asarray(s.columns["logp_mu"])[start:stop]
            if s.mask_T[start]:
                place = await writer.add(*own)  # type: ignore[arg-type]
                own = column_files(folder).lazy(((place, 0, place.tokens),))  # type: ignore[assignment]
            tokens.append(own[0])
            logprobs.append(own[1])
        return replace(s, tokens_T=spliced(tokens, np.int64)).with_columns(logp_mu=spliced(logprobs, np.float32))

    async def all_of_them() -> list[Sample]:
        writer = ColumnWriter(folder, "engine-0")
        return [await one(s, writer) for s in samples]

    return asyncio.run(all_of_them())


def test_answers_in_files_make_the_same_rows(tmp_path: Path) -> None:
    samples = make_samples([(0, 5, 3), (0, 5, 9), (1, 12, 1), (2, 30, 20), (3, 1, 4)], gaps=True)
    unread = filed(tmp_path, samples)
    assert all(isinstance(s.tokens_T, LazyArray) for s in unread)
    parts = pack(unread, 30, multiple=2)
    assert [[s.key for s in part] for part in parts] == [
        [s.key for s in part] for part in pack(samples, 30, multiple=2)
    ]
    frame = sent(pack_frame(*samples_to_wire(parts)))
    received, _ = samples_of_wire(frame.header, frame.arrays)
    for part, own in zip(pack(samples, 30, multiple=2), received, strict=True):
        a, b, c = lay_out(own), lay_out(part), lay_out([s for s in unread if s.key in {x.key for x in part}])
        assert a.columns.keys() == b.columns.keys()
        for name in ("tokens_T", "source_N", "target_N", "weight_N"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
        for name, values in b.columns.items():
            assert a.columns[name].tobytes() == values.tobytes()
        assert len(c.tokens_T) == len(b.tokens_T)


def test_chains_of_a_conversation_in_files_are_what_they_are_in_memory(tmp_path: Path) -> None:
    async def file(s: Segment, writer: ColumnWriter) -> Segment:
        place = await writer.add(s.tokens, s.logprobs, "text")
        return Segment(
            s.source, *column_files(tmp_path).lazy(((place, 0, place.tokens),)), Runs.of(s.versions), s.reward
        )

    async def body() -> Rollout:
        writer = ColumnWriter(tmp_path, "engine-0")
        said = [await file(s, writer) if s.source == "model" else s for s in (first, heard, second)]
        return replace(values, chains=(Chain((1, 2), tuple(said)), Chain((1, 2, 7), (said[2],))))

    first, second = Segment("model", (5, 6), (-0.5, -0.25), (3, 4)), Segment("model", (8,), (-1.5,), (4,), 0.5)
    heard = Segment.observed((7, 9))
    chains = (Chain((1, 2), (first, heard, second)), Chain((1, 2, 7), (second,)))
    values = Rollout(17, 3, chains, "stop", "", Score(1.0))
    for a, b in zip(samples_of(asyncio.run(body())), samples_of(values), strict=True):
        assert isinstance(a.tokens_T, LazyArray) and a.prompt_T.tolist() == b.prompt_T.tolist() and a.key == b.key
        assert (
            np.asarray(a.tokens_T).tolist() == np.asarray(b.tokens_T).tolist()
            and a.mask_T.tolist() == b.mask_T.tolist()
        )
        assert {n: np.asarray(v).tolist() for n, v in a.columns.items()} == {n: list(v) for n, v in b.columns.items()}


def samples_of(rollout: Rollout) -> list[Sample]:
    return [sample_of(rollout, number, chain) for number, chain in enumerate(rollout.chains)]


def test_what_is_sent_of_an_answer_in_files_does_not_grow_with_it(tmp_path: Path) -> None:
    sizes = []
    for length in (64, 512, 4096):
        (sample,) = filed(tmp_path, make_samples([(0, 5, length)]))
        path = tmp_path / sample.tokens_T.parts[1].stretches[0][0].file  # type: ignore[union-attr]
        path.unlink()  # nobody reads it here
        sizes.append(len(pack_frame(*samples_to_wire([[sample]]))))
    assert max(sizes) - min(sizes) <= 8, sizes


def test_a_damaged_answer_is_named_by_the_rank(tmp_path: Path) -> None:
    (sample,) = filed(tmp_path, make_samples([(0, 5, 8)]))
    frame = sent(pack_frame(*samples_to_wire([[sample]])))
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(CorruptError, match=rf"{path.name}: the answer at byte 0 \(8 tokens\)"):
        samples_of_wire(frame.header, frame.arrays)


def test_numbers_travel_exactly() -> None:
    entries = {
        "loss": Sum(Kind.TOTAL, (0.1,)),
        "gap": Sum(Kind.MAX, (-math.inf,)),
        "ess": Sum(Kind.SIZE, (1.5, 2.25, 3.0)),
        Mark.SKIPPED: Sum(Kind.COUNT, (1.0,)),
        Signal.KL: Sum(Kind.MEAN, (1e-30, 7.0)),
    }
    tokens = {(17, 3, 0): {"logp": np.array([-0.1, -2.3], np.float32)}, (18, 0, 1): {"logp": np.zeros(0, np.float32)}}
    header, arrays = totals_to_wire(Totals(entries, tokens))
    frame = sent(pack_frame(header, arrays))
    found = totals_of_wire(frame.header, frame.arrays)
    assert found.entries == entries and found.tokens.keys() == tokens.keys()
    np.testing.assert_array_equal(found.tokens[17, 3, 0]["logp"], tokens[17, 3, 0]["logp"])


def test_conditions_travel_exactly() -> None:
    given = Conditions(7, Coefficients(kl=0.1, entropy=1e-9))
    assert conditions_of(asdict(given)) == given
