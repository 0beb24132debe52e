"""Memory between the stages of a chain: what one has left is given back, and the most is counted for each alone."""

import gc
from contextlib import suppress
from pathlib import Path

import torch

from kitae.kernels.allocation import return_freed_memory

_RESET = Path("/proc/self/clear_refs")


def free_memory() -> None:
    """Models hold each other in circles, so they outlive their stage until somebody looks. What was freed stays
    with the process (`kitae.kernels.allocation`), cut up for sizes that the next stage may not have."""
    gc.collect()
    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def forget_peak() -> None:
    """Count from here; where the system cannot, `peak_memory_gb` is that of the whole process."""
    with suppress(OSError):
        _RESET.write_text("5")
