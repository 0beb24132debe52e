"""Attention of packed training rows: each span sees its prefix and, causally, itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kitae.data.packing import Span
from kitae.kernels import ops
from kitae.models.attention import causal_mask, masked_attention

_MAX_SCORES = 32 * 2**20  # scores held at a time, over all heads of a block


class Block(NamedTuple):
    """n spans of one shape, computed together: their query rows `[n, L]` and key rows `[n, P + L]`."""

    queries: Tensor
    keys: Tensor
    prefix: int


class PackedAttention:
    """The trainer's `AttentionContext`. Free of side effects, so activation checkpointing may call it again."""

    def __init__(self, spans: Sequence[Span], device: torch.device, heads: int, *, fused: bool = True) -> None:
        self.fused = fused
        self.blocks = _group_by_shape(spans, device, heads)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if self.fused and softcap is None and sinks is None:
            out: Tensor = _Attention.apply(q, k, v, self.blocks, scale, window)  # type: ignore[no-untyped-call]
            return out
        out = torch.zeros(q.shape[1], q.shape[0], q.shape[2], dtype=q.dtype, device=q.device)
        for block in self.blocks:
            for rows, keys in zip(block.queries, block.keys, strict=True):
                allowed = _allowed(block, window)
                mixed = masked_attention(
                    q[:, rows], k[:, keys], v[:, keys], allowed, scale=scale, softcap=softcap, sinks=sinks
                )
                out = out.index_copy(0, rows, mixed)
        return out


def _group_by_shape(spans: Sequence[Span], device: torch.device, heads: int) -> list[Block]:
    shapes: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        shapes.setdefault((span.prefix_length, span.length), []).append(span)
    blocks = []
    for (prefix, length), members in shapes.items():
        step = max(1, _MAX_SCORES // (heads * length * (prefix + length)))
        for i in range(0, len(members), step):
            part = members[i : i + step]
            own = torch.tensor([s.start for s in part])[:, None] + torch.arange(length)
            before = torch.tensor([s.prefix_start for s in part])[:, None] + torch.arange(prefix)
            blocks.append(Block(own.to(device), torch.cat((before, own), 1).to(device), prefix))
    return blocks


def _allowed(block: Block, window: int | None) -> Tensor:
    positions = torch.arange(block.keys.shape[1], device=block.keys.device)
    return causal_mask(positions[block.prefix :], positions, window)


def _take(x: Tensor, rows: Tensor, fold: int) -> Tensor:
    """`[H, T, D]`, rows `[n, L]` → `[n · H / fold, fold · L, D]`: the heads of a group become rows."""
    heads, _, dim = x.shape
    n, length = rows.shape
    picked = x.transpose(0, 1)[rows.flatten()].view(n, length, heads, dim).transpose(1, 2)
    return picked.reshape(n * (heads // fold), fold * length, dim)


def _put_back(x: Tensor, n: int, heads: int, length: int) -> Tensor:
    """The inverse of `_take`: `[n · H / fold, fold · L, D]` → `[n · L, H, D]`."""
    return x.view(n, heads, length, x.shape[-1]).transpose(1, 2).reshape(n * length, heads, x.shape[-1])


class _Attention(torch.autograd.Function):
    """Softmax attention block by block; the probabilities are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scale: float, window: int | None
    ) -> Tensor:
        heads, tokens, dim = q.shape
        fold = heads // k.shape[0]
        out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
        for block in blocks:
            n, length = block.queries.shape
            probs = _probabilities(_take(q, block.queries, fold), _take(k, block.keys, 1), block, fold, scale, window)
            mixed = torch.bmm(probs.to(v.dtype), _take(v, block.keys, 1))
            out[block.queries.flatten()] = _put_back(mixed, n, heads, length)
        ctx.save_for_backward(q, k, v, out)
        ctx.rest = (blocks, fold, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        blocks, fold, scale, window = ctx.rest
        heads, tokens, dim = q.shape
        kv_heads = k.shape[0]
        (grad,) = grads
        delta = (grad.float() * out.float()).sum(-1).t()[..., None]  # [Hq, T, 1]
        grad = grad.transpose(0, 1)
        dq = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
        # Prompts collect from all their responses: sum in fp32.
        dk = torch.zeros(tokens, kv_heads, dim, dtype=torch.float32, device=q.device)
        dv = torch.zeros_like(dk)
        for block in blocks:
            n, length = block.queries.shape
            keys = block.keys.flatten()
            span = block.keys.shape[1]
            q_b, k_b = _take(q, block.queries, fold), _take(k, block.keys, 1)
            v_b, grad_b = _take(v, block.keys, 1), _take(grad, block.queries, fold)
            probs = _probabilities(q_b, k_b, block, fold, scale, window)
            dv.index_add_(0, keys, _put_back(torch.bmm(probs.to(grad_b.dtype).mT, grad_b), n, kv_heads, span).float())
            dprobs = torch.bmm(grad_b, v_b.mT)
            delta_b = _take(delta, block.queries, fold)
            if ops.available(q.device, q.dtype):
                dscores = ops.softmax_backward(probs, dprobs, delta_b, scale)
            else:
                dscores = dprobs.float().sub_(delta_b).mul_(probs).mul_(scale).to(q.dtype)
            dq[block.queries.flatten()] = _put_back(torch.bmm(dscores, k_b), n, heads, length)
            dk.index_add_(0, keys, _put_back(torch.bmm(dscores.mT, q_b), n, kv_heads, span).float())
        return (
            dq.transpose(0, 1), dk.to(k.dtype).transpose(0, 1), dv.to(v.dtype).transpose(0, 1), None, None, None
        )  # fmt: skip


def _probabilities(q_b: Tensor, k_b: Tensor, block: Block, fold: int, scale: float, window: int | None) -> Tensor:
    scores = torch.bmm(q_b, k_b.mT)
    if ops.available(q_b.device, q_b.dtype):
        return ops.causal_softmax(scores, fold, scale, window)
    scores = scores.float().mul_(scale)
    allowed = _allowed(block, window)
    hidden = ~allowed.repeat(fold, 1)  # rows are (head in group, position)
    return torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1)
