"""fp32 masters as bfloat16 and what that lacks of them."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kitae.kernels.adamw import split, whole

LOWER = torch.arange(2**16, dtype=torch.int32)  # all that bfloat16 has no room for
INFINITY = 0x7F80
EDGES = [0, 1, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x42FF, INFINITY - 2]  # zero, denormals, 1, and near the largest


def masters(upper: int, negative: bool) -> Tensor:
    bits = LOWER + (upper << 16)
    return (bits | -(2**31) if negative else bits).view(torch.float32)


@given(st.integers(0, 0xFFFF))
def test_every_master_is_made_again(upper: int) -> None:
    """Also infinities and what is no number."""
    master = masters(upper & 0x7FFF, upper > 0x7FFF)
    parameter, rest = split(master)
    assert (parameter.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(whole(parameter, rest).view(torch.int32), master.view(torch.int32))


@given(st.one_of(st.sampled_from(EDGES), st.integers(0, INFINITY - 1)), st.booleans())
def test_the_parameter_is_the_nearest_number(upper: int, negative: bool) -> None:
    """As torch rounds, but away from zero where two are as near."""
    master = masters(upper, negative)
    parameter, rest = split(master)
    between = LOWER == 0x8000
    assert torch.equal(parameter[~between], master.bfloat16()[~between])
    assert parameter[between].abs() > master[between].abs()
    assert torch.equal(rest < 0, parameter.double().abs() > master.double().abs())
    assert torch.equal(split(parameter.float())[1], torch.zeros_like(rest))


def test_any_shape_and_order_in_memory() -> None:
    master = torch.randn(6, 5, 4)[::2].transpose(0, 2)
    parameter, rest = split(master)
    assert parameter.shape == rest.shape == master.shape
    assert torch.equal(whole(parameter, rest.contiguous()), master)
