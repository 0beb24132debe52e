"""Several engines behave as one. `test_conformance` and `test_process_engine` have pools of real ones."""

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kitae.clock import VirtualLoop, now
from kitae.engines.base import Capabilities, Request, SamplingParams, WeightUpdate
from kitae.engines.engine_pool import EnginePool
from kitae.engines.fake import FakeEngine, Pace
from kitae.errors import EngineError, RequestError, WeightsDamaged
from kitae.weights.probe import Probe


def request(id: str, share: str = "", tokens: int = 8) -> Request:
    return Request(id, (1, 2, 3, 4), SamplingParams(max_tokens=tokens), seed=0, share=share)


def virtual(body: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body())


def pool(count: int, pace: Pace | None = None, **options: Any) -> EnginePool:
    return EnginePool.of([FakeEngine(lambda r: (7,) * 100, pace or Pace(step=1.0), **options) for _ in range(count)])


def loads(engine: EnginePool) -> list[int]:
    return [e.stats().running for e in engine.members]


def test_groups_stay_together_on_the_engine_with_the_fewest_requests() -> None:
    async def body() -> None:
        engine = pool(3)
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
        assert engine._homes == {} and engine._requests == {} and [p.load for p in engine._places] == [0, 0, 0]

    virtual(body)


def test_whoever_asks_for_its_stats_changes_nothing() -> None:
    """A watchdog asks from its own thread, while engines come and go."""

    async def body() -> None:
        engine = pool(2)
        await engine.generate(request("0"))
        past, accounted = engine._past, dict(engine._busy)
        busy = engine.stats().busy_seconds
        assert busy == engine.stats().busy_seconds == pytest.approx(8 / 2)
        assert engine._past is past and engine._busy == accounted
        await engine.leave(engine.members[1])
        assert engine.stats().busy_seconds == pytest.approx(8 / 2), "by the number that there was"
        await engine.generate(request("1"))
        assert engine.stats().busy_seconds == pytest.approx(8 / 2 + 8)

    virtual(body)


def test_everything_else_is_for_all() -> None:
    async def body() -> None:
        engine = pool(2, Pace(step=1.0, update=2.0))
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
        await engine.suspend()
        assert [(await t).finish for t in tasks[1:]] == ["suspended"] * 3
        assert engine.stats().version == 1
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("x"))

    virtual(body)


class Odd(FakeEngine):
    """May serve whatever it likes, and fail."""

    def __init__(self, version: int | None = None, error: Exception | None = None, **options: Any) -> None:
        super().__init__(lambda r: (1,), **options)
        self.other, self.error, self.updates = version, error, 0

    async def update_weights(self, update: WeightUpdate) -> int:
        self.updates += 1
        if self.error is not None:
            raise self.error
        return await super().update_weights(replace(update, version=self.other or update.version))

    async def probe(self) -> tuple[Probe, ...]:
        return (Probe(self.other or 0, (-1.0,)),)


def test_a_watchdog_may_ask_while_requests_come_and_go() -> None:
    """From its own thread, which is let in after every few instructions."""
    engine, stop, asked = pool(1, Pace(step=1.0, batch=2000)), threading.Event(), list[int]()
    errors: list[BaseException] = []

    def look_on() -> None:
        try:
            while not stop.is_set():
                asked.append(engine.stats().waiting)
        except RuntimeError as error:
            errors.append(error)

    async def body() -> None:
        for turn in range(10):
            await asyncio.gather(*(engine.generate(request(f"{turn}/{i}", tokens=1 + i % 8)) for i in range(300)))

    interval = sys.getswitchinterval()
    watchdog = threading.Thread(target=look_on)
    try:
        sys.setswitchinterval(1e-6)
        watchdog.start()
        virtual(body)
    finally:
        stop.set()
        watchdog.join()
        sys.setswitchinterval(interval)
    assert not errors and asked


def test_it_can_do_what_all_of_them_can() -> None:
    engines = [Odd(), Odd(), Odd()]
    engines[0].capabilities = Capabilities(shares_weights=True, scores=True, seeded=False)
    engines[1].capabilities = Capabilities(shares_weights=True, scores=True)
    assert EnginePool.of(engines[:2]).capabilities == Capabilities(shares_weights=True, scores=True, seeded=False)
    assert EnginePool.of(engines).capabilities == Capabilities(shares_weights=True, seeded=False, stop_strings=False)


def test_every_engine_is_probed() -> None:
    found = asyncio.run(EnginePool.of([Odd(version=3), Odd(version=4)]).probe())
    assert found == (Probe(3, (-1.0,)), Probe(4, (-1.0,)))


