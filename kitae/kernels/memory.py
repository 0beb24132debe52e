"""Where memory lies: what is freed stays in the process, and weights that are used together lie side by side.

By default the C library gives every large block back to the system as soon as it is freed, and the next training step
takes the same gigabytes again, page fault by page fault: a quarter of the step's time on a small CPU.
"""

import ctypes
import functools
import math
import mmap
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
_LINE = 64  # bytes of the cache, at which tensors begin
_MASTER = "kitae_master"  # goes with the parameter, and is gone with it


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc to reuse large blocks instead of returning them. Elsewhere nothing happens."""
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _M_MMAP_THRESHOLD: 32 * 2**20,  # the largest it accepts
        _M_TRIM_THRESHOLD: 2**31 - 1,
        _M_TOP_PAD: 256 * 2**20,
        _M_ARENA_MAX: 1,  # the arenas of other threads cannot grow large blocks
    }
    return all(mallopt(name, value) for name, value in settings.items())


class Room:
    """Zeros on the host for so many bytes at a time, in pages of their own, which go back when all of them are freed.

    For what stays while other blocks come and go: among those it would leave holes that nothing fits into. Pages are
    large where the system has such: a page fault costs more than the zeros.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pages: mmap.mmap | None = None
        self._used = 0

    def take(self, shape: "Sequence[int]", dtype: "torch.dtype") -> "Tensor":
        import torch

        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.zeros(*shape, dtype=dtype)
        if self._pages is None or self._used + size > len(self._pages):
            self._pages = mmap.mmap(-1, max(self._size, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._pages.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        found = torch.frombuffer(self._pages, dtype=dtype, count=math.prod(shape), offset=self._used)
        self._used += -(-size // _LINE) * _LINE
        return found.view(*shape)

    def leave(self) -> None:
        """What has been taken keeps its pages as long as it lives."""
        self._pages = None


def bytes_in_rooms(shapes: "Iterable[Sequence[int]]", dtype: "torch.dtype") -> int:
    return sum(-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape in shapes)


def _is_glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"


def return_freed_memory() -> None:
    """Give back what is free now, with holes of it between what is not: whoever comes next may need other sizes."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def together(parameters: "Sequence[Tensor]") -> "Tensor | None":
    """A view of the tensors, one after the other along the first dimension, if they lie so in memory."""
    first = parameters[0].detach()
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    if any(p.data_ptr() != end for p, end in zip(parameters[1:], ends, strict=False)):
        return None
    rows = sum(len(p) for p in parameters)
    end = (first.storage_offset() + rows * first[0].numel()) * first.element_size()
    if end > first.untyped_storage().nbytes():
        return None
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def joined(parameters: "Sequence[Tensor]") -> "Tensor":
    """The tensors, one after the other along the first dimension: a view if they lie so in memory, else a copy."""
    import torch

    view = together(parameters)
    return torch.cat([p.detach() for p in parameters]) if view is None else view


def lay_together(parameters: "Sequence[Tensor]") -> "Tensor":
    """Move parameters into one tensor and make them views of it, unless they are already."""
    import torch

    whole = joined(parameters)
    if whole.data_ptr() != parameters[0].data_ptr():
        for p, place in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
            p.data = place
    return whole


@dataclass(frozen=True, slots=True)
class _Master:
    """tensor None: the parameter itself, which would be freed late if it knew itself."""

    tensor: "Tensor | None"
    room: Room | None


def set_master(parameter: "Tensor", master: "Tensor", room: Room | None = None) -> None:
    """From now on kernels may add gradients of the parameter to that of its fp32 master directly; it may be its own.

    room: where these gradients are.
    """
    vars(parameter)[_MASTER] = _Master(None if master is parameter else master, room)


def gradient_of(parameter: "Tensor") -> "Tensor | None":
    """The fp32 gradient of the parameter's master, to be added to in place; None: it has no master."""
    import torch

    found: _Master | None = vars(parameter).get(_MASTER)
    if found is None:
        return None
    master = parameter if found.tensor is None else found.tensor
    if master.grad is None:
        blank = torch.zeros if found.room is None else found.room.take
        master.grad = blank(master.shape, dtype=master.dtype)
    return master.grad
