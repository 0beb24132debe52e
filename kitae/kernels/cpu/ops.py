"""Functions on tensors that call the kernels of `cpu.cpp`. Callers check `available` first and have a torch twin."""

from ctypes import c_float, c_int64
from typing import Any

import torch
from torch import Tensor

from kitae.kernels.adamw import one_by_one, salt
from kitae.kernels.allocation import add_gradient, keep, kept
from kitae.kernels.base import AdamWPace, AdamWPart, DecodingKernels, GateLimits, SpanTable
from kitae.kernels.cpu.compile_cpp import SUFFIXES, call, cpu_library

_HEAD_DIMS = {0, 16, 32, 64, 80, 96, 128, 256}  # what decode_attention is compiled for; 0: not asked


def available(device: torch.device, dtype: torch.dtype, head_dim: int = 0) -> bool:
    return device.type == "cpu" and dtype in SUFFIXES and head_dim in _HEAD_DIMS and cpu_library() is not None


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store a new key and value per sequence and attend: q `[Hq, B, D]`, k, v `[Hkv, B, D]` → `[B, Hq, D]`."""
    heads, batch, dim = q.shape
    kv_heads = k.shape[0]
    page_size = k_pages.shape[2]
    out = torch.empty(batch, heads, dim, dtype=q.dtype)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the head dimension must be contiguous"
    strides = (c_int64 * 6)(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    call(
        "decode_attention", q.dtype, q, k, v, k_pages, v_pages, table, lengths, out, strides, batch, heads, kv_heads,
        dim, page_size, table.shape[1], c_float(scale), window or 0, c_float(softcap or 0.0), sinks,
    )  # fmt: skip
    return out


def sample(logits: Tensor, inverse_temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs of one draw per row of `[B, V]`; inverse temperature 0 is greedy."""
    batch, vocabulary = logits.shape
    logits = logits.contiguous()
    tokens = torch.empty(batch, dtype=torch.int64)
    logprobs = torch.empty(batch, dtype=torch.float32)
    assert inverse_temperature.dtype == torch.float32 and uniform.dtype == torch.float64
    call("sample", logits.dtype, logits, inverse_temperature, uniform, tokens, logprobs, batch, vocabulary)
    return tokens, logprobs


