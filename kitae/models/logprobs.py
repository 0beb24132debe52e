"""Log-probs and entropies of chosen tokens, without ever holding tokens × vocabulary.

Logits are computed in chunks of rows, and again in the backward pass, except those of the last chunk, which are kept.
Otherwise only the hidden states and three numbers per row are kept. Everything after the head's matrix product is in
fp32.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitae.errors import DataError
from kitae.kept_sets import KeptSets
from kitae.kernels.allocation import gradient_of
from kitae.kernels.devices import training_kernels
from kitae.kernels.exact.exact_products import product
from kitae.kernels.transfer import send

_LOWEST = -1e30  # lower bound of log-probs, as 0 times infinity is not a number
EXCLUDED = -1e30  # logits of tokens that cannot be drawn: finite, so a block of them is no nonsense to a kernel
_ROWS = 256  # of logits whose excluded columns are found at a time, without a kernel


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """The transformation of a model class's logits after the head: `softcap * tanh(scale * x / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def take(self, logits: Tensor) -> Tensor:
        """The same, to the last bit, written over logits that nobody else needs: a third of the time on a CPU."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward(self, logits: Tensor, grad: Tensor) -> Tensor:
        """The gradient with respect to the raw logits, from that of the transformed ones, which it overwrites."""
        if self.softcap is not None:
            grad *= 1 - (self(logits.to(grad.dtype)) / self.softcap) ** 2
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


@dataclass(frozen=True, slots=True)
class Head:
    """The layer that turns hidden states into logits: `Head(weight_VH, bias_V, HeadTransform(), exact=False)`."""

    weight: Tensor
    bias: Tensor | None
    transform: HeadTransform
    exact: bool

    def cut(self, rows: int) -> "Head":
        """A head with the first rows only; the same object if it has no more."""
        if len(self.weight) <= rows:
            return self
        return replace(self, weight=self.weight[:rows], bias=None if self.bias is None else self.bias[:rows])


@dataclass(frozen=True, slots=True)
class KeptColumns:
    """The columns of logits that count, row by row: `set_N` is the row of `bits` (`KeptSets.bits`) of each."""

    set_N: Tensor
    bits: Tensor

    @classmethod
    def of(cls, sets: KeptSets, device: torch.device) -> "KeptColumns":
        numbers, bits = sets.numbers.astype(np.int64), sets.bits()
        return cls(send(numbers % len(bits), device), send(bits.view(np.int32), device))

    def __getitem__(self, rows: slice | Tensor) -> "KeptColumns":
        return KeptColumns(self.set_N[rows], self.bits)

    def exclude_others(self, logits: Tensor) -> Tensor:
        """Write a log-prob of nothing over all other columns of `[N, V]`, in place."""
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        for i in range(0, len(logits), _ROWS):
            own = self.bits[self.set_N[i : i + _ROWS]]
            out = (own[:, :, None] >> places & 1 == 0).flatten(1)[:, : logits.shape[1]]
            logits[i : i + _ROWS, : out.shape[1]].masked_fill_(out, EXCLUDED)
        return logits


def token_logprobs(
    head: Head,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy_grad: bool = False,
    kept: KeptColumns | None = None,
) -> tuple[Tensor, Tensor]:
    """`(logp_N, entropy_N)` at the sampling temperature. Entropy carries no gradient unless `entropy_grad`.

    kept: both are of the distribution over these columns alone, renormalised.
    """
    if targets_N.device.type == "cpu":  # on a GPU the check would wait for the device
        _check_targets(targets_N, len(head.weight))
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head.weight, head.bias, targets_N, head.transform, 1.0 / temperature, chunk, entropy_grad,
        head.exact, kept,
    )  # fmt: skip
    return result


def _check_targets(targets_N: Tensor, rows: int) -> None:
    """Raise if a token has no row in the head: kernels would read and write out of bounds. The last token of a text is
    never embedded, so nothing else checks it."""
    wrong_N = targets_N[(targets_N < 0) | (targets_N >= rows)]
    if len(wrong_N):
        raise DataError(f"tokens to predict must be in 0…{rows - 1}, as the head has rows, got {int(wrong_N[0])}")


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: HeadTransform,
        inverse_temperature: float,
        chunk: int,
        entropy_grad: bool,
        exact: bool,
        kept: KeptColumns | None,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        logp, lse, entropy = (torch.empty(rows, dtype=torch.float32, device=hidden.device) for _ in range(3))
        buffer = hidden.new_empty(min(chunk, rows), weight.shape[0])
        for i in range(0, rows, chunk):
            part = slice(i, i + chunk)
            logits = chunk_logits(hidden[part], weight, bias, buffer, exact)
            logp[part], lse[part], entropy[part] = _row_statistics(
                logits, targets[part], transform, inverse_temperature, kept and kept[part]
            )
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.rest = (transform, inverse_temperature, chunk, entropy_grad, exact, kept)
        ctx.last = buffer  # the logits of the last chunk
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        transform, inverse_temperature, chunk, entropy_grad, exact, columns = ctx.rest
        grad_logp = grads[0].contiguous()
        grad_entropy = grads[1].contiguous() if entropy_grad else None
        needs_weight, needs_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        dhidden = torch.empty_like(hidden)
        into = gradient_of(weight) if needs_weight else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and into is None else into
        dbias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        buffer, ctx.last = ctx.last, None  # a second backward pass must compute them again
        kept = buffer is not None
        if buffer is None:
            buffer = hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])
        for i in reversed(range(0, hidden.shape[0], chunk)):
            part = slice(i, i + chunk)
            logits = buffer[: len(hidden[part])] if kept else chunk_logits(hidden[part], weight, bias, buffer, exact)
            kept = False
            dlogits = _row_gradients(
                logits,
                targets[part],
                lse[part],
                entropy[part],
                grad_logp[part],
                None if grad_entropy is None else grad_entropy[part],
                transform,
                inverse_temperature,
                columns and columns[part],
            )
            torch.mm(dlogits, weight, out=dhidden[part])
            if dweight is not None:
                add_product(dweight, dlogits, hidden[part])
            if dbias is not None:
                dbias += dlogits.sum(0, dtype=torch.float32)
        return (
            dhidden,
            None if dweight is into or dweight is None else dweight.to(weight.dtype),
            None if dbias is None or bias is None else dbias.to(bias.dtype),
            None, None, None, None, None, None, None,
        )  # fmt: skip


def add_product(total: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
    """`total += dlogits.T @ hidden`, with total in fp32. A kernel, if there is one, adds without rounding first."""
    kernels = training_kernels(total.device, hidden.dtype)
    if kernels is not None and kernels.add_product is not None:
        kernels.add_product(total, dlogits, hidden)
    else:
        total += torch.mm(dlogits.mT, hidden)


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor, exact: bool) -> Tensor:
    """The head's output, written into the one buffer that all chunks share."""
    logits = buffer[: len(hidden)]
    if exact:
        return product(hidden, weight, bias, logits)
    torch.mm(hidden, weight.t(), out=logits)
    return logits if bias is None else logits.add_(bias)


