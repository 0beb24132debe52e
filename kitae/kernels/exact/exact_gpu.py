"""The Triton kernels of exact mode, behind `products.py` and `attention.py`. Import only where Triton is.

Numbers that differ between the engine's and the trainer's calls are not specialised, so both run the same binary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Matrix products


@triton.jit(do_not_specialize=["M"])
def _product(
    x, weight, bias, out, M, N, K, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out = x @ weight.T + bias, each element added up by one program over all of K, in order.

    Tiles of BLOCK_M x BLOCK_N elements, BLOCK_K deep; EVEN: K is a multiple of that. Libraries choose how to add up
    by the shape of the product, so a row would depend on how many there are. M is not specialised: engine and trainer
    run one binary.
    """
    # Neighbouring programs share rows of the weights: eight blocks of rows before the next block of columns.
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    band = program // (8 * blocks_n)
    height = tl.minimum(blocks_m - band * 8, 8)
    block_m = band * 8 + program % (8 * blocks_n) % height
    block_n = program % (8 * blocks_n) // height
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    x_line = x + row.to(tl.int64)[:, None] * K + lane[None, :]
    weight_line = weight + column.to(tl.int64)[:, None] * K + lane[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            a = tl.load(x_line + start, mask=(row < M)[:, None], other=0.0)
            b = tl.load(weight_line + start, mask=(column < N)[:, None], other=0.0)
        else:
            inside = (start + lane < K)[None, :]
            a = tl.load(x_line + start, mask=(row < M)[:, None] & inside, other=0.0)
            b = tl.load(weight_line + start, mask=(column < N)[:, None] & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


# Most rows, and for them: BLOCK_M, BLOCK_N, BLOCK_K, warps, stages.
_TILES = {
    torch.bfloat16: ((256, (64, 64, 64, 4, 4)), (1024, (128, 64, 64, 4, 4)), (None, (128, 128, 64, 8, 4))),
    torch.float32: ((16, (16, 32, 32, 4, 3)), (512, (64, 64, 32, 4, 3)), (None, (128, 128, 16, 8, 3))),
}


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = x @ weight.T + bias` for contiguous rows.

    One program adds up all of K for its elements, in order, so the size of its tile changes the speed only. That the
    hardware has it so too is part of the probe in `kitae.models.exact`.
    """
    (rows, k), n = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and out.stride(1) == 1
    tile = next(tile for most, tile in _TILES[x.dtype] if most is None or rows <= most)
    block_m, block_n, block_k, warps, stages = tile
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(n, block_n),)
    _product[grid](
        x, weight, weight if bias is None else bias, out, rows, n, k, out.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BIAS=bias is not None, EVEN=k % block_k == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


# Attention


@triton.jit(
    do_not_specialize=["q_head", "q_row", "k_page", "k_head", "k_slot", "v_page", "v_head", "v_slot", "page_size"]
)
def _attend(
    q, keys, values, runs, table, sinks, out, scale, softcap, window,
    q_head, q_row, k_page, k_head, k_slot, v_page, v_head, v_slot, page_size,
    HKV: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of a run of queries over the keys before each, wherever pages put them.

    Grid (runs, key heads). The rows of a tile are tokens times the query heads that share a key, ROWS in all; keys come
    in blocks of BLOCK, counted from position 0 of the sequence. So a query adds up in the same order in a prompt, in a
    decoding step, and in the trainer. No stride is specialised, for the same reason.
    """
    # All strides are multiples of the head dimension, which is one of 16.
    q_head, q_row = tl.multiple_of(q_head, 16), tl.multiple_of(q_row, 16)
    k_page, k_head, k_slot = tl.multiple_of(k_page, 16), tl.multiple_of(k_head, 16), tl.multiple_of(k_slot, 16)
    v_page, v_head, v_slot = tl.multiple_of(v_page, 16), tl.multiple_of(v_head, 16), tl.multiple_of(v_slot, 16)
    run = runs + tl.program_id(0) * 4
    head = tl.program_id(1)
    first, count, position, begin = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
    slot = tl.arange(0, ROWS)
    token = slot // GROUP
    member = slot % GROUP
    live = (token < count) & (member < G)
    lane = tl.arange(0, WIDTH)
    real = live[:, None] & (lane < D)[None, :]
    row = first + token
    mine = head * G + member
    query = tl.load(q + row[:, None] * q_row + mine[:, None] * q_head + lane[None, :], mask=real, other=0.0)
    place = position + token
    top = tl.full([ROWS], -1.0e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a key without a value
        top = tl.load(sinks + mine, mask=live, other=0.0) * 1.4426950408889634
        norm = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    start = position * 0
    if WINDOW:
        start = tl.maximum(position + 1 - window, 0) // BLOCK * BLOCK
    # A block that a row does not see leaves it as it is: weights of 0, a factor of 1.
    for block in range(start, position + count, BLOCK):
        at = block + tl.arange(0, BLOCK)
        known = at < position + count
        page = tl.load(table + begin + at // page_size, mask=known, other=0).to(tl.int64)
        inside = known[:, None] & (lane < D)[None, :]
        where = page * k_page + at % page_size * k_slot + head * k_head
        key = tl.load(keys + where[:, None] + lane[None, :], mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        score = score * 1.4426950408889634
        distance = place[:, None] - at[None, :]
        seen = distance >= 0
        if WINDOW:
            seen = seen & (distance < window)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(weight, 1)
        where = page * v_page + at % page_size * v_slot + head * v_head
        value = tl.load(values + where[:, None] + lane[None, :], mask=inside, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher
    mixed = mixed / tl.where(norm > 0, norm, 1.0)[:, None]
    target = (row * HKV * G + mine)[:, None] * D + lane[None, :]
    tl.store(out + target, mixed.to(out.dtype.element_ty), mask=real)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, runs: Tensor, table: Tensor, page_size: int, *,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `exact_attention.attend`. A program computes one run and the query heads of one key head."""
    heads, rows, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    width = triton.next_power_of_2(dim)
    wide = width * q.element_size() > 256  # bytes of a key
    _attend[(len(runs), kv_heads)](
        q, keys, values, runs, table, q if sinks is None else sinks, out, scale, softcap or 0.0, window or 0,
        q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3], page_size,
        HKV=kv_heads, G=group, GROUP=triton.next_power_of_2(group), ROWS=max(64, triton.next_power_of_2(group)), D=dim,
        WIDTH=width, BLOCK=32 if wide else 64, SOFTCAP=softcap is not None, WINDOW=window is not None,
        SINKS=sinks is not None, num_warps=4, num_stages=1 if wide else 2,
    )  # fmt: skip
    return out
