"""Whole tensors from sharded ones, one at a time, for whoever writes them to a folder."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_writer() -> bool:
    """Of several ranks, the first one writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gathered(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, in the memory of the writer's host; elsewhere only its shape. All ranks must call it.

    One that is not sharded comes back as it is.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    there: Any = tensor.to(tensor.device_mesh.device_type)  # shards may lie on the host
    whole: Tensor = there.full_tensor()
    return whole.detach().to("cpu" if is_writer() else "meta")
