"""The part of publishing that is the same for every transport: lay out, compare, sum up, write bucket by bucket.

A transport brings the `BucketStore` on which the buckets lie, and a way for receivers to read them.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kitae.errors import EngineError
from kitae.weights.base import Bucket, Entry, Manifest, Mode
from kitae.weights.delta import Encoder, changed_positions
from kitae.weights.layout import LIMIT, Checksum, bits, copy, integers, lay_out, pieces, raw
from kitae.weights.published_version import ReadWriteLock


class BucketStore(Protocol):
    """Where a publisher keeps the buckets of the image and of the delta: bytes, as flat tensors of uint8 on `device`.

    `reserve` is called once, with the sizes of the image's buckets. `read` gives a bucket as it was put last. `draft`
    gives the bytes of a bucket to write on: those that were put last, or whatever there is if it is written `anew`;
    `put` says that they are complete. `put_delta`: the delta of the version that is written, in place of that before.
    `announce`: the version is complete.
    """

    device: torch.device

    def reserve(self, sizes: Sequence[int]) -> None: ...
    def read(self, number: int) -> Tensor: ...
    def draft(self, number: int, *, anew: bool) -> Tensor: ...
    def put(self, number: int, bucket: Bucket) -> None: ...
    def put_delta(self, buckets: Sequence[Bucket], data: Sequence[Tensor]) -> None: ...
    def announce(self, manifest: Manifest) -> None: ...
    def close(self) -> None: ...


class BucketPublisher:
    """Implements `kitae.weights.base.Publisher` but for `address`, and `kitae.weights.published_version.WeightStore`.

    mode: "full" always sends everything; "delta" sends what changed where no more than the share `dense` of all values
    did. On one machine "full" is faster: copying everything costs less than looking for what changed. A delta is for
    memory or a wire that must carry fewer bytes. limit: bytes of a bucket.

    The image is in the bucket store, which is never the memory of the trainer's device unless the transport says so.
    """

    def __init__(
        self, bucket_store: BucketStore, mode: Mode = "full", *, dense: float = 0.5, limit: int = LIMIT
    ) -> None:
        self.mode = mode
        self.dense = dense
        self.bucket_store = bucket_store
        self._limit = limit
        self._manifest: Manifest | None = None  # of the last version that was written whole
        self._whole = False  # the image holds what the manifest says
        self._closed = False
        self._entries: tuple[Entry, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._lock = ReadWriteLock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[Manifest | None]:
        """What can be fetched, which stays so meanwhile; None: nothing was published yet."""
        async with self._lock.read():
            yield self._manifest

    def publish(self, version: int, tensors: Mapping[str, Tensor], *, in_full: bool = False) -> Manifest:
        with self._lock.write():
            if self._closed:
                raise EngineError(f"version {version} cannot be published: the publisher is closed")
            began = time.perf_counter()
            self._lay_out(tensors)
            base = self._manifest if self.mode == "delta" and self._whole and not in_full else None
            self._whole = False
            written = self._write(version, tensors, base)
            self._manifest = replace(written, seconds=time.perf_counter() - began)
            self._whole = True
            self.bucket_store.announce(self._manifest)
            return self._manifest

    def close(self) -> None:
        """After a `publish` that is under way."""
        with self._lock.write():
            self._closed = True
            self.bucket_store.close()

    def _write(self, version: int, tensors: Mapping[str, Tensor], base: Manifest | None) -> Manifest:
        values = sum(tensor.numel() for tensor in tensors.values())
        most = None if base is None else int(self.dense * values)
        work = _Snapshot(self.bucket_store, self._sizes, most, self._limit)
        for entry in self._entries:
            work.add(entry, tensors[entry.name].detach().to(self.bucket_store.device).contiguous())
        buckets = work.finish()
        complete = Manifest(version, None, self._entries, buckets, bytes=sum(entry.nbytes for entry in self._entries))
        if base is None or not work.compares:
            self.bucket_store.put_delta((), ())
            return complete
        encoder = work.encoder
        sums = tuple(Bucket(len(data), checksum_of(data)) for data in encoder.buckets)
        self.bucket_store.put_delta(sums, encoder.buckets)
        unchanged = 1 - work.changed / max(1, values)
        return replace(
            complete,
            base=base.version,
            parts=tuple(encoder.parts),
            delta=sums,
            bytes=encoder.bytes,
            unchanged=unchanged,
        )

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        entries, sizes = lay_out(tensors, self._limit)
        if not self._sizes:
            self.bucket_store.reserve(sizes)
            self._entries, self._sizes = entries, sizes
        elif entries != self._entries:
            ours, theirs = ({entry.name: (entry.dtype, entry.shape) for entry in e} for e in (self._entries, entries))
            differ = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
            what = f"{differ[0]!r} differs" if differ else "their order differs"
            raise EngineError(f"every weight update must have the same tensors as the first; {what}")


class _Snapshot:
    """One version in the making. Tensors come in the order of the layout: a bucket is complete when another begins.

    most: values that may differ from those on the bucket_store; None: nothing is compared.
    """

    def __init__(self, bucket_store: BucketStore, sizes: Sequence[int], most: int | None, limit: int) -> None:
        self.changed = 0
        self.encoder = Encoder(limit)
        self._shelf = bucket_store
        self._sizes = sizes
        self._most = most
        self._buckets: list[Bucket] = []  # that are complete
        self._sum = Checksum()  # of the one that is not
        self._draft: Tensor | None = None  # of it

    @property
    def compares(self) -> bool:
        return self._most is not None and self.changed <= self._most

    def add(self, entry: Entry, source: Tensor) -> None:
        compares, width = self.compares, source.element_size()
        found = []
        for piece in pieces(entry, self._sizes):
            self._turn_to(piece.bucket)
            new, place = (
                raw(source)[piece.start : piece.end],
                slice(piece.offset, piece.offset + piece.end - piece.start),
            )
            self._sum.add(new)
            if compares:
                found.append(self._patch(new, place, width) + piece.start // width)
            else:
                copy(new, self._open(anew=self._most is None)[place])
        if compares:
            positions = np.concatenate(found) if found else np.empty(0, np.int64)
            self.changed += len(positions)
            self.encoder.add(entry.name, positions, bits(source).numpy())

    def finish(self) -> tuple[Bucket, ...]:
        self._turn_to(len(self._sizes))
        self.encoder.close()
        return tuple(self._buckets)

    def _patch(self, new: Tensor, place: slice, width: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Write what differs; the positions."""
        values = new.numpy().view(integers(width))
        old = self._shelf.read(len(self._buckets)) if self._draft is None else self._draft
        positions = changed_positions(values, old[place].numpy().view(integers(width)))
        if len(positions):
            self._open(anew=False)[place].numpy().view(integers(width))[positions] = values[positions]
        return positions

    def _open(self, *, anew: bool) -> Tensor:
        if self._draft is None:
            self._draft = self._shelf.draft(len(self._buckets), anew=anew)
        return self._draft

    def _turn_to(self, number: int) -> None:
        """End the buckets before this one."""
        while len(self._buckets) < number:
            bucket = Bucket(self._sizes[len(self._buckets)], self._sum.value)
            if self._draft is not None or self._most is None:
                self._open(anew=True)
                self._shelf.put(len(self._buckets), bucket)
            self._buckets.append(bucket)
            self._sum, self._draft = Checksum(), None


def checksum_of(data: Tensor) -> int:
    found = Checksum()
    found.add(data)
    return found.value
