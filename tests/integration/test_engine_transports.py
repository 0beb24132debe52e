"""An engine in a process of its own, by every transport: no token is sampled with weights that are not whole."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transport_rigs import Rig

from kitae.engines.base import Request, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.process.process_engine import ProcessEngine
from kitae.errors import EngineError, WeightsDamaged
from kitae.models.config import ModelConfig
from kitae.models.policy import Policy
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe, score_probe

pytestmark = pytest.mark.usefixtures("warm_posts")


@pytest.fixture
def policy(tiny_policy: Callable[..., Policy]) -> Policy:
    return tiny_policy()


@pytest.fixture(
    params=["memory", "broadcast", *(pytest.param(name, marks=pytest.mark.slow) for name in ("file", "http"))]
)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    found = Rig(request.param, tmp_path, limit=2**14, patience=1.0)
    yield found
    found.close()


def shift(policy: Policy, seed: int) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.01)


def test_nothing_is_sampled_before_the_weights_are_whole(
    made: Rig, policy: Policy, tiny_folder: Callable[[str], Path]
) -> None:
    model = ModelConfig(path=str(tiny_folder("llama")), dtype="float32", device="cpu")
    engine, late = (ProcessEngine(model, EngineConfig(memory_gb=0.02), made.publisher, threads=1) for _ in range(2))
    tensors = {name: p.detach() for name, p in policy.model.named_parameters()}

    def ask(version: int) -> "asyncio.Task[object]":
        request = Request(f"{version}", (1, 2, 3), SamplingParams(max_tokens=4), seed=version)
        return asyncio.create_task(engine.generate(request))

    async def publish(version: int, *, in_full: bool = False) -> Manifest:
        shift(policy, version)
        return await asyncio.to_thread(made.publisher.publish, version, tensors, in_full=in_full)

    async def whole(version: int, manifest: Manifest) -> None:
        assert await engine.update_weights(WeightUpdate(version, manifest)) == version
        assert await engine.probe() == (Probe(version, score_probe(policy)),)

    async def damaged(version: int, damage: str) -> None:
        first = await publish(version, in_full=True)
        old = made.bytes_of(first, 0)
        manifest = await publish(version, in_full=True)
        made.swap(manifest, 0, old) if damage == "old" else getattr(made, damage)(manifest, 0)
        with pytest.raises(WeightsDamaged, match=f"version {version} did not reach the engine's process whole"):
            await engine.update_weights(WeightUpdate(version, manifest))
        sampled, waiting = engine.stats().generated_tokens, ask(version)
        await asyncio.sleep(0.6)
        assert engine.stats().generated_tokens == sampled and not waiting.done()
        await whole(version, await publish(version, in_full=True))
        assert (await waiting).versions == (version,) * 4  # type: ignore[attr-defined]

    async def refused(version: int) -> None:
        manifest = await publish(version)
        first, *rest = manifest.entries
        for wrong, message in (
            (replace(first, name="nonsense"), "names an unknown parameter 'nonsense'"),
            (replace(first, shape=(2,)), "must have shape"),
        ):
            made.publisher._manifest = replace(manifest, entries=(wrong, *rest))
            with pytest.raises(EngineError, match=message):
                await engine.update_weights(WeightUpdate(version, made.publisher._manifest))
        await whole(version, await publish(version, in_full=True))

    async def body() -> None:
        try:
            await engine.start()
            await whole(1, await publish(1))
            await whole(2, await publish(2))
            for version, damage in enumerate(("flip", "cut", "lose", "old"), 3):
                await damaged(version, damage)
            await refused(7)
            os.kill(engine.pid, signal.SIGKILL)
            await late.start()
            assert await late.probe() == (Probe(7, score_probe(policy)),), "it has loaded by itself what was published"
        finally:
            await engine.close()
            await late.close()

    asyncio.run(asyncio.wait_for(body(), 200))
