"""Make the reports of steps, and refuse a step that cannot be trusted."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kitae.algorithms.filters import has_variance
from kitae.clock import now
from kitae.engines.base import Engine, EngineStats
from kitae.errors import VerifierError
from kitae.observe.machine import memory_share
from kitae.observe.step_report import BatchStats, Generation, Lap, Staleness, StepReport, Talks
from kitae.rl.buffer import SlotResult
from kitae.rl.issue import GivenUp
from kitae.trainer.learner import Learnt
from kitae.types import Group, Rollout, Runs


def sampled(slot_results: Sequence[SlotResult]) -> BatchStats:
    """What was sampled for a batch, dropped groups included."""
    groups = [result.group for result in slot_results if result.group]
    groups += [group for result in slot_results for group, _ in result.dropped]
    rollouts = [r for g in groups for r in g.rollouts]
    valid = [r for g in groups for r in g.valid]
    judged = [*rollouts, *(g.greedy for g in groups if g.greedy)]
    failed = [r for r in judged if r.score is None or not r.score.valid]
    rewards = [r.score.value for r in valid if r.score]
    lengths = [r.response_length for r in rollouts]
    return BatchStats(
        reward=float(np.mean(rewards)) if rewards else None,
        reward_std=float(np.std(rewards)) if rewards else None,
        length=float(np.mean(lengths)) if lengths else 0.0,
        length_max=max(lengths, default=0),
        truncated=float(np.mean([r.finish == "length" for r in rollouts])) if rollouts else 0.0,
        rollouts=len(rollouts),
        groups=sum(result.group is not None for result in slot_results),
        groups_dropped=sum(len(result.dropped) for result in slot_results),
        groups_with_signal=sum(has_variance(g.rewards_G) for g in groups),
        errors=len(failed),
        error_share=len(failed) / len(judged) if judged else 1.0,
        first_error=_first_error(judged, groups),
        components=_component_means([r.score.components for r in valid if r.score]),
        talks=_talks(rollouts),
    )


def _talks(rollouts: Sequence[Rollout]) -> Talks | None:
    """Means over conversations; None where every rollout is one answer."""
    talked = [r for r in rollouts if r.transcript]
    if not talked:
        return None
    turns = [sum(s.source == "model" for s in r.segments) for r in talked]
    said = [
        message
        for r, count in zip(talked, turns, strict=True)
        for message in [m for m in r.transcript if m.role == "assistant"][-count or None :]  # not those of the prompt
    ]
    number = len(talked)
    return Talks(
        turns=sum(turns) / number,
        chains=sum(len(r.chains) for r in talked) / number,
        calls=sum(len(m.calls) for m in said) / number,
        bad_calls=sum(bool(m.problem) for m in said) / number,
    )


def staleness(slot_results: Sequence[SlotResult], version: int, bound: int) -> Staleness:
    """How many versions older than `version` the trained tokens are. The bound that the buffer guarantees is asserted
    for every token."""
    ages = Counter[int]()
    for r in (r for result in slot_results if result.group for r in result.group.valid):
        for then, count in (run for s in r.segments if s.source == "model" for run in Runs.of(s.versions).runs):
            assert version - then <= bound, f"rollout {r.id}: version {then} at {version}"
            ages[max(0, version - then)] += count
    tokens = ages.total() or 1
    mean = sum(age * count for age, count in ages.items()) / tokens
    return Staleness(mean, max(ages, default=0), {age: ages[age] / tokens for age in range(1, bound + 1)})


def check_errors(step: int, found: BatchStats, limit: float) -> None:
    if found.error_share > limit:
        raise VerifierError(
            f"{found.error_share:.0%} of the answers of step {step} could not be judged "
            f"(verifier.max_error_share is {limit:.0%}). First reason: {found.first_error}"
        )


class Laps:
    """Cuts the time of a run into steps, one right after the other, so that they add up to all of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began, self._stats = now(), engine.stats()

    def lap(self, parts: Mapping[str, float]) -> tuple[Lap, Generation]:
        """What took how long since the last lap, and what the engine did in that time."""
        end, stats = now(), self._engine.stats()
        times, generation = Lap(end - self._began, parts), _generation(self._stats, stats)
        self._began, self._stats = end, stats
        return times, generation


def _generation(before: EngineStats, after: EngineStats) -> Generation:
    return Generation(
        after.busy_seconds - before.busy_seconds,
        after.generated_tokens - before.generated_tokens,
        after.restarts - before.restarts,
        after.engines,
    )


def step_report(
    step: int,
    found: BatchStats,
    ages: Staleness,
    learnt: Learnt,
    lap: tuple[Lap, Generation],
    given_up: GivenUp,
    sync: Mapping[str, float],
) -> StepReport:
    times, generation = lap
    return StepReport(
        step,
        found,
        ages,
        generation,
        times,
        given_up.overdue,
        given_up.spare,
        learnt.updates,
        learnt.samples,
        learnt.skipped,
        learnt.numbers,
        sync,
        memory_share(),
    )


def _first_error(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> str:
    if not rollouts:
        reasons = [f"no prompt could be sampled: {g.prompt.id}: {g.problem}" for g in groups if g.problem]
        return reasons[0] if reasons else "no prompt could be sampled"
    return next((r.score.detail for r in rollouts if r.score and not r.score.valid), "")


def _component_means(components: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for c in components for name in c})
    return {n: float(np.mean([c[n] for c in components if n in c])) for n in names}
