"""Keep freed memory in the process.

By default the C library gives every large block back to the system as soon as it is freed, and the next training step
takes the same gigabytes again, page fault by page fault: a quarter of the step's time on a small CPU.
"""

import ctypes
import functools
import platform

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
