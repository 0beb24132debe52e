"""Several engines behave as one; those with a process of their own may die."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitae.clock import VirtualLoop, now
from kitae.config import EngineConfig, ModelConfig
from kitae.engines.base import Completion, EngineStats, Request, SamplingParams, WeightUpdate
from kitae.engines.fake import FakeEngine, Pace
from kitae.engines.fleet import Fleet
from kitae.engines.native.engine import NativeEngine
from kitae.engines.process import ProcessEngine
from kitae.errors import EngineError, RequestError
from kitae.models.load import load_policy


def request(id: str, share: str = "", tokens: int = 8) -> Request:
    return Request(id, (1, 2, 3, 4), SamplingParams(max_tokens=tokens), seed=hash(id) % 1000, share=share)


def virtual(body: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body())


def fleet(count: int, pace: Pace | None = None, **options: Any) -> Fleet:
    return Fleet([FakeEngine(lambda r: (7,) * 100, pace or Pace(step=1.0), **options) for _ in range(count)])


def loads(engine: Fleet) -> list[int]:
    return [e.stats().running for e in engine.engines]


def test_groups_stay_together_on_the_engine_with_the_fewest_requests() -> None:
    async def body() -> None:
        engine = fleet(3)
        asked = [request(f"{g}/{i}", share=str(g)) for g in range(3) for i in range(4)]
        asked += [request("alone/0", tokens=4), request("alone/1", tokens=4)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
        await asyncio.sleep(0.5)
        assert loads(engine) == [5, 5, 4]
        stats = engine.stats()
        assert (stats.running, stats.prompt_tokens, stats.prompt_tokens_shared) == (14, 5 * 4, 9 * 4)
        await asyncio.sleep(5)
        late = asyncio.create_task(engine.generate(request("0/late", share="0")))
        await asyncio.sleep(0.5)
        assert loads(engine) == [5, 4, 4], "while the others of its group run, it goes where they are"
        await asyncio.gather(*tasks, late)
        assert engine.stats().busy_seconds == pytest.approx((13.5 + 8 + 8) / 3), "the mean"
        assert engine._homes == {} and engine._where == {} and engine._load == [0, 0, 0]

    virtual(body)


def test_everything_else_is_for_all() -> None:
    async def body() -> None:
        engine = fleet(2, Pace(step=1.0, update=2.0))
        tasks = [asyncio.create_task(engine.generate(request(str(i), tokens=50))) for i in range(4)]
        await asyncio.sleep(3.5)
        assert await engine.update_weights(WeightUpdate(1)) == 1
        assert now() == pytest.approx(5.5), "at the same time"
        await engine.pause()
        await asyncio.sleep(10)
        assert engine.stats().generated_tokens == 12
        await engine.resume()
        await asyncio.sleep(2)
        await engine.abort("0")
        await engine.abort("nobody")
        assert tasks[0].done() is False
        assert (await tasks[0]).finish == "abort" and (await tasks[0]).versions == (0, 0, 0, 1, 1)
        with pytest.raises(RequestError, match="'1' is in flight already"):
            await engine.generate(request("1"))
        await engine.park()
        assert [(await t).finish for t in tasks[1:]] == ["parked"] * 3
        assert engine.stats().version == 1
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("x"))

    virtual(body)


class Odd(FakeEngine):
    """Reports a sync, and may serve whatever it likes."""

    def __init__(self, metrics: dict[str, float], version: int | None = None, **options: Any) -> None:
        super().__init__(lambda r: (1,), **options)
        self.metrics, self.other = metrics, version

    def sync_metrics(self) -> dict[str, float]:
        return self.metrics

    async def update_weights(self, update: WeightUpdate) -> int:
        return await super().update_weights(replace(update, version=self.other or update.version))


def test_sync_metrics_are_merged() -> None:
    one = {"sync_bytes": 10.0, "sync_seconds": 0.5, "sync_delta": 1.0, "sync_resent": 1.0, "sync_unchanged": 0.9}
    two = {"sync_bytes": 30.0, "sync_seconds": 0.7, "sync_delta": 0.0, "sync_resent": 0.0}
    assert Fleet([Odd(one), Odd(two), Odd({})]).sync_metrics() == {
        "sync_bytes": 40.0,
        "sync_seconds": 0.7,
        "sync_delta": 0.5,
        "sync_resent": 1.0,
        "sync_unchanged": 0.9,
    }
    assert Fleet([Odd({})]).sync_metrics() == {}


def test_what_is_no_fleet_is_refused() -> None:
    with pytest.raises(EngineError, match="at least 1 engine, got 0"):
        Fleet([])
    with pytest.raises(EngineError, match="share the trainer's weights, or none, got both"):
        Fleet([Odd({}), Odd({}, shares_weights=False)])
    with pytest.raises(EngineError, match=r"must serve version 3, got \[3, 5\]"):
        asyncio.run(Fleet([Odd({}), Odd({}, version=5)]).update_weights(WeightUpdate(3)))


def test_two_processes_get_new_weights_and_one_is_lost(tiny_folder: Callable[[str], Path]) -> None:
    """Both serve the update; the requests of the one that is killed continue, and nothing shows but the restart."""
    model = ModelConfig(path=str(tiny_folder("llama")), dtype="float32", device="cpu")
    config = EngineConfig(memory_gb=0.02)
    policy = load_policy(model)
    for parameter in policy.model.parameters():
        parameter.data.mul_(1.01)
    sampling = SamplingParams(temperature=0.8, top_k=4, max_tokens=300)
    asked = [Request(str(i), tuple(range(5, 20 + i)), sampling, seed=i, share=str(i // 2)) for i in range(6)]

    async def native() -> list[Completion]:
        engine = NativeEngine(policy, config)
        try:
            return await _all(engine.generate(r) for r in asked)
        finally:
            await engine.close()

    async def body() -> tuple[list[Completion], list[EngineStats], dict[str, float]]:
        members = [ProcessEngine(model, config, threads=1) for _ in range(2)]
        engine = Fleet(members)
        try:
            await _all(member.start() for member in members)
            await engine.update_weights(WeightUpdate(3, {n: p.detach() for n, p in policy.model.named_parameters()}))
            tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
            while not all(member.stats().generated_tokens for member in members):
                await asyncio.sleep(0.01)
            child = members[1]._current()
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
            done = await asyncio.gather(*tasks)
            return done, [m.stats() for m in members] + [engine.stats()], engine.sync_metrics()
        finally:
            await engine.close()

    async def limited() -> Any:
        return await asyncio.wait_for(body(), 100)

    done, (first, second, whole), metrics = asyncio.run(limited())
    assert [c.tokens for c in done] == [c.tokens for c in asyncio.run(native())]
    assert {v for c in done for v in c.versions} == {3}
    assert (first.version, second.version, whole.version) == (3, 3, 3)
    assert (first.restarts, second.restarts, whole.restarts) == (0, 1, 1)
    assert first.prompt_tokens > 0 and second.prompt_tokens > 0
    assert metrics["sync_bytes"] == 2 * sum(p.numel() * 4 for p in policy.model.parameters())


async def _all(work: Any) -> list[Any]:
    results: list[Awaitable[Any]] = list(work)
    return await asyncio.gather(*results)
