"""S3, advantages: rewards of one group → one advantage per sample.

Equal rewards, or fewer than two of them, give exactly 0: the float mean of equal numbers need not be that number, and
what is left of it would grow to an advantage when divided by ε.
"""

from collections.abc import Callable, Mapping

import numpy as np

from kitae.algorithms.filters import has_variance
from kitae.types import FloatArray

_EPSILON = 1e-6  # added to the standard deviation, not to the variance


def group_centred(rewards_G: FloatArray) -> FloatArray:
    """R - mean of the group."""
    if not has_variance(rewards_G):
        return np.zeros_like(rewards_G)
    centred: FloatArray = rewards_G - rewards_G.mean()
    return centred


def group_zscore(rewards_G: FloatArray) -> FloatArray:
    """(R - mean) / (std + ε) with the sample standard deviation (ddof 1)."""
    if not has_variance(rewards_G):
        return np.zeros_like(rewards_G)
    scaled: FloatArray = group_centred(rewards_G) / (rewards_G.std(ddof=1) + np.float32(_EPSILON))
    return scaled


ADVANTAGES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "group-zscore": group_zscore,
    "group-centred": group_centred,
}
