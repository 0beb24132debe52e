"""What a norm over the root mean square computes, as kernels take it."""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


class NormRule(IntEnum):
    """How a row over its root mean square meets the weight."""

    EARLY = 0  # rounded, times the weight (Llama)
    LATE = 1  # times the weight, rounded once (OLMo 2)
    LATE_PLUS_ONE = 2  # times 1 + the weight, rounded once (Gemma)


class Norm(NamedTuple):
    """`Norm(weight, 1e-6, NormRule.EARLY)`, with a weight of `[H]`."""

    weight: Tensor
    eps: float
    rule: NormRule = NormRule.EARLY
