"""Compile CUDA C++ with the compiler that comes with torch (NVRTC), and launch it through the driver.

The results are cached under `~/.cache/kitae/kernels`, keyed by source, settings, compiler and architecture. `CudaError`
where something is missing or fails: every caller has Triton kernels that compute the same.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch

from kitae.paths import cache_dir

INCLUDED = Path(__file__).with_name("instructions.cuh")
_MOST_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

log = logging.getLogger("kitae")


class CudaError(RuntimeError):
    pass


class CudaKernel:
    """A kernel whose blocks are all on the device at once, so that they may wait for each other."""

    def __init__(self, image: bytes, name: str, size: tuple[int, int, int], device: torch.device) -> None:
        """size: blocks, threads, bytes of shared memory. For good: graphs may hold what a module has."""
        self._driver = _driver()
        self._size, self._device = size, device
        module, self._function = c_void_p(), c_void_p()
        with torch.cuda.device(device):
            self._check("cuModuleLoadData", self._driver.cuModuleLoadData(byref(module), image))
            self._check(name, self._driver.cuModuleGetFunction(byref(self._function), module, name.encode()))
            status = self._driver.cuFuncSetAttribute(self._function, c_int(_MOST_SHARED_MEMORY), c_int(size[2]))
            self._check("cuFuncSetAttribute", status)

    def launch(self, arguments: ctypes.Structure) -> None:
        """On torch's current stream of the device."""
        blocks, threads, shared_bytes = self._size
        pointers = (c_void_p * 1)(ctypes.addressof(arguments))
        sizes = map(c_uint, (blocks, 1, 1, threads, 1, 1, shared_bytes))
        with torch.cuda.device(self._device):
            stream = c_void_p(torch.cuda.current_stream().cuda_stream)
            status = self._driver.cuLaunchCooperativeKernel(self._function, *sizes, stream, pointers)
        self._check("cuLaunchCooperativeKernel", status)

    def _check(self, what: str, status: int) -> None:
        if status:
            told = c_char_p()
            self._driver.cuGetErrorString(c_int(status), byref(told))
            raise CudaError(f"{what} failed: {(told.value or b'?').decode()} ({status})")


@functools.cache
def loaded(image: bytes, name: str, size: tuple[int, int, int], device: torch.device) -> CudaKernel:
    """One for all who need it: none is ever unloaded."""
    return CudaKernel(image, name, size, device)


def compiled(source: Path, settings: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """The machine code of a file, with what it includes, whose macros are set to these numbers."""
    nvrtc = _nvrtc()
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(major), byref(minor))
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "-std=c++17"]
    options += [f"-D{name}={value}" for name, value in settings.items()]
    key = hashlib.sha256(source.read_bytes() + INCLUDED.read_bytes())
    key.update(f"{options} {major.value}.{minor.value}".encode())
    target = cache_dir() / "kernels" / f"{key.hexdigest()[:16]}.cubin"
    try:
        if target.is_file():
            return target.read_bytes()
    except OSError as error:
        log.warning("kernels cannot be read from where they are kept: %s", error)
    image = _compile(nvrtc, source, options)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as made:
            made.write(image)
        Path(made.name).chmod(0o644)
        Path(made.name).rename(target)
    except OSError as error:
        log.warning("kernels cannot be kept: %s (KITAE_CACHE chooses the folder)", error)
    return image


def _compile(nvrtc: ctypes.CDLL, source: Path, options: list[str]) -> bytes:
    program = c_void_p()
    header, name = (c_char_p * 1)(INCLUDED.read_bytes()), (c_char_p * 1)(INCLUDED.name.encode())
    nvrtc.nvrtcCreateProgram(byref(program), source.read_bytes(), source.name.encode(), c_int(1), header, name)
    flags = (c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, c_int(len(options)), flags)
    size = c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        text = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, text)
        raise CudaError(f"{source.name} cannot be compiled: {text.value.decode(errors='replace')[:1000]}")
    nvrtc.nvrtcGetCUBINSize(program, byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(byref(program))
    return image.raw


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}") from error


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The one that torch was built with, from the loader's path or from the packages beside torch."""
    major = (torch.version.cuda or "0").split(".")[0]
    beside = Path(torch.__file__).parent.parent / "nvidia"
    for helper in beside.glob(
        f"*/lib/libnvrtc-builtins.so.{major}*"
    ):  # the library looks for it, but not beside itself
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(helper), mode=os.RTLD_GLOBAL)
    name = f"libnvrtc.so.{major}"
    for path in (name, *map(str, sorted(beside.glob(f"*/lib/{name}")))):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path, mode=os.RTLD_GLOBAL)
    raise CudaError(f"{name} was not found, neither by the loader nor in {beside}")
