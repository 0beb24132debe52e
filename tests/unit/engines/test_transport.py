"""Weights through shared memory: what arrives has the same bits, whatever was sent and however, or it is noticed."""

import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitae.engines.transport import Published, Sync, WeightReceiver, WeightTransport, changed_positions, checksum
from kitae.errors import EngineError

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float16: torch.int16}


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (97, 33), "norm": (7,), "bias": (), "empty": (0,), "head": (5000,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.view(-1).view(DTYPES[t.dtype]) for name, t in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    left, right = bits(a), bits(b)
    return all(torch.equal(left[name], right[name]) for name in left)


class Pair:
    """Both sides in one process, as two would be: what is published goes through its record."""

    def __init__(self, source: dict[str, Tensor], **settings: object) -> None:
        self.source = source
        self.loaded = {name: torch.zeros_like(t) for name, t in source.items()}
        self.transport = WeightTransport(**{"mode": "delta", **settings})  # type: ignore[arg-type]
        descriptors = [os.dup(d) for d in self.transport.descriptors]
        self.receiver = WeightReceiver(*descriptors, self.loaded)

    def send(self, version: int) -> Published:
        published = self.transport.publish(version, self.source, base=self.receiver.version)
        self.found = self.receiver.fetch(Published.of(published.record()))
        return published

    def close(self) -> None:
        self.transport.close()
        for memory in (self.receiver._image, self.receiver._delta):
            memory.close()


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.45, 0.9]), min_size=1, max_size=12),
    seed=st.integers(0, 2**20),
)
def test_many_updates_arrive_bit_for_bit(dtype: torch.dtype, shares: list[float], seed: int) -> None:
    source = weights(dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    pair = Pair(source)
    assert pair.send(0).mode == "full"
    for version, share in enumerate(shares, 1):
        differs = values = 0
        for tensor in bits(source).values():  # any bits: NaN, infinities and -0 too
            before = tensor.clone()
            hit = torch.rand(tensor.shape, generator=generator) < share
            tensor[hit] = torch.randint(-(2**15), 2**15, (int(hit.sum()),), generator=generator).to(tensor.dtype)
            differs, values = differs + int((tensor != before).sum()), values + tensor.numel()
        published = pair.send(version)
        assert pair.found == published.checksum and same(source, pair.loaded)
        assert (published.mode == "delta") == (differs <= 0.5 * values)
        if published.unchanged is not None:
            assert published.unchanged == pytest.approx(1 - differs / values)
            assert published.bytes <= sum(t.nbytes for t in source.values())
    pair.close()


def test_a_sparse_update_is_small() -> None:
    pair = Pair(weights())
    pair.send(0)
    bits(pair.source)["head"][[3, 77]] += 1
    published = pair.send(1)
    assert (published.mode, published.base, [p.kind for p in published.parts]) == ("delta", 0, ["positions"])
    assert published.bytes == 2 * (4 + 2) and published.unchanged == 1 - 2 / (97 * 33 + 7 + 1 + 5000)
    assert pair.send(2).bytes == 0
    assert same(pair.source, pair.loaded)
    pair.close()


def test_mode_full_never_compares() -> None:
    pair = Pair(weights(), mode="full")
    assert [pair.send(v).mode for v in range(3)] == ["full"] * 3
    pair.close()


def test_a_receiver_without_the_base_gets_everything() -> None:
    pair = Pair(weights())
    pair.send(0)
    pair.transport.publish(1, pair.source, base=0)  # never fetched
    assert pair.send(2).mode == "full"
    pair.source["norm"] += 1
    delta = pair.transport.publish(3, pair.source, base=2)
    fresh = {name: torch.zeros_like(t) for name, t in pair.source.items()}
    receiver = WeightReceiver(*pair.transport.descriptors, fresh)
    assert receiver.fetch(delta) != delta.checksum and receiver.version is None
    assert receiver.fetch(pair.transport.in_full(delta)) == delta.checksum and receiver.version == 3
    assert same(pair.source, fresh)
    pair.close()


@pytest.mark.parametrize("memory", ["_image", "_delta"])
def test_every_flipped_byte_is_noticed(memory: str) -> None:
    pair = Pair(weights())
    pair.send(0)
    for tensor in bits(pair.source).values():
        tensor[::9] ^= 5
    published = pair.transport.publish(1, pair.source, base=0)
    if memory == "_image":
        published = pair.transport.in_full(published)
    kept = {name: t.clone() for name, t in pair.loaded.items()}
    descriptor = getattr(pair.transport, memory).descriptor
    pads = 0
    for offset in range(0, os.fstat(descriptor).st_size, 37):
        byte = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte[0] ^ 0x40]), offset)
        for name, tensor in kept.items():
            pair.loaded[name].copy_(tensor)
        found = pair.receiver.fetch(published)
        assert (found == published.checksum) == same(pair.source, pair.loaded)
        pads += found == published.checksum  # between tensors, where nothing is
        os.pwrite(descriptor, byte, offset)
    assert pads < published.bytes / 37 / 5
    pair.close()


