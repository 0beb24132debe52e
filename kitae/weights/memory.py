"""Weights through shared memory: from the trainer's process to engines' processes on the same machine.

One publisher writes the image and the delta, any number of receivers map the same descriptors: a version is copied into
the memory once, however many engines fetch it. The memory has no name in any file system: it is gone when the last
process that holds it is.
"""

import mmap
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from kitae.errors import EngineError
from kitae.weights import delta
from kitae.weights.base import Address, Bucket, Entry, Manifest, Mode
from kitae.weights.bits import Bits, bits, copy, integers, raw
from kitae.weights.board import Gate
from kitae.weights.checksum import Checksum
from kitae.weights.layout import LIMIT, Piece, lay_out, pieces, starts
from kitae.weights.whole import whole

_BYTE = np.dtype(np.uint8)


class MemoryPublisher:
    """Implements `kitae.weights.base.Publisher`, and is its own `Board`. `close` it when done, after the engines that
    fetch from it.

    mode: "full" always sends everything; "delta" sends what changed where no more than the share `dense` of all values
    did. On one machine "full" is faster: copying everything costs less than looking for what changed. A delta is for
    memory or a wire that must carry fewer bytes. limit: bytes of a bucket.
    """

    def __init__(self, mode: Mode = "full", *, dense: float = 0.5, limit: int = LIMIT) -> None:
        self.mode = mode
        self.dense = dense
        self._limit = limit
        self._manifest: Manifest | None = None  # of the last version that was written whole
        self._whole = False  # the image holds what the manifest says
        self._closed = False
        self._image, self._delta = _Memory("image"), _Memory("delta")
        self._entries: tuple[Entry, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._starts: tuple[int, ...] = ()
        self._gate = Gate()

    @property
    def descriptors(self) -> tuple[int, int]:
        """Of the image and the delta."""
        return self._image.descriptor, self._delta.descriptor

    @property
    def address(self) -> Address:
        image, delta = self.descriptors
        return Address("memory", {"pid": os.getpid(), "image": image, "delta": delta}, self.descriptors)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Manifest | None]:
        """What the memory has, which stays so meanwhile; None: nothing was published yet."""
        async with self._gate.held():
            yield self._manifest

    def publish(self, version: int, tensors: Mapping[str, Tensor], *, in_full: bool = False) -> Manifest:
        with self._gate.closed():
            if self._closed:
                raise EngineError(f"version {version} cannot be published: the publisher is closed")
            began = time.perf_counter()
            self._lay_out(tensors)
            base = self._manifest if self.mode == "delta" and self._whole and not in_full else None
            self._whole = False
            written = self._write(version, tensors, base)
            self._manifest = replace(written, seconds=time.perf_counter() - began)
            self._whole = True
            return self._manifest

    def close(self) -> None:
        """After a `publish` that is under way."""
        with self._gate.closed():
            self._closed = True
            self._image.close()
            self._delta.close()

    def _write(self, version: int, tensors: Mapping[str, Tensor], base: Manifest | None) -> Manifest:
        total = sum(tensor.numel() for tensor in tensors.values())
        changed = 0
        encoder, sums = delta.Encoder(), [Checksum() for _ in self._sizes]
        for entry in self._entries:
            source = whole(tensors[entry.name]).to("cpu").contiguous()
            for piece in pieces(entry, self._sizes):
                sums[piece.bucket].add(raw(source)[piece.start : piece.end])
            new, old = bits(source).numpy(), self._view(entry, source.element_size())
            if base is not None and changed <= self.dense * total:
                positions = delta.changed_positions(new, old)
                changed += len(positions)
                encoder.add(entry.name, positions, new)
                old[positions] = new[positions]
            else:
                np.copyto(old, new)
        buckets = tuple(Bucket(size, found.value) for size, found in zip(self._sizes, sums, strict=True))
        in_full = Manifest(version, None, self._entries, buckets, bytes=sum(entry.nbytes for entry in self._entries))
        if base is None or changed > self.dense * total:
            return in_full
        self._delta.write(encoder.chunks)
        unchanged = 1 - changed / max(1, total)
        return replace(in_full, base=base.version, parts=tuple(encoder.parts), bytes=encoder.bytes, unchanged=unchanged)

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        entries, sizes = lay_out(tensors, self._limit)
        if not self._sizes:
            self._image.reserve(starts(sizes)[-1])
            self._entries, self._sizes, self._starts = entries, sizes, starts(sizes)
        elif entries != self._entries:
            ours, theirs = ({entry.name: (entry.dtype, entry.shape) for entry in e} for e in (self._entries, entries))
            differ = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
            what = f"{differ[0]!r} differs" if differ else "their order differs"
            raise EngineError(f"every weight update must have the same tensors as the first; {what}")

    def _view(self, entry: Entry, width: int) -> Bits:
        return self._image.array(integers(width), entry.nbytes // width, self._starts[entry.bucket] + entry.offset)


class MemoryReceiver:
    """Implements `kitae.weights.base.Receiver` over the descriptors of a `MemoryPublisher`."""

    @classmethod
    def at(cls, address: Address, parameters: Mapping[str, Tensor]) -> "MemoryReceiver":
        """In another process of the same machine: one that has inherited the descriptors, or any other of this user."""
        pid, image, delta = (int(address.settings[name]) for name in ("pid", "image", "delta"))
        if pid != os.getppid():
            try:
                image, delta = (os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR) for number in (image, delta))
            except OSError as error:
                raise EngineError(f"the weights in the memory of process {pid} cannot be reached: {error}") from None
        return cls(image, delta, parameters)

    def __init__(self, image: int, delta: int, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.version: int | None = None  # that was fetched whole
        self.repaired = 0
        self._image, self._delta = _Memory("image", image), _Memory("delta", delta)
        for tensor in parameters.values():
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()

    def close(self) -> None:
        self._image.close()
        self._delta.close()

    def fetch(self, manifest: Manifest) -> tuple[int, ...]:
        manifest.check(self.parameters)
        base, self.version = self.version, None
        contents = _contents(manifest)
        if manifest.base is not None and manifest.base == base:
            self._apply(manifest)
            wrong = [number for number in contents if not self._is_whole(manifest, contents, number)]
            damaged = self._load(manifest, contents, wrong)
            self.repaired += len(wrong) - len(damaged)
        else:
            damaged = self._load(manifest, contents, contents)
        if not damaged:
            self.version = manifest.version
        return damaged

    def _apply(self, manifest: Manifest) -> None:
        for part in manifest.parts:
            try:
                delta.apply(part, self.parameters[part.name], self._delta.array)
            except (ValueError, IndexError, RuntimeError):  # positions or sizes that cannot be: it is damaged
                continue  # the checksums tell

    def _load(self, manifest: Manifest, contents: Mapping[int, list[Piece]], wanted: Iterable[int]) -> tuple[int, ...]:
        """Load buckets from the image; those that are damaged."""
        begin = starts([bucket.bytes for bucket in manifest.buckets])
        damaged = []
        for number in wanted:
            try:
                for piece in contents[number]:
                    values = self._image.array(_BYTE, piece.end - piece.start, begin[number] + piece.offset)
                    copy(values, raw(self.parameters[piece.name])[piece.start : piece.end])
            except ValueError:  # the memory is too small
                damaged.append(number)
                continue
            if not self._is_whole(manifest, contents, number):
                damaged.append(number)
        return tuple(damaged)

    def _is_whole(self, manifest: Manifest, contents: Mapping[int, list[Piece]], number: int) -> bool:
        found = Checksum()
        for piece in contents[number]:
            found.add(raw(self.parameters[piece.name])[piece.start : piece.end])
        return found.value == manifest.buckets[number].checksum


def _contents(manifest: Manifest) -> dict[int, list[Piece]]:
    """What is in each bucket, by its number."""
    sizes = [bucket.bytes for bucket in manifest.buckets]
    found: dict[int, list[Piece]] = {number: [] for number in range(len(sizes))}
    for entry in manifest.entries:
        for piece in pieces(entry, sizes):
            found[piece.bucket].append(piece)
    return found


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

    def array(self, dtype: np.dtype[Any], count: int, offset: int) -> Bits:
        """A view; it changes with the memory."""
        end = offset + count * dtype.itemsize
        if count == 0:
            return np.empty(0, dtype)
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self.descriptor, 0)
        return np.frombuffer(self._map, dtype, count, offset)

    def write(self, chunks: list[tuple[int, Bits]]) -> None:
        if chunks:
            offset, last = chunks[-1]
            self.reserve(offset + last.nbytes)
        for offset, values in chunks:
            self.array(values.dtype, values.size, offset)[:] = values

    def close(self) -> None:
        self._map = None
        os.close(self.descriptor)
