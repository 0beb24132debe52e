"""Weights through shared memory: what arrives has the same bits, whatever was sent and however, or it is noticed."""

import asyncio
import json
import os
import threading
import time
from bisect import bisect_right

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Manifest
from kitae.weights.layout import starts
from kitae.weights.shared_memory import MemoryPublisher, MemoryReceiver

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float16: torch.int16}
LIMIT = 1024  # bytes of a bucket: the small tensors share one, the large ones have several


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (97, 33), "norm": (7,), "bias": (), "empty": (0,), "head": (5000,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.view(-1).view(DTYPES[t.dtype]) for name, t in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    left, right = bits(a), bits(b)
    return all(torch.equal(left[name], right[name]) for name in left)


def through_json(manifest: Manifest) -> Manifest:
    return Manifest.of(json.loads(json.dumps(manifest.record())))


class Engines:
    """A publisher and some receivers in one process, as several would be: manifests go through JSON."""

    def __init__(self, source: dict[str, Tensor], count: int = 1, mode: str = "delta", limit: int = LIMIT) -> None:
        self.source = source
        self.publisher = MemoryPublisher(mode, limit=limit)  # type: ignore[arg-type]
        self.loaded: list[dict[str, Tensor]] = []
        self.receivers: list[MemoryReceiver] = []
        for _ in range(count):
            self.join()

    def join(self) -> MemoryReceiver:
        self.loaded.append({name: torch.zeros_like(t) for name, t in self.source.items()})
        self.receivers.append(MemoryReceiver(*map(os.dup, self.publisher.descriptors), self.loaded[-1]))
        return self.receivers[-1]

    def publish(self, version: int, *, in_full: bool = False) -> Manifest:
        return through_json(self.publisher.publish(version, self.source, in_full=in_full))

    def send(self, version: int) -> Manifest:
        manifest = self.publish(version)
        self.damaged = [receiver.fetch(manifest) for receiver in self.receivers]
        return manifest

    def whole(self) -> bool:
        return not any(self.damaged) and all(same(self.source, loaded) for loaded in self.loaded)

    def change(self, step: int = 9) -> None:
        for tensor in bits(self.source).values():
            tensor[::step] ^= 5

    def close(self) -> None:
        self.publisher.close()
        for receiver in self.receivers:
            receiver.close()


def flip(descriptor: int, offset: int) -> None:
    byte = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte[0] ^ 0x40]), offset)


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.45, 0.9]), min_size=1, max_size=12),
    limit=st.sampled_from([512, 4096, 2**20]),
    seed=st.integers(0, 2**20),
)
def test_many_updates_arrive_bit_for_bit(dtype: torch.dtype, shares: list[float], limit: int, seed: int) -> None:
    source = weights(dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    engines = Engines(source, count=2, limit=limit)
    assert engines.send(0).mode == "full" and engines.whole()
    for version, share in enumerate(shares, 1):
        differs = values = 0
        for tensor in bits(source).values():  # any bits: NaN, infinities and -0 too
            before = tensor.clone()
            hit = torch.rand(tensor.shape, generator=generator) < share
            tensor[hit] = torch.randint(-(2**15), 2**15, (int(hit.sum()),), generator=generator).to(tensor.dtype)
            differs, values = differs + int((tensor != before).sum()), values + tensor.numel()
        manifest = engines.send(version)
        assert engines.whole() and [r.version for r in engines.receivers] == [version] * 2
        assert (manifest.mode == "delta") == (differs <= 0.5 * values)
        if manifest.unchanged is not None:
            assert manifest.unchanged == pytest.approx(1 - differs / values)
            assert manifest.bytes <= sum(t.nbytes for t in source.values())
    assert all(receiver.repaired == 0 for receiver in engines.receivers)
    engines.close()


def test_a_sparse_update_is_small() -> None:
    engines = Engines(weights())
    engines.send(0)
    bits(engines.source)["head"][[3, 77]] += 1
    manifest = engines.send(1)
    assert (manifest.mode, manifest.base, [p.kind for p in manifest.parts]) == ("delta", 0, ["positions"])
    assert manifest.bytes == 2 * (4 + 2) and manifest.unchanged == 1 - 2 / (97 * 33 + 7 + 1 + 5000)
    assert engines.send(2).bytes == 0
    assert engines.whole()
    engines.close()


def test_mode_full_never_compares() -> None:
    engines = Engines(weights(), mode="full")
    assert [engines.send(v).mode for v in range(3)] == ["full"] * 3
    engines.close()


def test_in_full_writes_the_image_anew() -> None:
    engines = Engines(weights())
    engines.send(0)
    late, manifest = engines.join(), engines.publish(1)
    flip(engines.publisher.descriptors[0], 0)
    assert manifest.mode == "delta" and late.fetch(manifest) == (0,)
    again = engines.publish(1, in_full=True)
    assert again.mode == "full" and late.fetch(again) == () and same(engines.source, engines.loaded[-1])
    assert engines.send(2).mode == "delta" and engines.whole()
    engines.close()


def test_published_once_for_all_whenever_they_come() -> None:
    """One has the base and applies the delta; one joins late and one has missed a version: they load the image."""
    engines = Engines(weights(), count=2)
    engines.send(0)
    engines.change()
    engines.receivers[0].fetch(engines.publish(1))
    engines.change()
    late = engines.join()
    manifest = engines.publish(2)
    assert manifest.base == 1 and 0 < manifest.bytes < sum(t.nbytes for t in engines.source.values())
    engines.damaged = [receiver.fetch(manifest) for receiver in engines.receivers]
    assert engines.whole() and late.version == 2
    assert [receiver.repaired for receiver in engines.receivers] == [0, 0, 0]
    engines.close()


def test_who_has_the_base_does_not_read_the_image() -> None:
    engines = Engines(weights())
    engines.send(0)
    engines.change()
    manifest = engines.publish(1)
    flip(engines.publisher.descriptors[0], 0)
    assert engines.receivers[0].fetch(manifest) == () and same(engines.source, engines.loaded[0])
    assert engines.join().fetch(manifest) == (0,)
    engines.close()


def test_every_flipped_byte_of_the_image_is_noticed() -> None:
    engines = Engines(weights())
    manifest = engines.send(0)
    receiver, loaded, image = engines.receivers[0], engines.loaded[0], engines.publisher.descriptors[0]
    begin, pads = starts([bucket.bytes for bucket in manifest.buckets]), 0
    for offset in range(0, os.fstat(image).st_size, 37):
        flip(image, offset)
        damaged = receiver.fetch(manifest)
        assert (not damaged) == same(engines.source, loaded)
        assert damaged in ((), (bisect_right(begin, offset) - 1,)), "and only its bucket is damaged"
        assert receiver.version == (0 if not damaged else None)
        pads += not damaged  # between tensors, where nothing is
        flip(image, offset)
    assert pads < manifest.bytes / 37 / 5
    engines.close()


def test_a_damaged_delta_is_repaired_from_the_image() -> None:
    engines = Engines(weights())
    engines.send(0)
    kept = {name: t.clone() for name, t in engines.loaded[0].items()}
    engines.change()
    manifest = engines.publish(1)
    receiver, loaded, delta = engines.receivers[0], engines.loaded[0], engines.publisher.descriptors[1]
    hits = 0
    for offset in range(0, os.fstat(delta).st_size, 37):
        flip(delta, offset)
        for name, tensor in kept.items():
            loaded[name].copy_(tensor)
        receiver.version, before = 0, receiver.repaired
        assert receiver.fetch(manifest) == () and same(engines.source, loaded)
        hits += receiver.repaired > before
        flip(delta, offset)
    assert hits > 0.8 * manifest.bytes / 37, "what is between parts does no harm"
    engines.close()


def test_damage_on_both_ways_is_not_hidden() -> None:
    engines = Engines(weights())
    engines.send(0)
    engines.change()
    manifest = engines.publish(1)
    receiver = engines.receivers[0]
    for descriptor in engines.publisher.descriptors:
        flip(descriptor, 0)
    assert receiver.fetch(manifest) == (0,) and receiver.version is None
    engines.publish(1, in_full=True)
    assert receiver.fetch(manifest) == () and receiver.version == 1, "a broken one loads the image, delta or not"
    engines.close()


def test_a_memory_that_is_too_small_is_damage() -> None:
    engines = Engines(weights())
    manifest = engines.publish(0)
    os.ftruncate(engines.publisher.descriptors[0], 2 * LIMIT)
    assert engines.receivers[0].fetch(manifest) == tuple(range(2, len(manifest.buckets)))
    engines.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": torch.zeros(1)}, "weight update 0 names an unknown parameter 'more'"),
        ({"norm": torch.zeros(7)}, "weight update 0: 'norm' must have dtype bfloat16, got float32"),
        ({"norm": torch.zeros(8, dtype=torch.bfloat16)}, r"weight update 0: 'norm' must have shape \(7,\), got \(8,\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_touched(change: dict[str, Tensor], message: str) -> None:
    engines = Engines(weights())
    manifest = engines.publisher.publish(0, engines.source | change)
    with pytest.raises(EngineError, match=message):
        engines.receivers[0].fetch(manifest)
    assert not any(bool(t.any()) for t in engines.loaded[0].values())
    engines.close()


def test_other_tensors_are_refused() -> None:
    publisher = MemoryPublisher()
    publisher.publish(0, {"a": torch.ones(3), "b": torch.ones(3)})
    for other in ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(4)}):
        with pytest.raises(EngineError, match="same tensors as the first; 'b' differs"):
            publisher.publish(1, other)
    with pytest.raises(EngineError, match="same tensors as the first; their order differs"):
        publisher.publish(1, {"b": torch.ones(3), "a": torch.ones(3)})
    publisher.close()
    with pytest.raises(EngineError, match="version 1 cannot be published: the publisher is closed"):
        publisher.publish(1, {"a": torch.ones(3), "b": torch.ones(3)})


