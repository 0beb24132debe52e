"""How samples are distributed over micro-batches."""

import random

import numpy as np
import pytest

from kitae.data.packing import pack
from kitae.types import Sample


def make(group: int, index: int, prompt: int, response: int) -> Sample:
    tokens = np.concatenate([np.full(prompt, group), np.arange(response)])
    mask = np.arange(prompt + response) >= prompt
    blank = np.zeros(len(tokens), dtype=np.float32)
    return Sample(group, index, tokens, prompt, mask, blank)


def row_tokens(part: list[Sample]) -> int:
    prompts = {s.group: s.prompt_length for s in part}
    return sum(prompts.values()) + sum(s.length - s.prompt_length for s in part)


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_once_within_the_budget_and_in_few_rows(seed: int) -> None:
    rng = random.Random(seed)
    samples = [make(g, i, 10, rng.randint(1, 60)) for g in range(rng.randint(1, 40)) for i in range(4)]
    parts = pack(samples, 400)
    assert sorted((s.group, s.index) for p in parts for s in p) == sorted((s.group, s.index) for s in samples)
    assert max(row_tokens(p) for p in parts) <= 400
    assert len(parts) <= 1 + 2 * sum(row_tokens(p) for p in parts) // 400, "any two rows together exceed the budget"


def test_five_groups_in_two_rows_leave_no_short_one() -> None:
    """First fit would make rows of 400 and 100 tokens."""
    samples = [make(g, i, 10, 45) for g in range(5) for i in range(2)]
    assert sorted(row_tokens(p) for p in pack(samples, 400)) == [200, 300]


def test_what_is_longer_than_the_budget_goes_alone() -> None:
    samples = [make(0, 0, 10, 900), make(1, 0, 10, 10), make(2, 0, 10, 150), make(3, 0, 10, 30)]
    parts = pack(samples, 100)
    assert sorted([s.group for s in p] for p in parts) == [[0], [2], [3, 1]]
