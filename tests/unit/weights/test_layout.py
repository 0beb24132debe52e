"""Every byte of every tensor is in exactly one bucket, and no bucket is larger than allowed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kitae.weights.layout import lay_out, pieces, starts

SIZES = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([torch.int8, torch.bfloat16, torch.float32])))


@given(SIZES, st.sampled_from([64, 128, 1024]))
def test_nothing_is_lost_and_nothing_overlaps(shapes: list[tuple[int, torch.dtype]], limit: int) -> None:
    tensors = {str(i): torch.zeros(count, dtype=dtype) for i, (count, dtype) in enumerate(shapes)}
    entries, sizes = lay_out(tensors, limit)
    assert [entry.name for entry in entries] == list(tensors) and all(size <= limit for size in sizes)
    begin = starts(sizes)
    used: set[int] = set()
    for entry in entries:
        found = list(pieces(entry, sizes))
        assert entry.nbytes == tensors[entry.name].nbytes == sum(p.end - p.start for p in found)
        assert len(found) <= 1 or entry.nbytes > limit, "only what is larger than a bucket is cut"
        first = begin[entry.bucket] + entry.offset
        for piece in found:
            place = begin[piece.bucket] + piece.offset
            assert place == first + piece.start, "in one piece where the buckets follow each other"
            assert piece.offset + piece.end - piece.start <= sizes[piece.bucket]
            new = set(range(place, place + piece.end - piece.start))
            assert not new & used
            used |= new
    assert max(used, default=-1) < begin[-1]


def test_small_tensors_share_a_bucket() -> None:
    tensors = {"a": torch.zeros(10), "b": torch.zeros(10), "large": torch.zeros(100), "c": torch.zeros(3)}
    entries, sizes = lay_out(tensors, 256)
    assert [(e.bucket, e.offset) for e in entries] == [(0, 0), (0, 64), (1, 0), (2, 192)]
    assert sizes == (104, 256, 204)
