"""Tensors as the integers that have the same bits: NaN, infinities and -0 are values like others."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bits = npt.NDArray[Any]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The values of a contiguous tensor as integers, flat: the same memory."""
    return tensor.data.view(-1).view(_INTEGERS[tensor.element_size()])


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: the same memory."""
    return bits(tensor).view(torch.uint8)


def integers(size: int) -> np.dtype[Any]:
    """numpy's integers of so many bytes."""
    return np.dtype(f"i{size}")


def copy(values: Tensor, into: Tensor) -> None:
    """Values of the same dtype and number, from any device to any other."""
    if values.device.type == into.device.type == "cpu":
        np.copyto(into.numpy(), values.numpy())  # in one thread, see `checksum`
    else:
        into.copy_(values)
