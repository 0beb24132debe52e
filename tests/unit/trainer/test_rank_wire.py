"""What goes to ranks and comes back is what it was."""

import asyncio
import math
from dataclasses import asdict

import numpy as np
import torch
from test_gradient import make_samples

from kitae.algorithms.control import Coefficients, Signal
from kitae.data.packing import Row
from kitae.observe.meter import Kind, Sum, Totals
from kitae.processes.frames import Frame, pack_frame, read_frame
from kitae.trainer.base import Conditions, Mark
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.wire import conditions_of, rows_of_wire, rows_to_wire, totals_of_wire, totals_to_wire


def sent(frame: bytes) -> Frame:
    async def body() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        found = await read_frame(reader)
        assert found is not None
        return found

    return asyncio.run(body())


def test_rows_travel_exactly() -> None:
    samples = make_samples([(0, 5, 3), (0, 5, 9), (1, 12, 1), (2, 30, 20), (3, 1, 4)], gaps=True)
    observed = {s.key for s in samples[::2]}
    _, rows = pack_rows(samples, TrainingConfig(token_budget=30), torch.device("cpu"), ranks=4, observed=observed)
    rows.append(Row.empty())
    headers, arrays = rows_to_wire(rows)
    frame = sent(pack_frame({"rows": headers}, arrays))
    found = rows_of_wire(frame.header["rows"], frame.arrays)
    assert len(found) == len(rows) and sum(len(row.observed) for row in rows) == len(observed)
    for a, b in zip(found, rows, strict=True):
        assert (a.spans, a.lengths, a.observed, a.columns.keys()) == (b.spans, b.lengths, b.observed, b.columns.keys())
        for name in ("tokens_T", "positions_T", "source_N", "target_N", "weight_N"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert getattr(a, name).dtype == getattr(b, name).dtype
        for name, values in b.columns.items():
            np.testing.assert_array_equal(a.columns[name], values)


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
