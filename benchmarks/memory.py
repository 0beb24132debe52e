"""Peak memory as `kitae train --dry-run` predicts it, against that of the run.

    python benchmarks/memory.py [--recipe sort] [--device cpu] [--variants plain,lora] [--set model.path=…]

Each variant is a run of two steps in a process of its own: the largest resident memory of that process on a CPU, the
most that tensors took on a GPU, where what CUDA takes for itself is left out. The batches are large enough to fill a
row of `training.token_budget` tokens. Rewards are given by chance, so that any model has something to train on.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config
from kitae.config.root import RLConfig
from kitae.store.run_folder import Metrics
from kitae.study.time_estimate import estimate

COMMON = (
    "training.steps=2",
    "eval.prompts=0",
    "checkpoint.every=1000",
    "pipeline.refill=0",
    "training.group_size=8",
    f"verifier.name={Path(__file__).resolve()}:by_chance",
)
VARIANTS = {
    "plain": (),
    "longer rows": ("training.token_budget=2048", "training.prompts_per_step=32"),
    "bf16": ("model.dtype=bfloat16",),
    "moments in 16 bits": ("training.moments=bfloat16",),
    "LoRA": ("model.lora_rank=16",),
    "QLoRA": ("model.lora_rank=16", "model.lora_base=nf4"),
    "activations again": (
        "training.checkpoint_activations=true",
        "training.token_budget=2048",
        "training.prompts_per_step=32",
    ),
    "reference": ("algorithm.reference=frozen", "algorithm.kl.coef=0.01"),
    "reference that moves": (
        "algorithm.reference=ema",
        "algorithm.reference.every=1",
        "algorithm.reference.mix=0.1",
        "algorithm.kl.coef=0.01",
    ),
    "critic": ("algorithm.preset=ppo",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sort")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--set", nargs="*", default=["training.token_budget=1024", "training.prompts_per_step=16"])
    arguments = parser.parse_args()
    print(f"{'variant':20} {'predicted GiB':>14} {'measured GiB':>13} {'ratio':>6}")
    for name in arguments.variants.split(","):
        settings = [*COMMON, f"model.device={arguments.device}", *arguments.set, *VARIANTS[name]]
        found = predict(arguments.recipe, settings)
        measured = measure(arguments.recipe, settings, arguments.device)
        predicted = sum(found.values())
        parts = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in found.items() if size > 2**26)
        print(
            f"{name:20} {predicted / 2**30:14.2f} {measured / 2**30:13.2f} {predicted / measured:6.2f}   {parts}",
            flush=True,
        )


def predict(recipe: str, settings: list[str]) -> dict[str, float]:
    config = load_config(find_recipe(recipe), settings)
    assert isinstance(config, RLConfig)
    memory = estimate(config).memory
    assert memory is not None, "the model must be here"
    return {name: size for name, size in memory.parts.items() if name != "libraries" or config.model.device == "cpu"}


def measure(recipe: str, settings: list[str], device: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-c",
            "from kitae.cli.main import run; run()",
            "train",
            recipe,
            f"run.dir={folder}",
            *settings,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)}\n{said[-3000:]}")
        if device == "cpu":
            return usage.ru_maxrss * 1024
        import torch

        (run,) = Path(folder).iterdir()
        steps = Metrics(run / "metrics.jsonl").rows("step")
        shares = [row["device_memory_share"] for row in steps if "device_memory_share" in row]
        return max(shares) * torch.cuda.mem_get_info()[1]


def by_chance(response: str, reference: Any, context: Any) -> float:
    return float(zlib.crc32(response.encode()) % 2)


if __name__ == "__main__":
    main()
