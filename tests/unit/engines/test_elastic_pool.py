"""Engines join, leave and are lost while requests are in flight: nothing is lost, nothing is done twice."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.clock import VirtualLoop, now
from kitae.engines.base import Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.engine_pool import EnginePool
from kitae.engines.fake import FakeEngine, Pace
from kitae.errors import EngineError, EngineLost


def answer(request: Request) -> tuple[int, ...]:
    return tuple(hash((request.seed, i)) % 1000 for i in range(40))


class Mortal(FakeEngine):
    """Dies when it is told to, as an engine does whose process is lost: what it sampled is suspended."""

    def __init__(self) -> None:
        super().__init__(answer, Pace(step=1.0))
        self.dead = self.closed = False

    async def die(self) -> None:
        self.dead = True
        await super().suspend()

    def _alive(self) -> None:
        if self.dead:
            raise EngineLost("its node is gone")

    async def generate(self, request: Request) -> Completion:
        self._alive()
        return await super().generate(request)

    async def pause(self) -> None:
        self._alive()
        await super().pause()

    async def resume(self) -> None:
        self._alive()
        await super().resume()

    async def update_weights(self, update: WeightUpdate) -> int:
        self._alive()
        return await super().update_weights(update)

    async def close(self) -> None:
        self.closed = True
        await super().close()


def request(number: int, share: str = "") -> Request:
    return Request(str(number), (1, 2, 3), SamplingParams(max_tokens=20), seed=number, share=share)


def virtual(body: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body())


def check(done: list[Completion], count: int) -> None:
    assert sorted(int(c.id) for c in done) == list(range(count))
    for each in done:
        assert each.tokens == answer(request(int(each.id)))[:20] and each.finish == "length"


def test_from_one_to_three_to_one() -> None:
    async def body() -> None:
        engines = [Mortal() for _ in range(3)]
        pool = EnginePool.of(engines[:1])
        tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(4)]
        await asyncio.sleep(5.5)
        for engine in engines[1:]:
            await pool.join(engine)
        tasks += [asyncio.create_task(pool.generate(request(i))) for i in range(4, 12)]
        await asyncio.sleep(3)
        assert [e.stats().running for e in engines] == [4, 4, 4] and pool.stats().engines == 3
        await pool.leave(engines[0])
        await pool.leave(engines[2])
        assert engines[0].closed and engines[2].closed and pool.members == (engines[1],)
        check(await asyncio.gather(*tasks), 12)
        stats = pool.stats()
        assert stats.generated_tokens == 12 * 20, "what was sampled before is not sampled again"
        assert (stats.engines, stats.restarts, stats.running) == (1, 0, 0)
        assert stats.busy_seconds == pytest.approx(now(), abs=1.5), "the mean of those that there were"
        with pytest.raises(EngineError, match="the last engine of a pool cannot leave"):
            await pool.leave(engines[1])

    virtual(body)


class Filing(Mortal):
    """Has its answers on the disk before it tells of them, and the disk is slow; closed, it fails what is in flight."""

    async def generate(self, request: Request) -> Completion:
        done = await super().generate(request)
        await asyncio.sleep(30)
        if self.closed:
            raise EngineError("the engine was closed")
        return done


def test_what_an_engine_that_leaves_does_not_tell_in_time_is_sampled_elsewhere() -> None:
    async def body() -> None:
        engines = [Mortal(), Filing()]
        pool = EnginePool.of(engines)
        tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(4)]
        await asyncio.sleep(5.5)
        await pool.leave(engines[1])
        assert engines[1].closed
        check(await asyncio.gather(*tasks), 4)

    virtual(body)


def test_an_engine_that_is_lost_is_out_and_its_requests_go_on() -> None:
    async def body() -> None:
        engines = [Mortal(), Mortal()]
        pool = EnginePool.of(engines)
        tasks = [asyncio.create_task(pool.generate(request(i, share=str(i // 2)))) for i in range(4)]
        await asyncio.sleep(5.5)
        await engines[0].die()
        await pool.pause()
        assert pool.members == (engines[1],) and pool.losses == 1
        assert await pool.update_weights(WeightUpdate(1)) == 1
        await pool.resume()
        done = await asyncio.gather(*tasks)
        check(done, 4)
        assert {c.versions for c in done} == {(0,) * 5 + (1,) * 15}
        assert pool.stats().restarts == 1 and engines[0].closed
        check([await pool.generate(request(0))], 1)

    virtual(body)


def test_without_any_engine_requests_wait_for_one_but_not_for_ever() -> None:
    async def body() -> None:
        first, second = Mortal(), Mortal()
        pool = EnginePool.of([first], patience=60)
        tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(4)]
        await asyncio.sleep(5.5)
        await first.die()
        await asyncio.sleep(1)
        assert pool.members == () and pool.stats().waiting == 4 and pool.stats().engines == 0
        assert {id: len(s.tokens) for id, s in pool.progress({"0": 2}).items()} == {"0": 3, "1": 5, "2": 5, "3": 5}
        assert await pool.update_weights(WeightUpdate(7)) == 7 and pool.stats().version == 7
        await pool.abort("3")
        assert (await tasks[3]).finish == "abort" and len((await tasks[3]).tokens) == 5
        await asyncio.sleep(20)
        await pool.join(second)
        check(await asyncio.gather(*tasks[:3]), 3)
        await second.die()
        began, late = now(), asyncio.create_task(pool.generate(request(9)))
        with pytest.raises(EngineError, match="no engine is left, and none was found within 60 s"):
            await late
        assert now() - began == pytest.approx(60)
        waiting = asyncio.create_task(pool.generate(request(8)))
        await asyncio.sleep(1)
        await pool.suspend()
        assert (await waiting).finish == "suspended" and (await waiting).tokens == ()
        waiting = asyncio.create_task(pool.generate(request(8)))
        await asyncio.sleep(1)
        await pool.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting

    virtual(body)


def test_who_joins_a_fleet_that_stands_still_does_too() -> None:
    async def body() -> None:
        engines = [Mortal(), Mortal()]
        pool = EnginePool.of(engines[:1])
        await pool.pause()
        await pool.join(engines[1])
        tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(2)]
        await asyncio.sleep(30)
        assert pool.stats().generated_tokens == 0
        await pool.resume()
        check(await asyncio.gather(*tasks), 2)

    virtual(body)


def test_who_may_not_join() -> None:
    pool = EnginePool.of([Mortal()])
    with pytest.raises(EngineError, match="share the trainer's weights, or none, got both"):
        asyncio.run(pool.join(FakeEngine(answer, shares_weights=False)))
    with pytest.raises(EngineError, match="must be a member of the pool, got another"):
        asyncio.run(pool.leave(Mortal()))


EVENTS = st.lists(st.tuples(st.sampled_from(["join", "leave", "die", "update", "ask"]), st.integers(0, 9)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_whatever_happens_every_request_ends_once_and_whole(events: list[tuple[str, int]]) -> None:
    async def body() -> None:
        pool = EnginePool.of([Mortal(), Mortal()], patience=1000)
        tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(3)]
        version = 0

        async def newcomer() -> None:
            engine = Mortal()
            await engine.update_weights(WeightUpdate(version))
            await pool.join(engine)

        for what, seconds in events:
            await asyncio.sleep(seconds + 0.25)
            alive: list[Any] = list(pool.members)
            if what == "join":
                await newcomer()
            elif what == "leave" and len(alive) > 1:
                await pool.leave(alive[seconds % len(alive)])
            elif what == "die" and alive:
                await alive[seconds % len(alive)].die()
            elif what == "update":
                version += 1
                assert await pool.update_weights(WeightUpdate(version)) == version
            elif what == "ask":
                tasks.append(asyncio.create_task(pool.generate(request(len(tasks)))))
        await newcomer()
        done = await asyncio.gather(*tasks)
        check(done, len(tasks))
        assert all(list(c.versions) == sorted(c.versions) for c in done)
        assert pool.stats().generated_tokens == 20 * len(tasks)
        assert pool._requests == {} and pool._homes == {} and not pool._sharing

    virtual(body)
