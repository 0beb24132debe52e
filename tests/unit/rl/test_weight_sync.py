"""Handing weights over: published once, sent again when damaged, and never trusted without the probe."""

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kitae.engines.base import Capabilities, WeightUpdate
from kitae.engines.engine_pool import EnginePool
from kitae.engines.fake import FakeEngine
from kitae.errors import EngineError
from kitae.rl.weight_sync import WeightSync
from kitae.weights.base import Manifest
from kitae.weights.probe import Probe
from kitae.weights.shared_memory import MemoryPublisher, MemoryReceiver

OURS = (-1.0, -2.0)


class Source:
    """A trainer with two tensors, whose publications arrive damaged as often as it is told."""

    def __init__(self, mode: str = "full", damage: int = 0) -> None:
        self.publisher = MemoryPublisher(mode)  # type: ignore[arg-type]
        self.tensors = {"a": torch.zeros(1000), "b": torch.ones(10)}
        self.damage = damage
        self.calls: list[tuple[int, bool]] = []

    async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None:
        self.calls.append((version, in_full))
        manifest = await asyncio.to_thread(self.publisher.publish, version, self.tensors, in_full=in_full)
        if self.damage:
            self.damage -= 1
            for descriptor in self.publisher.descriptors:
                os.pwrite(descriptor, b"\xff", 0)
        return manifest

    async def probe(self) -> tuple[float, ...]:
        return OURS


class Scoring(FakeEngine):
    """Counts what happens to it; its probes are off, and its version old, as often as it is told."""

    def __init__(self, source: Source, *, off: int = 0, gap: float = 1.0, behind: int = 0) -> None:
        self.loaded = {name: torch.full_like(t, 9) for name, t in source.tensors.items()}
        receiver = MemoryReceiver(*map(os.dup, source.publisher.descriptors), self.loaded)
        super().__init__(lambda _: (1,), shares_weights=False, receiver=receiver)
        self.capabilities = Capabilities(shares_weights=False, scores=True)
        self.off, self.gap, self.behind = off, gap, behind
        self.events: list[Any] = []

    async def pause(self) -> None:
        self.events.append("pause")
        await super().pause()

    async def resume(self) -> None:
        self.events.append("resume")
        await super().resume()

    async def update_weights(self, update: WeightUpdate) -> int:
        self.events.append((update.version, update.recompute))
        return await super().update_weights(update)

    async def probe(self) -> tuple[Probe, ...]:
        self.events.append("probe")
        off = self.gap if self.off else 0.0
        version = self.stats().version - (1 if self.behind else 0)
        self.off, self.behind = max(0, self.off - 1), max(0, self.behind - 1)
        return (Probe(version, tuple(x + off for x in OURS)),)


def hand_over(source: Source, engine: Any, version: int, recompute: bool = False) -> dict[str, float]:
    sync = WeightSync(source, engine, recompute=recompute, tolerance=0.1)
    return asyncio.run(asyncio.wait_for(sync.hand_over(version), 20))


@pytest.fixture
def make() -> Iterator[Callable[..., Source]]:
    made: list[Source] = []

    def source(**options: Any) -> Source:
        made.append(Source(**options))
        return made[-1]

    yield source
    for each in made:
        each.publisher.close()


def test_an_engine_that_shares_weights_only_gets_the_version() -> None:
    class Nothing:
        async def publish(self, version: int, *, in_full: bool = False) -> Manifest | None:
            raise AssertionError("nothing is to be published")

        async def probe(self) -> tuple[float, ...]:
            raise AssertionError("nothing is to be scored")

    engine = FakeEngine(lambda _: (1,))
    sync = WeightSync(Nothing(), engine, recompute=False, tolerance=0.1)

    async def body() -> dict[str, float]:
        await engine.pause()  # as the trainer does before it changes the weights
        return await sync.hand_over(3)

    assert asyncio.run(body()).keys() == {"sync_seconds"}
    assert engine.stats().version == 3 and not engine._paused


@pytest.mark.parametrize("recompute", [False, True])
def test_it_stands_still_until_the_probe_has_agreed(make: Callable[..., Source], recompute: bool) -> None:
    source = make()
    engine = Scoring(source)
    metrics = hand_over(source, engine, 4, recompute)
    assert engine.events == ["pause", (4, recompute), "probe", "resume"] and source.calls == [(4, False)]
    assert metrics.pop("sync_seconds") > 0
    assert metrics == {
        "sync_bytes": 4040.0, "sync_delta": 0.0, "sync_resent": 0.0, "sync_repaired": 0.0, "probe_gap": 0.0,
    }  # fmt: skip
    assert torch.equal(engine.loaded["a"], source.tensors["a"])


