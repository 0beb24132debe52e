"""Triton kernels of a decoding step of a few rows, where time goes to the number of kernels as much as to reading.

The residual stream is kept with the sums of squares of its blocks of columns, so every product norms its input itself.
A product that is split writes parts; the program that comes last adds them up, in their order, so results do not
depend on who that is. With the rotary embedding inside attention a dense layer is five kernels instead of nine. Each
rounds where those of `decoding` round. The number of rows is no part of a kernel: it is built once. Legend as there; K
is the width of the input of a product, N of its output.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels.cuda.decoding import Stored, fit, over_pages

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


# Attention


@triton.jit
def _turned(
    line, bias, gain, cos, sin, lane, eps, real,
    D: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads `[R, WIDTH]` at `line`, with bias, norm and rotary; cos and sin are those of their position.

    No kernel but a part of one. Both halves of a head are read from where they lie, in order and exchanged.
    """
    kind = line.dtype.element_ty
    half = D // 2
    other = tl.where(lane < half, lane + half, lane - half)
    x = tl.load(line + lane, mask=real, other=0.0).to(tl.float32)
    y = tl.load(line + other, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        x = (x + tl.load(bias + lane, mask=real, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        y = (y + tl.load(bias + other, mask=real, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        near = lane < D
        x = (tl.load(gain + lane, mask=near, other=0.0).to(tl.float32) * (x * scale).to(kind).to(tl.float32)).to(kind)
        y = (tl.load(gain + other, mask=near, other=0.0).to(tl.float32) * (y * scale).to(kind).to(tl.float32)).to(kind)
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    c = tl.load(cos + lane % half, mask=lane < D, other=0.0).to(tl.float32)
    s = tl.load(sin + lane % half, mask=lane < D, other=0.0).to(tl.float32)
    s = tl.where(lane < half, -s, s)
    return ((x * c).to(kind).to(tl.float32) + (y * s).to(kind).to(tl.float32)).to(kind)


@triton.jit
def _attend_anew(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, keys, values, key_scales, value_scales, table, lengths,
    sinks, out, part, stats, counters, scale, softcap, window, eps, table_row,
    HQ: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, BITS8: tl.constexpr,
):  # fmt: skip
    """Attention as `_attend` of `decoding` computes it, of rows of qkv that are not rotated yet.

    Grid (sequences, key heads, SPLITS). Every program turns its queries. The one that has the end of the sequence turns
    the new key, writes key and value to their slot, and sees them last. A short sequence uses fewer splits; the last
    of them to come puts them together.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    used = tl.maximum(tl.cdiv(length - first, tl.maximum(share, 1)), 1)
    if split >= used:
        return
    begin = first + split * share
    end = tl.minimum(length, begin + share)
    group = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    near = (lane < D)[None, :]
    real = (group < G)[:, None] & near
    kind = qkv.dtype.element_ty
    line = qkv + row * (HQ + 2 * HKV) * D
    angle = tl.load(positions + row) * D
    at = (head * G + group)[:, None] * D
    query = _turned(line + at, bias + at, q_norm, cos + angle, sin + angle, lane[None, :], eps, real, D, BIAS, NORM)
    # The new key and value: all programs read them early, and the one at the end of the sequence uses them.
    ends = (begin < end) & (end == length)
    at_key = (HQ + head) * D
    key = _turned(line + at_key, bias + at_key, k_norm, cos + angle, sin + angle, lane[None, :], eps, near, D, BIAS,
                  NORM).to(tl.float32)  # fmt: skip
    at_value = (HQ + HKV + head) * D + lane[None, :]
    value = tl.load(line + at_value, mask=near, other=0.0).to(tl.float32)
    if BIAS:
        value = (value + tl.load(bias + at_value, mask=near, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    slot = tl.load(slots + row)
    place = (slot // PAGE * HKV + head) * PAGE + slot % PAGE
    key_unit = 1.0
    value_unit = 1.0
    if BITS8:
        key_largest = tl.max(tl.max(tl.abs(key), 1), 0)
        value_largest = tl.max(tl.max(tl.abs(value), 1), 0)
        key_unit = tl.where(key_largest > 0, key_largest / 127.0, 1.0)
        value_unit = tl.where(value_largest > 0, value_largest / 127.0, 1.0)
        key = tl.floor(key / key_unit + 0.5)
        value = tl.floor(value / value_unit + 0.5)
        tl.store(key_scales + place, key_unit, mask=ends)
        tl.store(value_scales + place, value_unit, mask=ends)
    tl.store(keys + place * D + lane[None, :], key.to(keys.dtype.element_ty), mask=near & ends)
    tl.store(values + place * D + lane[None, :], value.to(values.dtype.element_ty), mask=near & ends)
    top = tl.full([ROWS], -1.0e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    if SINKS:  # noqa: SIM102 (the outer condition is known when the kernel is built)
        if split == 0:
            top = tl.load(sinks + head * G + group, mask=group < G, other=0.0).to(tl.float32) * 1.4426950408889634
            norm = tl.full([ROWS], 1.0, tl.float32)
    top, norm, mixed = over_pages(
        query, keys, values, key_scales, value_scales, table + row * table_row, head, begin,
        tl.minimum(end, length - 1), length, top, norm, scale, softcap, window, HKV, D, ROWS, WIDTH, PAGE, BLOCK,
        SOFTCAP, WINDOW, BITS8,
    )  # fmt: skip
    score = tl.sum(query.to(tl.float32) * key, 1) * scale * key_unit
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * (score / softcap)) - 1.0)
    score = tl.where(ends, score * 1.4426950408889634, -1.0e30)
    higher = tl.maximum(top, score)
    weight = tl.where(ends, tl.exp2(score - higher), 0.0)
    fade = tl.exp2(top - higher)
    norm = norm * fade + weight
    mixed = mixed * fade[:, None] + (weight * value_unit).to(kind).to(tl.float32)[:, None] * value
    top = higher
    mixed = mixed / tl.where(norm > 0, norm, 1.0)[:, None]
    target = out + row * HQ * D + at + lane[None, :]
    if used == 1:
        tl.store(target, mixed.to(kind), mask=real)
    else:
        each = (row * HQ + head * G + group) * SPLITS
        tl.store(part + (each + split)[:, None] * D + lane[None, :], mixed, mask=real)
        log = tl.where(norm > 0, top + tl.log2(tl.where(norm > 0, norm, 1.0)), -1.0e30)
        tl.store(stats + each + split, log, mask=group < G)
        tl.debug_barrier()  # all of this program's share is written before it is counted
        counter = counters + row * HKV + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            top = tl.full([ROWS], -1.0e30, tl.float32)
            for s in tl.static_range(SPLITS):
                there = (group < G) & (s < used)
                top = tl.maximum(top, tl.load(stats + each + s, mask=there, other=-1.0e30, cache_modifier=".cg"))
            norm = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, WIDTH], tl.float32)
            for s in tl.static_range(SPLITS):
                there = (group < G) & (s < used)
                log = tl.load(stats + each + s, mask=there, other=-1.0e30, cache_modifier=".cg")
                weight = tl.where(there, tl.exp2(log - top), 0.0)
                piece = tl.load(part + (each + s)[:, None] * D + lane[None, :], mask=there[:, None] & near, other=0.0,
                                cache_modifier=".cg")  # fmt: skip
                norm += weight
                mixed += weight[:, None] * piece
            norm = tl.where(norm > 0, norm, 1.0)
            tl.store(target, (mixed / norm[:, None]).to(kind), mask=real)
            tl.store(counter, 0)


def attend(
    qkv: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor,
    positions: Tensor, slots: Tensor, keys: Stored, values: Stored, heads: int, table: Tensor, lengths: Tensor,
    counters: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, splits: int | None = None, block: int = 64,
) -> Tensor:  # fmt: skip
    """Rows `[B, (Hq + 2 Hkv) · D]` as a product left them → `[B, Hq · D]`; new keys and values go to their slots.

    What `rotate_and_store` and `attend` of `decoding` do one after the other, but qkv stays as it is.
    """
    (key_numbers, key_scales), (value_numbers, value_scales) = keys, values
    batch = qkv.shape[0]
    _, kv_heads, page_size, dim = key_numbers.shape
    if splits is None:
        splits = max(1, min(16, triton.next_power_of_2(triton.cdiv(512, batch * kv_heads))))
    out = torch.empty(batch, heads * dim, dtype=qkv.dtype, device=qkv.device)
    part = torch.empty(batch * heads * splits, dim, dtype=torch.float32, device=qkv.device)
    stats = torch.empty(batch * heads * splits, dtype=torch.float32, device=qkv.device)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    width = max(16, triton.next_power_of_2(dim))
    block, stages = fit(block, width * qkv.element_size(), qkv.device)
    _attend_anew[(batch, kv_heads, splits)](
        qkv, qkv if bias is None else bias, q_norm, k_norm, cos, sin, positions, slots, key_numbers, value_numbers,
        qkv if key_scales is None else key_scales, qkv if value_scales is None else value_scales, table, lengths,
        qkv if sinks is None else sinks, out, part, stats, counters, scale, softcap or 0.0, window or 0, eps,
        table.stride(0),
        HQ=heads, HKV=kv_heads, G=heads // kv_heads, ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), D=dim,
        WIDTH=width, PAGE=page_size, BLOCK=block, SPLITS=splits, BIAS=bias is not None, NORM=norms is not None,
        SOFTCAP=softcap is not None, WINDOW=window is not None, SINKS=sinks is not None,
        BITS8=key_scales is not None, num_stages=stages,
    )  # fmt: skip
    return out
