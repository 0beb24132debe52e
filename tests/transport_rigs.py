"""Every transport with its two ends in one process, as several would be: manifests and addresses go through JSON."""

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitae.weights.base import Address, Manifest, Mode, Receiver
from kitae.weights.broadcast import BroadcastPublisher
from kitae.weights.file_transport import FilePublisher
from kitae.weights.http_transport import Haste, HttpPublisher
from kitae.weights.ipc import IpcPublisher, IpcReceiver
from kitae.weights.layout import delta_chunks, image_chunks
from kitae.weights.publisher import BucketPublisher
from kitae.weights.shared_memory import MemoryPublisher
from kitae.weights.stores import FolderStore, HeapStore, NamedBuckets
from kitae.weights.transports import make_receiver

KINDS = ("memory", "file", "http", "broadcast", "ipc")
DELTAS = tuple(kind for kind in KINDS if kind != "ipc")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LIMIT = 1024  # bytes of a bucket: the small tensors share one, the large ones have several
HASTE = Haste(silence=5.0, connections=3)


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (97, 33), "norm": (7,), "bias": (), "empty": (0,), "head": (5000,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.view(-1).view(INTEGERS[t.element_size()]) for name, t in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    left, right = bits(a), bits(b)
    return all(torch.equal(left[name], right[name]) for name in left)


def through_json(manifest: Manifest) -> Manifest:
    return Manifest.of(json.loads(json.dumps(manifest.record())))


class HostMemory:
    """Implements `kitae.weights.ipc.DeviceMemory` with memory that is no device's."""

    device = torch.device("cpu")

    def allocate(self, size: int) -> tuple[Tensor, str]:
        self.path = Path(tempfile.mkstemp(prefix="kitae-test-", dir="/dev/shm")[1])
        os.truncate(self.path, size)
        return self.open(str(self.path), size), str(self.path)

    def free(self, data: Tensor) -> None:
        self.path.unlink()

    def open(self, handle: str, size: int) -> Tensor:
        return torch.from_file(handle, shared=True, size=size, dtype=torch.uint8)

    def close(self, data: Tensor) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Rig:
    """A publisher, what belongs to it, and some receivers."""

    def __init__(self, kind: str, folder: Path, mode: Mode = "delta", limit: int = LIMIT, **settings: Any) -> None:
        self.kind = kind
        self.mode: Mode = "full" if kind == "ipc" else mode
        self.loaded: list[dict[str, Tensor]] = []
        self.receivers: list[Any] = []
        make: dict[str, Callable[[], BucketPublisher]] = {
            "memory": lambda: MemoryPublisher(self.mode, limit=limit),
            "ipc": lambda: IpcPublisher(self.mode, memory=HostMemory(), limit=limit),
            "file": lambda: FilePublisher(self.mode, folder=folder / "shared", limit=limit, patience=0.2),
            "http": lambda: HttpPublisher(self.mode, haste=HASTE, limit=limit),
            "broadcast": lambda: BroadcastPublisher(
                self.mode, haste=HASTE, limit=limit, **{"patience": 5.0, "deadline": 10.0, **settings}
            ),
        }
        self.publisher: Any = make[kind]()

    def join(self, parameters: dict[str, Tensor]) -> Receiver:
        address = self.publisher.address
        address = Address(**json.loads(json.dumps(asdict(address) | {"descriptors": ()})))
        if self.kind == "ipc":
            receiver: Receiver = IpcReceiver(address, parameters, HostMemory())
        else:
            receiver = make_receiver(address, parameters)
        self.loaded.append(parameters)
        self.receivers.append(receiver)
        return receiver

    def leave(self, number: int) -> None:
        self.receivers.pop(number).close()
        self.loaded.pop(number)

    def publish(self, version: int, tensors: dict[str, Tensor], *, in_full: bool = False) -> Manifest:
        return through_json(self.publisher.publish(version, tensors, in_full=in_full))

    def fetch(self, manifest: Manifest) -> list[tuple[int, ...]]:
        """Of all receivers at once, the buckets that are damaged."""
        found: dict[int, tuple[int, ...] | Exception] = {}

        def one(number: int) -> None:
            try:
                found[number] = self.receivers[number].fetch(manifest)
            except Exception as error:
                found[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(self.receivers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a receiver hangs"
        for result in found.values():
            if isinstance(result, Exception):
                raise result
        return [result for _, result in sorted(found.items()) if not isinstance(result, Exception)]

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.publisher.close()

    # Damage, where the publisher keeps what it has published.

    def flip(self, manifest: Manifest, number: int, *, delta: bool = False, offset: int = 0) -> None:
        data = self._bytes(manifest, number, delta)
        data[offset] ^= 0x40
        self._replace(manifest, number, delta, data)

    def cut(self, manifest: Manifest, number: int, *, delta: bool = False) -> None:
        """Without its end; memory cannot lose that, and has zeros there."""
        data = self._bytes(manifest, number, delta)
        if isinstance(self.publisher.bucket_store, NamedBuckets):
            self._replace(manifest, number, delta, data[: len(data) // 2])
        else:
            data[len(data) // 2 :] = 0
            self._replace(manifest, number, delta, data)

    def lose(self, manifest: Manifest, number: int, *, delta: bool = False) -> None:
        if isinstance(self.publisher.bucket_store, NamedBuckets):
            lose(self.publisher.bucket_store.store, self._name(manifest, number, delta))
        else:
            self._replace(manifest, number, delta, torch.zeros_like(self._bytes(manifest, number, delta)))

    def bytes_of(self, manifest: Manifest, number: int) -> Tensor:
        return self._bytes(manifest, number, False)

    def swap(self, manifest: Manifest, number: int, data: Tensor) -> None:
        self._replace(manifest, number, False, data)

    def _name(self, manifest: Manifest, number: int, delta: bool) -> str:
        return (delta_chunks(manifest) if delta else image_chunks(manifest))[number].name

    def _bytes(self, manifest: Manifest, number: int, delta: bool) -> Tensor:
        bucket_store = self.publisher.bucket_store
        if isinstance(bucket_store, NamedBuckets):
            found = bucket_store.store.get(self._name(manifest, number, delta))
            assert found is not None
            return found.clone()
        if delta:
            return self._delta_view(manifest, number).clone()
        return bucket_store.read(number).clone()

    def _replace(self, manifest: Manifest, number: int, delta: bool, data: Tensor) -> None:
        bucket_store = self.publisher.bucket_store
        if isinstance(bucket_store, NamedBuckets):
            bucket_store.store.put(self._name(manifest, number, delta), data)
        else:
            (self._delta_view(manifest, number) if delta else bucket_store.read(number)).copy_(data)

    def _delta_view(self, manifest: Manifest, number: int) -> Tensor:
        start = sum(bucket.bytes for bucket in manifest.delta[:number])  # which are multiples of 64
        view: Tensor = self.publisher.bucket_store.delta.view(start, manifest.delta[number].bytes)
        return view


def lose(store: HeapStore | FolderStore | Any, name: str) -> None:
    if isinstance(store, FolderStore):
        (store.folder / name).unlink(missing_ok=True)
    else:
        del store._found[name]


def zeros(source: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in source.items()}


def change(source: dict[str, Tensor], step: int = 9) -> None:
    for tensor in bits(source).values():
        tensor[::step] ^= 5


@contextlib.contextmanager
def rig(kind: str, folder: Path, **settings: Any) -> Iterator[Rig]:
    made = Rig(kind, folder, **settings)
    try:
        yield made
    finally:
        made.close()
