"""The estimate of a dry run: what it grows with, and that it stays near the truth where the truth is known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kitae.cli.preview import describe
from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.study import time_estimate as module
from kitae.study.model_shape import ModelShape
from kitae.study.time_estimate import Estimate, Machine, Range, estimate

SMOLLM2 = ModelShape(parameters=134_515_008, hidden=576, inner=1536, layers=30, vocabulary=49152)


class Measured(Machine):
    """A machine of known speed: FLOP/s of products, bytes a second of copies."""

    rate, speed = 1.0e12, 12.0e9

    def _measure(self, rows: int) -> Range:
        rate = self.rate * min(1.0, (rows + 60) / 500)  # few rows are slower
        return Range(rate, rate)

    @property
    def bandwidth(self) -> float:
        return self.speed


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Estimate]:
    """`found(training={"steps": 3})`: the estimate on one Xeon core with AMX, as it was measured."""
    monkeypatch.setattr(module, "Machine", Measured)
    monkeypatch.setattr(module, "read_model", lambda _: SMOLLM2)

    def get(**sections: dict[str, Any]) -> Estimate:
        return estimate(config(**sections))

    return get


def config(**sections: dict[str, Any]) -> RLConfig:
    values: dict[str, Any] = {
        "data": {"task": "reverse"},
        "model": {"device": "cpu", "dtype": "bfloat16"},
        "sampling": {"max_tokens": 16},
        "training": {"steps": 15},
        "eval": {"prompts": 128},
    }
    return parse_config({**values, **{name: {**values.get(name, {}), **keys} for name, keys in sections.items()}})


def test_a_small_run_on_one_core_with_amx(found: Callable[..., Estimate]) -> None:
    """The speeds were measured there, and `_TRAFFIC` is fitted to them: a step of 64 answers of 11 tokens took 0.8 to
    1.6 s of sampling and 2.5 to 4.8 s of training, 0.96 and 2.8 s in the last one. The quickstart took 78 s of the
    processor; what a run takes beside its steps is guessed, so the bounds on it are wide.
    """
    seen = found()
    assert 0.45 < seen.generation.low < 0.9 * 1.2 and 0.9 < seen.generation.high < 1.8
    assert 1.35 < seen.training.low < 2.7 * 1.2 and 2.7 < seen.training.high < 5.4
    assert 50 < seen.run.low <= 110 and 90 < seen.run.high < 200


@pytest.mark.parametrize(
    ("part", "sections"),
    [
        ("generation", {"sampling": {"max_tokens": 32}}),
        ("generation", {"training": {"group_size": 16}}),
        ("training", {"training": {"group_size": 16}}),
        ("training", {"training": {"epochs": 2}}),
        ("training", {"algorithm": {"preset": "ppo"}}),
        ("training", {"model": {"plain": True}}),
        ("training", {"training": {"minibatches": 8}}),
        ("evaluations", {"eval": {"every": 5}}),
        ("evaluations", {"eval": {"prompts": 256}}),
        ("evaluations", {"eval": {"suites": ["countdown"]}}),
        ("evaluations", {"eval": {"max_tokens": 32}}),
        ("run", {"training": {"steps": 30}}),
        ("run", {"checkpoint": {"every": 1}}),
    ],
)
def test_more_work_takes_longer(found: Callable[..., Estimate], part: str, sections: dict[str, Any]) -> None:
    less, more = getattr(found(), part), getattr(found(**sections), part)
    assert more.high > 1.2 * less.high, (less, more)


def test_a_machine_is_measured_in_a_moment() -> None:
    model = ModelShape(parameters=10**6, hidden=64, inner=128, layers=2, vocabulary=100)
    machine = Machine(torch.device("cpu"), torch.float32, model)
    took = machine.generate(prompts=2, responses=8, prompt=10, longest=4, batch=8)
    assert 0 < took.low < took.high < 10
    assert machine.bandwidth > 1e7


def test_memory_of_a_cluster_is_not_this_machines(
    found: Callable[..., Estimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit here may fit there."""
    monkeypatch.setattr("kitae.study.memory_estimate.room", lambda _: 1.0)
    alone, spread = found(), found(cluster={"backend": "local", "ranks": 2})
    assert alone.memory is not None and not alone.memory.fits
    assert spread.memory is None and spread.model is not None
    assert "memory     is not worked out for a cluster" in describe(config(), spread)
