"""Weights through shared memory: from the trainer's process to engines' processes on the same machine.

One publisher writes the image and the delta, any number of receivers map the same descriptors: a version is copied into
the memory once, however many engines fetch it. The memory has no name in any file system: it is gone when the last
process that holds it is.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Address, Bucket, Manifest, Mode
from kitae.weights.layout import LIMIT, copy, starts
from kitae.weights.publisher import BucketPublisher
from kitae.weights.receiver import PullReceiver


class MemoryPublisher(BucketPublisher):
    """A `BucketPublisher` over memory that engines' processes inherit. `close` it when done, after the engines that
    fetch from it."""

    def __init__(self, mode: Mode = "full", *, dense: float = 0.5, limit: int = LIMIT) -> None:
        bucket_store = _SharedBuckets()
        super().__init__(bucket_store, mode, dense=dense, limit=limit)
        self.descriptors = (bucket_store.image.descriptor, bucket_store.delta.descriptor)

    @property
    def address(self) -> Address:
        image, delta = self.descriptors
        return Address("memory", {"pid": os.getpid(), "image": image, "delta": delta}, self.descriptors)


class MemoryReceiver(PullReceiver):
    """Over the descriptors of a `MemoryPublisher`: of the image and of the delta."""

    @classmethod
    def at(cls, address: Address, parameters: Mapping[str, Tensor]) -> "MemoryReceiver":
        """In another process of the same machine and user; a child may have inherited the descriptors instead."""
        pid, image, delta = (int(address.settings[name]) for name in ("pid", "image", "delta"))
        try:
            image, delta = (os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR) for number in (image, delta))
        except OSError as error:
            if pid != os.getppid():
                raise EngineError(f"the weights in the memory of process {pid} cannot be reached: {error}") from None
        return cls(image, delta, parameters)

    def __init__(self, image: int, delta: int, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(_MemoryReader(_Memory("image", image), _Memory("delta", delta)), parameters)


class _MemoryReader:
    def __init__(self, image: "_Memory", delta: "_Memory") -> None:
        self._image, self._delta = image, delta

    def image(self, manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        return _read(self._image, manifest.buckets, wanted)

    def delta(self, manifest: Manifest) -> Iterator[tuple[int, Tensor]]:
        return _read(self._delta, manifest.delta, range(len(manifest.delta)))

    def close(self) -> None:
        self._image.close()
        self._delta.close()


def _read(memory: "_Memory", buckets: Sequence[Bucket], wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    begin = starts([bucket.bytes for bucket in buckets])
    for number in wanted:
        try:
            yield number, memory.view(begin[number], buckets[number].bytes)
        except ValueError:  # it is too small
            continue


class _SharedBuckets:
    """Implements `kitae.weights.publisher.BucketStore`: buckets that follow each other and are written in place."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.image, self.delta = _Memory("image"), _Memory("delta")
        self._sizes: Sequence[int] = ()
        self._starts: tuple[int, ...] = ()

    def reserve(self, sizes: Sequence[int]) -> None:
        self._sizes, self._starts = sizes, starts(sizes)
        self.image.reserve(self._starts[-1])

    def read(self, number: int) -> Tensor:
        return self.image.view(self._starts[number], self._sizes[number])

    def draft(self, number: int, *, anew: bool) -> Tensor:
        return self.read(number)

    def put(self, number: int, bucket: Bucket) -> None:
        pass

    def put_delta(self, buckets: Sequence[Bucket], data: Sequence[Tensor]) -> None:
        begin = starts([bucket.bytes for bucket in buckets])
        self.delta.reserve(begin[-1])
        for start, values in zip(begin, data, strict=False):  # the last start is the end
            copy(values, self.delta.view(start, len(values)))

    def announce(self, manifest: Manifest) -> None:
        pass

    def close(self) -> None:
        self.image.close()
        self.delta.close()


class _Memory:
    """Memory that processes share by its descriptor, without a name."""

    def __init__(self, label: str, descriptor: int | None = None) -> None:
        self._map: mmap.mmap | None = None
        if descriptor is not None:
            self.descriptor = descriptor
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(f"kitae-{label}")
        else:
            with tempfile.TemporaryFile(prefix=f"kitae-{label}-") as file:
                self.descriptor = os.dup(file.fileno())

    def reserve(self, size: int) -> None:
        """Have at least so much; `EngineError` where there is not enough, now and not at some later access."""
        if size > os.fstat(self.descriptor).st_size:
            self._map = None
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self.descriptor, 0, size)
                else:
                    os.ftruncate(self.descriptor, size)
            except OSError as error:
                raise EngineError(f"no shared memory for {size} bytes of weights: {error}") from error

    def view(self, offset: int, size: int) -> Tensor:
        """Bytes that change with the memory; ValueError where it is too small."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if os.fstat(self.descriptor).st_size < offset + size:  # now: one that was cut would end us at an access
            raise ValueError(f"the memory must have {offset + size} bytes")
        if self._map is None or len(self._map) < offset + size:
            self._map = mmap.mmap(self.descriptor, 0)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)

    def close(self) -> None:
        self._map = None
        os.close(self.descriptor)
