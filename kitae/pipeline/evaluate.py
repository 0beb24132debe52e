"""Held-out evaluation: avg@k and pass@k, with confidence intervals over prompts."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kitae.config.root import RLConfig
from kitae.envs.episode import Episodes
from kitae.errors import DataError, RequestError, root_cause
from kitae.types import FloatArray, Group, Prompt

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts and its 95 % interval: `Interval(0.62, 0.54, 0.70)`."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`avg` is the mean score of all samples; `passed[k]` estimates that at least one of k samples scores 1."""

    prompts: int
    samples: int
    avg: Interval
    passed: dict[int, Interval]
    length: float
    truncated: float
    errors: int
    groups: tuple[Group, ...]

    def row(self) -> dict[str, float]:
        """The numbers, flat, for the metrics file."""
        numbers: dict[str, float] = {"avg": self.avg.mean, "avg_low": self.avg.low, "avg_high": self.avg.high}
        for k, estimate in self.passed.items():
            numbers |= {f"pass@{k}": estimate.mean, f"pass@{k}_low": estimate.low, f"pass@{k}_high": estimate.high}
        return numbers | {
            "prompts": self.prompts,
            "samples": self.samples,
            "length": self.length,
            "truncated": self.truncated,
            "errors": self.errors,
        }


def evaluation_due(config: RLConfig, step: int) -> bool:
    """Whether a run evaluates after this step: before training, at its end, and in between."""
    e = config.eval
    return e.prompts > 0 and (step in (0, config.training.steps) or bool(e.every and step % e.every == 0))


async def evaluate(runner: Episodes, prompts: Sequence[Prompt], samples: int) -> Evaluation:
    """Sample every prompt and score the answers. Answers that could not be judged are counted and left out.

    All answers to a prompt that the engine cannot take (longer than the context, say) count as such.
    """

    async def one(index: int, prompt: Prompt) -> Group:
        try:
            return await runner.group(index, prompt, samples)
        except (RequestError, DataError):
            return Group(index, prompt, ())

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
    except BaseExceptionGroup as problem:
        raise root_cause(problem) from None
    groups = [task.result() for task in running]
    judged = [g for g in groups if g.valid]
    rollouts = [r for g in groups for r in g.rollouts]
    averages = np.array([g.rewards_G.mean() for g in judged], dtype=np.float32)
    ks = sorted({1, *(2**i for i in range(1, 12) if 2**i <= samples), samples}) if samples > 1 else [1]
    passed = {}
    for k in ks:
        enough = [g for g in judged if len(g.valid) >= k]
        chances = [pass_at_k(len(g.valid), int((g.rewards_G >= 1).sum()), k) for g in enough]
        passed[k] = interval_of(np.array(chances, dtype=np.float32))
    return Evaluation(
        prompts=len(prompts),
        samples=samples,
        avg=interval_of(averages),
        passed=passed,
        length=float(np.mean([r.response_length for r in rollouts])) if rollouts else 0.0,
        truncated=float(np.mean([r.finish == "length" for r in rollouts])) if rollouts else 0.0,
        errors=len(prompts) * samples - sum(len(g.valid) for g in groups),
        groups=tuple(groups),
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a correct one: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def interval_of(values: FloatArray) -> Interval:
    """Mean and 95 % interval over prompts: Wilson's where all values are 0 or 1, else a seeded bootstrap."""
    if len(values) == 0:
        return Interval(math.nan, math.nan, math.nan)
    if np.isin(values, (0, 1)).all():
        return _wilson(float(values.mean()), len(values))
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


def _wilson(mean: float, n: int) -> Interval:
    z = 1.959964
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return Interval(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))  # rounding apart
