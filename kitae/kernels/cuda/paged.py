"""Triton kernels for attention of one new token of each sequence over the pages of the cache, or of several.

Several are PER neighbouring rows: a token, and draft tokens after it. They share each read of a key. `attend` takes
queries that are rotated, with keys that are stored. `turn_and_attend` takes rows as a product left them: one kernel
instead of three, which pays for small batches. Either goes on from what `shared_prompts` has begun. Legend as in
`decoding`.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels.cuda.decoding import Stored


class HeadStart(NamedTuple):
    """Attention of some rows over the first tokens of their sequences.

    skips `[sequences]` int32: how many tokens, whole pages; 0: none. means `[rows · Hq, D]`, logs `[rows · Hq]`, fp32:
    of their values, and the logarithm to base 2 of their weights' sum; anything where none are skipped.
    """

    skips: Tensor
    means: Tensor
    logs: Tensor


# Queries and keys that are rotated, and stored


@triton.jit
def over_pages(
    query, keys, values, key_scales, value_scales, table, head, begin, end, length, top, norm, mixed, scale, softcap,
    window,
    HKV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, BITS8: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Queries `[ROWS, WIDTH]` over tokens `[begin, end)` of a sequence, whose pages `table` names.

    length `[ROWS]`: tokens up to that of each query, with it. CAUSAL: some of those before `end` come later.

    Goes on from a maximum and a sum of weights, both `[ROWS]`, and the weighted sum of values, and returns them. BITS8:
    whole numbers are exact in half precision; the scales of keys go to the scores, those of values to the weights.
    """
    lane = tl.arange(0, WIDTH)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        seen = token < end
        page = tl.load(table + token // PAGE, mask=seen, other=0).to(tl.int64)
        line = (page * HKV + head) * PAGE + token % PAGE
        place = line * D
        inside = seen[:, None] & (lane < D)[None, :]
        key = tl.load(keys + place[:, None] + lane[None, :], mask=inside, other=0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if BITS8:
            score = score * tl.load(key_scales + line, mask=seen, other=0.0)[None, :]
        if SOFTCAP:
            capped = score / softcap
            score = softcap * (2.0 * tl.sigmoid(2.0 * capped) - 1.0)
        score = score * 1.4426950408889634
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (token[None, :] < length[:, None])
        if WINDOW:
            visible = visible & (length[:, None] - 1 - token[None, :] < window)
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(weight, 1)
        value = tl.load(values + place[:, None] + lane[None, :], mask=inside, other=0).to(query.dtype)
        if BITS8:
            weight = weight * tl.load(value_scales + line, mask=seen, other=0.0)[None, :]
        mixed = mixed * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher
    return top, norm, mixed


@triton.jit
def _share(length, first, split, window, BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """Tokens `[begin, end)` from `first` on that a split sees, and the number of splits that see any, at least 1.

    No kernel but a part of one. With a window, `first` is 0.
    """
    if WINDOW:
        first = tl.maximum(length - window, 0) // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * share
    used = tl.maximum(tl.cdiv(length - first, tl.maximum(share, 1)), 1)
    return begin, tl.minimum(length, begin + share), used


@triton.jit
def _start(
    means, logs, sinks, target, heads, ours, skip, split,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BEGUN: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of weights and weighted sum of values that a split goes on from.

    No kernel but a part of one. The first split has what was begun, and the sink, which is a key without a value.
    """
    top = tl.full([ROWS], -1.0e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    if BEGUN:
        lane = tl.arange(0, WIDTH)
        there = ours & (skip > 0) & (split == 0)
        real = there[:, None] & (lane < D)[None, :]
        top = tl.load(logs + target, mask=there, other=-1.0e30)
        norm = tl.where(there, 1.0, 0.0)
        mixed = tl.load(means + target[:, None] * D + lane[None, :], mask=real, other=0.0)
    if SINKS:
        there = ours & (split == 0)
        sink = tl.load(sinks + heads, mask=there, other=-1.0e30).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.where(there, tl.exp2(sink - higher), 0.0)
        mixed = mixed * fade[:, None]
        top = higher
    return top, norm, mixed


@triton.jit
def _attend(
    q, keys, values, key_scales, value_scales, table, lengths, sinks, skips, means, logs, out, part, stats, scale,
    softcap, window, q_row, table_row,
    HKV: tl.constexpr, G: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, BITS8: tl.constexpr, BEGUN: tl.constexpr,
):  # fmt: skip
    """Attention of PER queries a sequence over its pages, with a running maximum and sum (flash decoding).

    Grid (sequences, key heads, SPLITS). The G query heads that share a key head, of PER tokens, are the rows of one
    tile, so each key and value is read once for all of them; keys come in blocks of BLOCK tokens. With SPLITS > 1 a
    program sees a share of the sequence and leaves its mean in `part` and its log-normaliser in `stats` for `_combine`:
    small batches alone would not fill the multiprocessors.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    group = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    ours = group < G * PER
    line = row * PER + group // G
    heads = head * G + group % G
    reach = tl.load(lengths + line, mask=ours, other=0)
    length = tl.max(reach, 0)
    skip = 0
    if BEGUN:
        skip = tl.where(length > 0, tl.load(skips + row), 0)
    begin, end, _used = _share(length, skip, split, window + PER - 1, BLOCK, SPLITS, WINDOW)
    real = ours[:, None] & (lane < D)[None, :]
    query = tl.load(q + line[:, None] * q_row + heads[:, None] * D + lane[None, :], mask=real, other=0.0)
    target = line * HKV * G + heads
    top, norm, mixed = _start(means, logs, sinks, target, heads, ours, skip, split, D, ROWS, WIDTH, BEGUN, SINKS)
    top, norm, mixed = over_pages(
        query, keys, values, key_scales, value_scales, table + row * table_row, head, begin, end, reach, top, norm,
        mixed, scale, softcap, window, HKV, D, ROWS, WIDTH, PAGE, BLOCK, SOFTCAP, WINDOW, BITS8, PER > 1,
    )  # fmt: skip
    mixed = mixed / tl.where(norm > 0, norm, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out + target[:, None] * D + lane[None, :], mixed.to(out.dtype.element_ty), mask=real)
    else:
        each = target * SPLITS + split
        tl.store(part + each[:, None] * D + lane[None, :], mixed, mask=real)
        tl.store(stats + each, tl.where(norm > 0, top + tl.log2(tl.where(norm > 0, norm, 1.0)), -1.0e30), mask=ours)


@triton.jit
def _combine(
    part, stats, out, logs, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, LOGS: tl.constexpr
):  # fmt: skip
    """The mean of the SPLITS parts that were left, weighted by their log-normalisers; LOGS: and that of all.

    One program a row and query head.
    """
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    lane = tl.arange(0, WIDTH)
    log = tl.load(stats + line * SPLITS + split)
    top = tl.max(log, 0)
    weight = tl.exp2(log - top)
    total = tl.sum(weight, 0)
    weight = weight / total
    pieces = tl.load(part + (line * SPLITS + split)[:, None] * D + lane[None, :], mask=(lane < D)[None, :], other=0.0)
    mixed = tl.sum(pieces * weight[:, None], 0)
    tl.store(out + line * D + lane, mixed.to(out.dtype.element_ty), mask=lane < D)
    if LOGS:
        tl.store(logs + line, top + tl.log2(total))


def combine(part: Tensor, stats: Tensor, out: Tensor, logs: Tensor | None = None) -> None:
    """part `[rows · Hq, splits, D]` with stats `[rows · Hq, splits]`: the mean of all, and their log-normaliser."""
    lines, splits, dim = part.shape
    _combine[(lines,)](
        part, stats, out, stats if logs is None else logs, D=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
        SPLITS=splits, LOGS=logs is not None, num_warps=2 if splits <= 16 else 4,
    )  # fmt: skip


def attend(
    q: Tensor, keys: Stored, values: Stored, table: Tensor, lengths: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    begun: HeadStart | None = None, splits: int | None = None, block: int | None = None,
) -> Tensor:  # fmt: skip
    """One query per row over the pages of its sequence: q `[B, Hq, D]` (rows may be strided) → `[B, Hq, D]`.

    lengths `[B]` int32 counts the tokens to see, the new one included; 0 gives zeros. A table with fewer rows is that
    of sequences which have several neighbouring ones. begun: without a window.
    """
    (key_numbers, key_scales), (value_numbers, value_scales) = keys, values
    batch, heads, dim = q.shape
    sequences = len(table)
    per = batch // sequences
    _, kv_heads, page_size, _ = key_numbers.shape
    group = heads // kv_heads
    width = max(16, triton.next_power_of_2(dim))
    rows = max(16, triton.next_power_of_2(group * per))
    plan = plan_for(sequences * kv_heads, width * q.element_size(), rows, q.device)
    block, splits = block or plan.block, splits or plan.splits
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    part, stats = out, out
    if splits > 1:
        part = torch.empty(batch * heads, splits, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(batch * heads, splits, dtype=torch.float32, device=q.device)
    _attend[(sequences, kv_heads, splits)](
        q, key_numbers, value_numbers, q if key_scales is None else key_scales,
        q if value_scales is None else value_scales, table, lengths, q if sinks is None else sinks,
        *(begun or (lengths, out, out)), out, part, stats, scale, softcap or 0.0, window or 0, q.stride(0),
        table.stride(0),
        HKV=kv_heads, G=group, PER=per, ROWS=rows, D=dim, WIDTH=width,
        PAGE=page_size, BLOCK=block, SPLITS=splits, SOFTCAP=softcap is not None, WINDOW=window is not None,
        SINKS=sinks is not None, BITS8=key_scales is not None, BEGUN=begun is not None, num_stages=plan.stages,
    )  # fmt: skip
    if splits > 1:
        combine(part, stats, out)
    return out


class Plan(NamedTuple):
    """Tokens in a block, splits of a sequence, and stages.

    Keys are found by way of the table, so Triton takes three stages to have one block in flight, and two more for
    another.
    """

    block: int
    splits: int
    stages: int


@functools.cache
def plan_for(pairs: int, row_bytes: int, rows: int, device: torch.device) -> Plan:
    """For pairs of a sequence and a key head: a multiprocessor has two programs, whose blocks fit into it; and so many
    rows of queries, of which 16 go into what is left."""
    splits = max(1, min(16, int(triton.next_power_of_2(triton.cdiv(256, pairs)))))
    if device.type != "cuda":
        return Plan(64, splits, 1)
    limit = 0.9 * getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 * 1024)
    wide = 64 if row_bytes <= 256 else 32  # several programs must fit where their number hides waiting
    wished = (32, 5) if pairs <= 16 else (wide, 5) if pairs <= 256 else (wide, 3)
    choices = [wished, (wished[0], 3), (32, 3), (16, 3), (16, 2)]
    room = limit - (rows - 16) * row_bytes
    block, stages = next((c for c in choices if 2 * c[0] * row_bytes * (c[1] - 1) <= room), choices[-1])
    return Plan(block, splits, stages)


# Queries and keys as a product left them


@triton.jit
def turned(
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
def _store_new(
    line, bias, k_norm, cos, sin, keys, values, key_scales, value_scales, head, slot, eps, ends,
    HQ: tl.constexpr, HKV: tl.constexpr, NEW: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, BITS8: tl.constexpr,
):  # fmt: skip
    """The new keys and values of a head, `[NEW, WIDTH]` in fp32, with their scales; where `ends`, they go to their
    slots. line, slot and what belongs to a position are `[NEW, 1]`.

    No kernel but a part of one. BITS8: whole numbers over their scales, else the scales are 1.
    """
    kind = line.dtype.element_ty
    lane = tl.arange(0, WIDTH)[None, :]
    near = lane < D
    at_key = (HQ + head) * D
    key = turned(line + at_key, bias + at_key, k_norm, cos, sin, lane, eps, near, D, BIAS, NORM).to(tl.float32)
    at_value = (HQ + HKV + head) * D + lane
    value = tl.load(line + at_value, mask=near, other=0.0).to(tl.float32)
    if BIAS:
        value = (value + tl.load(bias + at_value, mask=near, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    place = (slot // PAGE * HKV + head) * PAGE + slot % PAGE
    key_unit = tl.full([NEW, 1], 1.0, tl.float32)
    value_unit = tl.full([NEW, 1], 1.0, tl.float32)
    if BITS8:
        key_largest = tl.max(tl.abs(key), 1)[:, None]
        value_largest = tl.max(tl.abs(value), 1)[:, None]
        key_unit = tl.where(key_largest > 0, key_largest / 127.0, 1.0)
        value_unit = tl.where(value_largest > 0, value_largest / 127.0, 1.0)
        key = tl.floor(key / key_unit + 0.5)
        value = tl.floor(value / value_unit + 0.5)
        tl.store(key_scales + place, key_unit, mask=ends)
        tl.store(value_scales + place, value_unit, mask=ends)
    tl.store(keys + place * D + lane, key.to(keys.dtype.element_ty), mask=near & ends)
    tl.store(values + place * D + lane, value.to(values.dtype.element_ty), mask=near & ends)
    return key, value, key_unit, value_unit


@triton.jit
def _put_together(
    part, stats, each, used, ours,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The mean `[ROWS, WIDTH]` of the parts that `used` splits have left, as `_combine` makes it.

    No kernel but a part of one. Other programs wrote them: they are read past the first cache.
    """
    lane = tl.arange(0, WIDTH)
    top = tl.full([ROWS], -1.0e30, tl.float32)
    for s in tl.static_range(SPLITS):
        there = ours & (s < used)
        top = tl.maximum(top, tl.load(stats + each + s, mask=there, other=-1.0e30, cache_modifier=".cg"))
    norm = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for s in tl.static_range(SPLITS):
        there = ours & (s < used)
        log = tl.load(stats + each + s, mask=there, other=-1.0e30, cache_modifier=".cg")
        weight = tl.where(there, tl.exp2(log - top), 0.0)
        piece = tl.load(part + (each + s)[:, None] * D + lane[None, :], mask=there[:, None] & (lane < D)[None, :],
                        other=0.0, cache_modifier=".cg")  # fmt: skip
        norm += weight
        mixed += weight[:, None] * piece
    return mixed / tl.where(norm > 0, norm, 1.0)[:, None]


@triton.jit
def _turn_and_attend(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, keys, values, key_scales, value_scales, table, lengths,
    sinks, skips, means, logs, out, part, stats, counters, scale, softcap, window, eps, table_row,
    HQ: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, PER: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BITS8: tl.constexpr, BEGUN: tl.constexpr,
):  # fmt: skip
    """Attention as `_attend` computes it, of rows of qkv that are not rotated yet.

    Grid (sequences, key heads, SPLITS). Every program turns its queries. The one that has the end of the sequence turns
    the new keys, writes keys and values to their slots, and sees them last. A short sequence uses fewer splits; the
    last of them to come puts them together.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(lengths + row * PER)
    length = tl.where(first > 0, first + PER - 1, 0)  # no row sees empty drafts behind it
    skip = 0
    if BEGUN:
        skip = tl.where(length > 0, tl.load(skips + row), 0)
    begin, end, used = _share(length, skip, split, window + PER - 1, BLOCK, SPLITS, WINDOW)
    if split >= used:
        return
    group = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    ours = group < G * PER
    real = ours[:, None] & (lane < D)[None, :]
    kind = qkv.dtype.element_ty
    mine = row * PER + group // G
    heads = head * G + group % G
    at = heads[:, None] * D
    angle = tl.load(positions + row) * D if PER == 1 else tl.load(positions + mine, mask=ours, other=0)[:, None] * D
    line = qkv + mine[:, None] * (HQ + 2 * HKV) * D
    query = turned(line + at, bias + at, q_norm, cos + angle, sin + angle, lane[None, :], eps, real, D, BIAS, NORM)
    # All programs read the new keys and values early, and the one at the end of the sequence uses them.
    ends = (begin < end) & (end == length)
    new = tl.arange(0, NEW)
    there = new < PER
    at_new = row * PER + tl.minimum(new, PER - 1)
    turn = tl.load(positions + at_new)[:, None] * D
    key, value, key_unit, value_unit = _store_new(
        qkv + at_new[:, None] * (HQ + 2 * HKV) * D, bias, k_norm, cos + turn, sin + turn, keys, values, key_scales,
        value_scales, head, tl.load(slots + at_new)[:, None], eps, ends & there[:, None], HQ, HKV, NEW, D, WIDTH, PAGE,
        BIAS, NORM, BITS8,
    )  # fmt: skip
    each = mine * HQ + heads
    top, norm, mixed = _start(means, logs, sinks, each, heads, ours, skip, split, D, ROWS, WIDTH, BEGUN, SINKS)
    top, norm, mixed = over_pages(
        query, keys, values, key_scales, value_scales, table + row * table_row, head, begin,
        tl.minimum(end, length - PER), first + group // G, top, norm, mixed, scale, softcap, window, HKV, D, ROWS,
        WIDTH, PAGE, BLOCK, SOFTCAP, WINDOW, BITS8, False,
    )  # fmt: skip
    if PER == 1:
        score = tl.sum(query.to(tl.float32) * key, 1)[:, None] * scale * key_unit
    else:
        score = tl.dot(query, tl.trans(key.to(kind)), input_precision="ieee") * scale * tl.trans(key_unit)
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * (score / softcap)) - 1.0)
    behind = (group // G)[:, None] - new[None, :]  # how far each query is after each new key
    visible = ends & (behind >= 0) & there[None, :]
    if WINDOW:
        visible = visible & (behind < window)
    score = tl.where(visible, score * 1.4426950408889634, -1.0e30)
    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.where(visible, tl.exp2(score - higher[:, None]), 0.0)
    fade = tl.exp2(top - higher)
    norm = norm * fade + tl.sum(weight, 1)
    weight = (weight * tl.trans(value_unit)).to(kind)
    if PER == 1:
        mixed = mixed * fade[:, None] + weight.to(tl.float32) * value
    else:
        mixed = mixed * fade[:, None] + tl.dot(weight, value.to(kind), input_precision="ieee")
    mixed = mixed / tl.where(norm > 0, norm, 1.0)[:, None]
    target = out + mine[:, None] * HQ * D + at + lane[None, :]
    if used == 1:
        tl.store(target, mixed.to(kind), mask=real)
    else:
        each = each * SPLITS
        tl.store(part + (each + split)[:, None] * D + lane[None, :], mixed, mask=real)
        log = tl.where(norm > 0, higher + tl.log2(tl.where(norm > 0, norm, 1.0)), -1.0e30)
        tl.store(stats + each + split, log, mask=ours)
        tl.debug_barrier()  # all of this program's share is written before it is counted
        counter = counters + row * HKV + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            whole = _put_together(part, stats, each, used, ours, ROWS, D, WIDTH, SPLITS)
            tl.store(target, whole.to(kind), mask=real)
            tl.store(counter, 0)


def turn_and_attend(
    qkv: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor,
    positions: Tensor, slots: Tensor, keys: Stored, values: Stored, heads: int, table: Tensor, lengths: Tensor,
    counters: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, begun: HeadStart | None = None, splits: int | None = None, block: int | None = None,
) -> Tensor:  # fmt: skip
    """Rows `[B, (Hq + 2 Hkv) · D]` as a product left them → `[B, Hq · D]`; new keys and values go to their slots.

    What `decoding.rotate_and_store` and `attend` do one after the other, but qkv stays as it is. counters: a zero for
    each pair of a sequence and a key head, if those are split (fewer than 256); zeros again afterwards. A table with
    fewer rows is that of sequences which have several neighbouring ones, at one position after the other.
    """
    (key_numbers, key_scales), (value_numbers, value_scales) = keys, values
    batch, sequences = len(qkv), len(table)
    per, group = batch // sequences, heads // key_numbers.shape[1]
    _, kv_heads, page_size, dim = key_numbers.shape
    width = max(16, triton.next_power_of_2(dim))
    rows = max(16, triton.next_power_of_2(group * per))
    plan = plan_for(sequences * kv_heads, width * qkv.element_size(), rows, qkv.device)
    block, splits = block or plan.block, splits or plan.splits
    out = torch.empty(batch, heads * dim, dtype=qkv.dtype, device=qkv.device)
    part = torch.empty(batch * heads * splits, dim, dtype=torch.float32, device=qkv.device)
    stats = torch.empty(batch * heads * splits, dtype=torch.float32, device=qkv.device)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    _turn_and_attend[(sequences, kv_heads, splits)](
        qkv, qkv if bias is None else bias, q_norm, k_norm, cos, sin, positions, slots, key_numbers, value_numbers,
        qkv if key_scales is None else key_scales, qkv if value_scales is None else value_scales, table, lengths,
        qkv if sinks is None else sinks, *(begun or (lengths, out, out)), out, part, stats, counters, scale,
        softcap or 0.0, window or 0, eps, table.stride(0),
        HQ=heads, HKV=kv_heads, G=group, PER=per, NEW=1 if per == 1 else 16,
        ROWS=rows, D=dim, WIDTH=width, PAGE=page_size, BLOCK=block,
        SPLITS=splits, BIAS=bias is not None, NORM=norms is not None, SOFTCAP=softcap is not None,
        WINDOW=window is not None, SINKS=sinks is not None, BITS8=key_scales is not None, BEGUN=begun is not None,
        num_stages=plan.stages,
    )  # fmt: skip
    return out
