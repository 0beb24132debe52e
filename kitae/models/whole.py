"""Where a shard lies in its tensor; whole tensors from sharded ones, one at a time, so that no rank holds a model."""

from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Place = tuple[slice, ...]
"""A block of a tensor: what it has of each dimension."""


def place_of(tensor: Tensor) -> Place:
    """Where this rank's part lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, without its gradient. All ranks that have a shard of it must call this at the same time."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # The shards may be on the host.
    found: Tensor = cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
    return found


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
