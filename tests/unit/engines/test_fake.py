"""What the fake engine answers, and when. That it keeps the contract of `Engine` is in `test_conformance`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from kitae.clock import VirtualLoop, now
from kitae.engines.base import Completion, EngineStats, Request, SamplingParams, WeightUpdate
from kitae.engines.fake import FakeEngine, Pace
from kitae.errors import RequestError

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
