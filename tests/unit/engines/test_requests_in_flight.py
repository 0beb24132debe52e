"""Requests in flight outlive whoever works on them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitae.engines.base import Completion, Request, Sampled, SamplingParams
from kitae.engines.requests_in_flight import Flight, Ledger
from kitae.errors import EngineError, RequestError


def request(id: str = "a", prior: Sampled | None = None) -> Request:
    return Request(id, (1, 2), SamplingParams(max_tokens=9), seed=5, prior=prior or Sampled())


def sampled(*tokens: int) -> Sampled:
    return Sampled(tokens, tuple(-float(t) for t in tokens), (3,) * len(tokens))


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 10))  # type: ignore[arg-type]


def result(flight: Flight[Any]) -> Completion:
    assert flight.future.done()
    return flight.future.result()


def test_an_id_is_in_flight_once_and_numbers_are_never_used_again() -> None:
    async def body() -> None:
        ledger: Ledger[str] = Ledger()
        with ledger.enter(request()) as one:
            with pytest.raises(RequestError, match="'a' is in flight already"), ledger.enter(request()):
                pass
            assert len(ledger) == 1 and ledger.find(one.number) is one and ledger.open() == [one]
        assert len(ledger) == 0 and ledger.find(one.number) is None
        with pytest.raises(ValueError), ledger.enter(request()) as two:
            raise ValueError
        assert two.number != one.number and len(ledger) == 0

    run(body)


def test_a_request_is_given_to_another_holder_with_what_was_told() -> None:
    """Without the last token: it may have been the one that ended it."""

    async def body() -> None:
        ledger: Ledger[str] = Ledger()
        first = request(prior=sampled(7))
        with ledger.enter(first) as flight:
            assert ledger.issue(flight, "one") == first
            ledger.grow(flight.number, 1, sampled(8, 9))
            ledger.grow(flight.number, 3, sampled(10, 11))
            assert ledger.progress({}) == {"a": sampled(7, 8, 9, 10)}
            assert ledger.progress({"a": 3}) == {"a": sampled(10)}
            ledger.lose("one")
            assert flight.holder is None and ledger.open() == [flight]
            assert ledger.issue(flight, "two") == replace(first, prior=sampled(7, 8, 9, 10))
            ledger.grow(flight.number, 4, sampled(12))
            assert ledger.progress({}) == {"a": sampled(7, 8, 9, 10)}
            flight.complete(sampled(7, 8, 9, 10, 12), "stop")
            assert result(flight) == Completion(
                "a", (7, 8, 9, 10, 12), (-7.0, -8.0, -9.0, -10.0, -12.0), (3,) * 5, "stop"
            )
            assert ledger.open() == []
        ledger.grow(flight.number, 5, sampled(13))  # its caller is gone

    run(body)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=12), st.integers(0, 3))
def test_what_was_told_once_is_kept(news: list[tuple[int, bool]], prior: int) -> None:
    """Whatever is told and lost, in any order: progress is a prefix of the one true answer, and never shrinks."""
    answer = tuple(range(100, 200))

    async def body() -> None:
        ledger: Ledger[int] = Ledger()
        with ledger.enter(request(prior=sampled(*answer[:prior]))) as flight:
            holder, told, known = 0, len(ledger.issue(flight, 0).prior.tokens), prior
            for count, dies in news:
                ledger.grow(flight.number, told, sampled(*answer[told : told + count]))
                told += count
                if dies:
                    ledger.lose(holder)
                    holder += 1
                    told = len(ledger.issue(flight, holder).prior.tokens)
                now = ledger.progress({})["a"]
                assert now == sampled(*answer[: len(now.tokens)]) and len(now.tokens) >= known
                known = len(now.tokens)

    run(body)


def test_what_nobody_works_on_ends_at_once_and_the_holder_is_asked_for_the_rest() -> None:
    async def body() -> None:
        ledger: Ledger[str] = Ledger()
        with ledger.enter(request("a")) as a, ledger.enter(request("b")) as b, ledger.enter(request("c")) as c:
            ledger.issue(a, "one")
            ledger.issue(b, "lost")
            ledger.grow(b.number, 0, sampled(4, 5))
            assert ledger.end_early("abort", "one", "nobody") is False
            assert ledger.end_early("abort", "one", "a") is True and not a.future.done()
            assert ledger.end_early("suspended", "one") is True
            assert result(b) == Completion("b", (4,), (-4.0,), (3,), "suspended")
            assert result(c) == Completion("c", (), (), (), "suspended") and not a.future.done()
            ledger.grow(a.number, 0, sampled(1, 2, 3))
            ledger.lose("one")  # before it answered
            assert result(a).tokens == (1, 2) and result(a).finish == "suspended"
            assert ledger.open() == [] and ledger.end_early("suspended", None) is False

    run(body)


def test_failing_all_spares_who_has_a_result() -> None:
    async def body() -> None:
        ledger: Ledger[str] = Ledger()
        with ledger.enter(request("a")) as a, ledger.enter(request("b")) as b:
            a.complete(sampled(1), "stop")
            ledger.fail(EngineError("gone"))
            assert result(a).finish == "stop"
            b.complete(sampled(1), "stop")  # too late
            with pytest.raises(EngineError, match="gone"):
                await b.future

    run(body)


def test_a_caller_that_is_gone_is_not_told() -> None:
    async def body() -> None:
        ledger: Ledger[str] = Ledger()
        flights = []

        async def call() -> None:
            with ledger.enter(request()) as flight:
                flights.append(flight)
                await flight.future

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        flights[0].complete(sampled(1), "stop")
        flights[0].settle(RequestError("no"))
        assert flights[0].future.cancelled() and len(ledger) == 0

    run(body)
