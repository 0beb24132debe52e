"""Kernels of the training step on a CPU, behind the interfaces of `kitae.kernels.base`.

Norms are made again in the backward pass, as is the gated product of the MLP: neither is kept. In fp32, and on CPUs
with tile registers, the gradients of weights are added into fp32 by the products themselves: into the gradient of the
master weight where there is one (`gradient_of`), so that none in bfloat16 ever exists, and none is made to be added.

The experts of a layer are one differentiable function. Pairs of a token and an expert are sorted by expert once. Then
some experts at a time, those that have any, read their rows, compute with them, and add what they made to the rows of
their tokens: what lies in between is of a few hundred pairs, or of one expert. A token's experts are added in their own
order, whatever the number of threads.

Legend: T tokens, K experts of each, S = T · K pairs, E experts, H width of the model, I inner width of an expert.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kitae.kernels.allocation import add_gradient, gradient_of, joined, keep, kept
from kitae.kernels.base import GateLimits, ModuleKernels, SoftmaxKernels, SpanKernels, TrainingKernels
from kitae.kernels.cpu import amx, ops
from kitae.kernels.layer_functions import layer_kernels


def add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """`total += dy.T @ x` for rows dy `[M, N]` and x `[M, K]`; total in fp32."""
    if dy.dtype == torch.bfloat16 and total.is_contiguous() and amx.can_add_outer(*total.shape):
        amx.add_outer(total, *(t if t.stride(1) == 1 else t.contiguous() for t in (dy, x)))
    elif dy.dtype == torch.float32:
        total.addmm_(dy.t(), x)
    else:
        total += torch.mm(dy.t(), x)


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of a weight for autograd; None if it has been added to that of the master."""
    into = gradient_of(weight)
    if into is None and not (weight.dtype == torch.bfloat16 and amx.can_add_outer(*weight.shape)):
        return torch.mm(dy.t(), x)
    total = torch.zeros(weight.shape, dtype=torch.float32) if into is None else into
    add_product(total, dy, x)
    return total.to(weight.dtype) if into is None else None


class StackGradient:
    """The gradient of weights that lie in one tensor `[E, N, K]`, filled one by one: others are not touched.

    turned: the weights lie as `[E, K, N]`. made: the gradient for autograd, at the end; None where it has been added to
    that of the master, and for weights that are frozen or missing.
    """

    def __init__(self, weights: Tensor | None, needed: bool, *, turned: bool = False) -> None:
        self._into = gradient_of(weights) if needed and weights is not None else None
        self.made = torch.zeros_like(weights) if needed and weights is not None and self._into is None else None
        self._turned = turned

    def add(self, parts: Sequence[tuple[int, slice]], dy: Tensor, x: Tensor) -> None:
        """Add `dy.T @ x` of each part of the rows to the gradient of the weight named with it, each at most once."""
        dy, x = (x, dy) if self._turned else (dy, x)
        for index, part in parts:
            if self._into is not None:
                add_product(self._into[index], dy[part], x[part])
            elif self.made is not None:
                torch.mm(dy[part].t(), x[part], out=self.made[index])

    def add_rows(self, parts: Sequence[tuple[int, slice]], dy: Tensor, weight: Tensor | None = None) -> None:
        """The same for biases `[E, N]`: add the sum of the rows, each times its weight."""
        total = self.made if self._into is None else self._into
        if total is not None:
            for index, part in parts:
                rows = dy[part].float()
                total[index] += rows.sum(0) if weight is None else weight[part] @ rows


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


_ROWS = 512  # of a block: what lies in between stays in the cache, and short parts are gathered and gated at once


class _Block(NamedTuple):
    """Sorted pairs of some experts: where they begin and end, and, counted from there, those of each expert."""

    at: slice
    parts: list[tuple[int, slice]]


def _blocks(chosen_TK: Tensor, experts: int) -> list[_Block]:
    """Blocks of the chosen experts, each with as few more rows than `_ROWS` as whole experts allow."""
    found, parts, start, end = [], [], 0, 0
    counts = torch.bincount(chosen_TK.flatten(), minlength=experts).tolist()
    if len(counts) > experts:
        raise IndexError(f"experts are numbered from 0 to {experts - 1}, got {len(counts) - 1}")
    for expert, count in enumerate(counts):
        if count:
            parts.append((expert, slice(end - start, end - start + count)))
            end += count
        if end - start >= _ROWS or (parts and expert == experts - 1):
            found.append(_Block(slice(start, end), parts))
            parts, start = [], end
    return found