def test_one_publication_for_all_engines(make: Callable[..., Source]) -> None:
    source = make(mode="delta")
    engines = [Scoring(source) for _ in range(3)]
    pool = EnginePool.of(engines)
    hand_over(source, pool, 0)
    source.tensors["a"][:5] = 2
    metrics = hand_over(source, pool, 1)
    assert source.calls == [(0, False), (1, False)], "once for each version"
    assert metrics["sync_bytes"] == 5 * (4 + 4) and metrics["sync_delta"] == 1
    assert metrics["sync_unchanged"] == 1 - 5 / 1010
    assert all(torch.equal(engine.loaded["a"], source.tensors["a"]) for engine in engines)


@pytest.mark.parametrize("times", [1, 2])
def test_damaged_weights_are_sent_again_in_full(
    make: Callable[..., Source], caplog: pytest.LogCaptureFixture, times: int
) -> None:
    source = make(mode="delta", damage=times)
    engine = Scoring(source)
    with caplog.at_level("WARNING", logger="kitae"):
        metrics = hand_over(source, engine, 7)
    assert metrics["sync_resent"] == times and source.calls == [(7, False)] + [(7, True)] * times
    assert len(caplog.messages) == times and "version 7 did not arrive whole" in caplog.text
    assert engine.stats().version == 7 and engine.events[-2:] == ["probe", "resume"]


def test_a_repair_is_counted(make: Callable[..., Source]) -> None:
    source = make(mode="delta")
    engine = Scoring(source)
    hand_over(source, engine, 0)
    source.tensors["b"][0] = 5  # lies behind the byte of the image that is damaged
    source.damage = 1
    metrics = hand_over(source, engine, 1)
    assert (metrics["sync_repaired"], metrics["sync_resent"]) == (0, 1), "neither way was whole"
    source.tensors["b"][0] = 6
    publish = source.publish

    async def damaged(version: int, *, in_full: bool = False) -> Manifest | None:
        manifest = await publish(version, in_full=in_full)
        os.pwrite(source.publisher.descriptors[1], b"\x03", 0)
        return manifest

    source.publish = damaged  # type: ignore[method-assign]
    metrics = hand_over(source, engine, 2)
    assert (metrics["sync_repaired"], metrics["sync_resent"]) == (1, 0)
    assert torch.equal(engine.loaded["b"], source.tensors["b"])


def test_what_never_arrives_ends_the_run(make: Callable[..., Source]) -> None:
    source = make(damage=3)
    engine = Scoring(source)
    with pytest.raises(EngineError, match="version 7 does not reach the engine whole, sent 3 times"):
        hand_over(source, engine, 7)
    assert "resume" not in engine.events


@pytest.mark.parametrize("wrong", [{"off": 1}, {"behind": 1}, {"off": 1, "gap": float("nan")}])
def test_an_engine_that_is_wrong_or_behind_gets_a_second_sync(
    make: Callable[..., Source], wrong: dict[str, Any]
) -> None:
    source = make(mode="delta")
    engine = Scoring(source, **wrong)
    metrics = hand_over(source, engine, 7)
    assert engine.events == ["pause", (7, False), "probe", (7, True), "probe", "resume"]
    assert source.calls == [(7, False), (7, True)] and metrics["sync_resent"] == 1 and metrics["probe_gap"] == 0


def test_one_wrong_engine_of_many_is_found(make: Callable[..., Source]) -> None:
    source = make()
    engines = [Scoring(source), Scoring(source, off=9, gap=0.5), Scoring(source)]
    with pytest.raises(EngineError, match=r"must serve version 2 with log-probs within 0\.1 .* difference of 0\.5, al"):
        hand_over(source, EnginePool.of(engines), 2)
    engines[1].off, engines[1].gap = 9, 0.05
    assert hand_over(source, EnginePool.of(engines), 2)["probe_gap"] == pytest.approx(0.05), "rounding explains it"


def test_an_old_version_that_no_sync_helps_raises(make: Callable[..., Source]) -> None:
    source = make()
    with pytest.raises(EngineError, match=r"must serve version 3 .* serves version 2 with a difference of 0, also"):
        hand_over(source, Scoring(source, behind=9), 3)


def test_the_served_version_is_asserted(make: Callable[..., Source]) -> None:
    class Stubborn(FakeEngine):
        async def update_weights(self, update: WeightUpdate) -> int:
            return 1

    with pytest.raises(AssertionError, match="serves version 1, expected 2"):
        hand_over(make(), Stubborn(lambda _: (1,)), 2)
