"""Where tensors lie in an image: in the order they are given, in buckets of at most `LIMIT` bytes.

A bucket is what has a checksum of its own and is loaded, or loaded again, by itself. It holds whole tensors; only one
that is larger than a bucket is cut, and then fills buckets to the last byte but for its end, so that every tensor lies
in one piece where the buckets follow each other.

A bucket that is sent has a name that no other bucket has, and a checksum: 64 bits, taken at the speed of memory, on the
device where the tensors are. Tensors are compared as integers with the same bits, so NaN and -0 are values like others.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kitae.weights.base import Bucket, Entry, Manifest, dtype_name

LIMIT = 32 * 2**20  # bytes: many tensors of a small model, a part of the embedding of a large one
_ALIGN = 64  # bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """`Piece("lm_head.weight", start=0, end=33_554_432, bucket=7, offset=0)`: bytes of a tensor in one bucket."""

    name: str
    start: int
    end: int
    bucket: int
    offset: int


def lay_out(tensors: Mapping[str, Tensor], limit: int = LIMIT) -> tuple[tuple[Entry, ...], tuple[int, ...]]:
    """Where each tensor begins, and the sizes of the buckets. limit: a multiple of 64."""
    entries, sizes = [], [0]
    for name, tensor in tensors.items():
        start = aligned(sizes[-1])
        if sizes[-1] and start + tensor.nbytes > limit:
            sizes.append(0)
            start = 0
        entries.append(Entry(name, dtype_name(tensor), tuple(tensor.shape), len(sizes) - 1, start))
        end = start + tensor.nbytes
        while end > limit:
            sizes[-1] = limit
            sizes.append(0)
            end -= limit
        sizes[-1] = end
    return tuple(entries), tuple(sizes)


def pieces(entry: Entry, sizes: Sequence[int]) -> Iterator[Piece]:
    """A tensor, bucket by bucket: one piece, or several where it is larger than a bucket."""
    bucket, offset, start = entry.bucket, entry.offset, 0
    while start < entry.nbytes:
        end = min(entry.nbytes, start + sizes[bucket] - offset)
        yield Piece(entry.name, start, end, bucket, offset)
        bucket, offset, start = bucket + 1, 0, end


def contents(entries: Iterable[Entry], sizes: Sequence[int]) -> dict[int, list[Piece]]:
    """What is in each bucket, by its number."""
    found: dict[int, list[Piece]] = {number: [] for number in range(len(sizes))}
    for entry in entries:
        for piece in pieces(entry, sizes):
            found[piece.bucket].append(piece)
    return found


def starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each bucket begins if they follow each other, and, last, where they end."""
    return tuple(accumulate((aligned(size) for size in sizes), initial=0))


def aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


Bits = npt.NDArray[Any]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The values of a contiguous tensor as integers, flat: the same memory."""
    return tensor.data.view(-1).view(_INTEGERS[tensor.element_size()])


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: the same memory."""
    return bits(tensor).view(torch.uint8)


def integers(size: int) -> np.dtype[Any]:
    """numpy's integers of so many bytes."""
    return np.dtype(f"i{size}")


def copy(values: Tensor, into: Tensor) -> None:
    """Values of the same dtype and number, from any device to any other."""
    if values.device.type == into.device.type == "cpu":
        np.copyto(into.numpy(), values.numpy())  # in one thread, see `checksum`
    else:
        into.copy_(values)


_BLOCK = 512  # words of 8 bytes that are added up before the CRC


class Checksum:
    """The CRC of the sums of blocks, and their sum. A change of one value always shows; the order of blocks counts."""

    def __init__(self) -> None:
        self._crc = self._total = 0

    def add(self, raw: Tensor) -> None:
        """Bytes: a flat tensor of uint8."""
        if raw.storage_offset() % 8:
            raw = raw.clone()
        whole = len(raw) // (8 * _BLOCK) * 8 * _BLOCK
        words = raw[:whole].view(torch.int64).view(-1, _BLOCK)
        # On a CPU by numpy, in one thread: those of torch wait for each other where other processes want the cores.
        sums = words.numpy().sum(1) if words.device.type == "cpu" else words.sum(1).cpu().numpy()
        for part in (sums, raw[whole:].cpu().numpy()):
            self._crc = zlib.crc32(part.tobytes(), self._crc)
            self._total += int(part.sum(dtype=np.int64))

    @property
    def value(self) -> int:
        return self._crc << 32 | self._total & 0xFFFFFFFF


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