def test_an_update_goes_to_all_before_an_error_is_raised_and_the_worst_counts() -> None:
    damaged, gone = WeightsDamaged("damaged"), EngineError("gone")
    engines = [Odd(error=damaged), Odd(error=gone), Odd()]
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(EnginePool.of(engines).update_weights(WeightUpdate(3)))
    assert [engine.updates for engine in engines] == [1, 1, 1] and engines[2].stats().version == 3
    with pytest.raises(WeightsDamaged):
        asyncio.run(EnginePool.of([engines[2], engines[0]]).update_weights(WeightUpdate(4)))


def test_what_is_no_pool_is_refused() -> None:
    with pytest.raises(EngineError, match="at least 1 engine, got 0"):
        EnginePool.of([])
    with pytest.raises(EngineError, match="share the trainer's weights, or none, got both"):
        EnginePool.of([Odd(), Odd(shares_weights=False)])
    with pytest.raises(EngineError, match=r"must serve version 3, got \[3, 5\]"):
        asyncio.run(EnginePool.of([Odd(), Odd(version=5)]).update_weights(WeightUpdate(3)))


class Judge:
    """Finds fault with what engines of some names answer, and waits a second over it."""

    def __init__(self, *liars: str) -> None:
        self.liars = liars
        self.engine_of: dict[str, str] = {}
        self.examined: list[tuple[str, int, int]] = []
        self.out: list[tuple[str, str, list[str]]] = []
        self.failure: EngineError | None = None

    async def examine(self, request: Request, done: Any, served: int) -> str:
        await asyncio.sleep(1)
        self.examined.append((request.id, len(done.tokens), served))
        new = len(done.tokens) > len(request.prior.tokens)
        return "it lies" if new and self.engine_of[request.id] in self.liars else ""

    async def refused(self, engine: str, why: str, rollouts: Any) -> None:
        self.out.append((engine, why, sorted(rollouts)))
        if self.failure is not None:
            raise self.failure


class Named(FakeEngine):
    def __init__(self, name: str, judge: Judge, pace: Pace) -> None:
        super().__init__(lambda r: (7,) * 100, pace)
        self.name, self.judge = name, judge

    async def generate(self, request: Request) -> Any:
        self.judge.engine_of[request.id] = self.name
        return await super().generate(request)


def judged(judge: Judge, *names: str) -> EnginePool:
    engine = EnginePool.of([Named(name, judge, Pace(step=1.0)) for name in names])
    engine.check = judge  # type: ignore[assignment]
    return engine


def test_an_engine_that_fails_the_check_is_out_with_all_that_it_gave() -> None:
    async def body() -> None:
        judge = Judge()
        engine = judged(judge, "honest", "liar")
        await asyncio.gather(*(engine.generate(request(f"train/{i}/0/0")) for i in range(4)))
        assert not judge.out and not engine.withdrawn
        before = [id.rpartition("/")[0] for id, name in judge.engine_of.items() if name == "liar"]
        judge.liars = ("liar",)
        judge.engine_of.clear()
        tasks = [asyncio.create_task(engine.generate(request(f"train/{i}/1/0", tokens=8 + i))) for i in range(4)]
        await asyncio.sleep(6)
        assert engine.progress({}) == {}, "reports are not judged"
        found = await asyncio.gather(*tasks)
        assert [len(done.tokens) for done in found] == [8, 9, 10, 11]
        assert set(judge.engine_of.values()) == {"honest"}, "each of them is answered by the other in the end"
        assert judge.out == [("liar", "it lies", sorted(before))], "once, though two of its answers were wrong"
        assert engine.withdrawn == set(before) and engine.sources(before[0]) == frozenset()
        assert [e.name for e in engine.members] == ["honest"]  # type: ignore[attr-defined]

    virtual(body)


def test_what_an_engine_gave_up_without_a_proof_is_not_continued() -> None:
    async def body() -> None:
        judge = Judge()
        engine = judged(judge, "a", "b")
        task = asyncio.create_task(engine.generate(request("train/0/0/0", tokens=20)))
        await asyncio.sleep(5.5)
        first = next(e for e in engine.members if e.stats().running)
        leaving = asyncio.create_task(engine.leave(first))
        done = await task
        await leaving
        assert len(done.tokens) == 20
        assert ("train/0/0/0", 0, 0) in judge.examined, "what it had was dropped before it was judged"
        task = asyncio.create_task(engine.generate(request("train/0/1/0", tokens=20)))
        await asyncio.sleep(5.5)
        await engine.suspend()
        assert (await task).tokens == () and (await task).finish == "suspended"

    virtual(body)


def test_a_check_may_end_the_run() -> None:
    async def body() -> None:
        judge = Judge("a", "b")
        judge.failure = EngineError("all of them lie")
        engine = judged(judge, "a", "b")
        with pytest.raises(EngineError, match="all of them lie"):
            await engine.generate(request("train/0/0/0"))
        with pytest.raises(EngineError, match="all of them lie"):
            await engine.generate(request("train/0/1/0"))

    virtual(body)
