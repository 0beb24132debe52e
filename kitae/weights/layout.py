"""Where tensors lie in an image: in the order they are given, in buckets of at most `LIMIT` bytes.

A bucket is what has a checksum of its own and is loaded, or loaded again, by itself. It holds whole tensors; only one
that is larger than a bucket is cut, and then fills buckets to the last byte but for its end, so that every tensor lies
in one piece where the buckets follow each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from kitae.weights.base import Entry, dtype_name

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
