"""How far the engine's log-probs are from the trainer's on each path, and what it costs to make them equal.

    python benchmarks/exactness.py [--model smollm2-135m] [--device auto] [--prompts 8] [--group 8] [--tokens 64]

Paths: `plain` (model.plain), `fast` (as it comes), `exact` (model.exact). For each of them in fp32
and bf16: rollouts are sampled, the trainer computes their log-probs in packed rows with shared prompts, and the gap is
taken token by token; then training steps on these rollouts are timed. Speeds are the best of `repeats` rounds, in which
the paths take turns. `--model qwen2.5-1.5b-shape` makes a model of that shape with random weights, for a GPU.
"""

import argparse
import asyncio
import gc
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from training import forward_backward, log_probs, make_worker, prepared

from kitae.data.chat import Chat
from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.config import ModelConfig
from kitae.models.exact import check, make_exact
from kitae.models.fuse import fuse
from kitae.models.load import load_policy, pick_device
from kitae.models.policy import Policy
from kitae.trainer.config import TrainingConfig
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment

SHAPE = "qwen2.5-1.5b-shape"
PATHS = ("plain", "fast", "exact")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Figures:
    """Of one path in one dtype."""

    gap_mean: float = 0.0
    gap_max: float = 0.0
    rollout_seconds: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)


class Case:
    """One path, loaded."""

    def __init__(self, a: argparse.Namespace, path: str, dtype: str) -> None:
        self.a = a
        self.clock = time.process_time if a.processor_time else time.perf_counter
        self.figures = Figures()
        self.policy = _random_policy(a.device, path, dtype) if a.model == SHAPE else load_policy(
            ModelConfig.model_validate({"path": a.model, "device": a.device, "dtype": dtype, "plain": path == "plain",
                                        "exact": path == "exact"}))  # fmt: skip
        self.prompts = _prompts(self.policy, a.prompts, a.prompt_tokens)
        batch = a.prompts * a.group
        self.engine = NativeEngine(
            self.policy, EngineConfig(memory_gb=a.memory_gb, max_batch=batch), plain=path == "plain"
        )
        settings = TrainingConfig(lr=1e-9, token_budget=a.token_budget)  # the policy stays what it is
        self.worker = make_worker(self.policy, settings, a.tokens)

    async def sample(self, step: int, tokens: int) -> list[Group]:
        async def one(p: int, i: int) -> Rollout:
            sampling = SamplingParams(max_tokens=tokens)
            seed = step * 10_000 + p * 100 + i
            done: Completion = await self.engine.generate(
                Request(f"{step}/{p}/{i}", self.prompts[p], sampling, seed=seed, share=f"{p}")
            )
            segment = Segment("model", done.tokens, done.logprobs, done.versions)
            return Rollout.of(p, i, self.prompts[p], (segment,), done.finish, "", Score(float((p + i) % 3 == 0)))

        size = self.a.group
        rollouts = await asyncio.gather(*(one(p, i) for p in range(len(self.prompts)) for i in range(size)))
        return [
            Group(p, Prompt(str(p), (), ""), tuple(rollouts[p * size : (p + 1) * size]))
            for p in range(len(self.prompts))
        ]

    async def round(self, step: int, tokens: int) -> None:
        began = self.clock()
        groups = await self.sample(step, tokens)
        self.figures.rollout_seconds.append(self.clock() - began)
        samples = prepared(groups, self.a.tokens)
        found = log_probs(self.worker, samples)
        gaps = np.concatenate([np.abs(f - s.loss("logp_mu")) for f, s in zip(found, samples, strict=True)])
        self.figures.gap_mean = float(gaps.mean())
        self.figures.gap_max = max(self.figures.gap_max, float(gaps.max()))
        began = self.clock()
        forward_backward(self.worker, samples)
        self.worker.optim_step()
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        self.figures.train_seconds.append(self.clock() - began)
        await self.engine.update_weights(WeightUpdate(step + 1))


def _random_policy(device: str, path: str, dtype: str) -> Policy:
    from gpu_rollouts import qwen_policy

    base = qwen_policy(device)
    model = base.model.to(DTYPES[dtype])
    with torch.no_grad():
        model.get_decoder().norm.weight.mul_(4)  # random weights are nearly indifferent between tokens; trained are not
    policy = Policy(model, None, SHAPE, exact=path == "exact")
    if path == "exact":
        make_exact(policy)
        check(policy)
    elif path == "fast":
        fuse(model, policy.device, policy.dtype)
    return policy


def _prompts(policy: Policy, count: int, tokens: int) -> list[tuple[int, ...]]:
    if policy.tokenizer is None:
        rng = random.Random(0)
        return [tuple(rng.randrange(1000, 150000) for _ in range(tokens)) for _ in range(count)]
    chat = Chat(policy.tokenizer)
    texts = json.loads((Path(__file__).parent / "peers" / "prompts.json").read_text())[:count]
    return [chat.encode_prompt([Message(**m) for m in messages]) for messages in texts]


async def measure(a: argparse.Namespace, dtype: str) -> dict[str, Figures]:
    cases = {}
    for path in a.paths.split(","):
        cases[path] = Case(a, path, dtype)
    try:
        for case in cases.values():
            await case.round(0, a.tokens)  # builds kernels and graphs
            case.figures.rollout_seconds.clear()
            case.figures.train_seconds.clear()
        for step in range(1, a.repeats + 1):
            for case in cases.values():
                await case.round(step, a.tokens)
    finally:
        for case in cases.values():
            await case.engine.close()
    return {path: case.figures for path, case in cases.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help=f"As model.path, or {SHAPE}.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="Of random prompts.")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--memory-gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--processor-time", action="store_true", help="Count seconds of this process only: for a busy CPU, one thread."
    )
    a = parser.parse_args()
    a.device = str(pick_device(a.device))
    name = torch.cuda.get_device_name() if a.device != "cpu" else f"cpu, {torch.get_num_threads()} threads"
    print(
        f"{a.model} on {name}: {a.prompts} prompts × {a.group} samples × {a.tokens} tokens, torch {torch.__version__}"
    )
    print("\n| dtype | path | gap, mean | gap, largest | rollouts, tok/s | × fast | training step, s | × fast |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for dtype in a.dtypes.split(","):
        found = asyncio.run(measure(a, dtype))
        total = a.prompts * a.group * a.tokens
        base = found.get("fast")
        for path, f in found.items():
            rollouts, training = min(f.rollout_seconds), min(f.train_seconds)
            slower = (rollouts / min(base.rollout_seconds), training / min(base.train_seconds)) if base else (1.0, 1.0)
            gaps = f"{f.gap_mean:.2g} | {f.gap_max:.2g}"
            speeds = f"{total / rollouts:,.0f} | {slower[0]:.2f} | {training:.2f} | {slower[1]:.2f}"
            print(f"| {dtype} | {path} | {gaps} | {speeds} |", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
