"""Several linear layers of one input, as one differentiable function, on any device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kitae.kernels.allocation import keep, kept

WeightGradient = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""(weight, gradient of the outputs, rows of the input) → gradient of the weight; None: it was added elsewhere."""


class _Linears(torch.autograd.Function):
    """The gradient of the input is added up by the matrix products themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: WeightGradient, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights = [w for w in parameters[::2] if w is not None]
        keep(ctx, x, *weights)
        ctx.gradient = gradient
        return tuple(torch.nn.functional.linear(x, w, b) for w, b in zip(weights, parameters[1::2], strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = kept(ctx)
        rows = x.reshape(-1, x.shape[-1])
        flat = [g.reshape(-1, g.shape[-1]) for g in grads]
        out: list[Tensor | None] = [None, None]
        if ctx.needs_input_grad[0]:
            dx = torch.mm(flat[0], weights[0])
            for g, w in zip(flat[1:], weights[1:], strict=True):
                dx.addmm_(g, w)
            out[0] = dx.view(x.shape)
        for i, (g, w) in enumerate(zip(flat, weights, strict=True)):
            out.append(ctx.gradient(w, g, rows) if ctx.needs_input_grad[2 * i + 2] else None)
            out.append(g.sum(0) if ctx.needs_input_grad[2 * i + 3] else None)
        return tuple(out)


def shared_input(x: Tensor, modules: Sequence[torch.nn.Linear], gradient: WeightGradient) -> tuple[Tensor, ...]:
    """What each of the modules makes of x; `gradient` computes those of their weights."""
    parameters = [p for m in modules for p in (m.weight, m.bias)]
    out: tuple[Tensor, ...] = _Linears.apply(x, gradient, *parameters)  # type: ignore[no-untyped-call]
    return out
