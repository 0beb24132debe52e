"""What a weight update to engines in other processes costs: everything, against the bf16 values that changed.

    python benchmarks/weight_sync.py [--model smollm2-135m] [--rates 1e-6 1e-5 2e-5] [--steps 4] [--engines 1]

For each learning rate: GRPO steps with AdamW on the model's own samples, with random rewards. After every step the
weights are published twice, in full and as a delta, each for engine processes of its own. Bytes are those published:
the same for any number of engines. Seconds are those of publishing, and of loading them in all engines at once, both
checksums included. The first step of AdamW moves every weight by the full rate, so it changes more values than those
that follow.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, replace

import numpy as np
from training import forward_backward, make_worker, prepared

from kitae.engines.base import Engine, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.fleet import Fleet
from kitae.engines.process.engine import ProcessEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.trainer.config import TrainingConfig
from kitae.trainer.worker import Worker
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment
from kitae.weights.base import Manifest, Mode
from kitae.weights.memory import MemoryPublisher
from kitae.weights.probe import score_probe

PROMPTS = ("17 + 25 = ", "The capital of France is", "Write a haiku about rain.", "Sort: 5, 3, 9, 1.")
GROUP, TOKENS = 4, 48


@dataclass(frozen=True)
class Update:
    manifest: Manifest
    load_seconds: float

    def __str__(self) -> str:
        m = self.manifest
        return f"{m.bytes / 1e6:.1f} | {m.seconds:.2f} | {self.load_seconds:.2f}"


class Side:
    """Some engines and what publishes for them."""

    def __init__(self, model: ModelConfig, mode: Mode, count: int) -> None:
        self.publisher = MemoryPublisher(mode)
        config = EngineConfig(memory_gb=0.25)
        self.engine: Engine = Fleet([ProcessEngine(model, config, self.publisher, threads=1) for _ in range(count)])

    async def update(self, version: int, worker: Worker) -> Update:
        manifest = await asyncio.to_thread(self.publisher.publish, version, worker.weights())
        began = time.perf_counter()
        await self.engine.update_weights(WeightUpdate(version, manifest))
        return Update(manifest, time.perf_counter() - began)

    async def close(self) -> None:
        await self.engine.close()
        self.publisher.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 2e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--engines", type=int, default=1, help="that get each version, in full and as deltas")
    a = parser.parse_args()
    model = ModelConfig(path=a.model, dtype="bfloat16")
    full, delta = Side(model, "full", a.engines), Side(model, "delta", a.engines)
    try:
        policy = load_policy(model)
        values = sum(p.numel() for p in policy.model.parameters())
        groups = await sample(full.engine, policy.tokenizer)
        version = 0
        rows: list[tuple[float, int, Update, Update]] = []
        for rate in a.rates:
            policy = load_policy(model)
            worker = make_worker(policy, TrainingConfig(steps=a.steps, lr=rate), TOKENS)
            for step in range(a.steps + 1):
                if step:
                    forward_backward(worker, prepared(with_random_scores(groups, seed=step), TOKENS))
                    worker.optim_step()
                found = await full.update(version, worker), await delta.update(version, worker)
                version += 1
                if step:
                    rows.append((rate, step, *found))
            ours = score_probe(policy)
            for probe in await delta.engine.probe():
                assert probe.version == version - 1 and probe.gap(ours) < 0.05, (probe, ours)
    finally:
        await asyncio.gather(full.close(), delta.close())
    print(f"\n{a.model}, bf16, {values / 1e6:.0f} M values, {a.engines} engine(s); bytes are published once for all\n")
    costs = "MB | publish, s | load, s"
    print(f"| lr | step | values unchanged | full: {costs} | delta: {costs} | sent as |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for rate, step, f, d in rows:
        same = "" if d.manifest.unchanged is None else f"{d.manifest.unchanged:.2%}"
        print(f"| {rate:g} | {step} | {same} | {f} | {d} | {d.manifest.mode} |")


async def sample(engine: Engine, tokenizer: object) -> list[Group]:
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