def test_a_publish_that_failed_leaves_no_base() -> None:
    engines = Engines(weights())
    engines.send(0)

    class Broken(torch.Tensor):
        def detach(self) -> Tensor:
            raise MemoryError

    engines.change()
    with pytest.raises(MemoryError):
        engines.publisher.publish(1, engines.source | {"head": engines.source["head"].as_subclass(Broken)})
    assert engines.send(1).mode == "full" and engines.whole()
    engines.close()


def test_nothing_is_written_while_somebody_holds_the_memory() -> None:
    engines = Engines(weights())
    first = engines.publish(0)

    async def body() -> None:
        async with engines.publisher.hold() as one, engines.publisher.hold() as two:  # they do not mind each other
            assert one == two == first
            engines.change()
            writing = asyncio.create_task(asyncio.to_thread(engines.publish, 1))
            await asyncio.sleep(0.1)
            late = asyncio.create_task(_held(engines.publisher))
            await asyncio.sleep(0.1)
            assert not writing.done() and not late.done(), "who comes later waits behind the writer"
            assert engines.receivers[0].fetch(first) == ()
        assert (await writing).version == 1
        assert await late == await writing

    async def _held(publisher: MemoryPublisher) -> Manifest | None:
        async with publisher.hold() as manifest:
            return manifest

    asyncio.run(asyncio.wait_for(body(), 30))
    engines.close()


