"""Time of all layers of a decoding step of a few rows on one GPU.

    python benchmarks/gpu_layers.py [--rows 1,4,8] [--contexts 300,8000] [--layers 28] [--shape 8b]

The shape of Qwen2.5-1.5B in bfloat16 with random weights, or that of Qwen3-8B. A step is a CUDA graph that is replayed.
Beside the time stands the floor: reading the weights of the layers, and keys and values, at 4.2 TB/s.
"""

import argparse
import itertools
from collections.abc import Callable

import torch
from gpu_rollouts import BYTES, large_policy, qwen_policy
from torch import Tensor

from kitae.engines.native.gpu_decoder import GpuDecoder
from kitae.engines.native.page_cache import KVCache
from kitae.models.fuse import fuse
from kitae.models.policy import Policy

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


def floor(policy: Policy, rows: int, context: int) -> float:
    """Microseconds."""
    layers = sum(p.numel() for name, p in policy.base.named_parameters() if ".layers." in name)
    cached = 2 * policy.layers * policy.kv_heads * policy.head_dim * rows * context
    return 2 * (layers + cached) / BYTES * 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--contexts", default="300,8000")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shape", choices=("1.5b", "8b"), default="1.5b")
    parser.add_argument("--memory-gb", type=float, default=16.0, help="of the cache")
    args = parser.parse_args()
    with torch.inference_mode(False):
        policy = large_policy(args.layers or 36) if args.shape == "8b" else qwen_policy(layers=args.layers or 28)
        fuse(policy.model, policy.device, policy.dtype)
        cache = KVCache(policy, args.memory_gb, PAGE)
        decoder = GpuDecoder.of(policy, cache)
        assert decoder is not None
    for pages in (*cache.keys, *cache.values):
        pages.numbers.normal_()
    print(f"{'rows':>4} {'context':>7} {'floor µs':>9} {'layers µs':>9} {'share':>6}")
    for rows, context in itertools.product(map(int, args.rows.split(",")), map(int, args.contexts.split(","))):
        given, limit = inputs(cache, rows, context), floor(policy, rows, context)
        found = microseconds(lambda given=given: decoder._small_batch_stream(*given, None, None))  # type: ignore[misc]
        print(f"{rows:4} {context:7} {limit:9.0f} {found:9.0f} {limit / found:6.0%}", flush=True)


if __name__ == "__main__":
    main()
