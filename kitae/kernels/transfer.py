"""Arrays to a device, without waiting for what it is doing."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor. On a GPU the copy takes its place in the stream and nobody waits; on a CPU it is none."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
