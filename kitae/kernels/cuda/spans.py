"""Triton kernels for attention of packed training rows, and its gradient: a span sees its prefix and, causally, itself.

All is counted in rows. Of a query in row q, a key in row k of its own span is q - k positions away; a key of its prefix
q - k - gap, where gap is the number of rows between the prefix and the span. So keys are read where they lie, once for
all spans that share them. The host lists which blocks there are, once a row and the longest first; blocks that all of
their queries see whole go through a loop without masks.

Scores and log-normalisers are in bits: exp2 is one instruction. Gradients have no atomics and are the same in each run.
Legend: T rows, Hq query heads, Hkv key heads, G of the former to each of the latter, D the size of a head.
"""

import functools
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels.base import SpanKernels, SpanTable
from kitae.kernels.transfer import send

_BITS = 1.4426950408889634  # of one nat
_PROGRAMS = 528  # for keys: four on each multiprocessor of a large GPU
_LEAST = 512  # rows of queries that are worth a program of their own


# Parts of kernels


@triton.jit
def _tile(at, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CUT: tl.constexpr):
    """Rows `[first, first + ROWS)` of D numbers as `[ROWS, WIDTH]`; CUT: those from `count` on are 0.

    No kernel but a part of one. A tile that is whole is read without a mask.
    """
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    place = at + tl.cast(first, tl.int64) * stride + row[:, None] * stride + lane[None, :]
    if CUT:
        tile = tl.load(place, mask=(row < count)[:, None] & (lane < D)[None, :], other=0.0)
    elif WIDTH != D:
        tile = tl.load(place, mask=(lane < D)[None, :], other=0.0)
    else:
        tile = tl.load(place)
    return tile


