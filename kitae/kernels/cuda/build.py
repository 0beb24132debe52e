"""Compile CUDA C++ with the compiler that comes with torch (NVRTC), and launch it through the driver.

The results are cached under `~/.cache/kitae/kernels`, keyed by source, settings, compiler and architecture. `CudaError`
where something is missing or fails: every caller has Triton kernels that compute the same.
"""

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch

from kitae.paths import cache_dir

INCLUDED = Path(__file__).with_name("instructions.cuh")
_MOST_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CudaError(RuntimeError):
    pass


class CudaKernel:
    """A kernel whose blocks are all on the device at once, so that they may wait for each other."""

    def __init__(self, image: bytes, name: str, blocks: int, threads: int, shared_bytes: int) -> None:
        """On the current device, for good: modules are never unloaded, since graphs may hold their kernels."""
        self._driver = _driver()
        self._size = blocks, threads, shared_bytes
        torch.cuda.current_stream()  # the context of torch is this thread's
        module, self._function = c_void_p(), c_void_p()
        self._check("cuModuleLoadData", self._driver.cuModuleLoadData(byref(module), image))
        self._check(name, self._driver.cuModuleGetFunction(byref(self._function), module, name.encode()))
        status = self._driver.cuFuncSetAttribute(self._function, c_int(_MOST_SHARED_MEMORY), c_int(shared_bytes))
        self._check("cuFuncSetAttribute", status)

    def launch(self, arguments: ctypes.Structure) -> None:
        """On the current stream of torch."""
        blocks, threads, shared_bytes = self._size
        pointers = (c_void_p * 1)(ctypes.addressof(arguments))
        sizes = map(c_uint, (blocks, 1, 1, threads, 1, 1, shared_bytes))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._driver.cuLaunchCooperativeKernel(self._function, *sizes, stream, pointers)
        self._check("cuLaunchCooperativeKernel", status)

    def _check(self, what: str, status: int) -> None:
        if status:
            told = c_char_p()
            self._driver.cuGetErrorString(c_int(status), byref(told))
            raise CudaError(f"{what} failed: {(told.value or b'?').decode()} ({status})")


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
    if target.is_file():
        return target.read_bytes()
    image = _compile(nvrtc, source, options)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as made:
            made.write(image)
        Path(made.name).rename(target)
    except OSError as error:
        raise CudaError(f"{error} (KITAE_CACHE chooses the folder kernels are kept in)") from error
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
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    beside = Path(torch.__file__).parent.parent / "nvidia"
    for path in (name, *map(str, sorted(beside.glob(f"*/lib/{name}")))):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_GLOBAL)
        except OSError:
            continue
        assert isinstance(library, ctypes.CDLL)
        return library
    raise CudaError(f"{name} was not found, neither by the loader nor in {beside}")
