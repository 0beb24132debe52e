"""Attention of packed training rows: each span sees its prefix and, causally, itself."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kitae.data.packing import Span
from kitae.kernels.base import SoftmaxKernels, SpanKernels, SpanTable
from kitae.kernels.cuda import flash
from kitae.kernels.devices import training_kernels
from kitae.kernels.exact import exact_attention as exactly
from kitae.kernels.transfer import send
from kitae.models.attention_seam import causal_mask, masked_attention
from kitae.models.span_states import SpanStates
from kitae.models.state_seam import MixerCall

_MAX_SCORES = 32 * 2**20  # scores held at a time, over all heads of a block


class Block(NamedTuple):
    """n spans of one shape, which are computed together: query rows `[n, L]` and key rows `[n, P + L]`."""

    queries: Tensor
    keys: Tensor
    prefix: int


class PackedAttention:
    """The trainer's `AttentionContext`. It has no side effects, so activation checkpointing may call it again.

    compiled: whether one kernel may compute all of it, where there is such a kernel.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        device: torch.device,
        heads: int,
        *,
        fused: bool = True,
        compiled: bool = True,
        exact: bool = False,
    ) -> None:
        self.fused = fused
        self.compiled = fused and compiled
        self.exact = exact
        self._known_reach: exactly.Reach | None = None
        self._spans, self._device, self._heads = spans, device, heads

    def carry(self, call: MixerCall) -> None:
        self.states.carry(call)

    @functools.cached_property
    def states(self) -> SpanStates:
        return SpanStates(self._spans, self._device)

    @functools.cached_property
    def plain(self) -> "PackedAttention":
        """The attention that exact attention takes its gradient from."""
        return PackedAttention(self._spans, self._device, self._heads, fused=self.fused, compiled=False)

    def _reach(self, group: int) -> exactly.Reach:
        if self._known_reach is None:
            spans = [(s.start, s.length, s.prefix_length, _rows(s)) for s in self._spans]
            self._known_reach = exactly.Reach.of(spans, 1, group, self._device)
        return self._known_reach

    @functools.cached_property
    def blocks(self) -> list[Block]:
        return _group_by_shape(self._spans, self._device, self._heads)

    @functools.cached_property
    def table(self) -> SpanTable:
        """The spans in the form that span kernels read."""
        _check_cover(self._spans)
        return SpanTable(torch.tensor([(s.start, s.length, s.prefix_start, s.prefix_length) for s in self._spans]))

    @functools.cached_property
    def layout(self) -> "_Layout":
        return _Layout.of(self._spans, self._device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        if self.exact:
            reach = self._reach(self._heads // k.shape[0])
            return exactly.with_gradient_of(
                lambda q, k, v: exactly.attend(q, exactly.as_pages(k), exactly.as_pages(v), reach, **settings),
                lambda q, k, v: self.plain.attend(layer, q, k, v, **settings),
                q, k, v,
            )  # fmt: skip
        plain = softcap is None and sinks is None
        quick = plain and flash.available(q)
        seen_once = quick and not torch.is_grad_enabled() and len(self._spans) == 1
        alone = seen_once and flash.is_alone(self.layout.bounds, window)
        if self.compiled and not alone and (spans := _span_kernels(q, plain)) is not None:
            rows = (t.transpose(0, 1) for t in (q, k, v))
            return _Spans.apply(*rows, sinks, self.table, scale, window, softcap, spans)  # type: ignore[no-any-return, no-untyped-call]
        if self.fused and quick:
            k, v = self.layout.keys(k.transpose(0, 1)), self.layout.keys(v.transpose(0, 1))
            return flash.attend(q.transpose(0, 1), k, v, self.layout.bounds, scale=scale, window=window)
        if self.fused and plain:
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


class _Layout(NamedTuple):
    """The row in the form that flash attention reads: the bounds of spans, and the key rows of each, prefix first."""

    bounds: flash.Bounds
    rows: Tensor | None  # None: every span sees itself only
    takers: tuple[Tensor, Tensor] | None  # indices into `rows`, sorted by row; where each row's begin, `[T + 1]`

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> "_Layout":
        starts = _check_cover(spans)
        lengths = [s.length for s in spans]
        bounds = flash.Bounds.of(lengths, [s.prefix_length + s.length for s in spans], device)
        if not any(s.prefix_length for s in spans):
            return cls(bounds, None, None)
        pieces = [p for s in spans for p in ((s.prefix_start, s.prefix_length), (s.start, s.length))]
        rows = np.concatenate([np.arange(start, start + length) for start, length in pieces])
        order = np.argsort(rows, kind="stable").astype(np.int32)
        first = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=starts[-1]))]).astype(np.int32)
        return cls(bounds, send(rows, device), (send(order, device), send(first, device)))

    def keys(self, x: Tensor) -> Tensor:
        """`[T, Hkv, D]` → `[S, Hkv, D]`."""
        if self.rows is None or self.takers is None:
            return x
        picked: Tensor = _Gather.apply(x, self.rows, *self.takers)  # type: ignore[no-untyped-call]
        return picked


