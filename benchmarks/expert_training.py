"""Forward and backward pass of the experts of one layer on a CPU: the model's own module, the fused one, the products.

    OMP_NUM_THREADS=1 python benchmarks/expert_training.py [--shapes smollm2,qwen3-30b] [--repeats 5] [--tokens 1024]
    OMP_NUM_THREADS=1 python benchmarks/expert_training.py --forward --tokens 8
    OMP_NUM_THREADS=1 python benchmarks/expert_training.py --dtype bfloat16

Processor seconds of one pass, the best of some, all taken in turns in one process, with random weights in fp32, or in
bfloat16 with fp32 masters. The gradients of the weights are there already, as in every micro-batch of a step but the
first. `grouped_mm` is what transformers chooses; `--ways eager` the loop of the class itself, which with many experts
takes minutes; `products` are the same matrix products alone, each into a tensor that is there: the floor. Memory is
what a pass needs at its peak beside weights, gradients and input, in MiB. With `--forward`, the forward pass alone, as
it is sampled with.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kitae.kernels.allocation import keep_freed_memory, return_freed_memory, set_master
from kitae.models.fuse import fuse


class Shape(NamedTuple):
    hidden: int
    inner: int
    experts: int
    top_k: int
    limited: bool = False  # as gpt-oss has them


SHAPES = {
    "smollm2": Shape(576, 1536, 4, 2),
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "gpt-oss": Shape(2880, 2880, 32, 4, limited=True),
}
WAYS = ("grouped_mm", "fused")


class Inputs(NamedTuple):
    x: Tensor
    chosen: Tensor
    gates: Tensor
    grad: Tensor


def make_inputs(shape: Shape, tokens: int, dtype: torch.dtype) -> Inputs:
    """Choices by chance: every expert gets about as many tokens."""
    gates, chosen = torch.randn(tokens, shape.experts).softmax(-1).topk(shape.top_k)
    x, grad = (torch.randn(tokens, shape.hidden).to(dtype) for _ in range(2))
    return Inputs(x.requires_grad_(), chosen, gates.to(dtype).requires_grad_(), grad)


def make_module(shape: Shape, dtype: torch.dtype) -> Any:
    inner, count = (
        ("intermediate_size", "num_local_experts") if shape.limited else ("moe_intermediate_size", "num_experts")
    )
    sizes = {"hidden_size": shape.hidden, inner: shape.inner, count: shape.experts, "num_experts_per_tok": shape.top_k}
    module: Any = GptOssExperts(GptOssConfig(**sizes)) if shape.limited else Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
    for parameter in module.to(dtype).parameters():
        parameter.data.normal_(0, 0.02)
        parameter.grad = torch.zeros_like(parameter)
    module.masters = [p if dtype == torch.float32 else p.detach().float() for p in module.parameters()]
    for master in module.masters:
        master.grad = torch.zeros_like(master) if master.grad is None else master.grad
    return module


def choose(module: Any, way: str) -> None:
    vars(module).pop("forward", None)
    module.config._experts_implementation = "grouped_mm" if way == "fused" else way
    for parameter, master in zip(module.parameters(), module.masters, strict=True):
        vars(parameter).clear()
        if way == "fused":
            set_master(parameter, master)
    if way == "fused" and not fuse(module, torch.device("cpu"), module.gate_up_proj.dtype):
        raise SystemExit("the module was not fused")


def run(module: Any, inputs: Inputs, forward: bool) -> None:
    if forward:
        with torch.no_grad():
            module(inputs.x, inputs.chosen, inputs.gates)
        return
    inputs.x.grad = inputs.gates.grad = None
    module(inputs.x, inputs.chosen, inputs.gates).backward(inputs.grad)


def products(module: Any, inputs: Inputs, forward: bool) -> Callable[[], None]:
    """Rows of each expert times its weights, and the four products of the backward pass."""
    gate_up, down = module.gate_up_proj, module.down_proj
    dgate_up, ddown = gate_up.grad, down.grad
    if hasattr(module, "limit"):
        gate_up, down, dgate_up, ddown = (w.transpose(1, 2) for w in (gate_up, down, dgate_up, ddown))
    counts = torch.bincount(inputs.chosen.flatten(), minlength=len(down)).tolist()
    most, (height, hidden) = max(counts), gate_up.shape[1:]
    rows, hidden_out, drows = (torch.randn(most, hidden).to(down.dtype) for _ in range(3))
    both, act, dact = (torch.randn(most, n).to(down.dtype) for n in (height, height // 2, height // 2))

    def compute() -> None:
        for e, n in enumerate(counts):
            if n:
                torch.mm(rows[:n], gate_up[e].t(), out=both[:n])
                torch.mm(act[:n], down[e].t(), out=hidden_out[:n])
        for e, n in enumerate(counts):
            if n and not forward:
                torch.mm(hidden_out[:n], down[e], out=dact[:n])
                torch.mm(hidden_out[:n].t(), act[:n], out=ddown[e])
                torch.mm(both[:n], gate_up[e], out=drows[:n])
                torch.mm(both[:n].t(), rows[:n], out=dgate_up[e])

    return torch.no_grad()(compute)


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def status(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith(field))


def peak(work: Callable[[], None]) -> int:
    """MiB that the process has at most while this runs, more than before. Linux only."""
    return_freed_memory()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak so far is forgotten
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def measure(shape: Shape, tokens: int, repeats: int, ways: list[str], forward: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = make_module(shape, dtype), make_inputs(shape, tokens, dtype)
    floor = products(module, inputs, forward)
    times: dict[str, list[float]] = {way: [] for way in (*ways, "products")}
    memory = {}
    for repeat in range(repeats + 1):
        for way in ways:
            choose(module, way)
            taken = seconds(lambda: run(module, inputs, forward))
            times[way] += [taken] if repeat else []
        times["products"] += [seconds(floor)] if repeat else []
    for way in ways:
        choose(module, way)
        memory[way] = peak(lambda: run(module, inputs, forward))
    best = {way: min(found) for way, found in times.items()}
    for way, found in best.items():
        text = f"{memory[way]:8} MiB" if way in memory else ""
        print(f"    {way:12} {found:8.4f} s  {found / best['products']:5.2f} of the products {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    keep_freed_memory()
    for name in arguments.shapes.split(","):
        print(f"{name}: {SHAPES[name]}, {arguments.tokens} tokens, {torch.get_num_threads()} threads")
        ways, dtype = arguments.ways.split(","), getattr(torch, arguments.dtype)
        measure(SHAPES[name], arguments.tokens, arguments.repeats, ways, arguments.forward, dtype)


if __name__ == "__main__":
    main()
