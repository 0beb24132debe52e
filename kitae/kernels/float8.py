"""Weights in 8 bits: numbers of float8 (e4m3, three bits after the point) times a unit, one for the whole weight.

The type has 15 powers of two above its smallest normal number, so one unit serves a weight whose rows differ in size.
"""

import math

import torch
from torch import Tensor

from kitae.kernels.norms import Norm, NormRule

KIND = torch.float8_e4m3fn
LARGEST = 448.0
GPUS = "needs a GPU that multiplies numbers of 8 bits (Ada, Hopper or later)"
_SMALLEST = 1e-30  # of a unit, so that zeros can be divided by it


def has_products(device: torch.device) -> bool:
    """Whether it is a GPU that multiplies 8 bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def unit_of(weight: Tensor) -> Tensor:
    """The number, fp32, by which the largest of a weight is divided to fit."""
    low, high = torch.aminmax(weight.detach())
    return torch.maximum(-low, high).float().div(LARGEST).clamp(min=_SMALLEST)


def unit_of_normed(norm: Norm) -> Tensor:
    """A unit with which no normed row overflows.

    A number of a row is at most √H times the root of the row's mean square, and the norm multiplies it by its gain.
    """
    gain = norm.weight.detach().float() + (1.0 if norm.rule == NormRule.LATE_PLUS_ONE else 0.0)
    return gain.abs().amax().mul(math.sqrt(len(gain)) / LARGEST).clamp(min=_SMALLEST)


def rounded(weight: Tensor) -> Tensor:
    """A weight as 8 bits keep it, in its own type."""
    unit = unit_of(weight)
    return ((weight.detach().float() / unit).to(KIND).float() * unit).to(weight.dtype)
