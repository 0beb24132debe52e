"""Kernels of the training step on a CPU, behind the interfaces of `kitae.kernels.base`.

Norms are made again in the backward pass, as is the gated product of the MLP: neither is kept. In fp32, and on CPUs
with tile registers, the gradients of weights are added into fp32 by the products themselves: into the gradient of the
master weight where there is one (`gradient_of`), so that none in bfloat16 ever exists, and none is made to be added.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kitae.kernels.allocation import add_gradient, gradient_of, joined, keep, kept
from kitae.kernels.base import ModuleKernels, SoftmaxKernels, SpanKernels, TrainingKernels
from kitae.kernels.cpu import ops
from kitae.kernels.cpu.expert_training import experts
from kitae.kernels.cpu.gradients import add_product, weight_gradient
from kitae.kernels.layer_functions import layer_kernels


def _bias_gradient(bias: Tensor | None, dy: Tensor) -> Tensor | None:
    return None if bias is None or not bias.requires_grad else add_gradient(bias, dy.sum(0))


def _project(x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """All outputs side by side, by one product wherever the weights lie: several would round otherwise."""
    found = [b for b in biases if b is not None]
    return torch.nn.functional.linear(x, joined(weights), torch.cat(found) if found else None)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """`[T, heads, D]` each to one tensor: a view, if they lie so in memory. It is written over."""
    first, heads = parts[0], sum(p.shape[1] for p in parts)
    shape, (_, _, dim) = (len(first), heads, first.shape[2]), first.shape
    starts = [first.data_ptr() + first.element_size() * dim * sum(p.shape[1] for p in parts[:i]) for i in range(3)]
    if any(p.data_ptr() != s or p.stride() != (heads * dim, dim, 1) for p, s in zip(parts, starts, strict=True)):
        return torch.cat(list(parts), 1)
    return first.as_strided(shape, (heads * dim, dim, 1))


class _NormedQKV(torch.autograd.Function):
    """Keeps the rows, which are also an output, for the way around the attention.

    Where heads have norms, what enters those is kept beside queries and keys; values lie in it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        eps: tuple[float, float],
        cos: Tensor,
        sin: Tensor,
        dim: int,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = [w for w in parameters[:3] if w is not None], parameters[3:6]
        gains = [p for p in parameters[6:] if p is not None]
        x = x.contiguous()
        by_head = _project(ops.norm_rows(x, gain, eps[0])[0], weights, biases).view(len(x), -1, dim)
        heads = [len(w) // dim for w in weights]
        q, k, v = torch.split(by_head, heads, 1)
        if gains:
            q, k = (ops.norm_rows(y.contiguous(), g, eps[1])[0] for y, g in zip((q, k), gains, strict=True))
            for y in (q, k):
                ops.rotate(y, cos, sin, y.shape[1])
        else:
            ops.rotate(by_head, cos, sin, heads[0] + heads[1])
        keep(ctx, x, gain, cos, sin, *weights, *biases, *((by_head, *gains) if gains else ()))
        ctx.rest = (eps, heads)
        return x.view_as(x), q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        around, *of_heads = grads
        x, gain, cos, sin, *parameters = kept(ctx)
        weights, biases, of_norms = parameters[:3], parameters[3:6], parameters[6:]
        eps, heads = ctx.rest
        dqkv = _side_by_side(of_heads)
        ops.rotate(dqkv, cos, sin, heads[0] + heads[1], back=True)
        dgains: list[Tensor | None] = []
        if of_norms:
            by_head, *gains = of_norms
            dgains = _norm_heads_backward(dqkv, by_head, gains, eps[1], heads)
        flat = dqkv.view(len(x), -1)
        normed, inverse_rms = ops.norm_rows(x, gain, eps[0])
        parts = torch.split(flat, [len(w) for w in weights], 1)
        dweights = [
            weight_gradient(w, part, normed) if needed else None
            for w, part, needed in zip(weights, parts, ctx.needs_input_grad[6:9], strict=True)
        ]
        dbiases = [_bias_gradient(b, part) for b, part in zip(biases, parts, strict=True)]
        dx, dgain = ops.rms_norm_gradients(torch.mm(flat, joined(weights)), x, gain, inverse_rms, around.contiguous())
        return dx, add_gradient(gain, dgain), None, None, None, None, *dweights, *dbiases, *dgains


def _norm_heads_backward(
    dqkv: Tensor, by_head: Tensor, gains: Sequence[Tensor], eps: float, heads: list[int]
) -> list[Tensor | None]:
    """Replace the gradients of normed queries and keys by those before the norms; returns those of the weights."""
    dgains = []
    for place, entered, gain in zip(*(torch.split(t, heads, 1)[:2] for t in (dqkv, by_head)), gains, strict=True):
        rows = entered.contiguous()
        _, inverse_rms = ops.norm_rows(rows, gain, eps)
        dx, dgain = ops.rms_norm_gradients(place.contiguous(), rows, gain, inverse_rms)
        place.copy_(dx)
        dgains.append(add_gradient(gain, dgain))
    return dgains


class _NormedPair(torch.autograd.Function):
    """Like `_NormedQKV`, of a sum of rows, with two linear layers without bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gain: Tensor, eps: float, *weights: Tensor) -> tuple[Tensor, ...]:
        total = (x + y).contiguous()
        normed, inverse_rms = ops.norm_rows(total, gain, eps)
        keep(ctx, total, gain, inverse_rms, *weights)
        ctx.eps = eps
        return total, *(torch.mm(normed, w.t()) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        around, *ours = grads
        total, gain, inverse_rms, *weights = kept(ctx)
        dnormed = torch.mm(ours[0], weights[0]).addmm_(ours[1], weights[1])
        dweights: list[Tensor | None] = [None, None]
        if any(needed := ctx.needs_input_grad[4:]):
            normed, _ = ops.norm_rows(total, gain, ctx.eps)
            of_each = zip(weights, ours, needed, strict=True)
            dweights = [weight_gradient(w, g, normed) if learns else None for w, g, learns in of_each]
        dx, dgain = ops.rms_norm_gradients(dnormed, total, gain, inverse_rms, around.contiguous())
        return dx, dx, add_gradient(gain, dgain), None, *dweights


class _SwiGLULinear(torch.autograd.Function):
    """The backward pass writes the gradients over gate and up: nobody else may keep them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        keep(ctx, gate, up, weight)
        return torch.nn.functional.linear(ops.swiglu(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = kept(ctx)
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        product = torch.mm(grad, weight)
        ops.swiglu_again(product, gate, up)
        torch.autograd.graph.increment_version((gate, up))  # so that torch refuses a second backward pass
        dweight = weight_gradient(weight, grad, product) if ctx.needs_input_grad[2] else None
        return gate.detach(), up.detach(), dweight


class _Embedding(torch.autograd.Function):
    """Where the weight has a master, the rows of its gradient are added there: no other of its size is made."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int) -> Tensor:
        keep(ctx, tokens, weight)
        ctx.padding = padding
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None]:
        tokens, weight = kept(ctx)
        into = gradient_of(weight)
        if into is None:
            made: Tensor = torch.ops.aten.embedding_dense_backward(grads[0], tokens, len(weight), ctx.padding, False)
            return None, made, None
        rows = grads[0].reshape(-1, grads[0].shape[-1]).to(into.dtype)
        tokens = tokens.flatten()
        into.index_add_(0, tokens, rows.masked_fill(tokens[:, None] == ctx.padding, 0))
        return None, None, None


def embedding(tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """Rows of the weight, differentiable; padding: a token whose row does not learn from it."""
    out: Tensor = _Embedding.apply(tokens, weight, -1 if padding is None else padding)  # type: ignore[no-untyped-call]
    return out


LAYERS = layer_kernels(_NormedQKV, _NormedPair, _SwiGLULinear, weight_gradient)
KERNELS = TrainingKernels(
    modules=ModuleKernels(
        rms_norm=ops.rms_norm,
        swiglu=ops.swiglu,
        embedding=embedding,
        experts=experts,
        layers=LAYERS,
    ),
    row_statistics=ops.row_statistics,
    row_gradients=ops.row_gradients,
    accumulate=ops.accumulate,
    add_product=add_product,
    adamw=ops.adamw,
    softmax=SoftmaxKernels(forward=ops.causal_softmax, backward=ops.softmax_backward),
)
KERNELS_F32 = replace(
    KERNELS,
    spans=SpanKernels(forward=ops.attend_spans, backward=ops.attend_spans_backward, sizes=range(16, 4097, 16)),
)
# For bfloat16 where there are tile registers.
KERNELS_TILES = replace(
    KERNELS,
    spans=SpanKernels(forward=ops.attend_spans, backward=ops.attend_spans_backward, sizes=range(32, 4097, 32)),
)
