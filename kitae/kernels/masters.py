"""The fp32 master of a bfloat16 parameter, in two bytes beside it, to the last bit.

The parameter is the upper half of its master, rounded, so that the lower half alone is kept: what the parameter lacks,
a signed number. As integers with the same bits, of which sums and shifts wrap around:

    parameter = (master + 0x8000) >> 16        rest = master - (parameter << 16)        in [-32768, 32767]

That is rounding to the nearest, and away from zero where two are as near. It holds for numbers: some NaN would be
rounded to what is none, but no step is made with a gradient that is not finite.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
