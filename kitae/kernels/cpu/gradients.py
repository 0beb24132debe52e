"""Gradients of weights on a CPU, added to those of fp32 masters where there are any."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kitae.kernels.allocation import gradient_of
from kitae.kernels.cpu import amx


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