class _Gather(torch.autograd.Function):
    """Select rows of x. The gradients of a row that is selected several times are added in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, order: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(rows, order, first)
        ctx.shape = x.shape
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, order, first = ctx.saved_tensors
        kernels = training_kernels(rows.device, grads[0].dtype)
        if kernels is not None and kernels.sum_rows is not None:
            return kernels.sum_rows(grads[0], order, first), None, None, None
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=rows.device)
        return total.index_add_(0, rows, grads[0].float()).to(grads[0].dtype), None, None, None


def _check_cover(spans: Sequence[Span]) -> list[int]:
    """The starts of all spans, and the end of the row. Spans must cover the row in order."""
    starts = [0, *itertools.accumulate(s.length for s in spans)]
    assert starts[:-1] == [s.start for s in spans], "spans must cover the row in order"
    return starts


def _rows(s: Span) -> list[int]:
    """The row indices of a span's prefix and of the span itself."""
    return [*range(s.prefix_start, s.prefix_start + s.prefix_length), *range(s.start, s.start + s.length)]


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


class _Spans(torch.autograd.Function):
    """The whole row by span kernels: q `[T, Hq, D]`, k, v `[T, Hkv, D]` → `[T, Hq, D]`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        table: SpanTable,
        scale: float,
        window: int | None,
        softcap: float | None,
        kernels: SpanKernels,
    ) -> Tensor:
        out, lse = kernels.forward(q, k, v, table, scale=scale, window=window, softcap=softcap, sinks=sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.rest = (table, scale, window, softcap, kernels)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        table, scale, window, softcap, kernels = ctx.rest
        made = kernels.backward(
            grads[0], q, k, v, out, lse, table, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        return *made, *(None,) * 5


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
        # A prompt's keys collect gradients from all its responses, so they are summed in fp32.
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
            if (softmax := _softmax_kernels(q)) is not None:
                dscores = softmax.backward(probs, dprobs, delta_b, scale)
            else:
                dscores = dprobs.float().sub_(delta_b).mul_(probs).mul_(scale).to(q.dtype)
            dq[block.queries.flatten()] = _put_back(torch.bmm(dscores, k_b), n, heads, length)
            dk.index_add_(0, keys, _put_back(torch.bmm(dscores.mT, q_b), n, kv_heads, span).float())
        return (
            dq.transpose(0, 1), dk.to(k.dtype).transpose(0, 1), dv.to(v.dtype).transpose(0, 1), None, None, None
        )  # fmt: skip


def _probabilities(q_b: Tensor, k_b: Tensor, block: Block, fold: int, scale: float, window: int | None) -> Tensor:
    scores = torch.bmm(q_b, k_b.mT)
    if (softmax := _softmax_kernels(q_b)) is not None:
        return softmax.forward(scores, fold, scale, window)
    scores = scores.float().mul_(scale)
    allowed = _allowed(block, window)
    hidden = ~allowed.repeat(fold, 1)  # rows are (head in group, position)
    return torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1)


def _span_kernels(like: Tensor, plain: bool) -> SpanKernels | None:
    """plain: neither softcap nor sinks. On a GPU, plain rows in fp32 are computed by cuBLAS instead."""
    kernels = training_kernels(like.device, like.dtype)
    spans = None if kernels is None else kernels.spans
    if spans is None or like.shape[-1] not in spans.sizes:
        return None
    if plain:
        return spans if like.device.type != "cuda" or like.dtype != torch.float32 else None
    return spans if spans.capped else None


def _softmax_kernels(like: Tensor) -> SoftmaxKernels | None:
    kernels = training_kernels(like.device, like.dtype)
    return None if kernels is None else kernels.softmax