def _times(
    rows: Tensor, weights: Tensor, block: _Block, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The rows of each expert times its own of the weights `[E, K, N]`, plus its own bias."""
    out = rows.new_empty(len(rows), weights.shape[2]) if out is None else out
    for expert, part in block.parts:
        if bias is None:
            torch.mm(rows[part], weights[expert], out=out[part])
        else:
            torch.addmm(bias[expert], rows[part], weights[expert], out=out[part])
    return out


class _Experts(torch.autograd.Function):
    """Keeps gates and ups `[S, 2 I]` beside its inputs. Rows of tokens are gathered again in the backward pass, and
    gated products made again, in the places of their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        chosen_TK: Tensor,
        gates_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        limits: GateLimits | None,
    ) -> Tensor:
        blocks = _blocks(chosen_TK, len(down))
        order_S = chosen_TK.flatten().argsort(stable=True)
        token_S, gate_S = order_S // chosen_TK.shape[1], gates_TK.flatten()[order_S].float()
        to_both, to_out = (w if limits else w.transpose(1, 2) for w in (gate_up, down))
        both_S2I = x_TH.new_empty(len(order_S), to_both.shape[2])
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
        for block in blocks:
            token, both = token_S[block.at], both_S2I[block.at]
            _times(x_TH[token], to_both, block, bias=gate_up_bias, out=both)
            made = _times(ops.gate_rows(both, limits), to_out, block, bias=down_bias)
            ops.add_rows(out_TH, token, made, gate_S[block.at])
        keep(ctx, x_TH, gates_TK, gate_up, down, gate_up_bias, down_bias, both_S2I, order_S, token_S, gate_S)
        ctx.blocks, ctx.limits = blocks, limits
        return out_TH.to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a gate is the product of an expert's activations with theirs: outputs are not needed."""
        x_TH, gates_TK, gate_up, down, gate_up_bias, down_bias, both_S2I, order_S, token_S, gate_S = kept(ctx)
        limits: GateLimits | None = ctx.limits
        of_x, _, _, *of_weights, _ = ctx.needs_input_grad
        learning = zip((gate_up, down, gate_up_bias, down_bias), of_weights, strict=True)
        made = [StackGradient(weights, needed, turned=limits is not None) for weights, needed in learning]
        dgate_up, ddown, dgate_up_bias, ddown_bias = made
        from_both, from_out = (w.transpose(1, 2) if limits else w for w in (gate_up, down))
        dx_TH = torch.zeros(x_TH.shape, dtype=torch.float32) if of_x else None
        dgate_S = torch.empty_like(gate_S)
        for block in ctx.blocks:
            token, both, gate = token_S[block.at], both_S2I[block.at], gate_S[block.at]
            dmade = grads[0][token]
            act = _times(dmade, from_out, block)
            dgate = ops.gate_rows_again(act, both, gate, limits)
            ddown.add(block.parts, dmade, act)
            if limits is not None:
                for expert, part in block.parts:
                    dgate[part] += dmade[part].float() @ down_bias[expert].float()
                ddown_bias.add_rows(block.parts, dmade, gate)
                dgate_up_bias.add_rows(block.parts, both)
            dgate_S[block.at] = dgate
            if of_weights[0]:
                dgate_up.add(block.parts, both, x_TH[token])
            if dx_TH is not None:
                ops.add_rows(dx_TH, token, _times(both, from_both, block))
        torch.autograd.graph.increment_version(both_S2I)  # so that torch refuses a second backward pass
        dgates_TK = torch.empty_like(gate_S).index_copy_(0, order_S, dgate_S).view(gates_TK.shape).to(gates_TK.dtype)
        return None if dx_TH is None else dx_TH.to(x_TH.dtype), None, dgates_TK, *(each.made for each in made), None


def experts(
    x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, limits: GateLimits | None = None
) -> Tensor:
    """See `kitae.kernels.base.Experts`."""
    biases = (None, None) if limits is None else (limits.gate_up_bias, limits.down_bias)
    out: Tensor = _Experts.apply(x, chosen, gates, gate_up, down, *biases, limits)  # type: ignore[no-untyped-call]
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
