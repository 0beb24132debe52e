"""Collective operations of the processes of a group, with gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `x[i]` to process i, and put what process i sends in its place."""
    return _apply(_Exchange, x, group)


def sum_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all processes. All of them use the sum alike, so its gradient is that of every part."""
    return _apply(_SumParts, x, group)


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor on all processes; its gradient is the sum of their gradients."""
    return _apply(_SumGradient, x, group)


def together(values: Tensor, own_n: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """`[…, n]` of each process → `[…, N]` of the row, for all. A gradient goes back to the process that has the value:
    all processes use the result alike, so it counts once."""
    return _apply(_Together, values, own_n, total, group)


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _swapped(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _swapped(grads[0], ctx.group), None


class _SumParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _Together(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, own_n: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_n)
        found = values.new_zeros(*values.shape[:-1], total)
        found[..., own_n] = values
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (own_n,) = ctx.saved_tensors
        return grads[0][..., own_n], None, None, None


def _swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    got = torch.empty_like(x)
    dist.all_to_all_single(got, x, group=group)
    return got


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
