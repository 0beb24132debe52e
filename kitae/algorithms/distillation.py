"""Distillation: how far a student is from a teacher at each token, over the whole vocabulary.

Legend: N tokens, V vocabulary, H hidden size. p is the teacher's distribution, q the student's. The logits of both are
computed in chunks of rows, so that the logits of all tokens are never held at once. The backward pass computes each
chunk again, except the last, which is still in memory. Only the student gets a gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kitae.errors import ConfigError, ModelError
from kitae.kernels.allocation import gradient_of
from kitae.models.logprobs import Head, add_product, chunk_logits

_LOWEST = -1e30  # of a log-prob: 0 times infinity is no number


def generalised_jsd(
    student: Head,
    student_NH: Tensor,
    teacher: Head,
    teacher_NH: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """loss_N = β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q; at β = 0 KL(p ‖ q), at β = 1 KL(q ‖ p)

    Both logits are divided by the temperature. The ends are limits up to a factor: JSD_β / β → KL(p ‖ q), the forward
    KL, for β → 0, and JSD_β / (1 − β) → KL(q ‖ p), the reverse KL, for β → 1. So a small β gives a small loss, but
    β = 0 does not.
    Source: Agarwal et al., 2306.13649, eq. 1.
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta must be between 0 and 1, got {beta:g}")
    if len(student.weight) != len(teacher.weight):
        raise ModelError(
            f"student and teacher must have one vocabulary, got {len(student.weight)} and {len(teacher.weight)} tokens"
        )
    assert len(student_NH) == len(teacher_NH)
    loss_N: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        student_NH, student.weight, student.bias, student, teacher, teacher_NH.detach(), beta, 1 / temperature, chunk
    )
    return loss_N


def divergence(logp_NV: Tensor, logq_NV: Tensor, beta: float) -> Tensor:
    """The loss of each row, from log-probs of teacher and student."""
    if beta == 0:
        return _kl(logp_NV, logq_NV)
    if beta == 1:
        return _kl(logq_NV, logp_NV)
    logm_NV = _mixture(logp_NV, logq_NV, beta)
    return beta * _kl(logp_NV, logm_NV) + (1 - beta) * _kl(logq_NV, logm_NV)


def divergence_gradient(logp_NV: Tensor, logq_NV: Tensor, beta: float) -> Tensor:
    """Of the same with respect to the student's logits, over temperature.

    q − p at β = 0, else c q (log(q / m) − KL(q ‖ m)) with c = 1 − β; at β = 1, m is p and c is 1.
    """
    q_NV = logq_NV.exp()
    if beta == 0:
        return q_NV.sub_(logp_NV.exp())
    against_NV, factor = (logp_NV, 1.0) if beta == 1 else (_mixture(logp_NV, logq_NV, beta), 1 - beta)
    excess_NV = logq_NV - against_NV
    mean_N = (q_NV * excess_NV).sum(-1, keepdim=True)
    return excess_NV.sub_(mean_N).mul_(q_NV).mul_(factor)


def _kl(loga_NV: Tensor, logb_NV: Tensor) -> Tensor:
    return (loga_NV.exp() * (loga_NV - logb_NV)).sum(-1)


def _mixture(logp_NV: Tensor, logq_NV: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(logp_NV + math.log(beta), logq_NV + math.log1p(-beta))


class _Divergence(torch.autograd.Function):
    """The student's weight and bias are arguments beside its head, so that autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        student: Head,
        teacher: Head,
        teacher_hidden: Tensor,
        beta: float,
        inverse_temperature: float,
        chunk: int,
    ) -> Tensor:
        rows = len(hidden)
        loss_N = torch.empty(rows, dtype=_wide(hidden).dtype, device=hidden.device)
        buffers = _buffers(hidden, student, teacher_hidden, teacher, chunk)
        for i in range(0, rows, chunk):
            part = slice(i, i + chunk)
            logits = _both_logits(hidden[part], student, teacher_hidden[part], teacher, buffers)
            logq, logp = (
                _log_probs(x, h, inverse_temperature) for x, h in zip(logits, (student, teacher), strict=True)
            )
            loss_N[part] = divergence(logp, logq, beta)
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden)
        ctx.rest = (student, teacher, beta, inverse_temperature, chunk)
        ctx.last = buffers  # the logits of the last chunk
        return loss_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden = ctx.saved_tensors
        student, teacher, beta, inverse_temperature, chunk = ctx.rest
        needs_weight, needs_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        dhidden = torch.empty_like(hidden)
        into = gradient_of(weight) if needs_weight else None
        wide = _wide(weight).dtype
        dweight = torch.zeros_like(weight, dtype=wide) if needs_weight and into is None else into
        dbias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        buffers, ctx.last = ctx.last, None  # a second backward pass finds nothing there
        kept = buffers is not None
        buffers = buffers or _buffers(hidden, student, teacher_hidden, teacher, chunk)
        for i in reversed(range(0, len(hidden), chunk)):
            part = slice(i, i + chunk)
            if kept:
                size = len(hidden[part])
                logits = buffers[0][:size], buffers[1][:size]
            else:
                logits = _both_logits(hidden[part], student, teacher_hidden[part], teacher, buffers)
            kept = False
            logp = _log_probs(logits[1], teacher, inverse_temperature)
            grad = divergence_gradient(logp, _log_probs(logits[0], student, inverse_temperature), beta)
            grad *= grads[0][part, None] * inverse_temperature
            dlogits = student.transform.backward(logits[0], grad).to(hidden.dtype)
            torch.mm(dlogits, weight, out=dhidden[part])
            if dweight is not None:
                add_product(dweight, dlogits, hidden[part])
            if dbias is not None:
                dbias += dlogits.sum(0, dtype=wide)
        return (
            dhidden,
            None if dweight is into or dweight is None else dweight.to(weight.dtype),
            None if dbias is None or bias is None else dbias.to(bias.dtype),
            None, None, None, None, None, None,
        )  # fmt: skip


def _buffers(hidden: Tensor, student: Head, teacher_hidden: Tensor, teacher: Head, chunk: int) -> tuple[Tensor, Tensor]:
    rows = min(chunk, len(hidden))
    return hidden.new_empty(rows, len(student.weight)), teacher_hidden.new_empty(rows, len(teacher.weight))


def _both_logits(
    hidden: Tensor, student: Head, teacher_hidden: Tensor, teacher: Head, buffers: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    return (
        chunk_logits(hidden, student.weight, student.bias, buffers[0], student.exact),
        chunk_logits(teacher_hidden, teacher.weight, teacher.bias, buffers[1], teacher.exact),
    )


def _log_probs(logits: Tensor, head: Head, inverse_temperature: float) -> Tensor:
    """The logits stay as they are."""
    return (head.transform(_wide(logits)) * inverse_temperature).log_softmax(-1).clamp(min=_LOWEST)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
