"""A delta on its base gives the new values, in whichever form it is smallest."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitae.weights.delta import Encoder, apply, changed_positions
from kitae.weights.layout import bits


@given(st.integers(0, 40), st.lists(st.integers(0, 39)), st.sampled_from([torch.int8, torch.int16, torch.int32]))
def test_changed_positions_equal_a_plain_comparison(length: int, hits: list[int], dtype: torch.dtype) -> None:
    old = torch.zeros(length, dtype=dtype)
    new = old.clone()
    new[[h for h in hits if h < length]] = 1
    assert changed_positions(new.numpy(), old.numpy()).tolist() == new.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("changed", "kind"), [(0, None), (1, "positions"), (30, "positions"), (300, "bitmap"), (1000, "whole")]
)
def test_the_smallest_form_is_taken_and_applies(changed: int, kind: str | None) -> None:
    old = torch.randn(1000).to(torch.bfloat16)
    new = old.clone()
    new[torch.randperm(1000)[:changed]] *= -1
    encoder = Encoder()
    encoder.add("w", changed_positions(bits(new).numpy(), bits(old).numpy()), bits(new).numpy())
    encoder.close()
    assert [part.kind for part in encoder.parts] == ([] if kind is None else [kind])
    assert encoder.bytes <= min(new.nbytes, sum(map(len, encoder.buckets)))
    for part in encoder.parts:
        assert (part.changed, part.bucket) == (changed, 0)
        apply(part, old, encoder.buckets[part.bucket])
    assert torch.equal(bits(old), bits(new))


def test_buckets_are_about_as_large_as_asked_and_no_part_is_cut() -> None:
    encoder = Encoder(limit=1024)
    tensors = [torch.full((length,), 1.0) for length in (100, 100, 2000, 30, 30)]
    for number, tensor in enumerate(tensors):
        encoder.add(str(number), np.arange(len(tensor)), bits(tensor).numpy())
    encoder.close()
    assert [part.bucket for part in encoder.parts] == [0, 0, 1, 2, 2]
    assert [len(data) for data in encoder.buckets] == [896, 8000, 256]
    for part, tensor in zip(encoder.parts, tensors, strict=True):
        found = torch.zeros_like(tensor)
        apply(part, found, encoder.buckets[part.bucket])
        assert torch.equal(found, tensor)
