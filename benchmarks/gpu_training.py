"""Training speed on one GPU: packed rows of ragged sequences, forward, backward and optimizer step.

    python benchmarks/gpu_training.py [--objective policy|sft|dpo] [--tokens 16384] [--rows 1] [--profile] [--no-fuse]
    python benchmarks/gpu_training.py --shape 8b --moments bfloat16 --tokens 4096 --rows 4 --chunk 2048

A model of the shape of Qwen2.5-1.5B in bfloat16 with fp32 master weights, groups of 8 responses of log-normal lengths
to prompts of 128 tokens, each prompt in the row once. Utilisation counts six operations for each weight and token (the
head: for each token with a loss) and the causal attention, not what is computed twice; the unit is 774 TFLOP/s, the
measured rate of bf16 matrix products on an H200.

With `--objective sft` each sequence is a demonstration with a prompt of its own. With `dpo`, groups are pairs that
share their prompt in the row; the reference is a column, as it is after the first pass over the data. With `--shape
qwen3` the shape is that of Qwen3-1.7B, with `8b` that of Qwen3-8B: their queries and keys have norms. The peak is shown
beside what `kitae train --dry-run` would predict of it.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_rollouts import FLOPS, large_policy, normed_policy, qwen_policy
from training import forward_backward, make_worker, weighted

from kitae.algorithms.preferences import PREFERENCE_LOSSES
from kitae.config.recipe import parse_config
from kitae.config.root import RLConfig
from kitae.data.packing import lay_out, pack
from kitae.models.fuse import fuse
from kitae.models.policy import Policy
from kitae.study.memory_estimate import hold
from kitae.study.model_shape import ModelShape
from kitae.trainer import objectives
from kitae.trainer.config import TrainingConfig
from kitae.trainer.objectives import Likelihood
from kitae.trainer.responses import PLACE, Preference
from kitae.trainer.start_trainer import supervised
from kitae.trainer.training_worker import Worker
from kitae.types import Sample

SHAPES: dict[str, tuple[Callable[..., Policy], int]] = {
    "1.5b": (qwen_policy, 28),
    "qwen3": (normed_policy, 28),
    "8b": (large_policy, 36),
}  # by --shape: what makes it, and of how many layers


def make_samples(tokens: int, rng: random.Random, first_group: int, size: int = 8) -> list[Sample]:
    """Groups of `size` that fill one row of at most `tokens`."""
    samples: list[Sample] = []
    used = 0
    group = first_group
    while True:
        prompt = [rng.randrange(1000, 150000) for _ in range(128)]
        used += 128
        for index in range(size):
            length = min(2048, max(16, int(rng.lognormvariate(5.8, 0.9))))
            length = min(length, tokens - used)
            if length < 2:
                return samples
            used += length
            all_tokens = np.array([*prompt, *(rng.randrange(1000, 150000) for _ in range(length))])
            mask = np.arange(len(all_tokens)) >= 128
            blank = np.zeros(len(all_tokens), dtype=np.float32)
            mu = np.where(mask, np.float32(-12), blank)
            advantage = np.where(mask, np.float32(rng.gauss(0, 1)), blank)
            columns = {"logp_mu": mu, "version": blank, "score": blank, "advantage": advantage}
            samples.append(Sample(group, index, all_tokens, 128, mask, blank, columns))
        group += 1


def make_offline(objective: str, policy: Policy, config: TrainingConfig, rows: int) -> tuple[Worker, list[Sample]]:
    rng, size = random.Random(0), 1 if objective == "sft" else 2
    made = [s for row in range(rows) for s in make_samples(config.token_budget, rng, 1000 * row, size)]
    weight = np.float32(1 / sum(s.loss_tokens for s in made))
    if objective == "sft":
        samples = [replace(s, weight_T=s.spread(weight), columns={}) for s in made]
        return supervised(Likelihood(policy, config, temperature=1.0), config).worker, samples
    groups = {s.group: [t for t in made if t.group == s.group] for s in made}
    samples = []
    for number, pair in enumerate(pair for pair in groups.values() if len(pair) == 2):
        for s in pair:
            ref, place = s.spread(np.float32(-12)), s.spread(np.float32(2 * number + s.index))
            columns = {"logp_ref": ref, PLACE: place}
            samples.append(replace(s, weight_T=s.spread(np.float32(1)), columns=columns, unit=number))
    loss = PREFERENCE_LOSSES["sigmoid"]
    return supervised(Preference(policy, config, loss, loss.settings({})), config).worker, samples


def operations(samples: Sequence[Sample], policy: Policy, config: TrainingConfig) -> tuple[int, float]:
    """Tokens of all rows, and the floating-point operations that the step needs."""
    body = sum(p.numel() for p in policy.base.parameters()) - policy.head.weight.numel()
    tokens, total = 0, 0.0
    for part in pack(samples, config.token_budget, not policy.plain):
        row = lay_out(part, not policy.plain)
        tokens += len(row.tokens_T)
        total += 6.0 * body * len(row.tokens_T) + 6.0 * policy.head.weight.numel() * row.loss_tokens
        pairs = sum(s.length * s.prefix_length + s.length * (s.length + 1) / 2 for s in row.spans)
        total += 12.0 * pairs * policy.heads * policy.head_dim * policy.layers
    return tokens, total


def shape_of(policy: Policy) -> ModelShape:
    told = policy.base.config
    parameters = sum(p.numel() for name, p in policy.base.named_parameters() if "lora_" not in name)
    sizes = (told.hidden_size, told.intermediate_size, policy.layers, told.vocab_size)
    return ModelShape(parameters, *sizes, policy.heads, policy.kv_heads, policy.head_dim, told.model_type)


def predicted(policy: Policy, config: TrainingConfig, tokens: int) -> float:
    """Bytes of training alone: without the cache of an engine, and what CUDA takes for itself."""
    run = parse_config({"data": {"task": "sort"}, "training": config.model_dump()})
    assert isinstance(run, RLConfig)
    parts = hold(run, shape_of(policy), policy.device, policy.dtype, tokens)
    return sum(size for name, size in parts.items() if name not in ("cache", "libraries"))


def print_gaps(profile: Any, most: int = 12) -> None:
    """When no kernel runs, and between which."""
    events = [e for e in profile.events() if e.device_type.name == "CUDA"]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    began, reached, last = spans[0][0], spans[0][1], spans[0][2]
    gaps = []
    for start, end, name in spans:
        gaps.append((start - reached, reached - began, last, name))
        if end > reached:
            reached, last = end, name
    gaps = [gap for gap in gaps if gap[0] > 0]
    print(f"no kernel for {sum(gap[0] for gap in gaps) / 1e3:.1f} of {(reached - began) / 1e3:.1f} ms; longest:")
    for gap, when, before, after in sorted(gaps, reverse=True)[:most]:
        print(f"  {gap / 1e3:9.2f} ms after {when / 1e3:8.1f} ms  {before[:48]} → {after[:48]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", choices=("policy", "sft", "dpo"), default="policy")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=1, help="Micro-batches in one optimizer step.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.5b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--moments", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    args = parser.parse_args()
    objectives.logit_chunk = lambda config, device: args.chunk
    made, layers = SHAPES[args.shape]
    policy = made(layers=args.layers or layers)
    fused = 0 if args.no_fuse else fuse(policy.model, policy.device, policy.dtype)
    config = TrainingConfig(token_budget=args.tokens, moments=args.moments, checkpoint_activations=args.checkpoint)
    rng = random.Random(0)
    samples: Sequence[Sample]
    if args.objective == "policy":
        samples = weighted([s for row in range(args.rows) for s in make_samples(args.tokens, rng, 100 * row)], 2048)
        worker = make_worker(policy, config, 2048)
    else:
        worker, samples = make_offline(args.objective, policy, config, args.rows)
    rows = len(pack(samples, args.tokens))
    tokens, work = operations(samples, policy, config)
    print(f"{args.objective}: {torch.cuda.get_device_name()} torch {torch.__version__}; {len(samples)} sequences, "
          f"{tokens} tokens in "
          f"{rows} rows, {sum(s.loss_tokens for s in samples)} with a loss; {fused} modules fused")  # fmt: skip
    times: list[tuple[float, float]] = []
    for step in range(args.steps + 2):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        forward_backward(worker, samples)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        if step == 0:
            print(f"peak before the optimizer has any state: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        worker.optim_step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began, middle - began))
    whole, passes = (min(t[i] for t in times[2:]) for i in (0, 1))
    print(f"forward and backward {passes * 1e3:.0f} ms ({work / passes / FLOPS:.1%}), whole step {whole * 1e3:.0f} ms: "
          f"{tokens / whole:,.0f} tokens/s, {work / whole / FLOPS:.1%} of {FLOPS / 1e12:.0f} TFLOP/s, "
          f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, "
          f"predicted {predicted(policy, config, tokens) / 2**30:.1f} GiB")  # fmt: skip
    if args.profile:
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
            forward_backward(worker, samples)
            worker.optim_step()
        kernels = sum(row.self_device_time_total for row in profile.key_averages())
        print(f"all kernels: {kernels / 1e3:.0f} ms")
        print_gaps(profile)
        for row in sorted(profile.key_averages(), key=lambda r: -r.self_device_time_total)[:30]:
            total = row.self_device_time_total
            print(f"  {total / 1e3:9.2f} ms {row.count:6} × {total / row.count:9.1f} µs  {row.key[:100]}")


if __name__ == "__main__":
    main()
