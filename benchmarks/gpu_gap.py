"""How far the engine's log-probs are from the trainer's on a GPU, for each path and dtype.

    python benchmarks/gpu_gap.py [--sequences 256] [--tokens 64] [--sharpness 6] [--dtypes bfloat16]

plain    no kernels and no graphs, in the engine and in the trainer (model.plain=true)
modules  CUDA graphs of the model's own modules, whose norms, MLPs and rotary are fused: what LoRA and others get
fused    the engine's own decoder, and the fused modules in the trainer: the default
float8   the same with weights in 8 bits in the engine (engine.weights_dtype=float8)

The engine samples groups of 8 with a model of the shape of Qwen2.5-1.5B; the trainer computes the log-probs of the same
tokens in packed rows. Weights are random; the last norm is multiplied by `sharpness`, for tokens that are not nearly
uniform: -log p of the sampled tokens is in the table. The gap grows with the size of the logits.
"""

import argparse
import asyncio
import random

import numpy as np
import torch
from gpu_rollouts import qwen_policy
from training import log_probs, make_worker

from kitae.engines.base import Completion, Request, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.fuse import fuse
from kitae.models.policy import Policy
from kitae.trainer.config import TrainingConfig
from kitae.types import Sample


async def sample(policy: Policy, path: str, requests: list[Request]) -> list[Completion]:
    weights = "float8" if path == "float8" else "model"
    config = {"memory_gb": 8, "max_batch": len(requests), "weights_dtype": weights}
    engine = NativeEngine(policy, EngineConfig.model_validate(config), plain=path == "plain")
    if path == "modules":
        engine.runner.decoder = None  # type: ignore[attr-defined]
    try:
        return await asyncio.gather(*(engine.generate(r) for r in requests))
    finally:
        await engine.close()


def to_sample(request: Request, done: Completion, group: int) -> Sample:
    prompt = len(request.prompt_tokens)
    tokens = np.array([*request.prompt_tokens, *done.tokens])
    mask = np.arange(len(tokens)) >= prompt
    mu = np.concatenate([np.zeros(prompt), done.logprobs]).astype(np.float32)
    return Sample(group, int(request.id), tokens, prompt, mask, np.zeros_like(mu), {"logp_mu": mu})


def measure(dtype: torch.dtype, path: str, args: argparse.Namespace) -> None:
    policy = qwen_policy("cuda", dtype)
    with torch.no_grad():
        policy.decoder.norm.weight.mul_(args.sharpness)  # type: ignore[attr-defined]
    if path != "plain":
        fuse(policy.model, policy.device, policy.dtype)
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1000, 150000) for _ in range(128)) for _ in range(args.sequences // 8)]
    sampling = SamplingParams(max_tokens=args.tokens)
    requests = [Request(str(i), prompts[i // 8], sampling, i, share=str(i // 8)) for i in range(len(prompts) * 8)]
    done = asyncio.run(sample(policy, path, requests))
    samples = [to_sample(r, c, int(r.share)) for r, c in zip(requests, done, strict=True)]
    found = log_probs(make_worker(policy, TrainingConfig(token_budget=8192), args.tokens), samples)
    gaps = np.concatenate([np.abs(f - s.loss("logp_mu")) for f, s in zip(found, samples, strict=True)])
    sure = -np.concatenate([s.loss("logp_mu") for s in samples]).mean()
    print(f"{str(dtype)[6:]:9} {path:8} {gaps.mean():10.2e} {np.quantile(gaps, 0.99):10.2e} {gaps.max():10.2e} "
          f"{sure:7.2f} {len(gaps):7}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sharpness", type=float, default=6.0)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{'dtype':9} {'path':8} {'mean |gap|':>10} {'99 %':>10} {'largest':>10} {'-log p':>7} {'tokens':>7}")
    for dtype in (getattr(torch, name) for name in args.dtypes.split(",")):
        for path in ("plain", "modules", "fused", "float8"):
            measure(dtype, path, args)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