def test_readers_and_a_writer_at_full_speed() -> None:
    """Whoever fetches what `hold` gave always finds it whole."""
    engines = Engines(weights(), count=3)
    engines.publish(0)
    done = threading.Event()

    def write() -> None:
        for version in range(1, 60):
            engines.change(3)
            engines.publish(version)
        done.set()

    async def read(receiver: MemoryReceiver) -> None:
        fetched = 0
        while not done.is_set() or fetched < 2:
            async with engines.publisher.hold() as manifest:
                assert manifest is not None
                assert await asyncio.to_thread(receiver.fetch, manifest) == ()
                fetched += 1
            await asyncio.sleep(0)

    async def body() -> None:
        writer = asyncio.create_task(asyncio.to_thread(write))
        await asyncio.gather(*(read(receiver) for receiver in engines.receivers))
        await writer

    asyncio.run(asyncio.wait_for(body(), 60))
    assert all(receiver.repaired == 0 for receiver in engines.receivers)
    engines.close()


def test_a_reader_that_is_cancelled_lets_go() -> None:
    publisher = MemoryPublisher()

    async def body() -> None:
        async def hold() -> None:
            async with publisher.hold() as manifest:
                assert manifest is None
                await asyncio.sleep(60)

        task = asyncio.create_task(hold())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())
    began = time.monotonic()
    publisher.publish(0, {"a": torch.ones(3)})
    assert time.monotonic() - began < 30
    publisher.close()
