"""Whole tensors from sharded ones: one at a time, so that no rank ever holds a whole model."""

from collections.abc import Iterable
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, without its gradient. Every rank that has a shard of it must ask at the same time."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    found: Tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()  # shards may be on the host
    return found


def walk(tensors: Iterable[Tensor]) -> None:
    """Give what another rank needs to make these whole, in this order."""
    for tensor in tensors:
        whole(tensor)


def is_writer() -> bool:
    """Of several ranks, the first one writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gathered(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, in the memory of the writer's host; elsewhere only its shape. All ranks must call it.

    One that is not sharded comes back as it is.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return whole(tensor).to("cpu" if is_writer() else "meta")
