"""S2, filters: which samples of a group are trained on. They judge raw scores, before any shaping.

A filter returns a mask over the judged samples of one group. A group without any kept sample is dropped, and the name
of the filter is the reason. Several filters combine ("all-correct+all-wrong"): a sample must pass them all.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kitae.algorithms.requirements import Trait, has
from kitae.types import BoolArray, FloatArray

CorrectAbove = Annotated[float, Field(description="Scores above this are correct.")]

_TOLERANCE = 1e-6


@has(Trait.NEUTRAL)
def none(scores_G: FloatArray) -> BoolArray:
    """Keep everything."""
    return np.ones(len(scores_G), dtype=bool)


def zero_variance(scores_G: FloatArray) -> BoolArray:
    """Drop groups whose scores are all equal (max − min ≤ 1e-6): a group baseline gives them no gradient."""
    return np.full(len(scores_G), has_variance(scores_G))


def all_correct(scores_G: FloatArray, *, correct_above: CorrectAbove = 0.5) -> BoolArray:
    """Drop groups in which every score is above correct_above."""
    return np.full(len(scores_G), not (scores_G > correct_above).all())


def all_wrong(scores_G: FloatArray, *, correct_above: CorrectAbove = 0.5) -> BoolArray:
    """Drop groups in which no score is above correct_above."""
    return np.full(len(scores_G), (scores_G > correct_above).any())


def keep_best(scores_G: FloatArray, *, correct_above: CorrectAbove = 0.5) -> BoolArray:
    """Keep only samples whose score is the group's best and above correct_above."""
    best: BoolArray = (scores_G >= scores_G.max(initial=-np.inf) - _TOLERANCE) & (scores_G > correct_above)
    return best


FILTERS: Mapping[str, Callable[..., BoolArray]] = {
    "none": none,
    "zero-variance": zero_variance,
    "all-correct": all_correct,
    "all-wrong": all_wrong,
    "keep-best": keep_best,
}


def has_variance(scores_G: npt.NDArray[np.floating[Any]]) -> bool:
    """False when all scores are equal. By max − min: the float std of equal numbers need not be 0."""
    return len(scores_G) > 1 and float(scores_G.max()) - float(scores_G.min()) > _TOLERANCE
