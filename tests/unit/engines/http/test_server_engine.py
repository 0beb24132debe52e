"""Servers that fail, lie or come and go. That they keep the contract of an engine is in `test_conformance`."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stand_in import StandIn

from kitae.cluster.link import Deadlines
from kitae.engines.base import Completion, Request, Sampled, SamplingParams, WeightUpdate
from kitae.engines.config import EngineConfig
from kitae.engines.http.engine import ServerEngine
from kitae.engines.http.peer import Program
from kitae.engines.http.start import start_servers
from kitae.errors import EngineError, RequestError
from kitae.models.config import ModelConfig
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.processes.status import family_of
from kitae.weights.memory import MemoryPublisher
from kitae.weights.probe import score_probe

TESTS = Path(__file__).parents[3]
LIMITS = Deadlines(start=120, answer=30, silence=2, stall=60, close=5)
LONG = 200


def ask(name: str, tokens: int = 20, **sampling: object) -> Request:
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": tokens, **sampling})  # type: ignore[arg-type]
    return Request(f"train/{name}/0", tuple(range(5, 20)), params, seed=3, share="p")


class Crew:
    """A trainer, stand-ins that run, and the engine over them."""

    def __init__(self, policy: Policy, model: ModelConfig, kind: str) -> None:
        self.policy, self.model, self.kind = policy, model, kind
        self.publisher = MemoryPublisher()
        self.servers: list[StandIn] = []
        self.urls: list[str] = []
        self.engine: ServerEngine

    async def run_servers(self, count: int) -> None:
        for _ in range(count):
            self.servers.append(StandIn(load_policy(self.model), self.kind, end=lambda: None))
            self.urls.append(await self.servers[-1].serve())

    async def start(self, **settings: object) -> ServerEngine:
        config = EngineConfig.model_validate({"kind": self.kind, **settings})
        self.engine = await start_servers(self.model, config, self.publisher, 0, limits=LIMITS)
        return self.engine

    def move(self, seed: int = 1) -> None:
        with torch.no_grad():
            for p in self.policy.model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.02)

    async def publish(self, version: int) -> WeightUpdate:
        tensors = {name: p.detach() for name, p in self.policy.model.named_parameters()}
        return WeightUpdate(version, await asyncio.to_thread(self.publisher.publish, version, tensors))

    def gap(self, done: Completion, prompt: tuple[int, ...]) -> float:
        scored = self.policy.score(torch.tensor(prompt + done.tokens))[len(prompt) - 1 :] / 1
        return float((scored - torch.tensor(done.logprobs)).abs().max())


@asynccontextmanager
async def crew(folder: Path, kind: str, servers: int = 0) -> AsyncIterator[Crew]:
    model = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    made = Crew(load_policy(model), model, kind)
    try:
        await made.run_servers(servers)
        if servers:
            await made.start(urls=made.urls)
        yield made
    finally:
        if hasattr(made, "engine"):
            await made.engine.close()
        await asyncio.gather(*(server.close() for server in made.servers))
        made.publisher.close()


async def told(engine: ServerEngine, tokens: int) -> None:
    while engine.stats().generated_tokens < tokens:
        await asyncio.sleep(0.01)


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("llama")


def started(kind: str) -> str:
    """The words that start a stand-in where the real server would be."""
    path = os.pathsep.join(map(str, (TESTS / "stand_ins", TESTS, TESTS.parent)))
    return f"env PYTHONPATH={path} OMP_NUM_THREADS=1 {sys.executable}"


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
            with pytest.raises(EngineError, match=rf"no server is left; {c.urls[0]}: .*; {c.urls[1]}: "):
                await asyncio.wait_for(engine.generate(ask("7/0")), 60)
            with pytest.raises(EngineError, match="no server is left"):
                await engine.resume()

    asyncio.run(body())


def test_a_killed_server_is_replaced_with_the_weights_of_the_day(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind) as c:
            engine = await c.start(server=started(kind))
            c.move()
            assert await engine.update_weights(await c.publish(4)) == 4
            (peer,) = engine._peers
            assert peer.program is not None
            root, pids = engine._folder.root, family_of(peer.program._process.pid)
            tasks = [asyncio.create_task(engine.generate(ask(f"{i}/0", LONG))) for i in range(3)]
            await told(engine, 30)
            os.kill(pids[-1], signal.SIGKILL)
            done = await asyncio.wait_for(asyncio.gather(*tasks), 120)
            assert all(len(d.tokens) == LONG and set(d.versions) == {4} for d in done)
            (probe,) = await engine.probe()
            assert probe.version == 4 and probe.gap(score_probe(c.policy)) < 1e-4
            assert engine.stats().restarts == 1 and engine._peers[0].name != peer.name
            left = family_of(engine._peers[0].program._process.pid)  # type: ignore[union-attr]
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
                c.engine._seats[0].dialect.request("r", ask("0/0"), version=version) for version in (1, 2)
            )
            assert body["cache_salt"] != later["cache_salt"]

    asyncio.run(body())


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


def test_requests_that_a_server_would_not_survive_are_refused_here(folder: Path, kind: str) -> None:
    async def body() -> None:
        async with crew(folder, kind, 1) as c:
            for wrong, why in (
                (replace(ask("a"), prompt_tokens=(5, 10_000)), r"tokens must be from 0 to 258, got 10000"),
                (replace(ask("a"), prompt_tokens=(5,) * 512), r"a prompt must have fewer than 512 tokens, got 512"),
                (ask("a", top_p=0.5, min_p=0.1), "must be off, got"),
            ):
                with pytest.raises(RequestError, match=why):
                    await c.engine.generate(wrong)
            assert len((await c.engine.generate(ask("a"))).tokens) == 20 and not c.servers[0].dead

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


def test_an_aborted_request_that_nobody_asked_to_end_goes_on(folder: Path) -> None:
    async def body() -> None:
        async with crew(folder, "vllm", 1) as c:
            task = asyncio.create_task(c.engine.generate(ask("0/0", LONG)))
            await told(c.engine, 20)
            (sequence,) = c.servers[0].engine.in_flight()
            await c.servers[0].engine.abort(sequence.request.id)  # by some other user of the server
            assert len((await asyncio.wait_for(task, 60)).tokens) == LONG

    asyncio.run(body())


HOLDS = (
    "import time; from multiprocessing.shared_memory import SharedMemory; m = SharedMemory(create=True, size=64); "
    "print('/dev/shm/' + m.name.lstrip('/'), flush=True); time.sleep(990)"
)


def test_the_memory_of_a_killed_server_is_given_back() -> None:
    async def body() -> None:
        program = await Program.start([sys.executable, "-c", HOLDS], {})
        while not program.words:
            await asyncio.sleep(0.05)
        path = Path(program.words.splitlines()[-1])
        assert path.exists()
        program.note_memory()
        for pid in reversed(family_of(program._process.pid)[1:]):
            os.kill(pid, signal.SIGKILL)
        await program.end()
        assert not path.exists()

    asyncio.run(body())