@triton.jit
def _put(at, tile, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `_tile`: the first `count` rows of a tile go to where they belong.

    No kernel but a part of one.
    """
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    place = at + tl.cast(first, tl.int64) * stride + row[:, None] * stride + lane[None, :]
    tl.store(place, tile.to(at.dtype.element_ty), mask=(row < count)[:, None] & (lane < D)[None, :])


@triton.jit
def _capped(score, inner):
    """tanh of scores of which `inner` makes twice the argument, in bits.

    No kernel but a part of one. Beyond the range of exp2 it is 1 or -1, as it should be.
    """
    return 1.0 - 2.0 / (tl.exp2(score * inner) + 1.0)


@triton.jit
def _span(table):
    """A block of queries: its first row, then end and start of its span, start and length of the prefix.

    No kernel but a part of one.
    """
    line = table + tl.program_id(1) * 5
    return tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(line + 4)


@triton.jit
def _reach(span, window, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr):
    """Blocks of keys that a block of queries sees whole, or not (MASKED): first and number, of prefix and own span.

    No kernel but a part of one. With a window all go through the loop with masks.
    """
    first, stop, start, _, prefix = span
    p_from = 0
    o_from = 0
    p_to = prefix // TILE_K
    o_to = (first + 1 - start) // TILE_K
    if MASKED:
        p_from = p_to
        o_from = o_to
        p_to = tl.cdiv(prefix, TILE_K)
        o_to = tl.cdiv(tl.minimum(first + TILE_Q, stop) - start, TILE_K)
        if WINDOW:
            hidden = first - start - window + 1  # positions of the span that none of them sees; below 0, of the prefix
            p_from = tl.minimum(tl.maximum(hidden + prefix, 0) // TILE_K, p_to)
            o_from = tl.maximum(hidden, 0) // TILE_K
    return p_from, p_to - p_from, o_from, o_to - o_from


@triton.jit
def _key_block(span, reach, i, TILE_K: tl.constexpr):
    """First row of block i of those within reach, the row where its stretch ends, and the gap between it and queries.

    No kernel but a part of one.
    """
    _, stop, start, prefix_start, prefix = span
    p_from, p_count, o_from, _ = reach
    before = i < p_count
    first = tl.where(before, prefix_start + (p_from + i) * TILE_K, start + (o_from + i - p_count) * TILE_K)
    end = tl.where(before, prefix_start + prefix, stop)
    return first, end, tl.where(before, start - prefix_start - prefix, 0)


# Forward


@triton.jit
def _mix(
    query, k, v, span, rows, top, norm, mixed, inner, unit, window, k_row, v_row,
    D: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Queries over the blocks of keys that they see whole, or not (MASKED), with a running maximum and sum.

    No kernel but a part of one.
    """
    reach = _reach(span, window, TILE_Q, TILE_K, WINDOW, MASKED)
    for i in range(reach[1] + reach[3]):
        first, end, gap = _key_block(span, reach, i, TILE_K)
        key = _tile(k, first, end - first, k_row, TILE_K, D, WIDTH, MASKED)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFTCAP:
            score = _capped(score, inner)
        if MASKED:
            there = first + tl.arange(0, TILE_K)
            distance = rows[:, None] - there[None, :] - gap
            seen = (distance >= 0) & (there < end)[None, :]
            if WINDOW:
                seen = seen & (distance < window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * unit)
        weight = tl.exp2(score * unit - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(weight, 1)
        value = _tile(v, first, end - first, v_row, TILE_K, D, WIDTH, MASKED)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
        top = higher
    return top, norm, mixed


@triton.jit(do_not_specialize=["window", "tokens"])
def _attend(
    q, k, v, sinks, out, lse, table, inner, unit, window, tokens, q_row, q_head, k_row, k_head, v_row, v_head,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries of one span.

    Grid (query heads, blocks of queries): the heads of a group are side by side and find the keys of each other in the
    cache. Nothing is gathered, and scores never leave the multiprocessor.
    """
    head = tl.program_id(0).to(tl.int64)
    span = _span(table)
    first = span[0]
    count = span[1] - first
    rows = first + tl.arange(0, TILE_Q)
    query = _tile(q + head * q_head, first, count, q_row, TILE_Q, D, WIDTH, True)
    k += head // G * k_head
    v += head // G * v_head
    top = tl.full([TILE_Q], -1.0e30, tl.float32)
    norm = tl.zeros([TILE_Q], tl.float32)
    if SINKS:  # keys without values
        top = tl.zeros([TILE_Q], tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        norm = tl.full([TILE_Q], 1.0, tl.float32)
    mixed = tl.zeros([TILE_Q, WIDTH], tl.float32)
    if not WINDOW:
        top, norm, mixed = _mix(
            query, k, v, span, rows, top, norm, mixed, inner, unit, window, k_row, v_row,
            D, WIDTH, TILE_Q, TILE_K, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    top, norm, mixed = _mix(
        query, k, v, span, rows, top, norm, mixed, inner, unit, window, k_row, v_row,
        D, WIDTH, TILE_Q, TILE_K, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    _put(out + head * D, mixed / norm[:, None], first, count, HQ * D, TILE_Q, D, WIDTH)
    place = head * tokens + rows
    tl.store(lse + place, top + tl.log2(norm), mask=tl.arange(0, TILE_Q) < count)


# Gradient of queries


@triton.jit
def _pull(
    query, grad, k, v, span, rows, log, delta, total, inner, unit, window, k_row, v_row,
    D: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What queries get from the blocks of keys that they see whole, or not (MASKED), added to `total`.

    No kernel but a part of one. Weights are made again from the log-normalisers.
    """
    reach = _reach(span, window, TILE_Q, TILE_K, WINDOW, MASKED)
    for i in range(reach[1] + reach[3]):
        first, end, gap = _key_block(span, reach, i, TILE_K)
        key = _tile(k, first, end - first, k_row, TILE_K, D, WIDTH, MASKED)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFTCAP:
            score = _capped(score, inner)
        weight = tl.exp2(score * unit - log[:, None])
        if MASKED:
            there = first + tl.arange(0, TILE_K)
            distance = rows[:, None] - there[None, :] - gap
            seen = (distance >= 0) & (there < end)[None, :]
            if WINDOW:
                seen = seen & (distance < window)
            weight = tl.where(seen, weight, 0.0)
        value = _tile(v, first, end - first, v_row, TILE_K, D, WIDTH, MASKED)
        dscore = weight * (tl.dot(grad, tl.trans(value), input_precision="ieee") - delta[:, None])
        if SOFTCAP:
            dscore = dscore * (1.0 - score * score)
        total = tl.dot(dscore.to(key.dtype), key, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["window", "tokens"])
def _query_gradient(
    q, k, v, out, grad, lse, delta, dq, table, inner, unit, scale, window, tokens,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, dq_row,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of queries of one span; and `delta`, the product of each output with its gradient.

    Grid as that of `_attend`. Delta is what `_key_gradient` needs too: here the gradient of the output is read anyhow.
    """
    head = tl.program_id(0).to(tl.int64)
    span = _span(table)
    first = span[0]
    count = span[1] - first
    real = tl.arange(0, TILE_Q) < count
    rows = first + tl.arange(0, TILE_Q)
    place = head * tokens + rows
    dout = _tile(grad + head * grad_head, first, count, grad_row, TILE_Q, D, WIDTH, True)
    mixed = _tile(out + head * D, first, count, HQ * D, TILE_Q, D, WIDTH, True)
    mean = tl.sum(dout.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(delta + place, mean, mask=real)
    query = _tile(q + head * q_head, first, count, q_row, TILE_Q, D, WIDTH, True)
    log = tl.load(lse + place, mask=real, other=0.0)
    k += head // G * k_head
    v += head // G * v_head
    total = tl.zeros([TILE_Q, WIDTH], tl.float32)
    if not WINDOW:
        total = _pull(
            query, dout, k, v, span, rows, log, mean, total, inner, unit, window, k_row, v_row,
            D, WIDTH, TILE_Q, TILE_K, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    total = _pull(
        query, dout, k, v, span, rows, log, mean, total, inner, unit, window, k_row, v_row,
        D, WIDTH, TILE_Q, TILE_K, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    _put(dq + head * D, total * scale, first, count, dq_row, TILE_Q, D, WIDTH)


# Gradients of keys and values


@triton.jit
def _collect(
    key, value, q, grad, lse, delta, dkey, dvalue, k_first, k_count, first, end, gap, head, inner, unit, window,
    tokens, q_row, q_head, grad_row, grad_head,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a block of keys gets from queries in rows `[first, end)`, from blocks that see it whole, or not (MASKED).

    No kernel but a part of one. Blocks at the diagonal, and one that the end cuts, need masks; with a window all do.
    The heads of a group follow each other within the loop.
    """
    blocks = tl.cdiv(end - first, TILE_Q)
    whole = (end - first) // TILE_Q
    diagonal = blocks
    if not WINDOW:
        diagonal = tl.minimum(tl.cdiv(tl.maximum(k_first + k_count - 1 + gap - first, 0), TILE_Q), blocks)
    steps = tl.maximum(whole - diagonal, 0)
    if MASKED:
        steps = blocks - steps
    for i in range(steps * G):
        block = i // G + diagonal
        if MASKED:
            block = tl.where(i // G < diagonal, i // G, blocks - 1)
        here = first + block * TILE_Q
        member = head * G + i % G
        query = _tile(q + member * q_head, here, end - here, q_row, TILE_Q, D, WIDTH, MASKED)
        rows = here + tl.arange(0, TILE_Q)
        place = member * tokens + rows
        if MASKED:
            log = tl.load(lse + place, mask=rows < end, other=0.0)
            mean = tl.load(delta + place, mask=rows < end, other=0.0)
        else:
            log = tl.load(lse + place)
            mean = tl.load(delta + place)
        score = tl.dot(key, tl.trans(query), input_precision="ieee")
        if SOFTCAP:
            score = _capped(score, inner)
        weight = tl.exp2(score * unit - log[None, :])
        if MASKED:
            there = k_first + tl.arange(0, TILE_K)
            distance = rows[None, :] - there[:, None] - gap
            seen = (distance >= 0) & (rows < end)[None, :]
            if WINDOW:
                seen = seen & (distance < window)
            weight = tl.where(seen, weight, 0.0)
        dout = _tile(grad + member * grad_head, here, end - here, grad_row, TILE_Q, D, WIDTH, MASKED)
        dvalue = tl.dot(weight.to(dout.dtype), dout, dvalue, input_precision="ieee")
        dscore = weight * (tl.dot(value, tl.trans(dout), input_precision="ieee") - mean[None, :])
        if SOFTCAP:
            dscore = dscore * (1.0 - score * score)
        dkey = tl.dot(dscore.to(query.dtype), query, dkey, input_precision="ieee")
    return dkey, dvalue


@triton.jit(do_not_specialize=["window", "tokens"])
def _key_gradient(
    q, k, v, grad, lse, delta, dkv, parts, pieces, stretches, inner, unit, scale, window, tokens,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, dkv_row,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and of their values, from some or all of the queries that see them.

    Grid (key heads, pieces). A piece is a block of keys with stretches of rows of queries: those of its own span and of
    all spans that have it in their prefix. Where there are many, as for a prompt with its answers, several programs
    have a piece each and leave parts in fp32 for `_sum_parts`.
    """
    head = tl.program_id(0).to(tl.int64)
    piece = pieces + tl.program_id(1) * 5
    k_first, k_count, slot = tl.load(piece), tl.load(piece + 1), tl.load(piece + 4)
    key = _tile(k + head * k_head, k_first, k_count, k_row, TILE_K, D, WIDTH, True)
    value = _tile(v + head * v_head, k_first, k_count, v_row, TILE_K, D, WIDTH, True)
    dkey = tl.zeros([TILE_K, WIDTH], tl.float32)
    dvalue = tl.zeros([TILE_K, WIDTH], tl.float32)
    for i in range(tl.load(piece + 2), tl.load(piece + 3)):
        first, end, gap = tl.load(stretches + i * 3), tl.load(stretches + i * 3 + 1), tl.load(stretches + i * 3 + 2)
        if not WINDOW:
            dkey, dvalue = _collect(
                key, value, q, grad, lse, delta, dkey, dvalue, k_first, k_count, first, end, gap, head, inner, unit,
                window, tokens, q_row, q_head, grad_row, grad_head, G, D, WIDTH, TILE_Q, TILE_K, WINDOW, SOFTCAP, False,
            )  # fmt: skip
        dkey, dvalue = _collect(
            key, value, q, grad, lse, delta, dkey, dvalue, k_first, k_count, first, end, gap, head, inner, unit,
            window, tokens, q_row, q_head, grad_row, grad_head, G, D, WIDTH, TILE_Q, TILE_K, WINDOW, SOFTCAP, True,
        )  # fmt: skip
    dkey *= scale
    if slot < 0:
        _put(dkv + head * D, dkey, k_first, k_count, dkv_row, TILE_K, D, WIDTH)
        _put(dkv + (HKV + head) * D, dvalue, k_first, k_count, dkv_row, TILE_K, D, WIDTH)
    else:
        _put(parts, dkey, (slot * 2 * HKV + head) * TILE_K, k_count, D, TILE_K, D, WIDTH)
        _put(parts, dvalue, (slot * 2 * HKV + HKV + head) * TILE_K, k_count, D, TILE_K, D, WIDTH)


@triton.jit
def _sum_parts(
    parts, dkv, sums, dkv_row,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Blocks of keys of which several programs had a piece: their parts, added in their order.

    Grid (heads of keys and of values, blocks, steps of ROWS keys). Atomics would add them in another order each time.
    """
    head = tl.program_id(0)
    line = sums + tl.program_id(1) * 4
    offset = tl.program_id(2) * ROWS
    first, count = tl.load(line) + offset, tl.load(line + 1) - offset
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for slot in range(tl.load(line + 2), tl.load(line + 3)):
        total += _tile(parts, (slot * HEADS + head) * TILE_K + offset, count, D, ROWS, D, WIDTH, True)
    _put(dkv + head * D, total, first, count, dkv_row, ROWS, D, WIDTH)


# What the host knows of a row

Bounds = Sequence[tuple[int, int, int, int]]  # start, length, start of the prefix, its length
Stretch = tuple[int, int, int]  # rows of queries [first, end) that see a block of keys, and the gap between


def _query_blocks(bounds: Bounds, tile: int, window: int | None, device: torch.device) -> Tensor:
    """`[blocks, 5]`: first row, end of the span, its start, start and length of its prefix."""
    blocks = np.array([
        (first, start + length, start, prefix_start, prefix)
        for start, length, prefix_start, prefix in bounds
        for first in range(start, start + length, tile)
    ], dtype=np.int32)  # fmt: skip
    first, end, start, _, prefix = blocks.T
    keys = prefix + np.minimum(first + tile, end) - start
    if window is not None:
        keys = np.minimum(keys, window + tile)
    return send(blocks[np.argsort(-keys, kind="stable")], device)


class _KeyBlocks(NamedTuple):
    """The tables that `_key_gradient` and `_sum_parts` read."""

    pieces: Tensor  # [n, 5]: first key, number of keys, stretches [from, to), slot of the part or -1
    stretches: Tensor  # [m, 3]
    sums: Tensor  # [blocks of several pieces, 4]: first key, number of keys, slots [from, to)
    slots: int


def _key_blocks(
    bounds: Bounds, tile_q: int, tile_k: int, window: int | None, kv_heads: int, device: torch.device
) -> _KeyBlocks:
    blocks = _takers(bounds, tile_k, window)
    total = sum(end - first for *_, stretches in blocks for first, end, _ in stretches)
    most = max(_LEAST, total * kv_heads // _PROGRAMS)
    pieces: list[tuple[int, int, int, int, int]] = []
    sums: list[tuple[int, int, int, int]] = []
    listed: list[Stretch] = []
    work: list[int] = []
    slots = 0
    for first, count, stretches in blocks:
        shares = _cut(stretches, most, tile_q)
        alone = len(shares) == 1
        if not alone:
            sums.append((first, count, slots, slots + len(shares)))
        for share in shares:
            pieces.append((first, count, len(listed), len(listed) + len(share), -1 if alone else slots))
            listed += share
            work.append(sum(end - first for first, end, _ in share))
            slots += not alone
    order = np.argsort(-np.array(work), kind="stable")
    return _KeyBlocks(
        send(np.array(pieces, dtype=np.int32)[order], device),
        send(np.array(listed, dtype=np.int32), device),
        send(np.array(sums, dtype=np.int32).reshape(-1, 4), device),
        slots,
    )


def _takers(bounds: Bounds, tile: int, window: int | None) -> list[tuple[int, int, list[Stretch]]]:
    """Blocks of keys, first row and number, and who sees them.

    A block is wholly inside or outside of each prefix. Without a window gaps do not matter, since prefixes lie before
    their spans: stretches that follow each other are one.
    """
    assert all(prefix_start + prefix <= start for start, _, prefix_start, prefix in bounds), "a prefix lies before"
    ends = {x for start, length, *_ in bounds for x in (start, start + length)}
    ends |= {x for *_, start, length in bounds if length for x in (start, start + length)}
    cuts = sorted(ends)
    takers: list[list[Stretch]] = [[] for _ in cuts]
    owner = [0] * len(cuts)  # where the span ends that a part of the row belongs to
    for start, length, prefix_start, prefix in bounds:
        for i in range(bisect_left(cuts, start), bisect_left(cuts, start + length)):
            owner[i] = start + length
        for i in range(bisect_left(cuts, prefix_start), bisect_left(cuts, prefix_start + prefix)):
            takers[i].append((start, start + length, 0 if window is None else start - prefix_start - prefix))
    found = []
    for i, (begin, stop) in enumerate(pairwise(cuts)):
        for first in range(begin, stop, tile):
            count = min(tile, stop - first)
            reach = None if window is None else first + count - 1 + window
            found.append((first, count, _joined([(first, owner[i], 0), *takers[i]], reach)))
    return found


def _joined(stretches: Sequence[Stretch], reach: int | None) -> list[Stretch]:
    """Join stretches that follow each other with the same gap. reach: the row from which keys are out of the window."""
    found: list[Stretch] = []
    for first, end, gap in stretches:
        stop = end if reach is None else min(end, reach + gap)
        follows = bool(found) and found[-1][1:] == (first, gap)
        if first < stop:
            found.append((found.pop()[0] if follows else first, stop, gap))
    return found


def _cut(stretches: Sequence[Stretch], most: int, tile: int) -> list[list[Stretch]]:
    """Shares of about equally many rows, in tiles; about `most` at most."""
    total = sum(end - first for first, end, _ in stretches)
    share = -(-total // -(-total // most))
    shares: list[list[Stretch]] = [[]]
    room = share
    for first, end, gap in stretches:
        at = first
        while at < end:
            if room <= 0:
                shares.append([])
                room = share
            stop = min(end, at + -(-room // tile) * tile)
            shares[-1].append((at, stop, gap))
            room -= stop - at
            at = stop
    return shares


# Functions on tensors that launch the kernels


class Tile(NamedTuple):
    """`Tile(128, 64, 8, 3)`: rows of queries, rows of keys, warps, stages."""

    q: int
    k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    forward: Tile
    queries: Tile  # for the gradient of queries
    keys: Tile  # for those of keys and values


_TILES = {  # by the width of a head
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 128, 8, 3)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 64, 8, 2)),
}
_SMALL = Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))  # for a GPU with less shared memory
_FLOAT32 = Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1))  # without tensor cores


@functools.cache
def _tiles(dtype: torch.dtype, width: int, device: torch.device) -> Tiles:
    if dtype == torch.float32:
        return _FLOAT32
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 * 1024)
    needed = 136 * 1024 if width <= 128 else 200 * 1024
    return _TILES[max(64, width)] if room >= needed else _SMALL


class _Call(NamedTuple):
    """The arguments of one call that all kernels get."""

    window: int | None
    width: int
    numbers: tuple[float, float]
    flags: dict[str, int | bool]

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, spans: SpanTable, scale: float, window: int | None, softcap: float | None
    ) -> "_Call":
        assert scale > 0, f"scale must be above 0, got {scale}"
        window = None if window is not None and window >= spans.longest else window
        numbers = (2 * _BITS * scale / softcap, _BITS * softcap) if softcap else (0.0, _BITS * scale)
        width = max(16, triton.next_power_of_2(q.shape[2]))
        flags = {"G": q.shape[1] // k.shape[1], "D": q.shape[2], "WIDTH": width, "WINDOW": window is not None,
                 "SOFTCAP": bool(softcap)}  # fmt: skip
        return cls(window, width, numbers, flags)


def _by_rows(x: Tensor) -> Tensor:
    """Any strides but the last, which is 1."""
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """The strides of rows and heads of each tensor."""
    return [n for t in tensors for n in t.stride()[:2]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, spans: SpanTable, *, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `kitae.kernels.base.AttendSpans`. The log-normalisers are in bits, `[Hq, T]`."""
    q, k, v = (_by_rows(t) for t in (q, k, v))
    call = _Call.of(q, k, spans, scale, window, softcap)
    tile = (tiles or _tiles(q.dtype, call.width, q.device)).forward
    blocks = spans.once(
        ("queries", tile.q, call.window), lambda: _query_blocks(spans.listed, tile.q, call.window, q.device)
    )
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    _attend[(heads, len(blocks))](
        q, k, v, q if sinks is None else sinks, out, lse, blocks, *call.numbers, call.window or 0, tokens,
        *_strides(q, k, v), HQ=heads, TILE_Q=tile.q, TILE_K=tile.k, SINKS=sinks is not None, **call.flags,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: SpanTable, *, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """See `kitae.kernels.base.AttendSpansBackward`."""
    q, k, v, grad = (_by_rows(t) for t in (q, k, v, grad))
    call = _Call.of(q, k, spans, scale, window, softcap)
    tiles = tiles or _tiles(q.dtype, call.width, q.device)
    heads, kv_heads = q.shape[1], k.shape[1]
    both = torch.empty(len(q), heads + 2 * kv_heads, q.shape[2], dtype=q.dtype, device=q.device)
    dq, dk, dv = torch.split(both, [heads, kv_heads, kv_heads], 1)
    delta = torch.empty_like(lse)
    query_gradient(dq, delta, grad, q, k, v, out, lse, spans, call, scale, tiles.queries)
    key_gradient(both[:, heads:], delta, grad, q, k, v, lse, spans, call, scale, tiles.keys)
    if sinks is None:
        return dq, dk, dv, None
    dsinks = -(torch.exp2(sinks.float()[:, None] * _BITS - lse) * delta).sum(1)
    return dq, dk, dv, dsinks.to(sinks.dtype)


def query_gradient(
    dq: Tensor, delta: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    spans: SpanTable, call: _Call, scale: float, tile: Tile,
) -> None:  # fmt: skip
    """Writes dq and, for all heads and rows, delta."""
    blocks = spans.once(
        ("queries", tile.q, call.window), lambda: _query_blocks(spans.listed, tile.q, call.window, q.device)
    )
    _query_gradient[(q.shape[1], len(blocks))](
        q, k, v, out, grad, lse, delta, dq, blocks, *call.numbers, scale, call.window or 0, len(q),
        *_strides(q, k, v, grad), dq.stride(0), HQ=q.shape[1], TILE_Q=tile.q, TILE_K=tile.k, **call.flags,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def key_gradient(
    dkv: Tensor, delta: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, spans: SpanTable,
    call: _Call, scale: float, tile: Tile,
) -> None:  # fmt: skip
    """Writes the gradients of keys and values, which lie side by side: `[T, 2 Hkv, D]`."""
    heads, dim = k.shape[1], q.shape[2]
    blocks = spans.once(
        ("keys", tile.q, tile.k, call.window, heads),
        lambda: _key_blocks(spans.listed, tile.q, tile.k, call.window, heads, q.device),
    )
    parts = torch.empty(blocks.slots * 2 * heads * tile.k * dim, dtype=torch.float32, device=q.device)
    _key_gradient[(heads, len(blocks.pieces))](
        q, k, v, grad, lse, delta, dkv, parts, blocks.pieces, blocks.stretches, *call.numbers, scale,
        call.window or 0, len(q), *_strides(q, k, v, grad), dkv.stride(0), HKV=heads, TILE_Q=tile.q, TILE_K=tile.k,
        **call.flags, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if blocks.slots:
        _sum_parts[(2 * heads, len(blocks.sums), tile.k // 16)](
            parts, dkv, blocks.sums, dkv.stride(0), HEADS=2 * heads, D=dim, WIDTH=call.width, TILE_K=tile.k, ROWS=16
        )


KERNELS = SpanKernels(forward=forward, backward=backward, sizes=range(16, 257, 16), capped=True)
