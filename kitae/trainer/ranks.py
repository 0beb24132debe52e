"""What ranks must agree about: the norm of a gradient, whether it is finite, and metrics."""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kitae.observe.meter import Totals


class Ranks(Protocol):
    """All of them call each method, in the same order, and get the same answer."""

    rank: int
    size: int

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Of the whole gradient, from a rank's part of it."""

    def every(self, flag: bool) -> bool: ...
    def together(self, totals: Totals) -> Totals: ...


class Alone:
    """One process."""

    rank, size = 0, 1

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def every(self, flag: bool) -> bool:
        return flag

    def together(self, totals: Totals) -> Totals:
        return totals


class Distributed:
    """The ranks of torch's process group. Each has its own part of a gradient: some of the tensors, or shards."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        own = torch.nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in gradients])
        squares = own.double() ** 2
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt().to(own.dtype)

    def every(self, flag: bool) -> bool:
        count = torch.tensor(float(flag))
        dist.all_reduce(count, group=self._group)
        return int(count.item()) == self.size

    def together(self, totals: Totals) -> Totals:
        found: list[Totals | None] = [None] * self.size
        dist.all_gather_object(found, totals, group=self._group)
        merged = Totals()
        for each in found:
            merged += each or Totals()
        return merged
