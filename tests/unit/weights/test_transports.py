"""What every transport must do: bring the same bits, or say what is damaged; never call half of something whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transport_rigs import DELTAS, KINDS, Rig, bits, change, rig, same, weights, zeros

from kitae.errors import EngineError
from kitae.weights.base import Address, Manifest
from kitae.weights.transports import make_publisher, make_receiver


@pytest.fixture(params=KINDS)
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with rig(request.param, tmp_path) as made:
        yield made


@pytest.fixture(params=DELTAS)
def with_delta(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with rig(request.param, tmp_path) as made:
        yield made


def test_updates_arrive_bit_for_bit_at_all(one: Rig) -> None:
    source = weights()
    first, second = one.join(zeros(source)), one.join(zeros(source))
    for version in range(4):
        manifest = one.publish(version, source)
        assert one.fetch(manifest) == [(), ()] and all(same(source, loaded) for loaded in one.loaded)
        assert manifest.mode == ("delta" if version and one.kind != "ipc" else "full")
        change(source)
    assert first.repaired == second.repaired == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_every_dtype(one: Rig, dtype: torch.dtype) -> None:
    source = {"w": (torch.arange(3000) % 100).to(dtype).view(30, 100)}
    one.join(zeros({"w": source["w"].view(torch.int8)}))
    one.leave(0)
    one.join({"w": torch.zeros(30, 100).to(dtype)})
    for version in range(2):
        assert one.fetch(one.publish(version, source)) == [()] and same(source, one.loaded[0])
        change(source)


def test_late_joiners_and_those_who_missed_one_pull(with_delta: Rig) -> None:
    source = weights()
    with_delta.join(zeros(source))
    missed = with_delta.join(zeros(source))
    assert with_delta.fetch(with_delta.publish(0, source)) == [(), ()]
    change(source)
    assert with_delta.receivers[0].fetch(with_delta.publish(1, source)) == ()
    change(source)
    manifest = with_delta.publish(2, source)
    with_delta.join(zeros(source))
    assert manifest.base == 1 and missed.version == 0  # type: ignore[attr-defined]
    assert with_delta.fetch(manifest) == [(), (), ()]
    late = with_delta.join(zeros(source))
    assert late.fetch(manifest) == (), "after all others"
    assert all(same(source, loaded) for loaded in with_delta.loaded)


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
@pytest.mark.parametrize("number", [0, 3])
def test_damage_of_the_image_is_found(one: Rig, damage: str, number: int) -> None:
    source = weights()
    receiver = one.join(zeros(source))
    manifest = one.publish(0, source)
    getattr(one, damage)(manifest, number)
    assert one.fetch(manifest) == [(number,)] and receiver.version is None  # type: ignore[attr-defined]
    again = one.publish(0, source, in_full=True)
    assert one.fetch(again) == [()] and same(source, one.loaded[0])


def damaged_delta(made: Rig, damage: str) -> tuple[Any, dict[str, Tensor], Manifest]:
    """A receiver with the first version; the tensors of the second; its manifest, whose delta is not as it was."""
    source = weights()
    receiver = made.join(zeros(source))
    made.fetch(made.publish(0, source))
    change(source)
    manifest = made.publish(1, source)
    assert manifest.mode == "delta" and len(manifest.delta) > 1
    getattr(made, damage)(manifest, 0, delta=True)
    return receiver, source, manifest


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damage_of_the_delta_is_repaired_from_the_image(with_delta: Rig, damage: str) -> None:
    receiver, source, manifest = damaged_delta(with_delta, damage)
    assert with_delta.fetch(manifest) == [()] and same(source, with_delta.loaded[0]) and receiver.repaired > 0


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damage_of_both_is_not_hidden(with_delta: Rig, damage: str) -> None:
    receiver, _, manifest = damaged_delta(with_delta, damage)
    for number in range(len(manifest.buckets)):
        getattr(with_delta, damage)(manifest, number)
    (damaged,) = with_delta.fetch(manifest)
    assert damaged and receiver.version is None and receiver.repaired == 0


def test_an_old_bucket_in_place_of_a_new_one_is_found(one: Rig) -> None:
    source = weights()
    first = one.publish(0, source)
    old = one.bytes_of(first, 2)
    change(source)
    second = one.publish(1, source, in_full=True)
    one.join(zeros(source))
    one.swap(second, 2, old)
    assert one.fetch(second) == [(2,)]


def test_who_asks_for_an_old_version_never_gets_another(one: Rig) -> None:
    """Either it is still there, whole, or its buckets are damaged."""
    source = weights()
    first, then = one.publish(0, source), {name: t.clone() for name, t in source.items()}
    change(source, step=1)
    one.publish(1, source, in_full=True)
    receiver = one.join(zeros(source))
    (damaged,) = one.fetch(first)
    if damaged:
        assert receiver.version is None  # type: ignore[attr-defined]
    else:
        assert same(then, one.loaded[0]) and one.kind == "file"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"more": torch.zeros(1)}, "weight update 0 names an unknown parameter 'more'"),
        ({"norm": torch.zeros(7)}, "weight update 0: 'norm' must have dtype bfloat16, got float32"),
        ({"norm": torch.zeros(8, dtype=torch.bfloat16)}, r"weight update 0: 'norm' must have shape \(7,\), got \(8,\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_touched(one: Rig, other: dict[str, Tensor], message: str) -> None:
    source = weights()
    one.join(zeros(source))
    manifest = one.publish(0, source | other)
    with pytest.raises(EngineError, match=message):
        one.fetch(manifest)
    assert not any(bool(t.any()) for t in one.loaded[0].values())


def test_adapters_alone(one: Rig) -> None:
    """A LoRA run publishes the tensors that it trains; the others of an engine stay."""
    model = weights() | {"lora_A": torch.randn(8, 33), "lora_B": torch.randn(97, 8)}
    adapters = {name: t for name, t in model.items() if "lora" in name}
    engine = {name: t.clone() for name, t in model.items()}
    one.join(engine)
    for version in range(3):
        change(adapters)
        manifest = one.publish(version, adapters)
        assert one.fetch(manifest) == [()] and same(model, engine)
        assert manifest.bytes <= sum(t.nbytes for t in adapters.values())


def test_a_model_without_weights(one: Rig) -> None:
    one.join({"empty": torch.zeros(0)})
    assert one.fetch(one.publish(0, {"empty": torch.zeros(0)})) == [()]


def test_non_contiguous_tensors_on_both_sides(one: Rig) -> None:
    source = {"w": torch.randn(40, 60).t()}
    one.join({"w": torch.zeros(40, 60).t()})
    assert one.fetch(one.publish(0, source)) == [()] and torch.equal(source["w"], one.loaded[0]["w"])


def test_a_closed_publisher_publishes_nothing(one: Rig, tmp_path: Path) -> None:
    with rig(one.kind, tmp_path / "other") as other:
        pass
    with pytest.raises(EngineError, match="version 1 cannot be published: the publisher is closed"):
        other.publish(1, weights())


OPERATIONS = st.sampled_from(["publish", "publish", "publish", "join", "leave", "skip", "damage", "damage delta"])


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, min_size=3, max_size=8), seed=st.integers(0, 2**16))
def test_whatever_happens_all_end_with_the_same_bits(
    kind: str, operations: list[str], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Receivers come, go and miss versions; what is published is damaged, and then sent again in full."""
    generator = torch.Generator().manual_seed(seed)
    source = weights(seed)
    with rig(kind, tmp_path_factory.mktemp("any"), patience=1.0) as made:
        made.join(zeros(source))
        for version, operation in enumerate([*operations, "publish"]):
            share = float(torch.rand((), generator=generator)) ** 4
            for tensor in bits(source).values():
                hit = torch.rand(tensor.shape, generator=generator) < share
                tensor[hit] = torch.randint(-(2**15), 2**15, (int(hit.sum()),), generator=generator).to(tensor.dtype)
            if operation == "join":
                made.join(zeros(source))
            if operation == "leave" and len(made.receivers) > 1:
                made.leave(0)
            manifest = made.publish(version, source)
            if operation == "skip":
                continue
            if operation == "damage":
                made.flip(manifest, version % len(manifest.buckets))
            if operation == "damage delta" and manifest.delta:
                made.flip(manifest, 0, delta=True)
            before = [receiver.version for receiver in made.receivers]
            damaged = made.fetch(manifest)
            for number, loaded in enumerate(made.loaded):
                assert same(source, loaded) or damaged[number], "whole is what has the same bits"
                if operation != "damage" or (before[number] is not None and before[number] == manifest.base):
                    assert not damaged[number]
            if any(damaged):
                assert not any(made.fetch(made.publish(version, source, in_full=True)))
            assert all(same(source, loaded) for loaded in made.loaded)


def test_kinds_are_made_by_name(tmp_path: Path) -> None:
    for kind in ("memory", "file", "http", "broadcast"):
        publisher = make_publisher(kind, "delta")
        assert publisher.address.kind == kind
        publisher.close()
    with pytest.raises(EngineError, match=r"weights must go by one of memory, .*, got 'pigeon'"):
        make_publisher("pigeon", "full")
    with pytest.raises(EngineError, match=r"weights must come by one of none, memory, .*, got 'pigeon'"):
        make_receiver(Address("pigeon", {}), {})


def test_a_folder_can_be_chosen(tmp_path: Path) -> None:
    publisher = make_publisher("file", "full", folder=tmp_path / "weights")
    publisher.publish(0, weights())
    assert publisher.address.settings["folder"] == str(tmp_path / "weights")
    assert len(list((tmp_path / "weights").iterdir())) == 1
    publisher.close()
    assert list((tmp_path / "weights").iterdir()) == []
