"""A pool is kept at the number of engines that is wanted, and nobody serves weights that were not checked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kitae.clock import VirtualLoop
from kitae.engines.base import Capabilities, Completion, Request, SamplingParams, WeightUpdate
from kitae.engines.engine_pool import EnginePool
from kitae.engines.fake import FakeEngine, Pace
from kitae.errors import EngineError, EngineLost, StoreError
from kitae.rl.weight_sync import WeightSync
from kitae.run.assembly import resized
from kitae.store.run_summary import ask_for, asked_for
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe


class Scored(FakeEngine):
    """Scores by the version that it serves, off by `off`; tells what happens to it."""

    capabilities = Capabilities(shares_weights=False, scores=True)

    def __init__(self, off: float = 0.0) -> None:
        super().__init__(lambda r: (7,) * 100, Pace(step=1.0), shares_weights=False)
        self.capabilities = Scored.capabilities
        self.off, self.dead, self.closed, self.served_first = off, False, False, -1
        self.served = 0

    async def generate(self, request: Request) -> Completion:
        if self.dead:
            raise EngineLost("its node is gone")
        self.served_first = self.served if self.served_first < 0 else self.served_first
        return await super().generate(request)

    async def update_weights(self, update: WeightUpdate) -> int:
        assert update.manifest is not None and self._paused, "nothing is sampled while weights are loaded"
        self.served = update.version
        return update.version

    async def probe(self) -> tuple[Probe, ...]:
        return (Probe(self.served, (-float(self.served) - self.off,)),)

    async def die(self) -> None:
        self.dead = True
        await self.suspend()

    async def close(self) -> None:
        self.closed = True
        await super().close()


class Source:
    version = 0

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None:
        self.version = version
        return Manifest(version, None, (), ())

    async def probe(self) -> tuple[float, ...]:
        return (-float(self.version),)


class Site:
    """Where engines are started: at most `places` of them, each in 5 s; `off`: of the next ones."""

    def __init__(self, folder: Path, places: int = 10) -> None:
        self.folder, self.places, self.off = folder, places, 0.0
        self.made: list[Scored] = []
        self.said: list[str] = []
        self.pool = EnginePool(self.start, 1, patience=100)
        self.source = Source()
        self.weights = WeightSync(self.source, self.pool, recompute=False, tolerance=0.1)

    @asynccontextmanager
    async def running(self, version: int, wanted: int = 1) -> AsyncIterator[None]:
        """With one engine at first, which serves this version, where more may be asked for."""
        await self.pool.start()
        await self.weights.hand_over(version)
        if wanted > 1:
            ask_for(self.folder, wanted)
        async with resized(self.pool, self.weights, self.folder, self.said.append):
            yield
        await self.pool.close()

    async def start(self, number: int) -> Scored:
        if self.made:
            await asyncio.sleep(5)
        if sum(not (e.closed or e.dead) for e in self.made) >= self.places:
            raise EngineError("no machine has 1 GPUs")
        self.made.append(Scored(self.off))
        return self.made[-1]

    def ask(self, count: int) -> "list[asyncio.Task[Completion]]":
        asked = [Request(str(i), (1, 2), SamplingParams(max_tokens=60), seed=i) for i in range(count)]
        return [asyncio.create_task(self.pool.generate(r)) for r in asked]


def virtual(body: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body())


def test_from_one_to_three_to_one_by_a_file(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        async with site.running(4):
            tasks = site.ask(6)
            await asyncio.sleep(3)
            ask_for(tmp_path, 3)
            site.source.version = 5  # the trainer has gone on, and nobody was handed that
            await asyncio.sleep(8)
            assert len(site.pool.members) == 3 and [e.served for e in site.made] == [4, 4, 4]
            more = [
                asyncio.create_task(site.pool.generate(Request(f"m{i}", (1,), SamplingParams(max_tokens=9), 1)))
                for i in range(6)
            ]
            await asyncio.sleep(2)
            assert [e.stats().running for e in site.made] == [6, 3, 3]
            await site.weights.hand_over(5)
            assert [e.served for e in site.made] == [5, 5, 5]
            ask_for(tmp_path, 1)
            await asyncio.sleep(3)
            assert site.pool.members == (site.made[0],) and [e.closed for e in site.made] == [False, True, True]
            assert {len((await t).tokens) for t in more} == {9} and {len((await t).tokens) for t in tasks} == {60}
        assert [e.served_first for e in site.made] == [4, 4, 4]
        assert sum("has joined" in line for line in site.said) == 2 and site.said[-1].startswith(
            "an engine has left: 1 of 1"
        )

    virtual(body)


def test_a_lost_engine_is_replaced_and_without_a_place_the_run_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path, places=2)
        async with site.running(1, 2):
            await asyncio.sleep(8)
            assert len(site.pool.members) == 2
            tasks = site.ask(4)
            await asyncio.sleep(3)
            site.places = 1
            await site.made[0].die()
            await asyncio.sleep(70)
            assert len(site.pool.members) == 1 and site.pool.refused == 2, "tried again after 30 s"
            assert sum("goes on with 1 of 2, and tries again every 30 s: no machine has" in s for s in site.said) == 1
            site.places = 2
            await asyncio.sleep(40)
            assert len(site.pool.members) == 2 and site.pool.stats().restarts == 1
            assert {len((await t).tokens) for t in tasks} == {60}

    virtual(body)


def test_who_loses_all_engines_gets_new_ones(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        async with site.running(1, 1):
            tasks = site.ask(3)
            await asyncio.sleep(3)
            await site.made[0].die()
            assert {len((await t).tokens) for t in tasks} == {60}
        assert len(site.made) == 2 and site.made[1].served_first == 1

    virtual(body)


def test_who_serves_other_weights_does_not_join(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        async with site.running(3, 2):
            site.off = 1.0
            await asyncio.sleep(8)
            assert len(site.pool.members) == 1 and site.made[1].closed and site.made[1].served_first == -1
            assert site.pool.refused == 1 and "an engine may not join: the engine must serve version 3" in site.said[0]
            site.off = 0.0
            await asyncio.sleep(60)
            assert len(site.pool.members) == 2

    virtual(body)


def test_one_that_starts_when_the_run_ends_is_closed(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        async with site.running(0, 3):
            await asyncio.sleep(4)
        await asyncio.sleep(10)
        assert len(site.made) == 1

    virtual(body)


def test_one_that_starts_when_it_is_not_wanted_any_more_is_closed(tmp_path: Path) -> None:
    async def body() -> None:
        site = Site(tmp_path)
        async with site.running(0, 3):
            await asyncio.sleep(3)
            ask_for(tmp_path, 1)
            await asyncio.sleep(10)
            assert len(site.made) == 1

    virtual(body)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    for engines in (0, -1, 5000):
        with pytest.raises(StoreError, match=f"from 1 to 4096 engines, got {engines}"):
            ask_for(tmp_path, engines)
    assert asked_for(tmp_path) is None
    for text in ("", "many", "0", "99999"):
        (tmp_path / "engines.txt").write_text(text)
        assert asked_for(tmp_path) is None
