"""What a step has to say for itself: the rows of metrics that the loops make, and complaints about steps that teach
nothing. The trainer and the objective add numbers of their own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kitae.algorithms.config import needs_group
from kitae.algorithms.filters import has_variance
from kitae.config.root import RLConfig
from kitae.engines.base import EngineStats
from kitae.errors import VerifierError
from kitae.observe.observer import Observer
from kitae.pipeline.buffer import Outcome
from kitae.types import Rollout

Row = dict[str, Any]

_SILENT_LIMIT = 5  # steps


def describe(step: int, outcomes: Sequence[Outcome]) -> Row:
    """What was sampled, dropped groups included: the reward curve must not depend on the filter."""
    groups = [o.group for o in outcomes if o.group] + [g for o in outcomes for g, _ in o.dropped]
    rollouts = [r for g in groups for r in g.rollouts]
    valid = [r for g in groups for r in g.valid]
    judged = [*rollouts, *(g.greedy for g in groups if g.greedy)]
    failed = [r for r in judged if r.score is None or not r.score.valid]
    rewards = [r.score.value for r in valid if r.score]
    lengths = [r.response_length for r in rollouts]
    return {
        "kind": "step",
        "step": step,
        "reward": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "length": float(np.mean(lengths)) if lengths else 0.0,
        "length_max": max(lengths, default=0),
        "truncated": float(np.mean([r.finish == "length" for r in rollouts])) if rollouts else 0.0,
        "rollouts": len(rollouts),
        "groups": sum(o.group is not None for o in outcomes),
        "groups_dropped": sum(len(o.dropped) for o in outcomes),
        "groups_with_signal": sum(has_variance(g.rewards_G) for g in groups),
        "errors": len(failed),
        "error_share": len(failed) / len(judged) if judged else 1.0,
        "first_error": _first_error(judged),
        **_component_means([r.score.components for r in valid if r.score]),
    }


def staleness(outcomes: Sequence[Outcome], version: int, bound: int) -> Row:
    """How old the tokens of a batch are, in versions. The bound that the buffer guarantees is asserted on each."""
    ages = Counter[int]()
    for r in (r for o in outcomes if o.group for r in o.group.valid):
        sampled = (Counter(s.versions) for s in r.segments if s.source == "model")
        for then, count in (item for found in sampled for item in found.items()):
            assert version - then <= bound, f"rollout {r.id}: version {then} at {version}"
            ages[max(0, version - then)] += count
    tokens = ages.total() or 1
    mean = sum(age * count for age, count in ages.items()) / tokens
    row: Row = {"staleness": mean, "staleness_max": max(ages, default=0)}
    return row | {f"staleness/{age}": ages[age] / tokens for age in range(1, bound + 1)}


def generation(before: EngineStats, after: EngineStats) -> Row:
    """What the engine did from one batch to the next."""
    seconds, tokens = after.busy_seconds - before.busy_seconds, after.generated_tokens - before.generated_tokens
    return {
        "generate_seconds": seconds,
        "generated_tokens": tokens,
        "generate_tokens_per_second": _rate(tokens, seconds),
        "engine_restarts": after.restarts - before.restarts,
    }


def times(row: Mapping[str, Any], waited: float, whole: float) -> Row:
    """Where the time of a step went."""
    train_seconds = row.get("train_seconds", 0.0)
    return {
        "train_tokens_per_second": _rate(row.get("train_tokens", 0.0), train_seconds),
        "wait_seconds": waited,
        "step_seconds": whole,
        "engine_idle": max(0.0, 1 - _rate(row["generate_seconds"], whole)),
        "trainer_idle": max(0.0, 1 - _rate(train_seconds, whole)),
    }


def check_errors(row: Mapping[str, Any], limit: float) -> None:
    if row["error_share"] > limit:
        raise VerifierError(
            f"{row['error_share']:.0%} of the answers of step {row['step']} could not be judged "
            f"(verifier.max_error_share is {limit:.0%}). First reason: {row['first_error']}"
        )


class Complaints:
    """Says it once when steps go by without anything to learn from."""

    def __init__(self, config: RLConfig, observer: Observer, folder: Path) -> None:
        self._compares = needs_group(config.algorithm)
        self._observer = observer
        self._folder = folder
        self._silent_steps = 0
        self._idle_steps = 0

    def about_rewards(self, row: Mapping[str, Any]) -> None:
        if not self._compares:
            return
        self._silent_steps = 0 if row["groups_with_signal"] else self._silent_steps + 1
        if self._silent_steps == _SILENT_LIMIT:
            self._observer.note(
                f"no group had differing rewards for {_SILENT_LIMIT} steps: nothing is being learnt. The mean "
                f"reward is {row['reward']}; make the task easier or harder, or look at: kitae show {self._folder}"
            )

    def about_updates(self, row: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
        self._idle_steps = 0 if row["updates"] else self._idle_steps + 1
        if self._idle_steps == _SILENT_LIMIT:
            reasons = Counter(reason for o in outcomes for _, reason in o.dropped)
            why = ", ".join(f"{count} dropped by {reason!r}" for reason, count in reasons.most_common())
            self._observer.note(f"nothing was trained on for {_SILENT_LIMIT} steps; of the last one's groups: {why}")
        if row.get("skipped_updates") or row.get("critic_skipped_updates"):
            step = row["step"]
            self._observer.note(f"step {step}: a gradient was not finite; those weights were left as they were")


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _first_error(rollouts: Sequence[Rollout]) -> str:
    if not rollouts:
        return "no prompt could be sampled"
    return next((r.score.detail for r in rollouts if r.score and not r.score.valid), "")


def _component_means(components: Sequence[Mapping[str, float]]) -> Row:
    names = sorted({name for c in components for name in c})
    return {f"reward/{n}": float(np.mean([c[n] for c in components if n in c])) for n in names}
