"""Simulated schedules against what can be worked out by hand, and the bounds of the real loops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.errors import ConfigError
from kitae.observe.timeline import read
from kitae.store.run_folder import Metrics
from kitae.study.simulate import Hardware, LogNormal, Schedule, Times, Work, simulate, study

EXACT = Times(step=0.01, sequence=0.001, prefill=1000, train=500, fixed=0.2, sync=0.3, verify=0.05)
TAIL = Work(LogNormal(64, 512), prompt=16)


def config(prompts: int = 8, bound: int = 0, **sections: dict[str, Any]) -> RLConfig:
    return parse_config(
        {
            "data": {"task": "reverse"},
            "sampling": {"max_tokens": 512},
            "training": {"prompts_per_step": prompts, "group_size": 4},
            "pipeline": {"max_staleness": bound, **sections.pop("pipeline", {})},
            **sections,
        }
    )


def test_taking_turns_by_hand() -> None:
    """8 groups of 4 on 4 engines: each computes 2 prompts and decodes 8 sequences; then all 4 train."""
    work = Work(LogNormal(100, 100, 0.0), prompt=50)
    found = simulate(Schedule(config(), Hardware(4, 0), EXACT, work, steps=5))
    generate = 2 * 50 / 1000 + 100 * (0.01 + 8 * 0.001)
    train = 0.2 + (32 * 100 + 8 * 50) / (4 * 500)
    seconds = generate + 0.05 + train + 0.3
    assert found.step_seconds == pytest.approx(seconds)
    assert found.tokens_per_second == pytest.approx(3200 / seconds)
    assert found.samples_per_second == pytest.approx(32 / seconds)
    assert found.engine_idle == pytest.approx(1 - generate / seconds)
    assert found.trainer_idle == pytest.approx(1 - train / seconds)
    assert (found.staleness, found.staleness_max, found.dropped, found.restarts) == (0, 0, 0, 0)


def test_a_trainer_that_is_never_kept_waiting_by_hand() -> None:
    """Generation is so fast that a step is training alone: weights are handed over beside it."""
    times = replace(EXACT, step=1e-5, sequence=0.0, verify=0.0)
    work = Work(LogNormal(100, 100, 0.0), prompt=50)
    found = simulate(Schedule(config(bound=1), Hardware(3, 1), times, work, steps=5))
    train = 0.2 + 3600 / 500
    assert found.step_seconds == pytest.approx(train)
    assert found.trainer_idle == pytest.approx(0.0, abs=1e-9)
    assert found.staleness == found.staleness_max == 1


@pytest.mark.thorough
def test_running_ahead_pays_where_lengths_have_a_tail(tmp_path: Path) -> None:
    times = replace(EXACT, sequence=0.0, train=5000.0, sync=0.1)
    found = [o for _, o in study(config(4), [4], [0, 1, 4], times, TAIL, steps=8)]
    assert [o.max_staleness for o in found] == [0, 1, 4]
    assert [o.staleness_max for o in found] == [0, 1, 4]
    assert found[0].speedup == 1.0 and (found[0].engines, found[0].trainers) == (4, 0)
    assert found[1].speedup is not None and found[2].speedup is not None
    assert 1.3 < found[1].speedup < found[2].speedup
    assert all(o.engines + o.trainers == 4 and o.trainers > 0 for o in found[1:])
    worse = [simulate(Schedule(config(4, bound=4), Hardware(e, 4 - e), times, TAIL, 8)) for e in (1, 3)]
    assert found[2].tokens_per_second >= max(o.tokens_per_second for o in worse)


def test_overdue_groups_may_be_given_up() -> None:
    """A batch that does not wait for the longest responses comes sooner."""
    times = replace(EXACT, sequence=0.0, train=5000.0, sync=0.1)
    waiting = simulate(Schedule(config(bound=1), Hardware(3, 1), times, TAIL, 8))
    settings = config(bound=1, pipeline={"overdue": "drop"})
    ((_, sync), (_, dropping)) = study(settings, [4], [0, 1], times, TAIL, steps=8, trainers=1)
    assert waiting.overdue == sync.overdue == 0 < dropping.overdue
    assert dropping.step_seconds < waiting.step_seconds and dropping.staleness_max == 1


def test_the_run_leaves_its_timeline_in_simulated_time(tmp_path: Path) -> None:
    schedule = Schedule(config(bound=2), Hardware(3, 1), EXACT, TAIL, steps=4)
    found = simulate(schedule, tmp_path)
    assert simulate(schedule) == found, "it is deterministic"
    spans = read(tmp_path)
    assert {s["part"] for s in spans} == {"generate", "verify", "train", "sync", "save"}
    assert len(Metrics(tmp_path / "metrics.jsonl").rows("step")) == 4 + 2 * 3
    training = [s["end"] - s["start"] for s in spans if s["part"] == "train"]
    assert min(training) > 0.2 and max(s["end"] for s in spans) > 8 * found.step_seconds
    assert [s["end"] - s["start"] for s in spans if s["part"] == "sync"] == pytest.approx([0.3] * 10, abs=2e-4)


def test_groups_without_signal_are_replaced() -> None:
    filters: dict[str, Any] = {"algorithm": {"preset": "grpo", "filter": "zero-variance"}}
    work = replace(TAIL, signal=0.5)
    settings = config(bound=1, pipeline={"refill": 10.0}, **filters)
    found = simulate(Schedule(settings, Hardware(3, 1), EXACT, work, steps=10))
    assert found.dropped == pytest.approx(8, abs=3) and found.refilled == pytest.approx(8, abs=2)
    assert found.samples_per_second * found.step_seconds == pytest.approx(32), "every batch is full"
    left = simulate(Schedule(config(bound=1, **filters), Hardware(3, 1), EXACT, work, steps=10))
    assert left.refilled == 0 and left.samples_per_second * left.step_seconds == pytest.approx(16, abs=4)


@pytest.mark.thorough
def test_asking_more_prompts_at_once_saves_rounds() -> None:
    """On-policy, a batch waits for one replacement after the other."""
    work = replace(TAIL, signal=0.4)
    found = {}
    for oversample in (1, 1.5, 3):
        settings = config(
            bound=0,
            pipeline={"refill": {"most": 10.0, "oversample": oversample}},
            algorithm={"preset": "grpo", "filter": "zero-variance"},
        )
        found[oversample] = simulate(Schedule(settings, Hardware(4, 0), EXACT, work, steps=10))
        assert found[oversample].samples_per_second * found[oversample].step_seconds == pytest.approx(32)
    assert found[3].step_seconds < 0.9 * found[1].step_seconds
    assert found[3].step_seconds < found[1.5].step_seconds < found[1].step_seconds


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("bound", "hardware"), [(0, Hardware(4, 0)), (1, Hardware(3, 1))])
def test_engines_that_die_cost_time_and_nothing_else(bound: int, hardware: Hardware) -> None:
    times = replace(EXACT, train=5000.0)
    schedule = Schedule(config(bound=bound), hardware, times, TAIL, steps=8)
    whole = simulate(schedule)
    mortal = simulate(replace(schedule, times=replace(times, life=8.0, restart=5.0)))
    assert whole.restarts == 0 < mortal.restarts
    assert mortal.step_seconds > 1.1 * whole.step_seconds
    assert mortal.staleness_max == bound and mortal.samples_per_second * mortal.step_seconds == pytest.approx(32)


def test_the_share_of_generation_can_be_set() -> None:
    ((schedule, found),) = study(config(), [4], [0], EXACT, TAIL, steps=6, generation_share=0.85)
    assert found.trainer_idle == pytest.approx(0.85)
    assert schedule.times.fixed == 0 and schedule.times.train != EXACT.train


def test_the_batch_may_grow_with_the_devices() -> None:
    found = list(study(config(), [2, 4], [0], EXACT, TAIL, steps=2, sequences=6))
    assert [s.config.training.prompts_per_step for s, _ in found] == [3, 6]


def test_a_share_of_the_devices_may_train() -> None:
    found = [o for _, o in study(config(), [2, 8], [1], EXACT, TAIL, steps=2, trainers=0.25)]
    assert [(o.engines, o.trainers) for o in found] == [(1, 1), (6, 2)]


def test_there_must_be_somebody_to_generate() -> None:
    with pytest.raises(ConfigError, match="needs at least 2 devices, 1 to train and others to generate, got 1"):
        next(study(config(), [4, 1], [0, 1], EXACT, TAIL))
    with pytest.raises(ConfigError, match="needs at least 9 devices, 8 to train and others to generate, got 8"):
        next(study(config(), [8], [1], EXACT, TAIL, trainers=8))


def test_log_normal_lengths() -> None:
    lengths = LogNormal(512, 4096)
    drawn = sorted(lengths(seed) for seed in range(1 << 52, 1 << 63, 1 << 50))
    assert drawn[len(drawn) // 2] == pytest.approx(512, rel=0.01)
    assert drawn[-1] == 4096 and drawn[int(0.998 * len(drawn))] < 4096 and drawn[0] >= 1
    assert LogNormal(512, 4096, 3.0)(int(0.9 * (1 << 63))) == 4096
    assert LogNormal(512, 512, 0.0)(1) == LogNormal(512, 512)(12345) == 512
