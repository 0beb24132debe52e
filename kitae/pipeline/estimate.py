"""What a run will need, worked out without loading the model: for `kitae train --dry-run`."""

import json
import struct
import time
from pathlib import Path

from kitae.config import Config
from kitae.kernels import amx
from kitae.models.load import SMOLLM2, find_model, pick_device, pick_dtype
from kitae.trainer.forward import token_budget

_KNOWN = {SMOLLM2: 134_515_008}
_PROMPT_TOKENS = 128  # a guess: prompts are not read for an estimate
_BASE_GB = 0.7  # interpreter and libraries
_DECODE_SHARE, _TRAIN_SHARE = 0.15, 0.35  # of the matrix rate, as measured on small models


def estimate(config: Config) -> str:
    """Memory and time as text; times assume that every response is as long as it may be."""
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    folder = find_model(config.model.path, download=False)
    parameters = _KNOWN.get(config.model.path) or (count_parameters(folder) if folder else None)
    lines = ["", f"device     {device}, {str(dtype).removeprefix('torch.')}"]
    if parameters is None:
        lines.append(f"model      {config.model.path} is not here yet: it will be downloaded, its size is not known")
        return "\n".join(lines)
    half = dtype.itemsize == 2
    trained = parameters if config.model.lora_rank == 0 else parameters // 50
    state = parameters * dtype.itemsize + trained * ((4 if half else 0) + 4 + 8)
    more = _extra_models(config, parameters, dtype.itemsize)
    held = dict(more)
    if half and device.type == "cpu" and config.engine.fast and not config.model.lora_rank and amx.available():
        held["packed weights"] = parameters * dtype.itemsize
    shape = json.loads((folder / "config.json").read_text()) if folder and (folder / "config.json").is_file() else {}
    width = shape.get("hidden_size", 576) * shape.get("num_hidden_layers", 30)
    t = config.training
    tokens = t.prompts_per_step * t.group_size * config.sampling.max_tokens
    packed = min(token_budget(t, device), tokens + t.prompts_per_step * _PROMPT_TOKENS)
    activations = packed * width * 34 * dtype.itemsize
    if config.training.checkpoint_activations:
        activations //= 12
    logits = config.training.logit_chunk * shape.get("vocab_size", 49152) * 8
    total = state + sum(held.values()) + activations + logits + (config.engine.memory_gb + _BASE_GB) * 2**30
    rate = _matrix_rate(str(device), dtype)
    generation = 2 * parameters * tokens / (rate * _DECODE_SHARE)
    passes = 6 * t.epochs * (2 if "critic" in more else 1) + 2 * len(more)
    training = passes * parameters * tokens / (rate * _TRAIN_SHARE)
    lines += [
        f"model      {parameters / 1e6:.0f} M parameters",
        f"memory     about {total / 2**30:.1f} GB: {state / 2**30:.1f} weights and optimizer, "
        f"{activations / 2**30:.1f} activations, {config.engine.memory_gb:g} cache"
        + "".join(f", {size / 2**30:.1f} {name}" for name, size in held.items()),
        f"a step     up to {tokens:,} tokens: about {generation:.0f} s of generation and {training:.0f} s of training",
        f"the run    {t.steps} steps: up to about {t.steps * (generation + training) / 60:.0f} min, evaluations apart",
    ]
    return "\n".join(lines)


def _extra_models(config: Config, parameters: int, itemsize: int) -> dict[str, int]:
    """Bytes of the models that the algorithm wants beside the policy."""
    a = config.algorithm
    found = {}
    if a.kl_coef and a.reference not in (None, "none"):
        shared = config.model.lora_rank > 0 and a.reference == "frozen"
        found["reference"] = 0 if shared else parameters * itemsize
    if a.advantage == "gae":
        found["critic"] = parameters * (itemsize + (4 if itemsize == 2 else 0) + 4 + 8)
    return found


def count_parameters(folder: Path) -> int | None:
    """From the headers of the safetensors files; nothing is read but those."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for n in tensor["shape"]:
                    count *= n
                total += count
    return total or None


def _matrix_rate(device: str, dtype: object) -> float:
    """FLOP/s of a matrix product about the size of a small model's layers."""
    import torch

    a, b = torch.randn(256, 1024, device=device).to(dtype), torch.randn(1024, 1024, device=device).to(dtype)  # type: ignore[call-overload]
    a @ b
    began = time.perf_counter()
    for _ in range(20):
        c = a @ b
    c.sum().item()
    return float(20 * 2 * 256 * 1024**2 / (time.perf_counter() - began))
