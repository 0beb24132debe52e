"""Compile `cpu.cpp`, with what it includes, once per machine with the system's C++ compiler and load it through ctypes.

No compiler, no problem: `cpu_library()` returns None, says so once, and every caller has a plain-torch path. The
result is cached under `~/.cache/kitae/kernels`, keyed by source, flags, compiler and processor.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from kitae.paths import cache_dir

SOURCE = Path(__file__).with_name("cpu.cpp")
INCLUDED = sorted(SOURCE.parent.glob("*.h"))
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=fast",
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)  # fmt: skip

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # of the names of kernels

log = logging.getLogger("kitae")


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be built."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        log.warning("no C++ compiler found: the engine uses plain torch, which is slower (install g++ to change that)")
        return None
    try:
        path = _build(compiler)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # a user without a home is a RuntimeError
        detail = getattr(error, "stderr", None) or f"{error} (KITAE_CACHE chooses the folder they are kept in)"
        log.warning("the CPU kernels could not be built, the engine uses plain torch: %s", str(detail).strip()[-500:])
        return None


def call(name: str, dtype: torch.dtype, *arguments: object) -> None:
    """Call the kernel `name` for a dtype.

    Tensors, structures and arrays become pointers, None a null pointer, integers int64 and floats double.
    """
    library = cpu_library()
    assert library is not None
    function = getattr(library, f"{name}_{SUFFIXES[dtype]}")
    function.restype = None
    function(*map(_as_c, arguments))


def _as_c(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Structure | ctypes.Array):
        return ctypes.byref(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_int64(value) if isinstance(value, int) else value


def _build(compiler: str) -> Path:
    key = hashlib.sha256(b"".join(path.read_bytes() for path in (SOURCE, *INCLUDED)))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    for part in (*FLAGS, compiler, version, platform.machine(), _processor()):
        key.update(part.encode())
    target = cache_dir() / "kernels" / f"{key.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "kernels.so"
        # Resolved at load time to the OpenMP runtime torch has loaded already: one thread pool, not two.
        omp = Path(torch.__file__).parent / "lib"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), f"-L{omp}"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        made.rename(target)
    return target


def _processor(known: Path = Path("/proc/cpuinfo")) -> str:
    """The kind of the processor by what the system reports: machines of several kinds may share a folder."""
    try:
        text = known.read_text()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU ")  # the last two on ARM
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(kinds)}))
