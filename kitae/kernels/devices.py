"""Which kernels a device has. Only here, and in runners made for one device, is an implementation chosen."""

import functools
import importlib.util

import torch

from kitae.kernels.base import DecodingKernels, TrainingKernels
from kitae.kernels.cpu import amx, ops
from kitae.kernels.cpu import training as cpu_training

_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def has_triton() -> bool:
    """Whether the Triton kernels of `kitae.kernels.cuda` can be imported: CPU machines need none."""
    return importlib.util.find_spec("triton") is not None


def training_kernels(device: torch.device, dtype: torch.dtype) -> TrainingKernels | None:
    """The functions of the training step; None: use plain torch."""
    if device.type == "cuda" and dtype in _DTYPES and has_triton():
        from kitae.kernels.cuda import training as cuda_training

        return cuda_training.KERNELS
    if not ops.available(device, dtype):
        return None
    if dtype == torch.float32:
        return cpu_training.KERNELS_F32
    return cpu_training.KERNELS_TILES if amx.available() else cpu_training.KERNELS


def decoding_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> DecodingKernels | None:
    """The functions of a decoding step; None: use plain torch. GPUs have a step of their own (`kitae.kernels.cuda`)."""
    return ops.DECODING if ops.available(device, dtype, head_dim) else None
