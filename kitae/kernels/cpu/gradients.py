"""Gradients of weights on a CPU: computed, and added where they belong."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kitae.kernels.cpu import amx
from kitae.kernels.memory import gradient_of


def add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """`total += dy.T @ x` for rows dy `[M, N]` and x `[M, K]`; total in fp32."""
    if dy.dtype == torch.bfloat16 and amx.can_add_outer(*total.shape):
        amx.add_outer(total, dy, x)
    elif dy.dtype == torch.float32:
        total.addmm_(dy.t(), x)
    else:
        total += torch.mm(dy.t(), x)


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of a weight for autograd; None: it has been added where it belongs."""
    into = gradient_of(weight)
    if into is None and not (weight.dtype == torch.bfloat16 and amx.can_add_outer(*weight.shape)):
        return torch.mm(dy.t(), x)
    total = torch.zeros(weight.shape, dtype=torch.float32) if into is None else into
    add_product(total, dy, x)
    return total.to(weight.dtype) if into is None else None


class StackGradient:
    """The gradient of weights that lie in one tensor `[E, N, K]`, filled one by one: others are not touched.

    made: it for autograd, at the end; None where it has been added where it belongs, and of frozen weights.
    """

    def __init__(self, weights: Tensor, needed: bool) -> None:
        self._into = gradient_of(weights) if needed else None
        self.made = torch.zeros_like(weights) if needed and self._into is None else None

    def add(self, parts: Sequence[tuple[int, slice]], dy: Tensor, x: Tensor) -> None:
        """`dy.T @ x` of a part of the rows to that of each weight named beside it; to each once at most."""
        for index, part in parts:
            if self._into is not None:
                add_product(self._into[index], dy[part], x[part])
            elif self.made is not None:
                torch.mm(dy[part].t(), x[part], out=self.made[index])
