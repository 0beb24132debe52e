"""Buckets as things that are sent: each has a name that no other bucket has, and can be checked by itself."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kitae.weights.base import Bucket, Manifest
from kitae.weights.checksum import Checksum
from kitae.weights.layout import contents

Kind = Literal["image", "delta"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`Chunk("image", 3, Bucket(33_554_432, 0x1d2c…), spans=((0, 4096), …))`: a bucket and where values are in it.

    spans: first byte and end of each piece, as the checksum of the bucket has them.
    """

    kind: Kind
    number: int
    bucket: Bucket
    spans: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return chunk_name(self.kind, self.number, self.bucket)

    def is_whole(self, data: Tensor) -> bool:
        """Whether these bytes are those that were published."""
        if len(data) != self.bucket.bytes:
            return False
        found = Checksum()
        for start, end in self.spans:
            found.add(data[start:end])
        return found.value == self.bucket.checksum


def chunk_name(kind: Kind, number: int, bucket: Bucket) -> str:
    """`image-00003-1d2c…`: with its checksum, so that a bucket that did not change keeps its name from version to
    version, and no old one can be taken for a new one."""
    return f"{kind}-{number:05}-{bucket.checksum:016x}"


def image_chunks(manifest: Manifest) -> tuple[Chunk, ...]:
    pieces = contents(manifest.entries, [bucket.bytes for bucket in manifest.buckets])
    spans = {n: tuple((p.offset, p.offset + p.end - p.start) for p in found) for n, found in pieces.items()}
    return tuple(Chunk("image", number, bucket, spans[number]) for number, bucket in enumerate(manifest.buckets))


def delta_chunks(manifest: Manifest) -> tuple[Chunk, ...]:
    return tuple(Chunk("delta", n, bucket, ((0, bucket.bytes),)) for n, bucket in enumerate(manifest.delta))
