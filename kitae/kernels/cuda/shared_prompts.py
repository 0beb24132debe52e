"""A Triton kernel for attention over what neighbouring sequences have in common: a prompt is read once for its samples.

`begin` computes it for a group of them, the queries of all heads and sequences being the rows of one tile; `paged` goes
on from there with what each sequence has alone. Legend as in `decoding`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels.cuda.decoding import Stored
from kitae.kernels.cuda.paged import HeadStart, combine, over_pages, plan_for, turned


class Groups(NamedTuple):
    """Neighbouring sequences that begin alike: they have the same first pages.

    of `[groups, 3]` int32: first sequence, how many, tokens that they share, whole pages; zeros: none. skips
    `[sequences]` int32: those tokens, of each sequence. most: how many sequences a group has at most.
    """

    of: Tensor
    skips: Tensor
    most: int


class Turning(NamedTuple):
    """How queries that a product left are turned: their bias, their norm with its eps, cos and sin by position."""

    bias: Tensor | None
    norm: tuple[Tensor, float] | None
    cos: Tensor
    sin: Tensor
    positions: Tensor


def most(heads: int, kv_heads: int, per: int = 1) -> int:
    """Sequences whose queries of a key head fit one tile, `per` rows of each; below 2 nothing can be shared."""
    return (64 if per == 1 else 128) // (heads // kv_heads * per)


@triton.jit
def _begin(
    q, bias, q_norm, cos, sin, positions, keys, values, key_scales, value_scales, table, groups, means, logs, scale,
    softcap, eps, q_row, table_row,
    HKV: tl.constexpr, G: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, TURN: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, SOFTCAP: tl.constexpr, BITS8: tl.constexpr,
):  # fmt: skip
    """Queries of a group over the tokens that its sequences share: their mean, and its log-normaliser.

    Grid (groups, key heads, SPLITS). The queries of all sequences of a group that share a key head are the rows of one
    tile, so that a prompt is read once. TURN: they are as a product left them. Groups that are none cost nothing.
    """
    mine = groups + tl.program_id(0) * 3
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(mine).to(tl.int64)
    count = tl.load(mine + 1)
    tokens = tl.load(mine + 2)
    if tokens == 0:
        return
    share = tl.cdiv(tl.cdiv(tokens, SPLITS), BLOCK) * BLOCK
    begin = split * share
    end = tl.minimum(tokens, begin + share)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    ours = row < count * PER * G
    real = ours[:, None] & (lane < D)[None, :]
    line = first * PER + row // G
    heads = head * G + row % G
    at = heads[:, None] * D
    source = q + line[:, None] * q_row + at
    if TURN:
        angle = tl.load(positions + line, mask=ours, other=0)[:, None] * D
        query = turned(source, bias + at, q_norm, cos + angle, sin + angle, lane[None, :], eps, real, D, BIAS, NORM)
    else:
        query = tl.load(source + lane[None, :], mask=real, other=0.0)
    top, norm, mixed = over_pages(
        query, keys, values, key_scales, value_scales, table + first * table_row, head, begin, end, row,
        tl.full([ROWS], -1.0e30, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32), scale,
        softcap, 0, HKV, D, ROWS, WIDTH, PAGE, BLOCK, SOFTCAP, False, BITS8, False,
    )  # fmt: skip
    seen = norm > 0  # a split of a short prompt may have nothing
    norm = tl.where(seen, norm, 1.0)
    each = (line * HKV * G + heads) * SPLITS + split
    tl.store(means + each[:, None] * D + lane[None, :], mixed / norm[:, None], mask=real)
    tl.store(logs + each, tl.where(seen, top + tl.log2(norm), -1.0e30), mask=ours)


def begin(
    q: Tensor, keys: Stored, values: Stored, heads: int, table: Tensor, groups: Groups, *,
    scale: float, softcap: float | None = None, turn: Turning | None = None, splits: int | None = None,
    block: int | None = None,
) -> HeadStart:  # fmt: skip
    """Rows whose first `heads` heads are queries, rotated or with how they are to be `turn`ed.

    A table with fewer rows is that of sequences which have several neighbouring ones.
    """
    (key_numbers, key_scales), (value_numbers, value_scales) = keys, values
    batch, sequences = len(q), len(table)
    _, kv_heads, page_size, dim = key_numbers.shape
    per, group = batch // sequences, heads // kv_heads
    width = max(16, triton.next_power_of_2(dim))
    rows = max(16, triton.next_power_of_2(group * per * min(groups.most, sequences)))
    pairs = triton.cdiv(sequences, groups.most) * kv_heads
    plan = plan_for(pairs, width * q.element_size(), rows, q.device)
    splits = splits or max(1, min(64, triton.next_power_of_2(triton.cdiv(96, pairs))))
    means = torch.empty(batch * heads, splits, dim, dtype=torch.float32, device=q.device)
    logs = torch.empty(batch * heads, splits, dtype=torch.float32, device=q.device)
    bias, norm, cos, sin, positions = turn or Turning(None, None, q, q, q)
    q_norm, eps = norm or (q, 0.0)
    _begin[(len(groups.of), kv_heads, splits)](
        q, q if bias is None else bias, q_norm, cos, sin, positions, key_numbers, value_numbers,
        q if key_scales is None else key_scales, q if value_scales is None else value_scales, table, groups.of, means,
        logs, scale, softcap or 0.0, eps, q.stride(0), table.stride(0),
        HKV=kv_heads, G=group, PER=per, ROWS=rows, D=dim, WIDTH=width, PAGE=page_size, BLOCK=block or plan.block,
        SPLITS=splits, TURN=turn is not None, BIAS=bias is not None, NORM=norm is not None,
        SOFTCAP=softcap is not None, BITS8=key_scales is not None, num_warps=8 if rows > 64 else 4,
        num_stages=plan.stages,
    )  # fmt: skip
    if splits == 1:
        return HeadStart(groups.skips, means, logs)
    parts, stats = means, logs
    means, logs = torch.empty_like(parts[:, 0]), torch.empty_like(stats[:, 0])
    combine(parts, stats, means, logs)
    return HeadStart(groups.skips, means, logs)
