"""Where memory lies: what is freed stays in the process, and weights that are used together lie side by side.

By default the C library gives every large block back to the system as soon as it is freed, and the next training step
takes the same gigabytes again, page fault by page fault: a quarter of the step's time on a small CPU.
"""

import ctypes
import functools
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc to reuse large blocks instead of returning them. Elsewhere nothing happens."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _M_MMAP_THRESHOLD: 32 * 2**20,  # the largest it accepts
        _M_TRIM_THRESHOLD: 2**31 - 1,
        _M_TOP_PAD: 256 * 2**20,
        _M_ARENA_MAX: 1,  # the arenas of other threads cannot grow large blocks
    }
    return all(mallopt(name, value) for name, value in settings.items())


def joined(parameters: "Sequence[Tensor]") -> "Tensor":
    """The tensors, one after the other along the first dimension: a view if they lie so in memory, else a copy."""
    import torch

    first = parameters[0].detach()
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    if all(p.data_ptr() == end for p, end in zip(parameters[1:], ends, strict=False)):
        rows = sum(len(p) for p in parameters)
        end = (first.storage_offset() + rows * first[0].numel()) * first.element_size()
        if end <= first.untyped_storage().nbytes():
            return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    return torch.cat([p.detach() for p in parameters])
