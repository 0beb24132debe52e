"""Which functions a device has, and that what it lacks is declared."""

import dataclasses

import pytest
import torch

from kitae.kernels import devices
from kitae.kernels.base import TrainingKernels
from kitae.kernels.cpu import amx
from kitae.kernels.cpu.compile_cpp import cpu_library
from kitae.kernels.devices import decoding_kernels, training_kernels

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_cpu_lacks_is_none(dtype: torch.dtype) -> None:
    kernels = training_kernels(CPU, dtype)
    assert kernels is not None
    lacking = {"sum_rows"} if dtype == torch.float32 or amx.available() else {"sum_rows", "spans"}
    assert {f.name for f in dataclasses.fields(TrainingKernels) if getattr(kernels, f.name) is None} == lacking
    assert kernels.modules.rotary is None and kernels.modules.layers is not None


@needs_compiler
def test_all_callers_get_the_same_record() -> None:
    assert training_kernels(CPU, torch.float32) is training_kernels(CPU, torch.float32)
    assert training_kernels(CPU, torch.float32).modules is training_kernels(CPU, torch.bfloat16).modules  # type: ignore[union-attr]


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_other_dtypes_and_devices_have_none(device: str) -> None:
    assert training_kernels(torch.device(device), torch.float16) is None
    assert decoding_kernels(torch.device(device), torch.float16, 64) is None
    assert training_kernels(torch.device("meta"), torch.float32) is None


def test_a_gpu_without_triton_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    assert training_kernels(torch.device("cuda"), torch.bfloat16) is None


@needs_compiler
def test_decoding_depends_on_the_size_of_heads() -> None:
    assert decoding_kernels(CPU, torch.float32, 64) is not None
    assert decoding_kernels(CPU, torch.float32, 48) is None
