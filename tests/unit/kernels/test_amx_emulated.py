"""The tests of tile registers on processors that have none: what a processor lacks is computed by functions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kitae.kernels.cpu import amx

HERE = Path(__file__).parent


def has_avx512() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return all(f" {name} " in flags for name in ("avx512f", "avx512bw", "avx512vl"))


@pytest.mark.slow
@pytest.mark.skipif(amx.available(), reason="the tests themselves run here")
@pytest.mark.skipif(not has_avx512(), reason="no AVX-512")
def test_tests_of_tiles_pass_with_emulated_ones(tmp_path: Path) -> None:
    files = [HERE / f"test_{name}.py" for name in ("amx", "packed", "cpu_training", "cpu_experts")]
    files += [HERE.parent / name for name in ("engines/test_packed_decoder.py", "trainer/test_kernels_of_a_step.py")]
    environment = os.environ | {"CXX": str(HERE / "emulated" / "amx_compiler.py"), "KITAE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "no AMX" not in done.stdout  # none was left out
