"""The part of fetching that is the same for every transport: check the manifest, apply the delta or load the image,
sum up what was loaded.

A transport brings a `Reader`, which gets the bytes of buckets from wherever they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kitae.weights import delta
from kitae.weights.base import DeltaPart, Manifest
from kitae.weights.layout import Checksum, Piece, contents, copy, raw


class Reader(Protocol):
    """Bytes of buckets with their numbers, in any order: flat tensors of uint8, each valid until the next is asked for.

    They need not be right: whoever reads sums up what was loaded. A bucket that cannot be had is left out.

    `image`: those that are wanted; `delta`: all of the delta, on the host.
    """

    def image(self, manifest: Manifest, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]: ...
    def delta(self, manifest: Manifest) -> Iterator[tuple[int, Tensor]]: ...
    def close(self) -> None: ...


class PullReceiver:
    """Implements `kitae.weights.base.Receiver` over a reader, which it closes with itself."""

    def __init__(self, reader: Reader, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.reader = reader
        self.version: int | None = None  # that was fetched whole
        self.repaired = 0
        for tensor in parameters.values():
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()

    def fetch(self, manifest: Manifest) -> tuple[int, ...]:
        manifest.check(self.parameters)
        base, self.version = self.version, None
        pieces = contents(manifest.entries, [bucket.bytes for bucket in manifest.buckets])
        if manifest.base is not None and manifest.base == base:
            self._apply(manifest)
            wrong = [number for number in pieces if not self._is_whole(manifest, pieces, number)]
            damaged = self._load(manifest, pieces, wrong)
            self.repaired += len(wrong) - len(damaged)
        else:
            damaged = self._load(manifest, pieces, pieces)
        if not damaged:
            self.version = manifest.version
        return damaged

    def close(self) -> None:
        self.reader.close()

    def _apply(self, manifest: Manifest) -> None:
        parts: dict[int, list[DeltaPart]] = {}
        for part in manifest.parts:
            parts.setdefault(part.bucket, []).append(part)
        for number, data in self.reader.delta(manifest) if parts else ():
            for part in parts[number]:
                try:
                    delta.apply(part, self.parameters[part.name], data)
                except (ValueError, IndexError, RuntimeError):  # positions or sizes that cannot be: it is damaged
                    continue  # the checksums show what is missing

    def _load(self, manifest: Manifest, pieces: Mapping[int, list[Piece]], wanted: Iterable[int]) -> tuple[int, ...]:
        """Load buckets from the image; those that are damaged."""
        left = {number for number in wanted if pieces[number]}
        for number, data in self.reader.image(manifest, sorted(left)) if left else ():
            if len(data) < manifest.buckets[number].bytes:
                continue
            for piece in pieces[number]:
                values = data[piece.offset : piece.offset + piece.end - piece.start]
                copy(values, raw(self.parameters[piece.name])[piece.start : piece.end])
            if self._is_whole(manifest, pieces, number):
                left.discard(number)
        return tuple(sorted(left))

    def _is_whole(self, manifest: Manifest, pieces: Mapping[int, list[Piece]], number: int) -> bool:
        found = Checksum()
        for piece in pieces[number]:
            found.add(raw(self.parameters[piece.name])[piece.start : piece.end])
        return found.value == manifest.buckets[number].checksum
