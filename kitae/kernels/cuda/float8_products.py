"""Products in 8 bits on a GPU that has them: weights as `kitae.kernels.float8` keeps them, rows in 8 bits too.

A normed row has the unit of its norm, which no row can overflow: it is known before the row is, and is the same for
all rows, so none depends on its neighbours. What a gated product leaves has no such bound; each of its rows has a unit,
by which the kernel that adds the product to the stream multiplies it. Products are cuBLAS's, which is fastest with one
unit for an operand. Legend as in `decoding`; K is the width of the input of a product, N of its output.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels import float8
from kitae.kernels.cuda.decoding import activated


class Float8Weight(NamedTuple):
    """A weight in 8 bits: numbers `[N, K]` times the unit `[]`."""

    numbers: Tensor
    unit: Tensor


class LayerFloat8(NamedTuple):
    """The weights of a layer in 8 bits, with the unit of the rows that each multiplies; 1 where rows have their own."""

    qkv: Float8Weight
    gate_up: Float8Weight
    down: Float8Weight
    before_qkv: Tensor
    before_gate_up: Tensor
    before_down: Tensor


def room_for(weight: Tensor) -> Float8Weight:
    return Float8Weight(torch.empty_like(weight, dtype=float8.KIND), weight.new_empty((), dtype=torch.float32))


@triton.jit
def _store(weight, unit, numbers, count, BLOCK: tl.constexpr):
    """numbers = weight / unit, in 8 bits.

    Grid (blocks of BLOCK numbers).
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(weight + place, mask=place < count, other=0.0).to(tl.float32) / tl.load(unit)
    tl.store(numbers + place, value.to(numbers.dtype.element_ty), mask=place < count)


def store(weight: Tensor, into: Float8Weight) -> None:
    """Round a contiguous weight as it is now into its place."""
    into.unit.copy_(float8.unit_of(weight))
    count, block = weight.numel(), 4096
    _store[(triton.cdiv(count, block),)](weight.detach(), into.unit, into.numbers, count, BLOCK=block, num_warps=8)


def product(rows: Tensor, unit: Tensor, weight: Float8Weight, dtype: torch.dtype) -> Tensor:
    """`rows @ weight.T` of rows `[T, K]` in 8 bits times their unit `[]`. 16 must divide the addresses of units."""
    numbers = weight.numbers.t()
    return torch._scaled_mm(
        rows, numbers, scale_a=unit, scale_b=weight.unit, out_dtype=dtype, use_fast_accum=rows.is_cuda
    )


@triton.jit
def _gate(both, out, units, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Rows that `decoding.swiglu` computes, in 8 bits, each over a unit of its own.

    One program a row, which it holds in one block of BLOCK >= WIDTH columns.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    act = activated(gate, up, GELU, both.dtype.element_ty).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(act), 0) / 448.0, 1.0e-30)
    tl.store(units + row, unit)
    tl.store(out + row * WIDTH + column, (act / unit).to(out.dtype.element_ty), mask=mask)


def gate(both: Tensor, *, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """`decoding.swiglu` in 8 bits `[T, I]`, and the units of its rows `[T]`."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=float8.KIND, device=both.device)
    units = torch.empty(rows, dtype=torch.float32, device=both.device)
    block = triton.next_power_of_2(width)
    _gate[(rows,)](both, out, units, WIDTH=width, BLOCK=block, GELU=gelu, num_warps=min(16, max(4, block // 1024)))
    return out, units