def test_values_are_compared_as_they_are_served() -> None:
    masters = {"w": torch.ones(4096)}
    transport = WeightTransport("delta")
    served = {"w": torch.zeros(4096, dtype=torch.bfloat16)}
    receiver = WeightReceiver(*transport.descriptors, served)
    dtypes = {"w": torch.bfloat16}
    receiver.fetch(transport.publish(0, masters, dtypes=dtypes))
    masters["w"] += 1e-4  # lost when rounded
    masters["w"][5] = 2
    published = transport.publish(1, masters, base=0, dtypes=dtypes)
    assert published.unchanged == 1 - 1 / 4096
    assert receiver.fetch(published) == published.checksum and served["w"][5] == 2 and served["w"][6] == 1
    transport.close()


def test_other_tensors_are_refused() -> None:
    transport = WeightTransport()
    transport.publish(0, {"a": torch.ones(3), "b": torch.ones(3)})
    for other in ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(4)}):
        with pytest.raises(EngineError, match="same tensors as the first; 'b' differs"):
            transport.publish(1, other)
    transport.close()


def test_checksum_sees_values_and_order() -> None:
    a, b = torch.arange(5000.0), torch.arange(5000.0) + 1
    assert checksum([a, b]) == checksum([a.clone(), b]) != checksum([b, a])
    assert checksum([a[1:]]) == checksum([a[1:].clone()])
    changed = a.clone()
    changed[4999] += 1
    assert checksum([changed]) != checksum([a])


def test_checksum_is_as_fast_as_memory() -> None:
    tensor = torch.zeros(2**26, dtype=torch.bfloat16)
    checksum([tensor])
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        checksum([tensor])
        seconds.append(time.perf_counter() - began)
    assert tensor.nbytes / min(seconds) > 1e9


@given(st.integers(0, 40), st.lists(st.integers(0, 39)), st.sampled_from([torch.int8, torch.int16, torch.int32]))
def test_changed_positions_equal_a_plain_comparison(length: int, hits: list[int], dtype: torch.dtype) -> None:
    old = torch.zeros(length, dtype=dtype)
    new = old.clone()
    new[[h for h in hits if h < length]] = 1
    assert changed_positions(new.numpy(), old.numpy()).tolist() == new.nonzero().flatten().tolist()


def test_the_numbers_for_the_log() -> None:
    sync = Sync(4, "delta", bytes=10, seconds=0.5, unchanged=0.99)
    assert sync.metrics() == {
        "sync_bytes": 10.0, "sync_seconds": 0.5, "sync_delta": 1.0, "sync_resent": 0.0, "sync_unchanged": 0.99,
    }  # fmt: skip
    assert "sync_unchanged" not in Sync(0, "full", 10, 0.5, None).metrics()
