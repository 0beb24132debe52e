"""Several engines behave as one. `test_process_engine` has a fleet of real ones."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kitae.clock import VirtualLoop, now
from kitae.engines.base import Request, SamplingParams, WeightUpdate
from kitae.engines.fake import FakeEngine, Pace
from kitae.engines.fleet import Fleet
from kitae.errors import EngineError, RequestError


def request(id: str, share: str = "", tokens: int = 8) -> Request:
    return Request(id, (1, 2, 3, 4), SamplingParams(max_tokens=tokens), seed=0, share=share)


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
