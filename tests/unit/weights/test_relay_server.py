"""A tree of relays: engines get the right bits whatever a relay does, and know which one was bad."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transport_rigs import HASTE, Rig, change, rig, same, weights, zeros

from kitae.weights.base import Manifest
from kitae.weights.chunks import image_chunks
from kitae.weights.relay_server import Relay, RelayPublisher, main, relay_receiver
from kitae.workers.frames import read_frame


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Rig]:
    with rig("relay", tmp_path) as made:
        yield made


def big(megabytes: int = 8, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randint(-99, 99, (2**20,), generator=generator, dtype=torch.int8) for n in range(megabytes)}


@contextmanager
def relay_process(parents: list[str], secret: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    setup = {"parents": parents, "secret": secret, "folder": str(folder), "haste": {"silence": 2.0}}
    process = subprocess.Popen(
        [sys.executable, "-m", "kitae.weights.relay_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(json.dumps(setup))
        process.stdin.close()
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_the_origin_sends_each_bucket_once_for_all_engines_behind_a_relay(tree: Rig, tmp_path: Path) -> None:
    source, asked = weights(), []
    chunk = tree.publisher.chunk
    tree.publisher.chunk = lambda version, name: asked.append(name) or chunk(version, name)
    for _ in range(4):
        tree.join(zeros(source))
    manifest = tree.publish(0, source)
    assert tree.fetch(manifest) == [()] * 4
    assert sorted(asked) == sorted(chunk.name for chunk in image_chunks(manifest))
    assert not any(receiver.bypassed for receiver in tree.receivers)


def test_a_relay_of_a_relay(tree: Rig) -> None:
    source = weights()
    leaf = tree.add_relay(tree.relays[0].url)
    tree.publisher.relays = (leaf.url,)
    tree.join(zeros(source))
    for version in range(3):
        assert tree.fetch(tree.publish(version, source)) == [()] and same(source, tree.loaded[0])
        change(source)
    assert not tree.receivers[0].bypassed and not leaf.downloads.bypassed


def test_a_relay_takes_a_new_version_by_itself(tree: Rig) -> None:
    source = weights()
    for version in range(3):
        tree.settle(tree.publish(version, source))
        change(source)


def test_engines_begin_with_different_relays(tree: Rig) -> None:
    tree.add_relay()
    tree.add_relay()
    tree.publish(0, weights())
    orders = []
    for _ in range(40):
        receiver = relay_receiver(tree.publisher.address, zeros(weights()))
        orders.append(receiver.reader._sources)  # type: ignore[attr-defined]
        receiver.close()
    assert {order[0] for order in orders} == {relay.url for relay in tree.relays}
    assert {order[-1] for order in orders} == {tree.publisher.url}


def test_a_corrupt_relay_is_bypassed_and_named(tree: Rig, caplog: pytest.LogCaptureFixture) -> None:
    source = weights()
    manifest = tree.publish(0, source)
    tree.settle(manifest)
    chunk, store = image_chunks(manifest)[2], tree.relays[0].store
    data = store.get(chunk.name)
    assert data is not None
    data[5] ^= 1
    store.put(chunk.name, data)
    tree.join(zeros(source))
    assert tree.fetch(manifest) == [()] and same(source, tree.loaded[0])
    assert tree.receivers[0].bypassed == {tree.relays[0].url: 1}
    assert f"{tree.relays[0].url} is bypassed for {chunk.name}: its bytes are not those" in caplog.text


def test_damage_at_the_origin_stops_at_the_first_relay(tmp_path: Path) -> None:
    origin = RelayPublisher(limit=1024)
    manifest = origin.publish(0, weights())
    chunk = image_chunks(manifest)[1]
    data = origin.store.get(chunk.name)
    assert data is not None
    data[0] ^= 1
    relay = Relay([origin.url], origin.secret, tmp_path, haste=HASTE)
    assert relay.chunk(0, chunk.name) is None and relay.store.get(chunk.name) is None
    data[0] ^= 1
    found = relay.chunk(0, chunk.name)
    assert found is not None and chunk.is_whole(found)
    relay.close()
    origin.close()


def test_a_relay_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    source, origin = big(), RelayPublisher(limit=2**18, haste=HASTE)
    with relay_process([origin.url], origin.secret, tmp_path) as (process, url):
        origin.relays = (url,)
        loaded = zeros(source)
        receiver = relay_receiver(origin.address, loaded)
        manifest = origin.publish(0, source)
        image, seen = receiver.reader.image, []

        def kill_after_three(manifest: Manifest, wanted: list[int]) -> Iterator[tuple[int, Tensor]]:
            for number, data in image(manifest, wanted):
                seen.append(number)
                if len(seen) == 3:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                yield number, data

        receiver.reader.image = kill_after_three  # type: ignore[method-assign, assignment]
        assert receiver.fetch(manifest) == () and same(source, loaded)
        assert receiver.bypassed[url] >= 1 and len(seen) == 32
    receiver.close()
    origin.close()


def test_a_slow_relay_is_bypassed(tmp_path: Path) -> None:
    source, origin = big(2), RelayPublisher(limit=2**18, haste=HASTE)
    manifest = origin.publish(0, source)
    relay = Relay([origin.url], origin.secret, tmp_path, haste=HASTE)
    chunk = relay.chunk

    def late(version: int, name: str) -> Tensor | None:
        time.sleep(HASTE.silence + 2)
        return chunk(version, name)

    relay.chunk = late  # type: ignore[method-assign]
    origin.relays = (relay.url,)
    loaded = zeros(source)
    receiver = relay_receiver(origin.address, loaded)
    began = time.monotonic()
    assert receiver.fetch(manifest) == () and same(source, loaded)
    assert receiver.bypassed[relay.url] <= HASTE.connections and time.monotonic() - began < 2 * HASTE.silence + 30
    receiver.close()
    relay.close()
    origin.close()


def test_a_relay_that_starts_again_goes_on_with_what_it_has(tmp_path: Path) -> None:
    source, origin = weights(), RelayPublisher(limit=1024)
    manifest = origin.publish(0, source)
    first = Relay([origin.url], origin.secret, tmp_path, haste=HASTE)
    chunks = image_chunks(manifest)
    assert all(first.chunk(0, chunk.name) is not None for chunk in chunks)
    first.close()
    (tmp_path / chunks[0].name).write_bytes(b"half")
    (tmp_path / f"{chunks[1].name}.77.tmp").write_bytes(b"half")
    asked, chunk = [], origin.chunk
    origin.chunk = lambda version, name: asked.append(name) or chunk(version, name)  # type: ignore[method-assign, func-returns-value]
    second = Relay([origin.url], origin.secret, tmp_path, haste=HASTE)
    for each in chunks:
        data = second.chunk(0, each.name)
        assert data is not None and each.is_whole(data)
    assert asked == [chunks[0].name], "the others were there"
    assert not (tmp_path / f"{chunks[1].name}.77.tmp").exists()
    second.close()
    origin.close()


def test_a_relay_outlives_its_parent(tree: Rig) -> None:
    """What it has it serves; what is new comes by the next parent."""
    source = weights()
    leaf = tree.add_relay(tree.relays[0].url)
    tree.publisher.relays = (leaf.url,)
    tree.join(zeros(source))
    assert tree.fetch(tree.publish(0, source)) == [()]
    tree.relays.pop(0).close()
    change(source)
    assert tree.fetch(tree.publish(1, source)) == [()] and same(source, tree.loaded[0])
    assert not tree.receivers[0].bypassed and leaf.downloads.bypassed


def test_a_version_that_is_published_again_with_other_weights(tree: Rig) -> None:
    """As after a return to an earlier checkpoint."""
    source = weights()
    tree.join(zeros(source))
    for _ in range(3):
        assert tree.fetch(tree.publish(7, source, in_full=True)) == [()] and same(source, tree.loaded[0])
        change(source)
    assert not tree.receivers[0].bypassed


def test_old_versions_are_removed(tree: Rig) -> None:
    source, sizes = weights(), []
    for version in range(6):
        tree.settle(tree.publish(version, source, in_full=True))
        change(source, step=1)
        sizes.append(len(list(tree.relays[0].store.folder.iterdir())))
    assert max(sizes) <= 2 * sizes[0]


def test_at_a_post_it_says_where_it_is_and_ends_with_the_connection(tmp_path: Path) -> None:
    origin = RelayPublisher(limit=1024)
    ours, theirs = socket.socketpair()
    setup = {"parents": [origin.url], "secret": origin.secret, "folder": str(tmp_path)}
    thread = threading.Thread(target=main, args=(setup, theirs))
    thread.start()

    async def greeting() -> str:
        reader, writer = await asyncio.open_connection(sock=ours)
        frame = await read_frame(reader)
        assert frame is not None
        writer.close()
        return str(frame.header["url"])

    url = asyncio.run(greeting())
    assert url.startswith("http://127.0.0.1:")
    thread.join(10)
    assert not thread.is_alive()
    theirs.close()
    origin.close()