def _row_statistics(
    logits: Tensor,
    targets: Tensor,
    transform: HeadTransform,
    inverse_temperature: float,
    kept: KeptColumns | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, log of the normaliser and entropy of each row."""
    kernels = training_kernels(logits.device, logits.dtype)
    if transform == HeadTransform() and kernels is not None:
        if kept is not None:
            kept.exclude_others(logits)
        return kernels.row_statistics(logits, targets, inverse_temperature)
    scaled = transform(logits.float()) * inverse_temperature  # the logits stay unchanged
    if kept is not None:
        scaled = kept.exclude_others(scaled.clone())
    lse = torch.logsumexp(scaled, -1)
    logp = scaled.gather(1, targets[:, None])[:, 0] - lse
    probs = (scaled - lse[:, None]).exp_()
    return logp, lse, lse - (probs * scaled.clamp(min=_LOWEST)).sum(-1)


def _row_gradients(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    transform: HeadTransform,
    inverse_temperature: float,
    kept: KeptColumns | None = None,
) -> Tensor:
    """Gradient with respect to the head's raw output, in its dtype.

    d logp / d z_j = [j = target] - p_j and d H / d z_j = -p_j (log p_j + H), with z the logits over temperature.
    """
    kernels = training_kernels(logits.device, logits.dtype)
    if transform == HeadTransform() and kernels is not None:
        if kept is not None:
            kept.exclude_others(logits)
        return kernels.row_gradients(logits, targets, lse, entropy, grad_logp, grad_entropy, inverse_temperature)
    transformed = transform(logits.float())
    logp = transformed * inverse_temperature - lse[:, None]
    logp = (logp if kept is None else kept.exclude_others(logp)).clamp(min=_LOWEST)
    probs = logp.exp()
    grad = -probs * grad_logp[:, None]
    grad.scatter_add_(1, targets[:, None], grad_logp[:, None])
    if grad_entropy is not None:
        grad -= probs * (logp + entropy[:, None]) * grad_entropy[:, None]
    grad *= inverse_temperature * transform.scale
    if transform.softcap is not None:
        grad *= 1 - (transformed / transform.softcap) ** 2
    return grad.to(logits.dtype)
