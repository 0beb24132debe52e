"""Triton kernels of a decoding step of a small batch, where time goes to the number of kernels as much as to reading.

The residual stream is kept with the sums of squares of its blocks of columns, and times the gain of the norm that comes
next: a norm is then a factor of each row of a product, and no kernel of its own. It is rounded once, where the Hugging
Face module rounds twice. Products have the columns of a weight as the rows of their tiles, so that tensor cores take a
weight from where the copy left it, and the few rows are the narrow side. A product that is split writes parts; the
program that comes last adds them up, in their order, so results do not depend on who that is. With attention that
rotates its rows (`paged`) a dense layer is five kernels, not nine. A kernel is built for up to 16, 32 or 64 rows.
Legend as in `decoding`; K is the width of the input of a product, N of its output.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels.cuda.float8_products import Float8Weight

MOST = 64  # rows: beyond, cuBLAS is faster
_BLOCK = 64  # columns of the stream whose squares are added up together


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows `[T, H]` to which every layer adds; times the gain of the next norm; the sums of their squares in blocks,
    `[T, blocks]` in fp32.

    counters: zeros, in which programs count who has come; they leave zeros.
    """

    rows: Tensor
    gained: Tensor
    squares: Tensor
    counters: Tensor


# The stream


@triton.jit(do_not_specialize=["rows"])
def _enter(
    tokens, table, parts, gain, rows_out, gained, squares, rows,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the stream, times the gain, and the sums of their squares. PARTS = 0: from the table of embeddings; else
    the parts are added to what is there.

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
    factor = tl.load(gain + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(gained + row * WIDTH + column, (exact * factor).to(kind), mask=mask)
    tl.store(squares + row * tl.num_programs(1) + block, tl.sum(exact * exact, 0))


def embed(tokens: Tensor, table: Tensor, gain: Tensor, counters: Tensor) -> Stream:
    """The stream of tokens `[T]` before the first layer; gain: of its first norm."""
    count, width = len(tokens), table.shape[1]
    rows, gained = (torch.empty(count, width, dtype=table.dtype, device=table.device) for _ in range(2))
    squares = torch.empty(count, triton.cdiv(width, _BLOCK), dtype=torch.float32, device=table.device)
    _enter[(count, squares.shape[1])](
        tokens, table, rows, gain, rows, gained, squares, count, WIDTH=width, PARTS=0, BLOCK=_BLOCK, num_warps=1
    )
    return Stream(rows, gained, squares, counters)


def add_parts(stream: Stream, parts: Tensor, gain: Tensor) -> None:
    """Add `[parts, T, H]`, in place; gain: of the next norm."""
    rows, squares = stream.rows, stream.squares
    _enter[(len(rows), squares.shape[1])](
        rows, rows, parts, gain, rows, stream.gained, squares, len(rows), WIDTH=rows.shape[1], PARTS=len(parts),
        BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip


# Products


@triton.jit(do_not_specialize=["rows"])
def _normed_product(
    x, squares, weight, weight_unit, unit, out, normed, rows, N, eps,
    K: tl.constexpr, BLOCKS: tl.constexpr, SQUARES: tl.constexpr, R: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, KEPT: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """out = norm(x) @ weight.T; GATED: swiglu of the product with both halves of the weight. KEPT: norm(x) is written.
    EIGHT: the weight is in 8 bits, and so is norm(x), over `unit`.

    Grid (blocks of columns, SPLITS). A tile has HEIGHT rows of the weight, half of them of each half if GATED, and R
    rows of x, which are times the gain already. A program adds up its share of K; with SPLITS > 1 the shares stay
    apart, `[SPLITS, rows, N]`.
    """
    COLUMNS: tl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    row = tl.arange(0, R)
    real = row < rows
    kind = x.dtype.element_ty
    block = tl.arange(0, SQUARES)
    size = tl.load(squares + row[:, None] * BLOCKS + block[None, :], mask=real[:, None] & (block < BLOCKS)[None, :],
                   other=0.0)  # fmt: skip
    scale = tl.rsqrt(tl.sum(size, 1) / K + eps)
    after = scale
    if EIGHT:
        own = tl.load(unit)
        scale = scale / own
        after = tl.zeros([R], tl.float32) + own * tl.load(weight_unit)
    index = tl.arange(0, HEIGHT)
    column = tl.program_id(0) * COLUMNS + index % COLUMNS
    line = weight + (index // COLUMNS * N + column).to(tl.int64)[:, None] * K
    total = tl.zeros([HEIGHT, R], tl.float32)
    for start in range(split * share, tl.minimum(K, split * share + share), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(line + k[None, :], mask=(column < N)[:, None] & (k < K)[None, :], other=0.0)
        a = tl.load(x + row[:, None] * K + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        if EIGHT:
            a = (a.to(tl.float32) * scale[:, None]).to(w.dtype)
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
        if KEPT:
            first = real & (tl.program_id(0) == 0)
            value = (a.to(tl.float32) * scale[:, None]).to(kind)
            tl.store(normed + row[:, None] * K + k[None, :], value, mask=first[:, None] & (k < K)[None, :])
    total = tl.trans(total) * after[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [R, 2, COLUMNS]), (0, 2, 1)))
        gate = gate.to(kind).to(tl.float32)
        total = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    target = out + (split * rows + row)[:, None] * N + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_product(
    x, weight, weight_unit, gain, parts, stream, gained, squares, counters, rows, N,
    K: tl.constexpr, R: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """stream += x @ weight.T; the stream times the gain, and the sums of its squares.

    Grid (blocks of HEIGHT columns, SPLITS). A program adds up its share of K and writes it to `[SPLITS, rows, N]`. The
    last of a block of columns adds the shares, in their order. EIGHT: the weight is in 8 bits, and so are rows of x,
    each block of BLOCK_K numbers over its own unit.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    column = block * HEIGHT + tl.arange(0, HEIGHT)
    row = tl.arange(0, R)
    kind = stream.dtype.element_ty
    share = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    total = tl.zeros([HEIGHT, R], tl.float32)
    for start in range(split * share, tl.minimum(K, split * share + share), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (column < N)[:, None] & (k < K)[None, :]
        w = tl.load(weight + column.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
        a = tl.load(x + row[:, None] * K + k[None, :], mask=(row < rows)[:, None] & (k < K)[None, :], other=0.0)
        if EIGHT:
            exact = a.to(tl.float32)
            unit = tl.maximum(tl.max(tl.abs(exact), 1) / 448.0, 1.0e-30)
            total += tl.dot(w, tl.trans((exact / unit[:, None]).to(w.dtype))) * unit[None, :]
        else:
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    if EIGHT:
        total *= tl.load(weight_unit)
    mask = (row < rows)[:, None] & (column < N)[None, :]
    here = row[:, None] * N + column[None, :]
    tl.store(parts + split * rows * N + here, tl.trans(total), mask=mask)
    tl.debug_barrier()  # all of this program's share is written before it is counted
    if tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1:
        whole = tl.zeros([R, HEIGHT], tl.float32)
        for part in tl.static_range(SPLITS):
            whole += tl.load(parts + part * rows * N + here, mask=mask, other=0.0, cache_modifier=".cg")
        value = tl.load(stream + here, mask=mask, other=0.0).to(tl.float32)
        value = (value + whole.to(kind).to(tl.float32)).to(kind)
        tl.store(stream + here, value, mask=mask)
        exact = value.to(tl.float32)
        factor = tl.load(gain + column, mask=column < N, other=0.0).to(tl.float32)
        tl.store(gained + here, (exact * factor[None, :]).to(kind), mask=mask)
        tl.store(squares + row * tl.num_programs(0) + block, tl.sum(exact * exact, 1), mask=row < rows)
        tl.store(counters + block, 0)


def normed_product(
    stream: Stream, eps: float, weight: Tensor | Float8Weight, *, gated: bool = False, out: Tensor | None = None,
    unit: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`norm(x) @ weight.T`; gated: swiglu of the product's halves. unit: of norm(x), if the weight is in 8 bits."""
    x = stream.gained
    count, width = x.shape
    numbers, weight_unit = weight if isinstance(weight, Float8Weight) else (weight, x)
    n, blocks, high = numbers.shape[0] // (2 if gated else 1), stream.squares.shape[1], _height(count)
    if out is None:
        out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    # Many columns are limited by reading, few by the time of one block.
    if isinstance(weight, Float8Weight):
        height, depth, warps, stages = (64, 128, 4, 4) if gated or n > 4096 else (32, 256, 4, 3)
    elif gated:
        height, depth, warps, stages = (64, 128, 4, 3) if high == 16 else (64, 64, 4, 4)
    elif n > 16384:
        height, depth, warps, stages = (128, 128, 8, 3) if high == 16 else (64, 64, 4, 4)
    else:
        height, depth, warps, stages = (16, 128, 4, 6) if high < 64 else (16, 256, 4, 3)
    _normed_product[(triton.cdiv(n, height // 2 if gated else height), 1)](
        x, stream.squares, numbers, weight_unit, x if unit is None else unit, out, x, count, n, eps, K=width,
        BLOCKS=blocks, SQUARES=triton.next_power_of_2(blocks), R=high, HEIGHT=height, BLOCK_K=depth, SPLITS=1,
        GATED=gated, KEPT=False, EIGHT=unit is not None, num_warps=warps,
        num_stages=max(2, stages * 2 // x.element_size()),
    )  # fmt: skip
    return out


def normed_parts(stream: Stream, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`norm(x) @ weight.T` in fp32 parts `[parts, T, N]` that are still to be added, and `norm(x)`: for few columns."""
    x = stream.gained
    count, width = x.shape
    n, blocks, splits = weight.shape[0], stream.squares.shape[1], min(8, triton.cdiv(width, 256))
    out = torch.empty(splits, count, n, dtype=torch.float32, device=x.device)
    normed = torch.empty_like(x)
    _normed_product[(triton.cdiv(n, 16), splits)](
        x, stream.squares, weight, x, x, out, normed, count, n, eps, K=width, BLOCKS=blocks,
        SQUARES=triton.next_power_of_2(blocks), R=_height(count), HEIGHT=16, BLOCK_K=512 // x.element_size(),
        SPLITS=splits, GATED=False, KEPT=True, EIGHT=False, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, normed


def add_product(
    stream: Stream, x: Tensor, weight: Tensor | Float8Weight, gain: Tensor, *, splits: int | None = None
) -> None:
    """Add `x @ weight.T` to the stream, in place; gain: of the norm that comes next."""
    count, k = x.shape
    float8 = isinstance(weight, Float8Weight)
    numbers, unit = weight if isinstance(weight, Float8Weight) else (weight, x)
    n, blocks = numbers.shape[0], stream.squares.shape[1]
    programs = 8 if float8 else round(128 / blocks)  # for all multiprocessors
    splits = splits or max(1, min(programs, k // 512, 8))
    parts = torch.empty(splits, count, n, dtype=torch.float32, device=x.device)
    _add_product[(blocks, splits)](
        x, numbers, unit, gain, parts, stream.rows, stream.gained, stream.squares, stream.counters, count, n,
        K=k, R=_height(count), HEIGHT=_BLOCK, BLOCK_K=256 // x.element_size(), SPLITS=splits, EIGHT=float8, num_warps=4,
        num_stages=4 if x.element_size() == 2 else 3,
    )  # fmt: skip


def _height(rows: int) -> int:
    """The height of the tile that holds so many rows."""
    return max(16, int(triton.next_power_of_2(rows)))
