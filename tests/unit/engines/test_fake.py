"""The fake engine keeps the contract of `Engine`, so that what is tested with it holds with a real one."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from kitae.clock import VirtualLoop, now
from kitae.engines.base import Completion, Engine, EngineStats, Request, SamplingParams, WeightUpdate
from kitae.engines.fake import FakeEngine, Pace
from kitae.errors import EngineError, RequestError

T = TypeVar("T")
STOP = 2
LONG = list(range(100, 140))


def request(id: str = "0/0", max_tokens: int = 64, prompt: tuple[int, ...] = (1, 5, 9)) -> Request:
    return Request(id, prompt, SamplingParams(max_tokens=max_tokens, stop_tokens=(STOP,)), seed=0)


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(10):
            return await body()

    return asyncio.run(limited())


def slow(**options: Any) -> FakeEngine:
    return FakeEngine(lambda _: LONG, Pace(step=0.002), **options)


async def generated(engine: Engine, tokens: int) -> None:
    while engine.stats().generated_tokens < tokens:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("answer", "max_tokens", "tokens", "finish"),
    [
        ([7, 8, STOP], 64, (7, 8, STOP), "stop"),
        ([7, STOP, 8], 64, (7, STOP), "stop"),
        ([7, 8], 64, (7, 8), "stop"),
        ([], 64, (), "stop"),
        ([7, 8, 9, 10], 3, (7, 8, 9), "length"),
        ([7, 8, STOP], 3, (7, 8, STOP), "stop"),
        ([7, 8, 9, STOP], 3, (7, 8, 9), "length"),
    ],
)
def test_how_an_answer_ends(answer: list[int], max_tokens: int, tokens: tuple[int, ...], finish: str) -> None:
    engine = FakeEngine(lambda _: answer, version=3)
    found = run(lambda: engine.generate(request(max_tokens=max_tokens)))
    assert found == Completion("0/0", tokens, (-1.0,) * len(tokens), (3,) * len(tokens), finish)  # type: ignore[arg-type]


def test_the_answer_is_a_function_of_the_request() -> None:
    engine = FakeEngine(lambda r: [*r.prompt_tokens, r.seed])

    async def body() -> list[Completion]:
        requests = [replace(request(str(i), prompt=(i + 10,)), seed=i + 50) for i in range(20)]
        return await asyncio.gather(*map(engine.generate, requests))

    found = run(body)
    assert [c.id for c in found] == [str(i) for i in range(20)]
    assert [c.tokens for c in found] == [(i + 10, i + 50) for i in range(20)]


def test_a_weight_update_in_flight_changes_the_version_of_later_tokens() -> None:
    engine = slow(version=4)

    async def body() -> Completion:
        running = asyncio.create_task(engine.generate(request()))
        await generated(engine, 3)
        assert await engine.update_weights(WeightUpdate(5)) == 5
        assert engine.stats().version == 5
        return await running

    found = run(body)
    assert found.tokens == tuple(LONG)
    assert set(found.versions) == {4, 5}
    assert list(found.versions) == sorted(found.versions)
    assert found.versions.count(4) >= 3


def test_no_token_is_sampled_between_pause_and_resume() -> None:
    engine = slow()

    async def body() -> None:
        before = asyncio.create_task(engine.generate(request("before")))
        await generated(engine, 3)
        await engine.pause()
        count = engine.stats().generated_tokens
        during = asyncio.create_task(engine.generate(request("during")))
        await asyncio.sleep(0.03)
        assert engine.stats().generated_tokens == count
        assert not before.done() and not during.done()
        assert engine.stats().running == 2
        await engine.update_weights(WeightUpdate(1))
        await engine.resume()
        first, second = await before, await during
        assert first.tokens == second.tokens == tuple(LONG)
        assert first.versions == (0,) * count + (1,) * (len(LONG) - count)
        assert second.versions == (1,) * len(LONG)

    run(body)


@pytest.mark.parametrize("paused", [False, True])
def test_abort_returns_what_was_sampled(paused: bool) -> None:
    engine = slow()

    async def body() -> None:
        running = asyncio.create_task(engine.generate(request("a")))
        other = asyncio.create_task(engine.generate(request("b")))
        await generated(engine, 6)
        if paused:
            await engine.pause()
        await engine.abort("a")
        found = await running
        assert found.finish == "abort"
        assert found.tokens == tuple(LONG[: len(found.tokens)])
        assert 0 < len(found.tokens) < len(LONG)
        await engine.resume()
        assert (await other).tokens == tuple(LONG)

    run(body)


def test_park_and_continue() -> None:
    async def run() -> None:
        engine = FakeEngine(lambda r: [1, 2, 3, 4, 5, 6], Pace(step=0.01))
        request = Request("a", (1,), SamplingParams(max_tokens=10), 0)
        task = asyncio.create_task(engine.generate(request))
        while engine.stats().generated_tokens < 2:
            await asyncio.sleep(0.001)
        await engine.park()
        part = await task
        assert part.finish == "parked" and 2 <= len(part.tokens) < 6
        await engine.update_weights(WeightUpdate(5))
        whole = await engine.generate(replace(request, prior=part.sampled))
        assert whole.tokens == (1, 2, 3, 4, 5, 6) and whole.finish == "stop"
        assert whole.versions == part.versions + (5,) * (6 - len(part.tokens))

    asyncio.run(run())


def test_abort_before_the_first_token() -> None:
    engine = slow()

    async def body() -> Completion:
        await engine.pause()
        running = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0.01)
        await engine.abort("a")
        return await running

    assert run(body) == Completion("a", (), (), (), "abort")


def test_abort_of_nobody_is_nothing() -> None:
    engine = FakeEngine(lambda _: [7])

    async def body() -> Completion:
        await engine.abort("0/0")
        return await engine.generate(request())

    assert run(body).finish == "stop"


def test_an_impossible_request_leaves_the_others_alone() -> None:
    def respond(r: Request) -> list[int]:
        if r.id == "bad":
            raise RequestError("too long")
        return [7, STOP]

    engine = FakeEngine(respond)

    async def body() -> list[Any]:
        bad = [request("bad"), request("empty", prompt=())]
        return await asyncio.gather(*map(engine.generate, [request("a"), *bad, request("b")]), return_exceptions=True)

    first, refused, empty, second = run(body)
    assert first.tokens == second.tokens == (7, STOP)
    assert isinstance(refused, RequestError)
    assert isinstance(empty, RequestError)
    assert "'empty'" in str(empty) and "empty" in str(empty)
    assert engine.stats().running == 0


def test_an_id_is_unique_in_flight_and_free_again_afterwards() -> None:
    engine = slow()

    async def body() -> None:
        running = asyncio.create_task(engine.generate(request("a", max_tokens=5)))
        await generated(engine, 1)
        with pytest.raises(RequestError, match="'a' is in flight already"):
            await engine.generate(request("a"))
        await running
        assert (await engine.generate(request("a", max_tokens=5))).finish == "length"

    run(body)


def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    engine = slow()

    async def body() -> None:
        running = asyncio.create_task(engine.generate(request("a")))
        await generated(engine, 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine.stats().running == 0
        assert (await engine.generate(request("a", max_tokens=2))).tokens == tuple(LONG[:2])

    run(body)


@pytest.mark.parametrize("paused", [False, True])
def test_close_fails_what_is_pending_and_refuses_what_comes(paused: bool) -> None:
    engine = slow()

    async def body() -> None:
        running = asyncio.create_task(engine.generate(request("a")))
        await generated(engine, 2)
        if paused:
            await engine.pause()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("b"))
        await engine.close()

    run(body)


def virtual(body: Callable[[], Awaitable[T]]) -> T:
    """On a clock that jumps, so that times are exact."""

    async def run() -> T:
        return await body()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def test_counters() -> None:
    async def body() -> EngineStats:
        engine = FakeEngine(lambda _: [7, 8, STOP], Pace(step=0.001), version=2)
        await asyncio.gather(*(engine.generate(request(str(i))) for i in range(4)))
        return engine.stats()

    stats = virtual(body)
    assert (stats.version, stats.prompt_tokens, stats.generated_tokens, stats.running) == (2, 12, 12, 0)
    assert stats.busy_seconds == pytest.approx(0.003)


def timed(pace: Pace, lengths: list[int], *, share: str = "", prompt: int = 100) -> tuple[list[float], EngineStats]:
    """When each of some requests that come at once ends."""

    async def body() -> tuple[list[float], EngineStats]:
        engine = FakeEngine(lambda r: LONG[: r.seed], pace)

        async def one(index: int, length: int) -> float:
            asked = replace(request(str(index), prompt=(1,) * prompt), seed=length, share=share)
            assert len((await engine.generate(asked)).tokens) == length
            return now()

        return await asyncio.gather(*(one(i, n) for i, n in enumerate(lengths))), engine.stats()

    return virtual(body)


def test_a_step_takes_longer_the_more_sequences_it_has() -> None:
    ends, stats = timed(Pace(step=1.0, sequence=0.5), [10, 4, 10])
    first = 4 * (1 + 3 * 0.5)
    assert ends == pytest.approx([first + 6 * 2, first, first + 6 * 2])
    assert stats.busy_seconds == pytest.approx(ends[0]) and stats.generated_tokens == 24


def test_prompts_take_time_and_shared_ones_only_once() -> None:
    ends, stats = timed(Pace(step=1.0, prefill=50), [5, 5])
    assert ends == pytest.approx([9.0, 9.0]) and stats.prompt_tokens == 200
    ends, stats = timed(Pace(step=1.0, prefill=50), [5, 5], share="group")
    assert ends == pytest.approx([7.0, 7.0])
    assert (stats.prompt_tokens, stats.prompt_tokens_shared) == (100, 100)


def test_what_exceeds_the_batch_waits() -> None:
    ends, _ = timed(Pace(step=1.0, batch=2), [5, 3, 4])
    assert ends == pytest.approx([5.0, 3.0, 7.0])


def test_it_stands_still_for_new_weights() -> None:
    async def body(recompute: bool) -> tuple[float, Completion, float]:
        engine = FakeEngine(lambda _: LONG, Pace(step=1.0, prefill=10, update=3.0))
        running = asyncio.create_task(engine.generate(request(prompt=(1,) * 10)))
        await asyncio.sleep(11.5)  # a second of prefill, 10 steps and a half
        await engine.update_weights(WeightUpdate(1, recompute=recompute))
        updated = now()
        return updated, await running, now()

    updated, found, end = virtual(lambda: body(False))
    assert (updated, end) == pytest.approx((14.5, 44.0))
    assert found.versions == (0,) * 10 + (1,) * 30
    *_, end = virtual(lambda: body(True))
    assert end == pytest.approx(44.0 + (10 + 10) / 10), "the prompt and what was sampled are computed once more"


def test_it_dies_and_goes_on() -> None:
    async def body(pace: Pace) -> tuple[list[Completion], float, EngineStats]:
        engine = FakeEngine(lambda _: LONG, pace, seed=3)
        found = await asyncio.gather(*(engine.generate(request(str(i))) for i in range(3)))
        await asyncio.sleep(0)
        return found, now(), engine.stats()

    found, end, stats = virtual(lambda: body(Pace(step=1.0, life=15.0, restart=5.0)))
    assert [c.tokens for c in found] == [tuple(LONG)] * 3
    assert stats.restarts > 0
    assert end == pytest.approx(len(LONG) + 5 * stats.restarts)
    assert stats.busy_seconds == pytest.approx(len(LONG))
    *_, whole, unharmed = virtual(lambda: body(Pace(step=1.0)))
    assert whole == len(LONG) and unharmed.restarts == 0
