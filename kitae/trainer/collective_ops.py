"""What ranks must agree on: the norm of a gradient, whether it is finite, and metrics."""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kitae.observe.meter import Kind, Totals


class Ranks(Protocol):
    """All ranks call each method, in the same order, and get the same result.

    host: whether the optimizer's state lies in host memory.
    """

    rank: int
    size: int
    host: bool

    def norm(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """The norm of the whole gradient, from the parts on this rank. Each has its parameter, which has the layout."""

    def every(self, flag: bool) -> bool: ...
    def together(self, totals: Totals) -> Totals: ...
    def everyone(self, own: Any) -> list[Any]:
        """What each rank gives."""


class Alone:
    """The operations for a single process."""

    rank, size, host = 0, 1, False

    def norm(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.nn.utils.get_total_norm([gradient for gradient, _ in gradients])

    def every(self, flag: bool) -> bool:
        return flag

    def together(self, totals: Totals) -> Totals:
        return totals

    def everyone(self, own: Any) -> list[Any]:
        return [own]


class Distributed:
    """The ranks of torch's process group. Each has its shards of a gradient, or a copy of what is not sharded.

    device: what the ranks compute on. control, saving: groups for tensors in host memory; `saving` is used by
    checkpoints alone, which are written in parallel with everything else. peers: this many successive ranks compute the
    same rows, so only the first one's metrics count.
    """

    def __init__(
        self,
        device: torch.device,
        control: dist.ProcessGroup,
        saving: dist.ProcessGroup,
        *,
        peers: int = 1,
        host: bool = False,
    ) -> None:
        self.saving = saving
        self.host = host
        self._device = device
        self._control = control
        self._peers = peers
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def norm(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        by_copies: dict[int, list[Tensor]] = {}
        for gradient, parameter in gradients:
            by_copies.setdefault(copies(parameter, self.size), []).append(gradient)
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for count, parts in by_copies.items():
            squares += torch.nn.utils.get_total_norm(parts).to(squares) ** 2 / count
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def every(self, flag: bool) -> bool:
        count = torch.tensor(float(flag))
        dist.all_reduce(count, group=self._control)
        return int(count.item()) == self.size

    def together(self, totals: Totals) -> Totals:
        merged = Totals()
        for rank, each in enumerate(self.everyone(totals)):
            merged += each if rank % self._peers == 0 else each.only(Kind.MAX)
        return merged

    def everyone(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._control)
        return found


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    own: Tensor = tensor.to_local()
    return own.detach()


def copies(tensor: Tensor, ranks: int) -> int:
    """How many of `ranks` ranks hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks
    assert not any(placement.is_partial() for placement in tensor.placements)
    sharded = (
        size for size, p in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if not p.is_replicate()
    )
    return ranks // math.prod(sharded)
