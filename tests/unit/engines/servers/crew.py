"""A trainer, servers that stand in for those of other people, and the engine over them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from stand_in import StandIn

from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.engine_pool import EnginePool
from kitae.engines.servers.server_engine import ServerEngine
from kitae.engines.start_engine import start_servers
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.weights.shared_memory import MemoryPublisher
from kitae.workers.connection import Deadlines

TESTS = Path(__file__).parents[3]
LIMITS = Deadlines(start=120, answer=30, silence=2, stall=60, close=5)
LONG = 200


def ask(name: str, tokens: int = 20, **sampling: object) -> Request:
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": tokens, **sampling})  # type: ignore[arg-type]
    return Request(f"train/{name}/0", tuple(range(5, 20)), params, seed=3, share="p")


class Crew:
    """A trainer, stand-ins that run, and the engine over them."""

    def __init__(self, policy: Policy, model: ModelConfig, kind: str) -> None:
        self.policy, self.model, self.kind = policy, model, kind
        self.publisher = MemoryPublisher()
        self.servers: list[StandIn] = []
        self.urls: list[str] = []
        self.engine: EnginePool

    async def run_servers(self, count: int) -> None:
        for _ in range(count):
            self.servers.append(StandIn(load_policy(self.model), self.kind, end=lambda: None))
            self.urls.append(await self.servers[-1].serve())

    async def start(self, **settings: object) -> EnginePool:
        config = EngineConfig.model_validate({"kind": self.kind, **settings})
        self.engine = await start_servers(self.model, config, self.publisher, 0, limits=LIMITS)
        return self.engine

    def move(self, seed: int = 1) -> None:
        with torch.no_grad():
            for p in self.policy.model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.02)

    async def publish(self, version: int) -> WeightUpdate:
        tensors = {name: p.detach() for name, p in self.policy.model.named_parameters()}
        return WeightUpdate(version, await asyncio.to_thread(self.publisher.publish, version, tensors))

    def gap(self, done: Completion, prompt: tuple[int, ...]) -> float:
        scored = self.policy.score(torch.tensor(prompt + done.tokens))[len(prompt) - 1 :] / 1
        return float((scored - torch.tensor(done.logprobs)).abs().max())


@asynccontextmanager
async def crew(folder: Path, kind: str, servers: int = 0) -> AsyncIterator[Crew]:
    model = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    made = Crew(load_policy(model), model, kind)
    try:
        await made.run_servers(servers)
        if servers:
            await made.start(urls=made.urls)
        yield made
    finally:
        if hasattr(made, "engine"):
            await made.engine.close()
        await asyncio.gather(*(server.close() for server in made.servers))
        made.publisher.close()


def one(pool: EnginePool) -> ServerEngine:
    """The only server of a pool."""
    (engine,) = pool.members
    assert isinstance(engine, ServerEngine)
    return engine


async def told(engine: EnginePool, tokens: int) -> None:
    while engine.stats().generated_tokens < tokens:
        await asyncio.sleep(0.01)


def started(kind: str) -> str:
    """The words that start a stand-in where the real server would be."""
    path = os.pathsep.join(map(str, (TESTS / "stand_ins", TESTS, TESTS.parent)))
    return f"env PYTHONPATH={path} OMP_NUM_THREADS=1 {sys.executable}"
