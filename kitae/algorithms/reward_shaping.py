"""S1, reward shaping: raw scores → the rewards that advantages are computed from.

Order: truncation rule → length penalty → bias and scale → clip → normalisation. A KL penalty comes after that, per
token, where advantages are computed. The metric `reward` is always the raw score.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kitae.types import BoolArray, FloatArray, IntArray

Wide = npt.NDArray[np.float64]

OverlongBuffer = Annotated[
    int, Field(ge=0, description="Soft length penalty over the last so many tokens before the limit; 0: off.")
]
LengthPenalty = Annotated[
    float,
    Field(ge=0, description="Taken off the score, times the length over that of the group's longest response; 0: off."),
]
Bias = Annotated[float, Field(description="Added to the score.")]
Scale = Annotated[float, Field(gt=0, description="Factor after the bias.")]
Clip = Annotated[float, Field(ge=0, description="Rewards are clipped to ± this; 0: off.")]


def narrow(values: Wide) -> FloatArray:
    """As float32; what it does not hold becomes infinite, which whoever called the stage refuses."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


@dataclass(frozen=True, slots=True)
class StepRewards:
    """One row for each judged response of a step (B of them), greedy ones included.

    `StepRewards(scores_B=[1., 0.], lengths_B=[12, 64], truncated_B=[False, True], groups_B=[7, 7], max_tokens=64)`
    """

    scores_B: FloatArray
    lengths_B: IntArray
    truncated_B: BoolArray
    groups_B: IntArray
    max_tokens: int


def standard(
    step: StepRewards,
    *,
    overlong_buffer: OverlongBuffer = 0,
    length_penalty: LengthPenalty = 0.0,
    bias: Bias = 0.0,
    scale: Scale = 1.0,
    clip: Clip = 0.0,
) -> FloatArray:
    """(score − length penalties + bias) × scale, clipped to ± clip where that is not 0."""
    penalties_B = np.array([overlong_penalty(int(n), step.max_tokens, overlong_buffer) for n in step.lengths_B])
    penalties_B -= length_penalty * relative_lengths(step.lengths_B, step.groups_B)
    rewards_B = (step.scores_B + penalties_B + bias) * scale
    return narrow(rewards_B.clip(-clip, clip) if clip else rewards_B)


SHAPINGS: Mapping[str, Callable[..., FloatArray]] = {"standard": standard}


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft length penalty: 0 up to `max_tokens - buffer`, then linear down to -1 at `max_tokens`.

    `max_tokens` is the hard generation cap; `length` counts tokens, never characters.
    """
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))


def relative_lengths(lengths_B: IntArray, groups_B: IntArray) -> Wide:
    """The length of each response over that of the longest of its group, a greedy one included."""
    _, group_B = np.unique(groups_B, return_inverse=True)
    longest = np.ones(len(lengths_B), dtype=np.int64)  # as many as there could be groups; empty responses divide by 1
    np.maximum.at(longest, group_B, lengths_B)
    relative: Wide = lengths_B / longest[group_B]
    return relative


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations: `Moments().add([1, 0]).std` is 0.5."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: FloatArray) -> "Moments":
        if len(values) == 0:
            return self
        count, mean = len(values), float(values.mean(dtype=np.float64))
        total, shift = self.count + count, mean - self.mean
        return replace(
            self,
            count=total,
            mean=self.mean + shift * count / total,
            squares=self.squares
            + float(((values.astype(np.float64) - mean) ** 2).sum())
            + shift**2 * self.count * count / total,
        )

    @property
    def std(self) -> float:
        return float((self.squares / max(1.0, self.count)) ** 0.5)

    def normalise(self, values: FloatArray, ddof: int = 0, epsilon: float = 0.0) -> FloatArray:
        """(x − mean) / (std + ε); zeros where nothing varies."""
        if self.std <= 1e-6:
            return np.zeros_like(values)
        std = float((self.squares / max(1.0, self.count - ddof)) ** 0.5)
        return narrow((values.astype(np.float64) - self.mean) / (std + epsilon))
