"""Gradients of weights on tile registers, in bfloat16; the products of the decoder are behind `packed.py`."""

import functools
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from kitae.kernels.cpu.compile_cpp import cpu_library

_TILE, _DEPTH = 16, 32
_SLAB_ROWS, _SLAB_DEPTH = 2048, 1024  # as in amx.h


@functools.cache
def available() -> bool:
    """Whether the kernels are built for tiles and the system lets this process use them."""
    library = cpu_library()
    if library is None:
        return False
    library.amx_available.restype = c_int64
    return bool(library.amx_available())


def add_outer(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """`total [N, K] += dy [M, N].T @ x [M, K]`, total in fp32: the gradient of a weight. Rows may be strided."""
    (rows, height), depth = dy.shape, x.shape[1]
    assert total.dtype == torch.float32 and total.is_contiguous() and total.shape == (height, depth)
    assert dy.dtype == x.dtype == torch.bfloat16 and dy.stride(1) == x.stride(1) == 1
    left = torch.empty(min(height, _SLAB_ROWS) * _SLAB_DEPTH, dtype=torch.bfloat16)
    right = torch.empty(depth * _SLAB_DEPTH, dtype=torch.bfloat16)
    library = cpu_library()
    assert library is not None
    library.amx_add_outer.restype = None
    library.amx_add_outer(
        *(c_void_p(dy.data_ptr()), c_int64(dy.stride(0)), c_void_p(x.data_ptr()), c_int64(x.stride(0))),
        c_void_p(total.data_ptr()),
        *(c_int64(n) for n in (rows, height, depth)),
        *(c_void_p(t.data_ptr()) for t in (left, right)),
    )


def can_add_outer(height: int, depth: int) -> bool:
    """Whether `add_outer` can compute the gradient of a weight of this shape."""
    return available() and height % _TILE == 0 and depth % _DEPTH == 0
