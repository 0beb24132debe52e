"""Whole tensors from sharded ones, one at a time, so that no rank ever holds a whole model."""

from collections.abc import Iterable
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, without its gradient. All ranks that have a shard of it must call this at the same time."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # The shards may be on the host.
    found: Tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return found


def walk(tensors: Iterable[Tensor]) -> None:
    """Take part in gathering these tensors, in this order, for the rank that needs them."""
    for tensor in tensors:
        whole(tensor)


def is_writer() -> bool:
    """Whether this rank writes files, as the first one does."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor in the host memory of the writer; on other ranks only its shape. All ranks must
    call it.

    A tensor that is not sharded is returned as it is.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return whole(tensor).to("cpu" if is_writer() else "meta")
