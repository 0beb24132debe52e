"""Time of all layers of a decoding step of a few rows on one GPU: kernel after kernel, and as one kernel.

    python benchmarks/gpu_layers.py [--rows 1,4,8] [--contexts 300,8000] [--layers 28] [--shape 8b] [--parts]

The shape of Qwen2.5-1.5B in bfloat16 with random weights, or that of Qwen3-8B. A step is a CUDA graph that is replayed.
Beside the times: the floor, which is reading the weights of the layers, and keys and values, at 4.2 TB/s; and how far
logits of the two are apart, as a share of their size. With `--parts` the one kernel is timed without its meetings,
attention, weights or products, each left out alone: what it computes is wrong then, and the differences tell where
time goes.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_rollouts import BYTES, large_policy, qwen_policy
from torch import Tensor

from kitae.engines.native.fused import FusedDecoder
from kitae.engines.native.page_cache import KVCache
from kitae.kernels.cuda import resident
from kitae.kernels.cuda.build import CudaKernel
from kitae.models.fuse import fuse
from kitae.models.policy import Policy

PARTS = {  # what is written instead of what
    "meetings": [("while (read_acquire(s.counters) < count)", "while (false)")],
    "attention": [("if (split < splits) attend_item(l);", "")],
    "weights": [(f"if ({r} < left) fetch16", "if (false) fetch16") for r in ("r", "r + 4", "low", "low + 4")],
    "products": [("mma16(c[2 * half", "if (false) mma16(c[2 * half")],
}
PAGE = 16


def inputs(cache: KVCache, rows: int, context: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    width = -(-context // PAGE)
    table = torch.zeros(rows, width + 1, dtype=torch.int32, device="cuda")
    table[:, :width] = torch.randperm(cache.pages, device="cuda")[: rows * width].view(rows, width)
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    positions = lengths.long() - 1
    slots = table[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
    tokens = torch.randint(1000, 150000, (rows,), device="cuda")
    return tokens, positions, slots, table, lengths


def microseconds(step: Callable[[], object], repeats: int = 30) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        graph.capture_begin()
        step()
        graph.capture_end()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for i in range(repeats + 5):
        if i == 5:
            begin.record()
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats


def without(kernel: resident.Resident, part: str) -> CudaKernel:
    """The kernel as it would be without a part."""
    source, kept = resident.SOURCE, kernel.kernel
    text = source.read_text()
    for old, new in PARTS[part]:
        assert old in text, old
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        resident.SOURCE = Path(folder) / source.name
        resident.SOURCE.write_text(text)
        kernel.build()
    resident.SOURCE = source
    made, kernel.kernel = kernel.kernel, kept
    assert made is not None
    return made


def floor(policy: Policy, rows: int, context: int) -> float:
    """Microseconds."""
    layers = sum(p.numel() for name, p in policy.base.named_parameters() if ".layers." in name)
    cached = 2 * policy.layers * policy.kv_heads * policy.head_dim * rows * context
    return 2 * (layers + cached) / BYTES * 1e6


def apart(decoder: FusedDecoder, policy: Policy, given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> float:
    head, found, kernel = policy.head.weight, [], decoder.resident
    for decoder.resident in (None, kernel):
        logits = torch.empty(len(given[0]), len(head), dtype=head.dtype, device="cuda")
        decoder.logits_of_few(*given, head, logits)
        found.append(logits.float())
    return float((found[0] - found[1]).norm() / found[0].norm())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--contexts", default="300,8000")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shape", choices=("1.5b", "8b"), default="1.5b")
    parser.add_argument("--memory-gb", type=float, default=16.0, help="of the cache")
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    with torch.inference_mode(False):
        policy = large_policy(args.layers or 36) if args.shape == "8b" else qwen_policy(layers=args.layers or 28)
        fuse(policy.model, policy.device, policy.dtype)
        cache = KVCache(policy, args.memory_gb, PAGE)
        decoder = FusedDecoder.of(policy, cache)
        assert decoder is not None
        decoder.try_resident(policy)
    kernel = decoder.resident
    assert kernel is not None, "no kernel for all layers here"
    for pages in (*cache.keys, *cache.values):
        pages.numbers.normal_()
    others = {part: without(kernel, part) for part in PARTS} if args.parts else {}
    told = "".join(f"{'no ' + part:>14}" for part in others)
    print(f"{'rows':>4} {'context':>7} {'floor µs':>9} {'kernels':>9} {'one':>9} {'share':>6} {'apart':>8}{told}")
    for rows, context in itertools.product(map(int, args.rows.split(",")), map(int, args.contexts.split(","))):
        given, limit = inputs(cache, rows, context), floor(policy, rows, context)
        several = microseconds(lambda given=given: decoder._stream_of_few(*given, None))  # type: ignore[misc]
        one = microseconds(lambda given=given: kernel.stream(*given))  # type: ignore[misc]
        line = f"{rows:4} {context:7} {limit:9.0f} {several:9.0f} {one:9.0f} {limit / one:6.0%}"
        line += f" {apart(decoder, policy, given):8.1e}"
        kept = kernel.kernel
        for kernel.kernel in others.values():
            line += f"{microseconds(lambda given=given: kernel.stream(*given)):14.0f}"  # type: ignore[misc]
            kernel._counters.zero_()  # without meetings nobody leaves them so
        kernel.kernel = kept
        print(line, flush=True)


if __name__ == "__main__":
    main()
