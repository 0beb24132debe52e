from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitae.observe.meter import Kind, Meter, Totals, average

finite = st.floats(-1e6, 1e6)


def test_means_totals_and_maxima() -> None:
    meter = Meter()
    meter.mean("entropy", 1.0, count=1)
    meter.mean("entropy", 4.0, count=2)
    meter.mean("plain", 2.0)
    meter.mean("plain", 4.0)
    meter.total("loss", -0.5)
    meter.total("loss", 0.25)
    meter.max("gap", -3.0)
    meter.max("gap", -5.0)
    assert meter.totals().numbers() == {"entropy": 3.0, "plain": 3.0, "loss": -0.25, "gap": -3.0}


def test_nothing_measured_is_nothing_reported() -> None:
    meter = Meter()
    assert meter.totals().numbers() == {}
    meter.mean("never", 1.0, count=0)
    assert meter.totals().numbers() == {}


@given(st.lists(st.lists(finite, min_size=1, max_size=5), min_size=1, max_size=5))
def test_any_cut_into_parts_gives_the_same_numbers(parts: list[list[float]]) -> None:
    values = [x for part in parts for x in part]
    meter = Meter()
    for part in parts:
        meter.mean("mean", sum(part) / len(part), len(part))
        meter.total("total", sum(part))
        meter.max("max", max(part))
    found = meter.totals().numbers()
    assert found["mean"] == pytest.approx(sum(values) / len(values), abs=1e-3)
    assert found["total"] == pytest.approx(sum(values), abs=1e-3)
    assert found["max"] == max(values)


def test_tensors_are_fetched_at_the_end() -> None:
    import torch

    def one(value: float) -> torch.Tensor:
        return torch.tensor(value)

    meter = Meter()
    meter.mean("entropy", one(1.0), 1)
    meter.mean("entropy", 4.0, torch.tensor(2))
    meter.part("gated", one(6.0), torch.tensor(3))
    meter.part("none", one(0.0), torch.tensor(0))
    meter.max("gap", one(-3.0))
    meter.max("gap", one(float("-inf")))
    meter.max("nothing", one(float("-inf")))
    meter.max("broken", one(float("nan")))
    meter.max("broken", 1.0)
    meter.sample_size("ess", one(2.0), one(2.0), 2)
    found = meter.totals().numbers()
    assert str(found.pop("broken")) == "nan"
    assert found == {"entropy": 3.0, "gated": 2.0, "gap": -3.0, "ess": 1.0}


class Signal(Enum):
    KL = "kl"


def some(*values: float) -> Totals:
    meter = Meter()
    for value in values:
        meter.mean("mean", value, 2)
        meter.total("loss", value)
        meter.max("max", value)
        meter.mean(Signal.KL, value)
    return meter.totals() + Totals.of(Kind.COUNT, tokens=len(values))


def test_parts_of_ranks_and_micro_batches_add_up() -> None:
    together = some(1.0, 3.0) + some(8.0)
    assert together.numbers() == {"mean": 4.0, "loss": 12.0, "max": 8.0, "tokens": 3.0} == some(1.0, 3.0, 8.0).numbers()


def test_each_update_of_a_step_counts_once() -> None:
    step = average([some(1.0, 3.0), some(8.0)])
    assert step.numbers() == {"mean": 5.0, "loss": 6.0, "max": 8.0, "tokens": 3.0}


def test_what_steers_is_no_metric() -> None:
    step = average([some(1.0, 3.0), some(8.0)])
    assert step[Signal.KL] == 5.0 and step["kl"] is None and "kl" not in step.numbers()
    assert average([])[Signal.KL] is None
