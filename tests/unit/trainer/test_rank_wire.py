"""What goes to ranks and comes back is what it was."""

import asyncio
import math
from dataclasses import asdict, replace

import numpy as np
from test_gradient import make_samples

from kitae.algorithms.control import Coefficients, Signal
from kitae.data.packing import lay_out, pack
from kitae.observe.meter import Kind, Sum, Totals
from kitae.processes.frames import Frame, pack_frame, read_frame
from kitae.trainer.base import Conditions, Mark
from kitae.trainer.sending import samples_of_wire, samples_to_wire
from kitae.trainer.wire import conditions_of, totals_of_wire, totals_to_wire


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
