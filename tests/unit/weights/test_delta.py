"""A delta on its base gives the new values, in whichever form it is smallest."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitae.weights.bits import Bits, bits
from kitae.weights.delta import Encoder, apply, changed_positions


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
    encoder, memory = Encoder(), np.zeros(4096, dtype=np.uint8)
    encoder.add("w", changed_positions(bits(new).numpy(), bits(old).numpy()), bits(new).numpy())
    for offset, values in encoder.chunks:
        memory[offset : offset + values.nbytes] = values.view(np.uint8)

    def read(dtype: np.dtype[np.generic], count: int, offset: int) -> Bits:
        return np.frombuffer(memory, dtype, count, offset)

    assert [part.kind for part in encoder.parts] == ([] if kind is None else [kind])
    assert encoder.bytes == sum(values.nbytes for _, values in encoder.chunks) <= new.nbytes
    for part in encoder.parts:
        assert part.changed == changed
        apply(part, old, read)
    assert torch.equal(bits(old), bits(new))