def row_statistics(logits: Tensor, targets: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, log-normaliser and entropy of each row of `[N, V]`."""
    rows, vocabulary = logits.shape
    assert targets.dtype == torch.int64, targets.dtype
    logits, targets = logits.contiguous(), targets.contiguous()
    logp, lse, entropy = (torch.empty(rows, dtype=torch.float32) for _ in range(3))
    call(
        "row_statistics", logits.dtype, logits, targets, logp, lse, entropy, c_float(inverse_temperature), rows,
        vocabulary,
    )  # fmt: skip
    return logp, lse, entropy


def row_gradients(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    inverse_temperature: float,
) -> Tensor:
    """Overwrites the logits with their gradient and returns them."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous()
    vectors = [t.contiguous() for t in (targets, lse, entropy, grad_logp)]
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    call("row_gradients", logits.dtype, logits, *vectors, grad_entropy, c_float(inverse_temperature), rows, vocabulary)
    return logits


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / rms(x)` over the last dimension, differentiable."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of contiguous rows, and 1 / rms of each; no gradients."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    out = torch.empty_like(x)
    inverse_rms = torch.empty(rows, dtype=torch.float32)
    call("rms_norm", x.dtype, x, weight, out, inverse_rms, c_float(eps), rows, width)
    return out, inverse_rms


def rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of contiguous rows and, in fp32, of the weight of a norm; `plus` is added to that of the rows."""
    dx = torch.empty_like(x)
    dweight = torch.zeros(weight.shape, dtype=torch.float32)
    call("rms_norm_backward", x.dtype, grad, x, weight, inverse_rms, plus, dx, dweight, len(inverse_rms), x.shape[-1])
    return dx, dweight


def rotate(rows: Tensor, cos: Tensor, sin: Tensor, heads: int, *, back: bool = False) -> None:
    """Rotary of the first `heads` heads of rows `[T, heads or more, D]`, in place; cos and sin `[T, D]`, contiguous.

    back: the gradient takes the place of what came for the output.
    """
    assert rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] and cos.is_contiguous() and sin.is_contiguous()
    call("rotate", rows.dtype, rows, rows.stride(0), cos, sin, len(rows), heads, rows.shape[2], back)


def swiglu_again(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """The backward pass of `swiglu` in place: gate and up become their gradients, and grad becomes the output."""
    call("swiglu_again", gate.dtype, grad, gate, up, gate.numel())


def gate_rows(gate_up: Tensor, limits: GateLimits | None = None) -> Tensor:
    """`silu(gate) * up` of rows `[N, 2 I]` that begin with gate and end with up, or as `limits` say; no gradients."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype)
    assert gate_up.is_contiguous()
    call("gate_rows" if limits is None else "limit_rows", gate_up.dtype, gate_up, out, rows, inner, *_numbers(limits))
    return out


def gate_rows_again(grad: Tensor, gate_up: Tensor, weight: Tensor, limits: GateLimits | None = None) -> Tensor:
    """The backward pass of `weight[:, None] * gate_rows(gate_up, limits)`; returns the gradient of the weight, in fp32.

    In place: gate and up become their gradients, and grad, that of the weighted rows, becomes these rows.
    """
    assert grad.is_contiguous() and gate_up.is_contiguous() and weight.is_contiguous()
    assert weight.dtype == torch.float32 and gate_up.dtype == grad.dtype
    dweight = torch.empty(len(grad), dtype=torch.float32)
    call(
        "gate_rows_again" if limits is None else "limit_rows_again", grad.dtype, grad, gate_up, weight, dweight,
        *grad.shape, *_numbers(limits),
    )  # fmt: skip
    return dweight


def _numbers(limits: GateLimits | None) -> list[c_float]:
    return [] if limits is None else [c_float(limits.alpha), c_float(limits.limit)]


def add_rows(total: Tensor, place: Tensor, rows: Tensor, weight: Tensor | None = None) -> None:
    """`total[place[n]] += weight[n] * rows[n]` for each n in turn; total and weight in fp32."""
    assert total.is_contiguous() and place.is_contiguous() and rows.is_contiguous()
    assert total.dtype == torch.float32 and place.dtype == torch.int64
    assert weight is None or (weight.dtype == torch.float32 and weight.is_contiguous())
    call("add_rows", rows.dtype, total, place, rows, weight, *rows.shape)


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """`total + part` in fp32, in place where there is a total."""
    if total is None:
        return part.to(torch.float32, copy=True)
    assert total.is_contiguous()
    part = part.contiguous()
    call("accumulate", part.dtype, total, part, part.numel())
    return total


@one_by_one
def adamw(part: AdamWPart, factor: float, pace: AdamWPace) -> None:
    """See `kitae.kernels.base.AdamWStep`."""
    parameter, rest, grad, mean, square = part
    assert parameter.dtype == (torch.float32 if rest is None else torch.bfloat16)
    assert all(t.is_contiguous() for t in (parameter, parameter if rest is None else rest, mean, square))
    grad = grad.contiguous()
    numbers = factor, pace.rate, *pace.betas, pace.eps, pace.decay, *pace.corrections
    call(
        "adamw", mean.dtype, parameter, rest, grad, mean, square, *map(c_float, numbers), salt(pace.step),
        parameter.numel(),
    )  # fmt: skip


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, differentiable."""
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def causal_softmax(scores: Tensor, fold: int, scale: float, window: int | None) -> Tensor:
    """Scores `[N, fold · L, S]` to probabilities, in place: position i of L sees keys up to i + S - L."""
    n, rows, span = scores.shape
    assert scores.is_contiguous()
    call("causal_softmax", scores.dtype, scores, c_float(scale), n, fold, rows // fold, span, window or 0)
    return scores


def softmax_backward(probs: Tensor, dprobs: Tensor, delta: Tensor, scale: float) -> Tensor:
    """`probs · (dprobs - delta) · scale`, written over `dprobs`; delta is one fp32 number per row."""
    assert probs.is_contiguous() and dprobs.is_contiguous() and delta.dtype == torch.float32
    delta = delta.contiguous()
    call("softmax_backward", probs.dtype, probs, dprobs, delta, c_float(scale), delta.numel(), probs.shape[-1])
    return dprobs


def exact_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    runs: Tensor,
    table: Tensor,
    page_size: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `kitae.kernels.exact.exact_attention.attend`."""
    heads, rows, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=q.dtype)
    assert runs.dtype == torch.int64 and table.dtype == torch.int32
    runs, table = runs.contiguous(), table.contiguous()
    strides = (c_int64 * 8)(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    call(
        "exact_attention", q.dtype, q, keys, values, runs, table, out, strides, len(runs), heads, keys.shape[1], dim,
        page_size, c_float(scale), window or 0, c_float(softcap or 0.0), sinks,
    )  # fmt: skip
    return out


def attend_spans(
    q: Tensor, k: Tensor, v: Tensor, spans: SpanTable, *, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `kitae.kernels.base.AttendSpans`; without softcap and sinks."""
    assert softcap is None and sinks is None
    q, k, v = (_by_rows(t) for t in (q, k, v))
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=torch.float32)
    call(
        "attend_spans", q.dtype, q, k, v, out, lse, spans.bounds, _strides(q, k, v, out), len(spans.bounds),
        q.shape[1], k.shape[1], q.shape[2], c_float(scale), window or 0,
    )  # fmt: skip
    return out, lse


def attend_spans_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: SpanTable,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """See `kitae.kernels.base.AttendSpansBackward`; without softcap and sinks."""
    assert softcap is None and sinks is None
    q, k, v, grad = (_by_rows(t) for t in (q, k, v, grad))
    heads = [t.shape[1] for t in (q, k, v)]
    dq, dk, dv = torch.split(torch.empty(len(q), sum(heads), q.shape[2], dtype=q.dtype), heads, 1)
    strides = _strides(q, k, v, out, grad, dq, dk, dv)
    call(
        "attend_spans_backward", q.dtype, q, k, v, out, grad, lse, dq, dk, dv, spans.bounds, strides,
        len(spans.bounds), *heads[:2], q.shape[2], c_float(scale), window or 0,
    )  # fmt: skip
    return dq, dk, dv, None


def _by_rows(x: Tensor) -> Tensor:
    """Any strides but the last, which is 1."""
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> Any:
    """The strides of rows and heads of each tensor."""
    return (c_int64 * (2 * len(tensors)))(*(n for t in tensors for n in t.stride()[:2]))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, inverse_rms = norm_rows(x, weight, eps)
        keep(ctx, x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = kept(ctx)
        grad = grads[0].contiguous()
        dx, dweight = rms_norm_gradients(grad, x, weight, inverse_rms)
        return dx, add_gradient(weight, dweight) if ctx.needs_input_grad[1] else None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        call("swiglu", gate.dtype, gate, up, out, gate.numel())
        keep(ctx, gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = kept(ctx)
        grad = grads[0].contiguous()
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        call("swiglu_backward", gate.dtype, grad, gate, up, dgate, dup, gate.numel())
        return dgate, dup


DECODING = DecodingKernels(attend=decode_attention, sample=sample)
