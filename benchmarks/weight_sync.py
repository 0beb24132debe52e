"""What a weight update to engines in other processes costs: everything, against the bf16 values that changed.

    python benchmarks/weight_sync.py [--model smollm2-135m] [--rates 1e-6 1e-5 2e-5] [--steps 4] [--engines 1]
    python benchmarks/weight_sync.py --transports memory file http broadcast [ipc] [--engines 2]

For each learning rate: GRPO steps with AdamW on the model's own samples, with random rewards. After every step the
weights are published twice, in full and as a delta, each for engine processes of its own. Bytes are those published:
the same for any number of engines. Seconds are those of publishing, and of loading them in all engines at once, both
checksums included. The first step of AdamW moves every weight by the full rate, so it changes more values than those
that follow.

With --transports: each of them in turn carries the model's weights to receivers in processes of their own, in full and,
with 2 % of the values changed, as a delta. Seconds are the middle ones of five updates: of publishing, and until the
last receiver has loaded and summed up everything. ipc needs a GPU.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from training import forward_backward, make_worker, prepared

from kitae.engines.base import Engine, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.process.process_engine import ProcessEngine
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.trainer.config import TrainingConfig
from kitae.trainer.training_worker import Worker
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment
from kitae.weights.base import Address, Manifest, Mode
from kitae.weights.probe import score_probe
from kitae.weights.shared_memory import MemoryPublisher
from kitae.weights.transports import PUBLISHERS, make_publisher, make_receiver

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

        async def make(number: int) -> ProcessEngine:
            engine = ProcessEngine(model, config, self.publisher, threads=1)
            await engine.start()
            return engine

        self.engine = EnginePool(make, count)

    async def start(self) -> None:
        await self.engine.start()

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
    parser.add_argument("--transports", nargs="+", choices=sorted(PUBLISHERS), help="compare these")
    parser.add_argument("--device", default="", help="of the weights on both sides; cuda for ipc if not set, else cpu")
    a = parser.parse_args()
    if a.transports:
        compare(a.model, a.transports, a.engines, a.device)
        return
    model = ModelConfig(path=a.model, dtype="bfloat16")
    full, delta = Side(model, "full", a.engines), Side(model, "delta", a.engines)
    try:
        await asyncio.gather(full.start(), delta.start())
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


def compare(model: str, kinds: Sequence[str], engines: int, device: str) -> None:
    policy = load_policy(ModelConfig(path=model, dtype="bfloat16"))
    host = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    total = sum(tensor.nbytes for tensor in host.values())
    print(f"\n{model}, bf16, {total / 1e6:.0f} MB, {engines} receiver(s) in processes of their own\n")
    print("| transport | sent | MB | publish, s | all have it, s | GB/s to each receiver |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        for mode in ("full",) if kind == "ipc" else ("full", "delta"):
            where = device or ("cuda" if kind == "ipc" else "cpu")
            tensors = {name: tensor.to(where) for name, tensor in host.items()}
            print(f"| {kind} | {time_transport(kind, mode, tensors, engines)} |", flush=True)  # type: ignore[arg-type]


def time_transport(kind: str, mode: Mode, tensors: dict[str, Tensor], engines: int) -> str:
    publisher: Any = make_publisher(kind, mode)
    context = multiprocessing.get_context("spawn")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    device = next(iter(tensors.values())).device.type
    pipes, processes = [], []
    for _ in range(engines):
        ours, theirs = context.Pipe()
        setup = (theirs, publisher.address.kind, dict(publisher.address.settings), shapes, device)
        processes.append(context.Process(target=receive, args=setup, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    times, manifest = [], None
    for version in range(6):
        manifest = publisher.publish(version, tensors)
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(manifest.record())
        assert all(pipe.recv() == () for pipe in pipes), "whole"
        times.append((manifest.seconds, time.perf_counter() - began))
        for tensor in tensors.values():
            tensor.view(-1)[version::50] *= -1
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    publisher.close()
    assert manifest is not None
    publish, load = (sorted(seconds)[2] for seconds in zip(*times[1:], strict=True))
    return (
        f"{manifest.mode} | {manifest.bytes / 1e6:.0f} | {publish:.2f} | {load:.2f} | {manifest.bytes / load / 1e9:.2f}"
    )


def receive(
    pipe: Connection, kind: str, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]], device: str
) -> None:
    torch.set_num_threads(1)
    parameters = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    receiver = make_receiver(Address(kind, settings), parameters)
    pipe.send("ready")
    while (record := pipe.recv()) is not None:
        pipe.send(receiver.fetch(Manifest.of(record)))
    receiver.close()


if __name__ == "__main__":
    asyncio.run(main())
