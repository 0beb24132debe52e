"""The differentiable functions of a decoder layer in what they have in common on all devices.

A device brings its autograd functions and the way in which gradients of weights are computed; here is how their
arguments are made from the modules of a layer (`layer_kernels`), and several linear layers of one input as one
function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from kitae.kernels.allocation import keep, kept
from kitae.kernels.base import HeadNorms, LayerKernels

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


def layer_kernels(qkv: Any, pair: Any, gated: Any, gradient: WeightGradient) -> LayerKernels:
    """The functions of `LayerKernels`, which say what they compute, by the autograd functions of a device.

    qkv is applied to x, gain, (eps, eps of heads), cos, sin, dim, three weights, three biases and, where heads are
    normed, two gains; pair to x, y, gain, eps and two weights; gated to gate, up and a weight. `gradient` computes the
    gradient of a weight of single linear layers.
    """

    def normed_qkv(
        x: Tensor,
        norm: tuple[Tensor, float],
        cos: Tensor,
        sin: Tensor,
        dim: int,
        *modules: Linear,
        heads: HeadNorms | None = None,
    ) -> tuple[Tensor, ...]:
        gains, head_eps = ((), 0.0) if heads is None else ((heads.queries, heads.keys), heads.eps)
        parameters = [*(m.weight for m in modules), *(m.bias for m in modules), *gains]
        found: tuple[Tensor, ...] = qkv.apply(
            x, norm[0], (norm[1], head_eps), cos.contiguous(), sin.contiguous(), dim, *parameters
        )
        return found

    def normed_pair(x: Tensor, y: Tensor, norm: tuple[Tensor, float], *modules: Linear) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = pair.apply(x, y, *norm, *(m.weight for m in modules))
        return found

    def linears(x: Tensor, *modules: Linear) -> tuple[Tensor, ...]:
        parameters = [p for m in modules for p in (m.weight, m.bias)]
        found: tuple[Tensor, ...] = _Linears.apply(x, gradient, *parameters)  # type: ignore[no-untyped-call]
        return found

    def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = gated.apply(gate.contiguous(), up.contiguous(), weight)
        return found

    return LayerKernels(normed_qkv=normed_qkv, normed_pair=normed_pair, linears=linears, swiglu_linear=swiglu_linear)
