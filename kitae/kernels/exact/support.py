"""Where exact mode can run."""

import torch

from kitae.kernels.cpu import ops
from kitae.kernels.devices import has_triton


def missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why these kernels cannot be used, or None."""
    if device.type == "cpu":
        needs = "a C++ compiler, float32 or bfloat16, and heads of 16, 32, 64, 80, 96, 128 or 256"
        return None if ops.available(device, dtype, head_dim) else f"on a CPU it needs {needs}"
    known = dtype in (torch.float32, torch.bfloat16) and head_dim % 16 == 0 and head_dim <= 256
    if device.type != "cuda" or not has_triton() or not known:
        return "it needs a CPU, or a CUDA GPU with Triton; float32 or bfloat16; heads of a multiple of 16 up to 256"
    return None
