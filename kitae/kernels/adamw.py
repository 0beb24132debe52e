"""AdamW in plain torch, how a moment is rounded to 16 bits, and the fp32 master of a bfloat16 parameter.

A moving average in bfloat16 has 8 bits: a change of less than 1/512 would be lost by rounding to nearest, step by step
the same way, and the average would stand still. So it is rounded up or down by chance, in proportion to what is cut
off: right on average. The chance is a number mixed from place and step, the same on every device and after a resume.

The fp32 master of a bfloat16 parameter, in two bytes beside it, to the last bit.

The parameter is the upper half of its master, rounded, so that the lower half alone is kept: what the parameter lacks,
a signed number. As integers with the same bits, of which sums and shifts wrap around:

    parameter = (master + 0x8000) >> 16        rest = master - (parameter << 16)        in [-32768, 32767]

That is rounding to the nearest, and away from zero where two are as near. It holds for numbers: some NaN would be
rounded to what is none, but no step is made with a gradient that is not finite.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kitae.kernels.base import AdamWPace, AdamWPart, AdamWStep


@dataclass(slots=True, eq=False)
class Rest:
    """The difference of a master to its parameter, int16, and the master's gradient, fp32.

    It holds no reference to the parameter.
    """

    bits: Tensor
    grad: Tensor | None = None


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 to bfloat16 and int16."""
    bits = master.detach().view(torch.int32)
    upper = bits + 0x8000 >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def whole(parameter: Tensor, rest: Tensor) -> Tensor:
    """The fp32 master: the inverse of `split`."""
    upper = parameter.detach().view(torch.int16).to(torch.int32)
    return ((upper << 16) + rest).view(torch.float32)


_BITS = 0xFFFFFFFF
_PLACE, _STEP = 0x9E3779B1, 0x85EBCA6B


def salt(step: int) -> int:
    """What an update's number adds to chance; 31 bits, so that any language takes it as an integer."""
    return step * _STEP & 0x7FFFFFFF


def chances(count: int, step: int, device: torch.device) -> Tensor:
    """32 random bits for each place, of which the lower half is the mean's and the upper half the square's."""
    x = torch.arange(count, device=device) * _PLACE & _BITS ^ salt(step)
    x = (x ^ x >> 16) * 0x7FEB352D & _BITS
    x = (x ^ x >> 15) * 0x846CA68B & _BITS
    return x ^ x >> 16


def rounded(x: Tensor, chance: Tensor) -> Tensor:
    """fp32 to bfloat16: the bits that do not fit are added to 16 bits of chance, and carry or not."""
    bits = x.contiguous().view(torch.int32) + chance.view_as(x).to(torch.int32)
    return (bits & -65536).view(torch.float32).bfloat16()


def one_by_one(update: Callable[[AdamWPart, float, AdamWPace], None]) -> AdamWStep:
    """A step that knows the scale and goes from weight to weight."""

    @functools.wraps(update)
    def step(parts: Sequence[AdamWPart], scale: Tensor, pace: AdamWPace) -> None:
        factor = scale.item()
        if math.isfinite(factor):
            for part in parts:
                update(part, factor, pace)

    return step


@one_by_one
def adamw(part: AdamWPart, factor: float, pace: AdamWPace) -> None:
    """See `kitae.kernels.base.AdamWStep`."""
    parameter, rest, grad, mean, square = part
    master = parameter if rest is None else whole(parameter, rest)
    grad, (beta1, beta2), (correct1, correct2) = grad * factor, pace.betas, pace.corrections
    m = mean.float().lerp_(grad, 1 - beta1)
    v = square.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = v.sqrt().div_(correct2).add_(pace.eps)
    master.mul_(pace.decay).addcdiv_(m, root, value=-pace.rate / correct1)
    if mean.dtype == torch.bfloat16:
        chance = chances(m.numel(), pace.step, m.device)
        m, v = rounded(m, chance & 0xFFFF), rounded(v, chance >> 16)
    mean.copy_(m)
    square.copy_(v)
    if rest is not None:
        upper, lacking = split(master)
        parameter.copy_(upper)
        rest.copy_(lacking)
