"""Triton kernels of the training step on a GPU, behind the interfaces of `kitae.kernels.base`.

Norms, gated MLPs, and the log-probs and entropies of rows of logits, each with its gradient. They round where the
Hugging Face modules round; sums are in fp32.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kitae.kernels.adamw import salt
from kitae.kernels.allocation import gradient_over, joined, keep, kept
from kitae.kernels.base import AdamWPace, AdamWPart, ModuleKernels, TrainingKernels
from kitae.kernels.cuda import decoding, spans
from kitae.kernels.layer_functions import layer_kernels
from kitae.kernels.transfer import send

_PROGRAMS = 1056  # of kernels that walk over rows: eight on each multiprocessor of a large GPU


# Gradients of weights


def _weight_gradient(weights: Sequence[Tensor], dy: Tensor, x: Tensor) -> Tensor | None:
    """`dy.T @ x`, the gradient of weights that lie together; None: the product has added it to those of their masters,
    in fp32."""
    into = gradient_over(weights)
    if into is None:
        return torch.mm(dy.t(), x)
    total, begun = into
    add_product(total, dy, x, begun=begun)
    return None


def add_product(total: Tensor, dy: Tensor, x: Tensor, *, begun: bool = True) -> None:
    """`total += dy.T @ x`, total in fp32; begun: there is something to add to."""
    if x.dtype == torch.float32:
        torch.addmm(total, dy.t(), x, beta=int(begun), out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, dy.t(), x, torch.float32, beta=int(begun), out=total)


# RMSNorm


@triton.jit
def _rms_norm_backward(
    grad, x, weight, plus, dx, dweight, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PLUS: tl.constexpr
):  # fmt: skip
    """Gradients of RMSNorm: dx of each row, plus what came by another way (PLUS), and parts of that of the weight.

    Each program walks over every so-many-th row, in one block of BLOCK >= WIDTH columns, and adds up its part of
    dweight in registers; the parts `[programs, WIDTH]` are summed outside. No atomics, so the result is always the
    same. 1 / rms is made again from the row, which is read anyhow.
    """
    kind = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * WIDTH + column
        value = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + here, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        normed = value * scale
        inner = g * gain
        mean = tl.sum(inner * normed, 0) / WIDTH
        out = (inner - normed * mean) * scale
        if PLUS:  # what the same input got by another way
            out = out.to(kind).to(tl.float32) + tl.load(plus + here, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + here, out.to(kind), mask=mask)
        total += g * normed.to(kind).to(tl.float32)
    tl.store(dweight + tl.program_id(0) * WIDTH + column, total, mask=mask)


def _norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight of a norm; `plus` is added to that of the rows."""
    rows, width = x.shape
    programs = min(_PROGRAMS, rows)
    dx = torch.empty_like(x)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm_backward[(programs,)](
        grad.contiguous(), x, weight, x if plus is None else plus.contiguous(), dx, parts, rows, eps,
        WIDTH=width, BLOCK=block, PLUS=plus is not None, num_warps=min(8, max(1, block // 2048)),
    )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.eps = eps
        return decoding.rms_norm(rows, None, weight, eps)[1].view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx, dweight = _norm_gradients(grads[0].reshape(x.shape), x, weight, ctx.eps)
        return dx.view(grads[0].shape), dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / rms(x)` over the last dimension, differentiable."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


# Rotary


@triton.jit
def _rotate(
    x, out, cos, sin, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """Rotary of all heads of a row, rounded where the modules round; BACK: its gradient, a turn the other way.

    One program a row, with the halves of all heads as two tiles `[HEADS, HALF]`. The modules need a kernel for each
    product, sum and concatenation.
    """
    row = tl.program_id(0).to(tl.int64)
    kind = x.dtype.element_ty
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    mask = (head < H) & (lane < D // 2)
    low = row * H * D + head * D + lane
    a = tl.load(x + low, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + low + D // 2, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * D + lane, mask=lane < D // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + row * D + lane, mask=lane < D // 2, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    new_a = (a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32)
    new_b = (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)
    tl.store(out + low, new_a.to(kind), mask=mask)
    tl.store(out + low + D // 2, new_b.to(kind), mask=mask)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    rows, heads, dim = x.shape
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(rows,)](
        x, out, cos, sin, H=heads, HEADS=triton.next_power_of_2(heads), D=dim, HALF=triton.next_power_of_2(dim // 2),
        BACK=back,
    )  # fmt: skip
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, back=True), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of `[T, H, D]`; cos and sin `[T, D]`, whose halves are equal. Differentiable."""
    out: Tensor = _Rotary.apply(x, cos.contiguous(), sin.contiguous())  # type: ignore[no-untyped-call]
    return out


# Norms and the linear layers that follow. Queries, keys and values are one product, rotated within its output


@triton.jit
def _rotate_within(
    out, cos, sin, q, k, v, q_row, k_row, v_row,
    HQ: tl.constexpr, HKV: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Forward: out is rotated in place. BACK: the gradients q, k and v are rotated back and written side by side.

    One program a row of queries, keys and values, as `[HEADS, HALF]` twice; values are not rotated. BACK takes the
    place of a concatenation: one product then gives the gradient of the input, and one those of all three weights.
    """
    row = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    near = lane < D // 2
    low = row * (HQ + 2 * HKV) * D + head * D + lane
    c = tl.load(cos + row * D + lane, mask=near, other=0.0).to(tl.float32)
    s = tl.load(sin + row * D + lane, mask=near, other=0.0).to(tl.float32)
    if BACK:
        is_q = near & (head < HQ)
        is_k = near & (head >= HQ) & (head < HQ + HKV)
        is_v = near & (head >= HQ + HKV) & (head < HQ + 2 * HKV)
        from_q = q + row * q_row + head * D + lane
        from_k = k + row * k_row + (head - HQ) * D + lane
        from_v = v + row * v_row + (head - HQ - HKV) * D + lane
        a = (tl.load(from_q, mask=is_q, other=0.0).to(tl.float32) + tl.load(from_k, mask=is_k, other=0.0).to(tl.float32)
             + tl.load(from_v, mask=is_v, other=0.0).to(tl.float32))  # fmt: skip
        b = (tl.load(from_q + D // 2, mask=is_q, other=0.0).to(tl.float32)
             + tl.load(from_k + D // 2, mask=is_k, other=0.0).to(tl.float32)
             + tl.load(from_v + D // 2, mask=is_v, other=0.0).to(tl.float32))  # fmt: skip
        s = -s
        mask = near & (head < HQ + 2 * HKV)
    else:
        mask = near & (head < HQ + HKV)
        a = tl.load(out + low, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(out + low + D // 2, mask=mask, other=0.0).to(tl.float32)
    turns = head < HQ + HKV
    new_a = tl.where(turns, (a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32), a)
    new_b = tl.where(turns, (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32), b)
    tl.store(out + low, new_a.to(kind), mask=mask)
    tl.store(out + low + D // 2, new_b.to(kind), mask=mask)


def _rotate_heads(out: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, int, int], grads: list[Tensor]) -> None:
    heads, kv_heads, dim = shape
    q, k, v = grads or [out, out, out]
    _rotate_within[(out.shape[0],)](
        out, cos, sin, q, k, v, q.stride(0), k.stride(0), v.stride(0),
        HQ=heads, HKV=kv_heads, HEADS=triton.next_power_of_2(heads + 2 * kv_heads), D=dim,
        HALF=triton.next_power_of_2(dim // 2), BACK=bool(grads),
    )  # fmt: skip


@triton.jit
def _norm_and_rotate(
    qkv, out, gains, cos, sin, rows, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """RMSNorm and rotary of each head of queries and keys, rounded where the modules round.

    Grid (heads, blocks of ROWS rows): the halves of a head as two tiles `[ROWS, HALF]`. Out of place: the gradient of
    the norm needs what came in. gains: the weight for queries, then the one for keys.
    """
    head = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    near = lane < D // 2
    mask = (row < rows) & near
    kind = out.dtype.element_ty
    low = qkv + (row * (HQ + 2 * HKV) + head) * D + lane
    a = tl.load(low, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(low + D // 2, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
    gain = gains + tl.where(head < HQ, 0, D) + lane
    gain_a = tl.load(gain, mask=near, other=0.0).to(tl.float32)
    gain_b = tl.load(gain + D // 2, mask=near, other=0.0).to(tl.float32)
    a = (gain_a * (a * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    b = (gain_b * (b * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    c = tl.load(cos + row * D + lane, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + row * D + lane, mask=mask, other=0.0).to(tl.float32)
    new_a = (a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32)
    new_b = (b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)
    place = out + (row * (HQ + HKV) + head) * D + lane
    tl.store(place, new_a.to(kind), mask=mask)
    tl.store(place + D // 2, new_b.to(kind), mask=mask)


@triton.jit
def _norm_and_rotate_backward(
    qkv, q, k, v, q_row, k_row, v_row, out, gains, dgains, cos, sin, rows, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients q, k and v rotated back and taken through the norms, side by side, and parts of those of the gains.

    Grid (heads, programs). Each program walks over every so-many-th block of ROWS rows of one head, and adds up its
    part of the gradient of its gain in registers; the parts `[programs, heads of q and k, D]` are summed outside. No
    atomics, so the result is always the same. 1 / rms is made again from the row. Values are copied.
    """
    head = tl.program_id(0)
    lane = tl.arange(0, HALF)[None, :]
    near = lane < D // 2
    kind = out.dtype.element_ty
    gain = gains + tl.where(head < HQ, 0, D) + lane
    gain_a = tl.load(gain, mask=near, other=0.0).to(tl.float32)
    gain_b = tl.load(gain + D // 2, mask=near, other=0.0).to(tl.float32)
    total_a = tl.zeros([ROWS, HALF], tl.float32)
    total_b = tl.zeros([ROWS, HALF], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & near
        if head < HQ:
            source = q + row * q_row + head * D
        elif head < HQ + HKV:
            source = k + row * k_row + (head - HQ) * D
        else:
            source = v + row * v_row + (head - HQ - HKV) * D
        a = tl.load(source + lane, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + lane + D // 2, mask=mask, other=0.0).to(tl.float32)
        low = (row * (HQ + 2 * HKV) + head) * D + lane
        if head < HQ + HKV:
            c = tl.load(cos + row * D + lane, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(sin + row * D + lane, mask=mask, other=0.0).to(tl.float32)
            grad_a = ((a * c).to(kind).to(tl.float32) + (b * s).to(kind).to(tl.float32)).to(kind).to(tl.float32)
            grad_b = ((b * c).to(kind).to(tl.float32) - (a * s).to(kind).to(tl.float32)).to(kind).to(tl.float32)
            x = tl.load(qkv + low, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(qkv + low + D // 2, mask=mask, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
            x *= scale
            y *= scale
            total_a += grad_a * x.to(kind).to(tl.float32)
            total_b += grad_b * y.to(kind).to(tl.float32)
            a = grad_a * gain_a
            b = grad_b * gain_b
            mean = ((tl.sum(a * x, 1) + tl.sum(b * y, 1)) / D)[:, None]
            a = (a - x * mean) * scale
            b = (b - y * mean) * scale
        tl.store(out + low, a.to(kind), mask=mask)
        tl.store(out + low + D // 2, b.to(kind), mask=mask)
    if head < HQ + HKV:
        part = dgains + (tl.program_id(1) * (HQ + HKV) + head) * D + lane
        tl.store(part, tl.sum(total_a, 0)[None, :], mask=near)
        tl.store(part + D // 2, tl.sum(total_b, 0)[None, :], mask=near)


_HEAD_ROWS = 16  # rows of a head that are in registers together


def _norm_heads(
    qkv: Tensor, gains: Sequence[Tensor], eps: float, cos: Tensor, sin: Tensor, shape: tuple[int, int, int]
) -> Sequence[Tensor]:
    """Queries and keys `[T, heads, D]`, normed and rotated; qkv stays as it is."""
    heads, kv_heads, dim = shape
    out = torch.empty(len(qkv), heads + kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    _norm_and_rotate[(heads + kv_heads, triton.cdiv(len(qkv), _HEAD_ROWS))](
        qkv, out, joined(gains), cos, sin, len(qkv), eps,
        HQ=heads, HKV=kv_heads, D=dim, HALF=triton.next_power_of_2(dim // 2), ROWS=_HEAD_ROWS,
    )  # fmt: skip
    return torch.split(out, [heads, kv_heads], 1)


def _norm_heads_backward(
    grads: Sequence[Tensor], dqkv: Tensor, qkv: Tensor, gains: Sequence[Tensor], eps: float, cos: Tensor, sin: Tensor,
    shape: tuple[int, int, int],
) -> list[Tensor]:  # fmt: skip
    """Fill dqkv; returns the gradients of the two weights."""
    heads, kv_heads, dim = shape
    every = heads + 2 * kv_heads
    programs = min(triton.cdiv(_PROGRAMS, every), triton.cdiv(len(qkv), _HEAD_ROWS))
    parts = torch.empty(programs, heads + kv_heads, dim, dtype=torch.float32, device=qkv.device)
    _norm_and_rotate_backward[(every, programs)](
        qkv, *grads, *(g.stride(0) for g in grads), dqkv, joined(gains), parts, cos, sin, len(qkv), eps,
        HQ=heads, HKV=kv_heads, D=dim, HALF=triton.next_power_of_2(dim // 2), ROWS=_HEAD_ROWS,
    )  # fmt: skip
    return [part.sum((0, 1)).to(qkv.dtype) for part in torch.split(parts, [heads, kv_heads], 1)]


class _NormedQKV(torch.autograd.Function):
    """Keeps the rows, and makes their norm again in the backward pass.

    The rows are also an output, for the way around the attention: what comes back there is added by the same kernel.
    Where heads have norms, what enters those is kept beside queries and keys; values lie in it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: tuple[float, float], cos: Tensor, sin: Tensor, dim: int,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases, gains = parameters[:3], parameters[3:6], [p for p in parameters[6:] if p is not None]
        weight = joined([w for w in weights if w is not None])
        bias = joined([b for b in biases if b is not None]) if biases[0] is not None else None
        qkv = torch.nn.functional.linear(decoding.rms_norm(x, None, gain, eps[0])[1], weight, bias)
        counts = [len(w) // dim for w in weights if w is not None]
        shape = (counts[0], counts[1], dim)
        q, k, v = torch.split(qkv.view(len(x), -1, dim), counts, 1)
        if gains:
            q, k = _norm_heads(qkv, gains, eps[1], cos, sin, shape)
        else:
            _rotate_heads(qkv, cos, sin, shape, [])
        ctx.rest = (eps, shape)
        keep(ctx, x, gain, cos, sin, *weights, *((qkv, *gains) if gains else ()))
        return x.view_as(x), q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        around, *of_heads = grads
        x, gain, cos, sin, *parameters = kept(ctx)
        weights, of_norms = parameters[:3], parameters[3:]
        eps, shape = ctx.rest
        weight = joined(weights)
        dqkv = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        of_heads = [g if g.stride(1) == g.shape[2] else g.contiguous() for g in of_heads]
        dgains: list[Tensor] = []
        if of_norms:
            qkv, *gains = of_norms
            dgains = _norm_heads_backward(of_heads, dqkv, qkv, gains, eps[1], cos, sin, shape)
        else:
            _rotate_heads(dqkv, cos, sin, shape, of_heads)
        sizes = [len(w) for w in weights]
        dweights: tuple[Tensor | None, ...] = (None,) * 3
        dbiases = torch.split(dqkv.sum(0), sizes) if any(ctx.needs_input_grad[9:12]) else dweights
        if any(ctx.needs_input_grad[6:9]):
            dweight = _weight_gradient(weights, dqkv, decoding.rms_norm(x, None, gain, eps[0])[1])
            dweights = dweights if dweight is None else torch.split(dweight, sizes)
        dx, dgain = _norm_gradients(torch.mm(dqkv, weight), x, gain, eps[0], around)
        return dx, dgain, None, None, None, None, *dweights, *dbiases, *dgains


class _NormedPair(torch.autograd.Function):
    """Like `_NormedQKV`, of a sum of rows, with two linear layers without bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gain: Tensor, eps: float, *weights: Tensor) -> tuple[Tensor, ...]:
        total, normed = decoding.rms_norm(x, y, gain, eps)
        keep(ctx, total, gain, *weights)
        ctx.eps = eps
        return total, *(torch.mm(normed, w.t()) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        around, *ours = grads
        total, gain, *weights = kept(ctx)
        dnormed = torch.mm(ours[0], weights[0]).addmm_(ours[1], weights[1])
        dweights: list[Tensor | None] = [None, None]
        if any(ctx.needs_input_grad[4:]):
            normed = decoding.rms_norm(total, None, gain, ctx.eps)[1]
            dweights = [_weight_gradient([w], g, normed) for w, g in zip(weights, ours, strict=True)]
        dx, dgain = _norm_gradients(dnormed, total, gain, ctx.eps, around)
        return dx, dx, dgain, None, *dweights


# Gated MLP


@triton.jit
def _swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    """out = round(silu(gate)) * up.

    One program for every BLOCK numbers. One pass over memory, where the modules need two and keep what is between.
    """
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = here < count
    g = tl.load(gate + here, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + here, mask=mask, other=0.0).to(tl.float32)
    act = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + here, (act * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(grad, gate, up, out, count, BLOCK: tl.constexpr, AGAIN: tl.constexpr):
    """Gate and up become their gradients, in place; AGAIN: the output is computed once more.

    One program for every BLOCK numbers. With AGAIN the output, which the gradient of the next weight needs, is not kept
    from the forward pass: it is as large as gate or up.
    """
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = here < count
    kind = gate.dtype.element_ty
    d = tl.load(grad + here, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + here, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + here, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    act = (g * s).to(kind).to(tl.float32)
    if AGAIN:
        tl.store(out + here, (act * u).to(kind), mask=mask)
    tl.store(gate + here, (d * u * s * (1.0 + g * (1.0 - s))).to(kind), mask=mask)
    tl.store(up + here, (d * act).to(kind), mask=mask)


class _SwiGLULinear(torch.autograd.Function):
    """`(silu(gate) * up) @ weight.T`. Keeps gate and up, and makes their product again in the backward pass.

    The backward pass writes the gradients over gate and up: nobody else may keep them.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        keep(ctx, gate, up, weight)
        return torch.nn.functional.linear(_product(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = kept(ctx)
        grad = grads[0]
        dproduct = torch.matmul(grad, weight)
        again = ctx.needs_input_grad[2]
        count = gate.numel()
        _swiglu_backward[(triton.cdiv(count, 2048),)](
            dproduct, gate, up, dproduct, count, BLOCK=2048, AGAIN=again, num_warps=8
        )  # the product takes the place of its own gradient
        rows = grad.reshape(-1, grad.shape[-1]), dproduct.view(-1, gate.shape[-1])
        dweight = _weight_gradient([weight], *rows) if again else None
        return gate.detach(), up.detach(), dweight


def _product(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    _swiglu[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), BLOCK=2048, num_warps=8)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (t.clone() for t in ctx.saved_tensors)
        grad = grads[0].contiguous()
        count = gate.numel()
        _swiglu_backward[(triton.cdiv(count, 2048),)](
            grad, gate, up, grad, count, BLOCK=2048, AGAIN=False, num_warps=8
        )  # fmt: skip
        return gate, up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, differentiable."""
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


# Log-probs and entropies


@triton.jit
def _row_statistics(logits, targets, logp, lse, entropy, inverses, V, BLOCK: tl.constexpr):
    """Log-prob of the target, log-normaliser and entropy of each row of logits over its temperature.

    One program a row, which walks over the vocabulary in blocks of BLOCK with a running maximum. One read of the
    logits, where plain torch makes several copies in fp32.
    """
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverses + row)
    line = logits + row * V
    top = -1.0e30
    norm = 0.0
    mean = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < V
        z = tl.load(line + column, mask=mask, other=0.0).to(tl.float32) * inverse
        higher = tl.maximum(top, tl.max(tl.where(mask, z, -1.0e30), 0))
        weight = tl.where(mask, tl.exp(z - higher), 0.0)
        fade = tl.exp(top - higher)
        norm = norm * fade + tl.sum(weight, 0)
        mean = mean * fade + tl.sum(weight * tl.maximum(z, -1.0e30), 0)  # 0 times infinity is no number
        top = higher
    total = top + tl.log(norm)
    chosen = tl.load(line + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(lse + row, total)
    tl.store(logp + row, chosen - total)
    tl.store(entropy + row, total - mean / norm)


def row_statistics(
    logits: Tensor, targets: Tensor, inverse_temperature: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, log-normaliser and entropy of each row of `[N, V]`; one temperature, or one for each."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    if not isinstance(inverse_temperature, Tensor):
        inverse_temperature = torch.full((rows,), inverse_temperature, dtype=torch.float32, device=logits.device)
    logp, lse, entropy = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    _row_statistics[(rows,)](
        logits, targets, logp, lse, entropy, inverse_temperature, vocabulary, BLOCK=1024, num_warps=2
    )  # fmt: skip
    return logp, lse, entropy


@triton.jit
def _row_gradients(
    logits, targets, lse, entropy, grad_logp, grad_entropy, inverse, V, BLOCK: tl.constexpr, ENTROPY: tl.constexpr
):  # fmt: skip
    """Logits become their gradient, from those of log-prob and entropy (ENTROPY).

    Grid (rows, blocks of BLOCK columns). In place: there is no second tensor of rows x vocabulary.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < V
    place = logits + row * V + column
    z = tl.load(place, mask=mask, other=0.0).to(tl.float32) * inverse
    log = tl.maximum(z - tl.load(lse + row), -1.0e30)  # 0 times infinity is no number
    p = tl.exp(log)
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    out = (hit - p) * tl.load(grad_logp + row)
    if ENTROPY:
        out -= p * (log + tl.load(entropy + row)) * tl.load(grad_entropy + row)
    tl.store(place, (out * inverse).to(logits.dtype.element_ty), mask=mask)


def row_gradients(
    logits: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grad_logp: Tensor, grad_entropy: Tensor | None,
    inverse_temperature: float,
) -> Tensor:  # fmt: skip
    """Overwrites the logits with their gradient and returns them."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    _row_gradients[(rows, triton.cdiv(vocabulary, 4096))](
        logits, targets, lse, entropy, grad_logp, grad_logp if grad_entropy is None else grad_entropy,
        inverse_temperature, vocabulary, BLOCK=4096, ENTROPY=grad_entropy is not None, num_warps=8,
    )  # fmt: skip
    return logits


# Rows that were taken several times


@triton.jit
def _sum_rows(parts, order, first, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Row t of out is the sum, in fp32, of the parts `order[first[t]:first[t + 1]]`.

    One program a row, in one block of BLOCK >= WIDTH columns. Keys of a shared prompt collect from all responses: the
    order is fixed, so no atomics are needed, and sums do not differ between runs.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(first + row), tl.load(first + row + 1)):
        source = tl.load(order + place).to(tl.int64)
        total += tl.load(parts + source * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


def sum_rows(parts: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """`[S, …]` → `[T, …]`: row t is the fp32 sum of the parts `order[first[t]:first[t + 1]]`, in that order."""
    parts = parts.contiguous()
    out = torch.empty(len(first) - 1, *parts.shape[1:], dtype=parts.dtype, device=parts.device)
    width = out[0].numel()
    _sum_rows[(len(out),)](
        parts, order, first, out, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=2 if width <= 512 else 4
    )
    return out


# Gradients of bf16 parameters, added up in fp32, and what becomes of them


@triton.jit
def _accumulate(total, part, count, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """total += part, in fp32; FIRST: total = part.

    One program for every BLOCK numbers. One launch for a gradient, the first included; no gain over torch was seen.
    """
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = here < count
    value = tl.load(part + here, mask=mask, other=0.0).to(tl.float32)
    if not FIRST:
        value += tl.load(total + here, mask=mask, other=0.0)
    tl.store(total + here, value, mask=mask)


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """`total + part` in fp32, in place; without a total, a new one."""
    first = total is None
    part = part.contiguous()
    if total is None:
        total = torch.empty(part.shape, dtype=torch.float32, device=part.device)
    assert total.is_contiguous()
    _accumulate[(triton.cdiv(part.numel(), 4096),)](total, part, part.numel(), BLOCK=4096, FIRST=first, num_warps=8)
    return total


_COLUMNS = tl.constexpr(7)  # of a part: addresses of weight, rest, gradient, mean, square; numbers, first program


@triton.jit(do_not_specialize=["salt"])
def _adamw(
    parts, owners, scale, rate, beta1, beta2, eps, decay, correct1, correct2, salt,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A step of AdamW on weight, mean and square, with the gradient times `scale`; SPLIT: the weight is bfloat16, and
    its master made again from the rest, as in `kitae.kernels.adamw`.

    One program for every BLOCK numbers of a part; `owners` says of which. One launch for all weights: the host would
    take longer for hundreds than the device. Clipping, update and rounding are one pass over memory. The factor of
    clipping is read on the device, so the host need not wait for the norm; where it is no number, nothing is written.
    HALF: mean and square are bfloat16, rounded by the same chance as in `kitae.kernels.adamw`. EVEN: all addresses and
    sizes are multiples of 16.
    """
    factor = tl.load(scale)
    if factor == factor:  # else the gradient is not finite, and nothing may change
        part = parts + tl.load(owners + tl.program_id(0)).to(tl.int64) * _COLUMNS
        kept: tl.constexpr = tl.pointer_type(tl.bfloat16 if HALF else tl.float32)
        here = (tl.program_id(0) - tl.load(part + 6)) * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(part + 5)
        weight = tl.load(part).to(tl.pointer_type(tl.int16 if SPLIT else tl.float32)) + here
        rest = tl.load(part + 1).to(tl.pointer_type(tl.int16)) + here
        grad = tl.load(part + 2).to(tl.pointer_type(tl.float32)) + here
        mean = tl.load(part + 3).to(kept) + here
        square = tl.load(part + 4).to(kept) + here
        if EVEN:
            count = tl.multiple_of(count, 16)
            weight = tl.multiple_of(weight, 16)
            rest = tl.multiple_of(rest, 16)
            grad = tl.multiple_of(grad, 16)
            mean = tl.multiple_of(mean, 16)
            square = tl.multiple_of(square, 16)
        mask = here < count
        g = tl.load(grad, mask=mask, other=0.0) * factor
        if SPLIT:
            upper = tl.load(weight, mask=mask, other=0).to(tl.int32) << 16
            p = (upper + tl.load(rest, mask=mask, other=0).to(tl.int32)).to(tl.float32, bitcast=True) * decay
        else:
            p = tl.load(weight, mask=mask, other=0.0) * decay
        m = tl.load(mean, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(square, mask=mask, other=0.0).to(tl.float32)
        m = m + (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        p -= rate / correct1 * m / (tl.sqrt_rn(v) / correct2 + eps)
        if HALF:
            bits = here.to(tl.uint32) * 0x9E3779B1 ^ salt.to(tl.uint32)
            bits = (bits ^ bits >> 16) * 0x7FEB352D
            bits = (bits ^ bits >> 15) * 0x846CA68B
            bits = bits ^ bits >> 16
            m = ((m.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
            v = ((v.to(tl.uint32, bitcast=True) + (bits >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        tl.store(mean, m.to(mean.dtype.element_ty), mask=mask)
        tl.store(square, v.to(square.dtype.element_ty), mask=mask)
        if SPLIT:
            whole = p.to(tl.int32, bitcast=True)
            upper = (whole + 0x8000) >> 16
            tl.store(weight, upper.to(tl.int16), mask=mask)
            tl.store(rest, (whole - (upper << 16)).to(tl.int16), mask=mask)
        else:
            tl.store(weight, p, mask=mask)


def adamw(parts: Sequence[AdamWPart], scale: Tensor, pace: AdamWPace) -> None:
    """See `kitae.kernels.base.AdamWStep`."""
    block, alike = 2048, dict[tuple[bool, bool, bool], list[list[int]]]()
    grads = [part.grad.contiguous() for part in parts]  # of which those that were not live as long as this call
    for (parameter, rest, _, mean, square), grad in zip(parts, grads, strict=True):
        tensors = (parameter, parameter if rest is None else rest, grad, mean, square)
        assert all(t.is_contiguous() for t in tensors) and grad.dtype == torch.float32
        assert parameter.dtype == (torch.float32 if rest is None else torch.bfloat16)
        line = [*(t.data_ptr() for t in tensors), parameter.numel()]
        key = rest is not None, mean.dtype == torch.bfloat16, all(number % 16 == 0 for number in line)
        alike.setdefault(key, []).append(line)
    for (divided, half, even), lines in alike.items():
        owners, first = _owners(tuple(line[5] for line in lines), block, scale.device)
        table = np.column_stack([np.array(lines, dtype=np.int64), first])
        _adamw[(len(owners),)](
            send(table, scale.device), owners, scale, pace.rate, *pace.betas, pace.eps, pace.decay, *pace.corrections,
            salt(pace.step), BLOCK=block, SPLIT=divided, HALF=half, EVEN=even, num_warps=8,
        )  # fmt: skip


@functools.lru_cache(maxsize=8)
def _owners(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, NDArray[np.int64]]:
    """To which of the parts each program belongs, int32, and the first program of each part."""
    programs = -(-np.array(sizes, dtype=np.int64) // block)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int32), programs)
    return send(owners, device), np.cumsum(programs) - programs


LAYERS = layer_kernels(
    _NormedQKV, _NormedPair, _SwiGLULinear, lambda weight, grad, rows: _weight_gradient([weight], grad, rows)
)
KERNELS = TrainingKernels(
    modules=ModuleKernels(
        rms_norm=rms_norm,
        swiglu=swiglu,
        rotary=rotary,
        layers=LAYERS,
    ),
    row_statistics=row_statistics,
    row_gradients=row_gradients,
    accumulate=accumulate,
    add_product=add_product,
    spans=spans.KERNELS,
    sum_rows=sum_rows,
    adamw=adamw,
)
