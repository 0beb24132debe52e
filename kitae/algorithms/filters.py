"""S2, group filters: which groups are trained on. They judge the raw scores, before shaping."""

from collections.abc import Callable, Mapping

from kitae.types import FloatArray

_TOLERANCE = 1e-6


def keep_all(scores_G: FloatArray) -> bool:
    return True


def has_variance(scores_G: FloatArray) -> bool:
    """False when all scores are equal. By max - min: the float std of equal numbers need not be 0."""
    return len(scores_G) > 1 and float(scores_G.max() - scores_G.min()) > _TOLERANCE


FILTERS: Mapping[str, Callable[[FloatArray], bool]] = {"none": keep_all, "zero-variance": has_variance}
