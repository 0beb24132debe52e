"""Broadcast in rounds: whoever dies or does not come, nobody hangs, and all that are left get the same bits."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import broadcast_member
import pytest
import torch
from torch import Tensor
from transport_rigs import Rig, change, rig, same, weights, zeros
from warm_starts import context

from kitae.errors import EngineError
from kitae.weights.base import Bucket, Manifest
from kitae.weights.broadcast import BroadcastPublisher, BroadcastReceiver, _header, _receive
from kitae.weights.layout import Chunk, image_chunks
from kitae.weights.process_group import BroadcastGroup, choose_backend, host_store, join_store
from kitae.weights.publisher import checksum_of


class Member:
    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def tell(self, message: dict[str, Any]) -> None:
        self.connection.send(json.dumps(message))

    def hear(self) -> dict[str, Any] | None:
        """None: it is dead."""
        try:
            found: dict[str, Any] = json.loads(self.connection.recv())
        except EOFError:
            return None
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


@contextmanager
def members(publisher: BroadcastPublisher, source: dict[str, Tensor], *die_after: int | None) -> Iterator[list[Member]]:
    """As many as there are numbers: of the bucket with which each dies."""
    address = asdict(publisher.address) | {"descriptors": ()}
    sizes = {name: len(tensor) for name, tensor in source.items()}
    with ExitStack() as stack:
        made = []
        for number in die_after:
            ours, theirs = context().Pipe()
            process = context().Process(target=broadcast_member.main, args=(theirs,))
            process.start()
            theirs.close()
            made.append(Member(process, ours))
            stack.callback(made[-1].end)
            made[-1].tell({"address": address, "sizes": sizes, "die_after": number})
        assert [each.hear() for each in made] == [{"ready": True}] * len(made)
        yield made


def big(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randint(0, 256, (2**20,), generator=generator, dtype=torch.uint8) for n in range(6)}


def sums(source: dict[str, Tensor]) -> dict[str, int]:
    return {name: checksum_of(tensor) for name, tensor in source.items()}


@pytest.fixture
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with rig("broadcast", tmp_path, **getattr(request, "param", {})) as made:
        for _ in range(3):
            made.join(zeros(weights()))
        yield made


def pulled(made: Rig) -> list[int]:
    return [receiver.pulled for receiver in made.receivers]


def test_one_group_for_all_rounds_of_the_same_members(three: Rig) -> None:
    source = weights()
    for version in range(4):
        manifest = three.publish(version, source)
        assert three.fetch(manifest) == [(), (), ()] and all(same(source, loaded) for loaded in three.loaded)
        assert manifest.mode == ("delta" if version else "full")
        change(source)
    assert pulled(three) == [0, 0, 0] and (three.publisher.rounds, three.publisher._keys) == (4, 1)


def test_members_come_and_go(three: Rig) -> None:
    source = weights()
    assert three.fetch(three.publish(0, source)) == [(), (), ()]
    three.leave(0)
    change(source)
    began = time.monotonic()
    assert three.fetch(three.publish(1, source)) == [(), ()]
    three.join(zeros(source))
    change(source)
    assert three.fetch(three.publish(2, source)) == [(), (), ()]
    assert time.monotonic() - began < 30, "who has left is not waited for"
    assert pulled(three)[:2] == [0, 0] and pulled(three)[2] > 0, "who lacks the base pulls"
    change(source)
    assert three.fetch(three.publish(3, source)) == [(), (), ()]
    assert pulled(three)[:2] == [0, 0] and all(same(source, loaded) for loaded in three.loaded)


def test_who_comes_after_the_round_pulls_at_once(three: Rig) -> None:
    source = weights()
    manifest = three.publish(0, source)
    three.fetch(manifest)
    three.join(zeros(source))
    began = time.monotonic()
    assert three.receivers[3].fetch(manifest) == () and same(source, three.loaded[3])
    assert time.monotonic() - began < 25 and three.receivers[3].pulled == len(manifest.buckets)


@pytest.mark.thorough
def test_who_does_not_come_is_waited_for_once(tmp_path: Path) -> None:
    source, patience = weights(), 8.0
    with rig("broadcast", tmp_path, patience=patience) as made:
        made.join(zeros(source))
        made.join(zeros(source))
        for version, waits in ((0, True), (1, False)):
            manifest = made.publish(version, source)
            began = time.monotonic()
            assert made.receivers[0].fetch(manifest) == ()
            assert (time.monotonic() - began >= patience - 0.1) == waits
            change(source)


def test_in_processes_of_their_own() -> None:
    source, publisher = big(), BroadcastPublisher(limit=2**18)
    with members(publisher, source, None, None) as both:
        for version in range(2):
            manifest = publisher.publish(version, source)
            for each in both:
                each.tell(manifest.record())
            for each in both:
                assert each.hear() == {"damaged": [], "sums": sums(source), "pulled": 0}
            change(source)
    publisher.close()


def test_a_receiver_that_dies_in_the_middle_of_a_broadcast() -> None:
    """Neither the publisher nor the others hang; these pull what is missing, and the next round is without the dead."""
    source, publisher = big(), BroadcastPublisher(limit=2**16, deadline=6.0)
    with members(publisher, source, None, 5, None) as (first, mortal, last):
        manifest = publisher.publish(0, source)
        began = time.monotonic()
        for each in (first, mortal, last):
            each.tell(manifest.record())
        before = [first.hear(), last.hear()]
        assert mortal.hear() is None and time.monotonic() - began < 30
        assert all(a is not None and a["damaged"] == [] and a["sums"] == sums(source) for a in before)
        change(source)
        began = time.monotonic()
        manifest = publisher.publish(1, source)
        assert time.monotonic() - began < 5, "publishing does not wait for a round"
        for each in (first, last):
            each.tell(manifest.record())
        after = [first.hear(), last.hear()]
        assert all(a is not None and a["damaged"] == [] and a["sums"] == sums(source) for a in after)
        assert [a and a["pulled"] for a in after] == [b and b["pulled"] for b in before], "by broadcast again"
    publisher.close()


@pytest.mark.parametrize("three", [{"deadline": 3.0}], indirect=True)
def test_a_publisher_that_dies_leaves_nobody_hanging(three: Rig) -> None:
    source = weights()
    manifest = three.publish(0, source)
    send, numbers = BroadcastGroup.send, []

    def dies(group: BroadcastGroup, data: Tensor) -> None:
        numbers.append(1)
        if len(numbers) > 8:
            three.publisher._server.close()
            raise RuntimeError("the publisher is gone")
        send(group, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BroadcastGroup, "send", dies)
        began = time.monotonic()
        damaged = three.fetch(manifest)
        assert time.monotonic() - began < 40
    assert all(found and len(found) < len(manifest.buckets) for found in damaged)
    assert [receiver.version for receiver in three.receivers] == [None] * 3


def test_members_that_do_not_meet_give_up_in_time() -> None:
    store = host_store("127.0.0.1", 2.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the 2 processes of a broadcast did not meet"):
        BroadcastGroup.make(store, "alone", 0, 2, backend="gloo", deadline=2.0)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"version": 3}, id="an old version"),
        pytest.param({"number": 6}, id="another bucket"),
        pytest.param({"bucket": Bucket(64, 12)}, id="other bytes"),
    ],
)
def test_a_header_that_is_not_the_next_ends_the_round(other: dict[str, Any]) -> None:
    store = host_store("127.0.0.1", 10.0)
    chunk = Chunk("image", 5, Bucket(64, 11), ((0, 64),))
    sent = {"version": 4, "number": 5, "bucket": chunk.bucket} | other

    def send() -> None:
        group = BroadcastGroup.make(store, "k", 0, 2, backend="gloo", deadline=10.0)
        group.send(_header(sent["version"], Chunk("image", sent["number"], sent["bucket"], ()), here=True))

    thread = threading.Thread(target=send)
    thread.start()
    client = join_store("127.0.0.1", store.port, 10.0)
    group = BroadcastGroup.make(client, "k", 1, 2, backend="gloo", deadline=10.0)
    with pytest.raises(ValueError, match="the next bucket must be"):
        _receive(group, 4, chunk)
    thread.join()


def test_a_bucket_that_was_damaged_on_the_way_is_pulled(three: Rig) -> None:
    source = weights()
    manifest = three.publish(0, source)
    send, count = BroadcastGroup.send, [0]

    def flips(group: BroadcastGroup, data: Tensor) -> None:
        count[0] += 1
        if data.dtype == torch.uint8 and count[0] == 6:
            data = data.clone()
            data[7] ^= 1
        send(group, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BroadcastGroup, "send", flips)
        assert three.fetch(manifest) == [(), (), ()]
    assert pulled(three) == [1, 1, 1] and all(same(source, loaded) for loaded in three.loaded)


def test_what_does_not_fit_does_not_stop_the_others(three: Rig) -> None:
    """One engine refuses: the round is without it."""
    source = weights()
    three.leave(2)
    odd = BroadcastReceiver.at(three.publisher.address, {"norm": torch.zeros(8)})
    with rig_patience(three, 1.0):
        manifest = three.publish(0, source)
        with pytest.raises(EngineError, match="unknown parameter"):
            odd.fetch(manifest)
        assert three.fetch(manifest) == [(), ()]
    odd.close()


@contextmanager
def rig_patience(made: Rig, seconds: float) -> Iterator[None]:
    before, made.publisher._patience = made.publisher._patience, seconds
    yield
    made.publisher._patience = before


def test_the_number_of_buckets_that_are_sent(three: Rig) -> None:
    source = weights()
    manifest: Manifest = three.publish(0, source)
    sent: list[int] = []
    send = BroadcastGroup.send

    def count(group: BroadcastGroup, data: Tensor) -> None:
        sent.append(data.nbytes)
        send(group, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BroadcastGroup, "send", count)
        three.fetch(manifest)
    assert sent[1::2] == [chunk.bucket.bytes for chunk in image_chunks(manifest)], "once for three engines"


@pytest.mark.parametrize(
    ("gpus", "backend"), [(["a", "b"], "nccl"), (["a", "a"], "gloo"), (["", "b"], "gloo"), (["", ""], "gloo")]
)
def test_nccl_carries_a_round_where_all_members_have_a_gpu_each(gpus: list[str], backend: str) -> None:
    assert choose_backend(gpus, "auto") == backend
    assert choose_backend(gpus, "nccl") == "nccl" and choose_backend(gpus, "gloo") == "gloo"
