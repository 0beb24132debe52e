"""Weights that do not arrive, or not where they should, and what was computed with the ones before."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from crew import ask, crew, one

from kitae.engines.base import WeightUpdate
from kitae.errors import EngineError
from kitae.weights.probe import score_probe


@pytest.mark.thorough(keep=1)
def test_an_unknown_tensor_is_refused_before_a_server_hears_of_it(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind, 1) as c:
            update = await c.publish(1)
            manifest = update.manifest
            assert manifest is not None
            wrong = replace(manifest, entries=(replace(manifest.entries[0], name="unknown"), *manifest.entries[1:]))
            c.publisher._manifest = wrong
            c.servers[0].calls.clear()
            with pytest.raises(EngineError, match="weight update 1 names an unknown parameter 'unknown'"):
                await c.engine.update_weights(WeightUpdate(1, wrong))
            assert not [call for call in c.servers[0].calls if "pause" in call or "rpc" in call or "weights" in call]
            assert set((await c.engine.generate(ask("0/0"))).versions) == {0}

    asyncio.run(body())


@pytest.mark.thorough(keep=1)
def test_a_server_with_other_weights_than_it_says_does_not_join(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind) as c:
            await c.run_servers(2)
            c.servers[1].stale = True
            with torch.no_grad():
                next(c.servers[1].policy.model.parameters()).mul_(2)
            with pytest.raises(EngineError, match=rf"{c.urls[1]} cannot be used: it must serve version 0 with log"):
                await c.start(urls=c.urls)

    asyncio.run(body())


@pytest.mark.thorough(keep=1)
def test_a_server_that_fails_at_an_update_is_never_resumed(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind, 2) as c:
            c.move()
            await c.engine.pause()
            update = await c.publish(1)
            c.servers[0].die()
            c.servers[0].calls.clear()
            assert await c.engine.update_weights(update) == 1
            await c.engine.resume()
            done = await c.engine.generate(replace(ask("0/0"), share=""))
            assert set(done.versions) == {1}
            assert not [call for call in c.servers[0].calls if "resume" in call or "continue" in call]
            assert [probe.version for probe in await c.engine.probe()] == [1]

    asyncio.run(body())


@pytest.mark.thorough(keep=1)
def test_a_server_that_keeps_its_old_weights_is_found_at_the_update(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind, 2) as c:
            c.servers[0].stale = True
            c.move()
            assert await c.engine.update_weights(await c.publish(1)) == 1
            (probe,) = await c.engine.probe()
            assert probe.version == 1 and probe.gap(score_probe(c.policy)) < 1e-4
            done = await asyncio.gather(*(c.engine.generate(replace(ask(f"{i}/0"), share="")) for i in range(4)))
            assert all(set(d.versions) == {1} for d in done) and c.engine.stats().restarts == 1
            assert {name for i in range(4) for name in c.engine.sources(f"train/{i}/0")} == {c.urls[1]}

    asyncio.run(body())


@pytest.mark.thorough(keep=1)
def test_a_prompt_computed_before_an_update_is_not_used_after_it(folder: Path, kind: str) -> None:
    """Every request has the salt of its version, and the cache is emptied at every update."""

    async def body() -> None:
        async with crew(folder, kind, 1) as c:
            for version in (1, 2):
                c.move(version)
                await c.engine.update_weights(await c.publish(version))
                assert not c.servers[0].seen, "the cache is empty"
                done = await c.engine.generate(ask("0/0", temperature=1.0))
                assert c.gap(done, tuple(range(5, 20))) < 1e-4
            route = "/reset_prefix_cache" if kind == "vllm" else "/flush_cache"
            assert c.servers[0].calls.count(route) == 3, "at the start and at every update"
            (_, body), (_, later) = (
                one(c.engine).server.dialect.request("r", ask("0/0"), version=version) for version in (1, 2)
            )
            assert body["cache_salt"] != later["cache_salt"]

    asyncio.run(body())
