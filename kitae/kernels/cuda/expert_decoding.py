"""Triton kernels for mixtures of experts in the decoding step, and the functions on tensors that launch them.

A pair is a token and one of its experts; pair p = t · K + k. Few pairs read the weights of their experts each for
itself. Many are sorted by expert first, and blocks of pairs with the same expert share one read. Nothing waits for the
device, so a step can be captured as a graph. Legend: T tokens, K experts of each, P = T · K pairs, E experts, H width
of the model, I of an expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitae.kernels.base import GateLimits

_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ALONE = 2  # pairs for each expert up to which sorting does not pay: two of them rarely meet


@triton.jit
def _route(
    logits, gates, experts, PARTS: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    SLOTS: tl.constexpr, RENORMALISE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The K largest of softmax(logits) and their numbers, one program a token: softmax, top-k, division, conversion.

    Logits come in PARTS that are added, and rounded to KIND as one product would be. K passes over a row that stays in
    registers. Of equal ones the first is taken.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    value = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        line = (part * tl.num_programs(0) + row) * E
        value += tl.load(logits + line + column, mask=column < E, other=float("-inf")).to(tl.float32)
    value = value.to(KIND).to(tl.float32)
    p = tl.exp(value - tl.max(value, 0))
    p = p / tl.sum(p, 0)
    p = tl.where(column < E, p, -1.0)
    slot = tl.arange(0, SLOTS)
    gate = tl.zeros([SLOTS], tl.float32)
    expert = tl.zeros([SLOTS], tl.int32)
    for k in tl.static_range(K):
        best = tl.max(p, 0)
        where = tl.minimum(tl.min(tl.where(p == best, column, WIDTH), 0), E - 1)  # not a number: somewhere inside
        gate = tl.where(slot == k, best, gate)
        expert = tl.where(slot == k, where, expert)
        p = tl.where(column == where, -1.0, p)
    if RENORMALISE:
        gate = gate / tl.sum(gate, 0)
    tl.store(gates + row * K + slot, gate, mask=slot < K)
    tl.store(experts + row * K + slot, expert, mask=slot < K)


def route(logits: Tensor, top_k: int, renormalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gates `[T, K]` in float32 and experts `[T, K]` in int32: the largest of a softmax over all experts.

    logits `[T, E]`, or `[parts, T, E]` that are still to be added; dtype: of the model, in which a router has them.
    renormalise: the gates of a token add up to 1.
    """
    rows, experts = logits.shape[-2:]
    gates_TK = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    experts_TK = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    _route[(rows,)](
        logits, gates_TK, experts_TK, PARTS=logits.numel() // (rows * experts), E=experts,
        WIDTH=triton.next_power_of_2(experts), K=top_k, SLOTS=triton.next_power_of_2(top_k), RENORMALISE=renormalise,
        KIND=_KINDS.get(dtype, tl.float32), num_warps=1,
    )  # fmt: skip
    return gates_TK, experts_TK


