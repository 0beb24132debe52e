"""What a stage of a chain has left behind is given back before the next one."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from kitae.chains.chain_runner import forget_peak, free_memory
from kitae.kernels.allocation import keep_freed_memory
from kitae.observe.progress import peak_memory_gb


def resident_gb() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 2**20


def main() -> None:
    keep_freed_memory()
    before = resident_gb()
    blocks = [torch.ones(4 * 2**20) for _ in range(24)]  # 16 MB each
    kept = blocks[::8]
    del blocks
    held = resident_gb()
    free_memory()
    assert held - before > 0.3, "it is kept, so that a step does not take it again page by page"
    assert resident_gb() - before < 0.5 * (held - before)
    assert all(float(block[0]) == 1 for block in kept)
    forget_peak()
    assert peak_memory_gb() < held + 0.05


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed")
@pytest.mark.skipif(platform.machine() == "aarch64", reason="torch has an allocator of its own there")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Blocks below the size of a map of their own, with some between them that stay: holes. In a process that has none
    of its own yet."""
    subprocess.run([sys.executable, __file__], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
