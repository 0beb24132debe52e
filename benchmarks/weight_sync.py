"""What a weight update to an engine in another process costs: everything, against the bf16 values that changed.

    python benchmarks/weight_sync.py [--model smollm2-135m] [--rates 1e-6 1e-5 2e-5] [--steps 4]

For each learning rate: GRPO steps with AdamW on the model's own samples, with random rewards. After every step the
weights go to two engine processes, one that takes them in full and one that takes deltas. Seconds are those until the
engine serves them: publish, load, and both checksums. The first step of AdamW moves every weight by the full rate, so
it changes more values than those that follow.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor
from training import forward_backward, make_worker, prepared

from kitae.engines.base import Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.process.engine import ProcessEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.trainer.config import TrainingConfig
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment
from kitae.weights.base import Manifest
from kitae.weights.memory import MemoryPublisher
from kitae.weights.probe import score_probe

PROMPTS = ("17 + 25 = ", "The capital of France is", "Write a haiku about rain.", "Sort: 5, 3, 9, 1.")
GROUP, TOKENS = 4, 48
Sync = tuple[Manifest, float]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 2e-5])
    parser.add_argument("--steps", type=int, default=4)
    a = parser.parse_args()
    model = ModelConfig(path=a.model, dtype="bfloat16")
    publishers = [MemoryPublisher(mode) for mode in ("full", "delta")]
    full, delta = (ProcessEngine(model, EngineConfig(memory_gb=0.25), p, threads=1) for p in publishers)
    try:
        policy = load_policy(model)
        values = sum(p.numel() for p in policy.model.parameters())
        groups = await sample(full, policy.tokenizer)
        version = 0
        rows: list[tuple[float, int, list[Sync]]] = []
        for rate in a.rates:
            policy = load_policy(model)
            worker = make_worker(policy, TrainingConfig(steps=a.steps, lr=rate), TOKENS)
            for step in range(a.steps + 1):
                if step:
                    forward_backward(worker, prepared(with_random_scores(groups, seed=step), TOKENS))
                    worker.optim_step()
                syncs = [
                    await send(engine, publisher, version, worker.weights())
                    for engine, publisher in zip((full, delta), publishers, strict=True)
                ]
                version += 1
                if step:
                    rows.append((rate, step, syncs))
            for probe in await delta.probe():
                assert probe.gap(score_probe(policy)) < 0.05, "the engine serves other weights than the trainer's"
    finally:
        await asyncio.gather(full.close(), delta.close())
        for publisher in publishers:
            publisher.close()
    print(f"\n{a.model}, bf16, {values / 1e6:.0f} M values\n")
    print("| lr | step | values unchanged | full: MB | s | delta: MB | s | sent as |")
    print("|---|---|---|---|---|---|---|---|")
    for rate, step, ((f, f_seconds), (d, d_seconds)) in rows:
        same = "" if d.unchanged is None else f"{d.unchanged:.2%}"
        print(
            f"| {rate:g} | {step} | {same} | {f.bytes / 1e6:.1f} | {f_seconds:.2f} "
            f"| {d.bytes / 1e6:.1f} | {d_seconds:.2f} | {d.mode} |"
        )


async def send(engine: ProcessEngine, publisher: MemoryPublisher, version: int, weights: Mapping[str, Tensor]) -> Sync:
    """What was published, and the seconds until the engine served it."""
    began = time.perf_counter()
    manifest = await asyncio.to_thread(publisher.publish, version, weights)
    await engine.update_weights(WeightUpdate(version, manifest))
    return manifest, time.perf_counter() - began


async def sample(engine: ProcessEngine, tokenizer: object) -> list[Group]:
    """Answers of the model itself."""
    sampling = SamplingParams(max_tokens=TOKENS)
    groups = []
    for g, text in enumerate(PROMPTS):
        prompt = tuple(tokenizer(text)["input_ids"])  # type: ignore[operator]
        requests = [Request(f"{g}/{i}", prompt, sampling, seed=100 * g + i, share=str(g)) for i in range(GROUP)]
        done = await asyncio.gather(*(engine.generate(r) for r in requests))
        rollouts = tuple(
            Rollout.of(g, i, prompt, (Segment("model", c.tokens, c.logprobs, c.versions),), c.finish, "", Score(0.0))
            for i, c in enumerate(done)
        )
        groups.append(Group(g, Prompt(str(g), (Message("user", text),), ""), rollouts))
    return groups


def with_random_scores(groups: list[Group], seed: int) -> list[Group]:
    random = np.random.default_rng(seed)
    return [
        replace(g, rollouts=tuple(replace(r, score=Score(float(random.normal()))) for r in g.rollouts)) for g in groups
    ]


if __name__ == "__main__":
    asyncio.run(main())
