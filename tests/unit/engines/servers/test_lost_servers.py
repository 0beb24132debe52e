"""Servers that die, do not come up, or are refused."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from crew import LONG, ask, crew, one, started, told

from kitae.errors import EngineError
from kitae.weights.probe import score_probe
from kitae.workers.process_status import family_of


@pytest.mark.thorough(keep=1)
def test_requests_of_a_lost_server_are_continued_by_the_others(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind, 2) as c:
            engine = c.engine
            requests = [replace(ask(f"{i}/0", LONG), share="") for i in range(6)]
            tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
            await told(engine, 60)
            known = engine.progress({})
            c.servers[0].die()
            done = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert [d.id for d in done] == [r.id for r in requests], "none lost, none double"
            assert all(len(d.tokens) == len(d.logprobs) == len(d.versions) == LONG for d in done)
            for d in done:
                before = known[d.id].tokens
                assert d.tokens[: len(before)] == before, "what was told stays"
            stats = engine.stats()
            assert stats.restarts == 1 and stats.running + stats.waiting == 0
            assert len(await engine.probe()) == 1
            c.servers[1].die()
            with pytest.raises(EngineError, match=rf"no engine is left: {c.urls[0]}: .*; {c.urls[1]}: "):
                await asyncio.wait_for(engine.generate(ask("7/0")), 60)
            with pytest.raises(EngineError, match="no engine is left"):
                await engine.resume()

    asyncio.run(body())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)], indirect=True)
def test_a_killed_server_is_replaced_with_the_weights_of_the_day(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind) as c:
            engine = await c.start(server=started(kind))
            c.move()
            assert await engine.update_weights(await c.publish(4)) == 4
            server = one(engine).server
            assert server.program is not None
            root, pids = one(engine)._folder.root, family_of(server.program._process.pid)
            tasks = [asyncio.create_task(engine.generate(ask(f"{i}/0", LONG))) for i in range(3)]
            await told(engine, 30)
            os.kill(pids[-1], signal.SIGKILL)
            done = await asyncio.wait_for(asyncio.gather(*tasks), 120)
            assert all(len(d.tokens) == LONG and set(d.versions) == {4} for d in done)
            (probe,) = await engine.probe()
            assert probe.version == 4 and probe.gap(score_probe(c.policy)) < 1e-4
            assert engine.stats().restarts == 1 and one(engine).name != server.name
            left = family_of(one(engine).server.program._process.pid)  # type: ignore[union-attr]
            await engine.close()
            assert not any(os.path.exists(f"/proc/{pid}") for pid in (*pids, *left)), "no orphans"
            assert not root.exists(), "and no memory"

    asyncio.run(body())


def test_a_server_that_does_not_come_up_is_refused_with_its_last_words(folder: Path) -> None:
    async def body() -> None:
        async with crew(folder, "vllm") as c:
            with pytest.raises(EngineError, match=r"ended before it was ready: exit status 1; .*\n.*No module named"):
                await c.start(server=f"env PYTHONPATH= {sys.executable} -S")

    asyncio.run(body())


def test_a_refused_server_is_known_by_what_it_answered(folder: Path) -> None:
    async def body() -> None:
        async with crew(folder, "vllm", 2) as c:
            await asyncio.gather(*(c.engine.generate(replace(ask(f"{i}/1"), share="")) for i in range(4)))
            found = [c.engine.sources(f"train/{i}/1") for i in range(4)]
            assert {name for names in found for name in names} == set(c.urls)
            assert c.engine.sources("train/9/1") == frozenset()
            (bad,) = found[0]
            await c.engine.refuse(bad, "it lies")
            await asyncio.gather(*(c.engine.generate(replace(ask(f"{i}/2"), share="")) for i in range(4)))
            assert all(c.engine.sources(f"train/{i}/2") == set(c.urls) - {bad} for i in range(4))

    asyncio.run(body())
