"""Triton kernels of a decoding step of a few rows, where time goes to the number of kernels as much as to reading.

The residual stream is kept with the sums of squares of its blocks of columns, so every product norms its input itself.
A product that is split writes parts; the program that comes last adds them up, in their order, so results do not
depend on who that is. With attention that rotates its rows (`paged`) a dense layer is five kernels, not nine. Each
rounds where those of `decoding` round. The number of rows is no part of a kernel: it is built once. Legend as there; K
is the width of the input of a product, N of its output.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 16  # rows: those of one tile
_BLOCK = 32  # columns of the stream whose squares are added up together


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows `[T, H]` to which every layer adds, and the sums of their squares in blocks, `[T, blocks]` in fp32.

    counters: zeros, in which programs count who has come; they leave zeros.
    """

    rows: Tensor
    squares: Tensor
    counters: Tensor


# The stream


@triton.jit(do_not_specialize=["rows"])
def _enter(
    tokens, table, parts, rows_out, squares, rows, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of the stream, and the sums of their squares. PARTS = 0: from the table of embeddings; else the parts are
    added to what is there.

    Grid (rows, blocks of BLOCK columns).
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    kind = rows_out.dtype.element_ty
    if PARTS == 0:
        value = tl.load(table + tl.load(tokens + row) * WIDTH + column, mask=mask, other=0.0)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(parts + (part * rows + row) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(rows_out + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        value = (value + total.to(kind).to(tl.float32)).to(kind)
    tl.store(rows_out + row * WIDTH + column, value, mask=mask)
    exact = value.to(tl.float32)
    tl.store(squares + row * tl.num_programs(1) + block, tl.sum(exact * exact, 0))


def embed(tokens: Tensor, table: Tensor, counters: Tensor) -> Stream:
    """The stream of tokens `[T]` before the first layer."""
    count, width = len(tokens), table.shape[1]
    rows = torch.empty(count, width, dtype=table.dtype, device=table.device)
    squares = torch.empty(count, triton.cdiv(width, _BLOCK), dtype=torch.float32, device=table.device)
    _enter[(count, squares.shape[1])](
        tokens, table, rows, rows, squares, count, WIDTH=width, PARTS=0, BLOCK=_BLOCK, num_warps=1
    )
    return Stream(rows, squares, counters)


def add_parts(stream: Stream, parts: Tensor) -> None:
    """Add `[parts, T, H]`, in place."""
    rows, squares = stream.rows, stream.squares
    _enter[(len(rows), squares.shape[1])](
        rows, rows, parts, rows, squares, len(rows), WIDTH=rows.shape[1], PARTS=len(parts), BLOCK=_BLOCK, num_warps=1
    )


# Products


@triton.jit(do_not_specialize=["rows"])
def _normed_product(
    x, squares, gain, weight, out, normed, rows, N, eps,
    K: tl.constexpr, BLOCKS: tl.constexpr, SQUARES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """out = norm(x) @ weight.T; GATED: swiglu of the product with both halves of the weight. KEPT: norm(x) is written.

    Grid (blocks of BLOCK_N columns, SPLITS). A tile of 16 rows; the norm of what it reads is made on the way. A program
    adds up its share of K; with SPLITS > 1 the shares stay apart, `[SPLITS, rows, N]`.
    """
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, 16)
    real = row < rows
    kind = x.dtype.element_ty
    block = tl.arange(0, SQUARES)
    size = tl.load(squares + row[:, None] * BLOCKS + block[None, :], mask=real[:, None] & (block < BLOCKS)[None, :],
                   other=0.0)  # fmt: skip
    scale = tl.rsqrt(tl.sum(size, 1) / K + eps)
    total = tl.zeros([16, BLOCK_N], tl.float32)
    total_up = tl.zeros([16, BLOCK_N], tl.float32)
    for start in range(split * share, tl.minimum(K, split * share + share), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (column < N)[:, None] & (k < K)[None, :]
        line = column.to(tl.int64)[:, None] * K + k[None, :]
        w = tl.load(weight + line, mask=inside, other=0.0)
        value = tl.load(x + row[:, None] * K + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        value = (value.to(tl.float32) * scale[:, None]).to(kind).to(tl.float32)
        a = (tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)[None, :] * value).to(kind)
        if KEPT:
            first = real & (tl.program_id(0) == 0)
            tl.store(normed + row[:, None] * K + k[None, :], a, mask=first[:, None] & (k < K)[None, :])
        total += tl.dot(a, tl.trans(w), input_precision="ieee")
        if GATED:
            up = tl.load(weight + N.to(tl.int64) * K + line, mask=inside, other=0.0)
            total_up += tl.dot(a, tl.trans(up), input_precision="ieee")
    if GATED:
        gate = total.to(kind).to(tl.float32)
        total = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * total_up.to(kind).to(tl.float32)
    target = out + (split * rows + row)[:, None] * N + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (column < N)[None, :])


def normed_product(
    stream: Stream, norm: tuple[Tensor, float], weight: Tensor, *, gated: bool = False, out: Tensor | None = None
) -> Tensor:
    """`norm(x) @ weight.T`; gated: swiglu of the product's halves."""
    x, (gain, eps) = stream.rows, norm
    count, width = x.shape
    n, blocks = weight.shape[0] // (2 if gated else 1), stream.squares.shape[1]
    if out is None:
        out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    # Many columns are limited by reading, few by the time of one block.
    columns, depth, warps, stages = (32, 128, 2, 3) if gated else (128, 64, 4, 4) if n > 16384 else (16, 256, 4, 3)
    _normed_product[(triton.cdiv(n, columns), 1)](
        x, stream.squares, gain, weight, out, x, count, n, eps, K=width, BLOCKS=blocks,
        SQUARES=triton.next_power_of_2(blocks), BLOCK_N=columns, BLOCK_K=depth, SPLITS=1, GATED=gated, KEPT=False,
        num_warps=warps, num_stages=max(2, stages * 2 // x.element_size()),
    )  # fmt: skip
    return out


def normed_parts(stream: Stream, norm: tuple[Tensor, float], weight: Tensor) -> tuple[Tensor, Tensor]:
    """`norm(x) @ weight.T` in fp32 parts `[parts, T, N]` that are still to be added, and `norm(x)`: for few columns."""
    x, (gain, eps) = stream.rows, norm
    count, width = x.shape
    n, blocks, splits = weight.shape[0], stream.squares.shape[1], min(8, triton.cdiv(width, 256))
    out = torch.empty(splits, count, n, dtype=torch.float32, device=x.device)
    normed = torch.empty_like(x)
    _normed_product[(triton.cdiv(n, 16), splits)](
        x, stream.squares, gain, weight, out, normed, count, n, eps, K=width, BLOCKS=blocks,
        SQUARES=triton.next_power_of_2(blocks), BLOCK_N=16, BLOCK_K=256, SPLITS=splits, GATED=False, KEPT=True,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, normed


@triton.jit(do_not_specialize=["rows"])
def _add_product(
    x, weight, parts, stream, squares, counters, rows, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """stream += x @ weight.T, and the sums of squares of the stream.

    Grid (blocks of BLOCK_N columns, SPLITS). A program adds up its share of K and writes it to `[SPLITS, rows, N]`. The
    last of a block of columns adds the shares, in their order.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, 16)
    kind = stream.dtype.element_ty
    share = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    total = tl.zeros([16, BLOCK_N], tl.float32)
    for start in range(split * share, tl.minimum(K, split * share + share), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (column < N)[:, None] & (k < K)[None, :]
        w = tl.load(weight + column.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
        a = tl.load(x + row[:, None] * K + k[None, :], mask=(row < rows)[:, None] & (k < K)[None, :], other=0.0)
        total += tl.dot(a, tl.trans(w), input_precision="ieee")
    mask = (row < rows)[:, None] & (column < N)[None, :]
    here = row[:, None] * N + column[None, :]
    tl.store(parts + split * rows * N + here, total, mask=mask)
    tl.debug_barrier()  # all of this program's share is written before it is counted
    if tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.zeros([16, BLOCK_N], tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(parts + part * rows * N + here, mask=mask, other=0.0, cache_modifier=".cg")
        value = tl.load(stream + here, mask=mask, other=0.0).to(tl.float32)
        value = (value + total.to(kind).to(tl.float32)).to(kind)
        tl.store(stream + here, value, mask=mask)
        exact = value.to(tl.float32)
        tl.store(squares + row * tl.num_programs(0) + block, tl.sum(exact * exact, 1), mask=row < rows)
        tl.store(counters + block, 0)


def add_product(stream: Stream, x: Tensor, weight: Tensor, *, splits: int | None = None) -> None:
    """Add `x @ weight.T` to the stream, in place."""
    count, k = x.shape
    n, blocks = weight.shape[0], stream.squares.shape[1]
    splits = splits or 1 << min(3, max(1, k // 384).bit_length() - 1)
    parts = torch.empty(splits, count, n, dtype=torch.float32, device=x.device)
    _add_product[(blocks, splits)](
        x, weight, parts, stream.rows, stream.squares, stream.counters, count, n,
        K=k, BLOCK_N=_BLOCK, BLOCK_K=128, SPLITS=splits, num_warps=4, num_stages=4,
    )  # fmt: skip