@triton.jit
def _expert_product(
    x, weight, bias, experts, order, ends, gates, out, tokens, N, K, alpha, limit,
    E: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, SORTED: tl.constexpr, GATED: tl.constexpr,
    LIMITED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A row of x for each pair, times the weight of its expert.

    Grid (blocks of pairs, blocks of BLOCK_N columns). SORTED: a block is up to BLOCK_P pairs of one expert, in the
    order of `order`; which, it finds in `ends`, where the pairs of each expert end. Otherwise a block is one pair,
    padded to a tile. Both halves of a layer of experts are this kernel:

    GATED: x are the tokens, the weight is gate and up; swiglu of the product goes to a row for each pair, in the order
    of the blocks. Otherwise x are these rows; the product, times the gate of its pair, goes to `[TOP, tokens, N]`.

    LIMITED: as gpt-oss has them. Weights lie `[E, K, N]`, with columns of gate and up in turn, so that one tile has
    those of both; there are biases; and the gated product is (up + 1) * gate * sigmoid(alpha * gate) within limits.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_P)
    if SORTED:
        number = tl.arange(0, WIDTH)
        end_of = tl.load(ends + number, mask=number < E, other=0)
        start_of = tl.load(ends + number - 1, mask=(number > 0) & (number < E), other=0)
        blocks_of = tl.where(number < E, tl.cdiv(end_of - start_of, BLOCK_P), 0)
        until = tl.cumsum(blocks_of, 0)
        expert = tl.sum((until <= block).to(tl.int32), 0)
        mine = number == expert
        before = tl.sum(tl.where(mine, until - blocks_of, 0), 0)
        place = tl.sum(tl.where(mine, start_of, 0), 0) + (block - before) * BLOCK_P + lane
        real = place < tl.sum(tl.where(mine, end_of, 0), 0)
        pair = tl.load(order + place, mask=real, other=0).to(tl.int64)
        depth = tl.where(block < tl.max(until, 0), K, 0)  # the last blocks have nothing to do
    else:
        expert = tl.load(experts + block)
        place = block + lane
        real = lane < 1
        pair = place.to(tl.int64)
        depth = K
    source = pair // TOP if GATED else place.to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    halves: tl.constexpr = 2 if GATED else 1
    base = weight + expert.to(tl.int64) * halves * N * K
    kind = x.dtype.element_ty
    mask = real[:, None] & inside[None, :]
    TILE: tl.constexpr = halves * BLOCK_N if LIMITED else BLOCK_N
    total = tl.zeros([BLOCK_P, TILE], tl.float32)
    total_up = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    wide = tl.program_id(1) * TILE + tl.arange(0, TILE)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + source[:, None] * K + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        if LIMITED:
            there = base + k.to(tl.int64)[:, None] * (halves * N) + wide[None, :]
            tile = tl.load(there, mask=(k < K)[:, None] & (wide < halves * N)[None, :], other=0.0)
            total += tl.dot(a, tile, input_precision="ieee")
        else:
            line = column.to(tl.int64)[:, None] * K + k[None, :]
            seen = inside[:, None] & (k < K)[None, :]
            total += tl.dot(a, tl.trans(tl.load(base + line, mask=seen, other=0.0)), input_precision="ieee")
            if GATED:
                up = tl.load(base + N.to(tl.int64) * K + line, mask=seen, other=0.0)
                total_up += tl.dot(a, tl.trans(up), input_precision="ieee")
    if LIMITED:
        own = tl.load(bias + expert * halves * N + wide, mask=(wide < halves * N) & (expert < E), other=0.0)
        total = (total.to(kind).to(tl.float32) + own.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    if GATED and LIMITED:
        gate, up = tl.split(tl.reshape(total, [BLOCK_P, BLOCK_N, 2]))
        gate = tl.minimum(gate, limit)
        up = (tl.minimum(tl.maximum(up, -limit), limit) + 1.0).to(kind).to(tl.float32)
        share = tl.sigmoid((gate * alpha).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        act = up * (gate * share).to(kind).to(tl.float32)
        tl.store(out + place.to(tl.int64)[:, None] * N + column[None, :], act.to(kind), mask=mask)
    elif GATED:
        gate = total.to(kind).to(tl.float32)
        act = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * total_up.to(kind).to(tl.float32)
        tl.store(out + place.to(tl.int64)[:, None] * N + column[None, :], act.to(kind), mask=mask)
    else:
        share = tl.load(gates + pair, mask=real, other=0.0)
        value = total.to(kind).to(tl.float32) * share[:, None]
        target = (pair % TOP) * tokens + pair // TOP
        tl.store(out + target[:, None] * N + column[None, :], value.to(out.dtype.element_ty), mask=mask)


def mix(
    x_TH: Tensor, gates_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor, limits: GateLimits | None = None
) -> Tensor:
    """What the experts of each token make of it, times their gates, `[K, T, H]`: parts that `rms_norm` adds up.

    gate_up `[E, 2 I, H]`, down `[E, H, I]`, as transformers keeps them; with limits, `[E, H, 2 I]` and `[E, I, H]`.
    """
    (tokens, top), (experts, _, _) = experts_TK.shape, down.shape
    width, inner = x_TH.shape[1], down.shape[1 if limits else 2]
    pairs, flat = tokens * top, experts_TK.view(-1)
    share = pairs > _ALONE * experts
    order, ends = _by_expert(flat, experts) if share else (flat, flat)
    # A block has room for twice the pairs of an expert, so that few weights are read a second time.
    rows = min(128, max(16, triton.next_power_of_2(2 * pairs // experts))) if share else 16
    blocks = min(pairs, experts) + pairs // rows if share else pairs
    depth = (128 if share else 256) // x_TH.element_size()  # so that small GPUs have room for it, in float32 too
    act = torch.empty(pairs, inner, dtype=x_TH.dtype, device=x_TH.device)
    out = torch.empty(top, tokens, width, dtype=x_TH.dtype if share else torch.float32, device=x_TH.device)

    gate_up_bias, down_bias, alpha, limit = limits or GateLimits(flat, flat, 0.0, 0.0)  # which nobody reads

    def product(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, n: int, k: int, gated: bool, cols: int) -> None:
        _expert_product[(blocks, triton.cdiv(n, cols))](
            x, weight, bias, flat, order, ends, gates_TK, out, tokens, n, k, alpha, limit, E=experts,
            WIDTH=triton.next_power_of_2(experts), TOP=top, SORTED=share, GATED=gated, LIMITED=limits is not None,
            BLOCK_P=rows, BLOCK_N=cols, BLOCK_K=depth, num_warps=8 if rows == 128 else 4, num_stages=3,
        )  # fmt: skip

    # Few pairs: narrow blocks, so that every multiprocessor has something to read.
    product(x_TH, gate_up, gate_up_bias, act, inner, width, gated=True, cols=64 if pairs > 16 else 32)
    product(act, down, down_bias, out, width, inner, gated=False, cols=128 if rows >= 64 else 64)
    return out


@triton.jit
def _arrange(experts, order, ends, pairs, BLOCK: tl.constexpr):
    """Pairs in the order of their experts, and where those of each expert end.

    One program an expert, which looks at all pairs twice: how many have a lower expert, and where its own are. A sort
    by radix and what torch needs around it took 27 microseconds for 4,096 pairs.
    """
    mine = tl.program_id(0)
    lower = 0
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        expert = tl.load(experts + pair, mask=pair < pairs, other=mine + 1)
        lower += tl.sum((expert < mine).to(tl.int32), 0)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_mine = (tl.load(experts + pair, mask=pair < pairs, other=mine + 1) == mine).to(tl.int32)
        tl.store(order + lower + tl.cumsum(is_mine, 0) - 1, pair, mask=is_mine == 1)
        lower += tl.sum(is_mine, 0)
    tl.store(ends + mine, lower)


def _by_expert(experts_P: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, and where those of each expert end; both int32."""
    order_P = torch.empty_like(experts_P)
    ends_E = torch.empty(experts, dtype=torch.int32, device=experts_P.device)
    block = min(4096, triton.next_power_of_2(len(experts_P)))
    _arrange[(experts,)](experts_P, order_P, ends_E, len(experts_P), BLOCK=block, num_warps=8)
    return order_P, ends_E
