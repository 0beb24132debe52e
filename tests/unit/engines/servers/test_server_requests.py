"""Requests that are continued, whoever ended them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from crew import LONG, ask, crew, told

from kitae.engines.base import Sampled
from kitae.engines.servers.server_engine import Stopwatch


def test_a_continued_request_gets_a_seed_of_its_own(folder: Path) -> None:
    async def body() -> None:
        async with crew(folder, "vllm", 1) as c:
            whole = await c.engine.generate(ask("0/0", 40))
            first = whole.sampled
            part = Sampled(first.tokens[:10], first.logprobs[:10], first.versions[:10])
            again = await c.engine.generate(replace(ask("0/0", 40), prior=part))
            assert again.tokens[:10] == whole.tokens[:10] and len(again.tokens) == 40
            assert again.tokens[10:20] != whole.tokens[:10], "not the first draws again"
            twice = await c.engine.generate(replace(ask("0/0", 40), prior=part))
            assert twice.tokens == again.tokens, "but always the same"

    asyncio.run(body())


@pytest.mark.thorough
def test_an_aborted_request_that_nobody_asked_to_end_goes_on(folder: Path) -> None:
    async def body() -> None:
        async with crew(folder, "vllm", 1) as c:
            task = asyncio.create_task(c.engine.generate(ask("0/0", LONG)))
            await told(c.engine, 20)
            (sequence,) = c.servers[0].engine.in_flight()
            await c.servers[0].engine.abort(sequence.request.id)  # by some other user of the server
            assert len((await asyncio.wait_for(task, 60)).tokens) == LONG

    asyncio.run(body())


def test_a_stopwatch_counts_while_it_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch = Stopwatch()
    for now, so in ((1.0, True), (2.0, True), (4.0, False), (9.0, False), (10.0, True)):  # noqa: B007
        watch.note(so)
    now = 10.5
    assert watch.seconds == 3.5
