"""How samples are distributed over rows, and laid out in them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from kitae.data.packing import Row, lay_out, pack
from kitae.types import Sample


def make(group: int, index: int, prompt: int, response: int, unit: int | None = None) -> Sample:
    tokens = np.concatenate([np.full(prompt, group), np.arange(response)])
    mask = np.arange(prompt + response) >= prompt
    blank = np.zeros(len(tokens), dtype=np.float32)
    return Sample(group, index, tokens, prompt, mask, blank, unit=unit)


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


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("share", [True, False])
def test_samples_of_a_unit_stay_in_one_row(seed: int, share: bool) -> None:
    """Pairs that are compared, of one prompt or of two, among samples without a unit."""
    rng = random.Random(seed)
    pairs = [make(g, i, 10 + i * rng.randint(0, 1), rng.randint(1, 60), unit=g) for g in range(12) for i in range(2)]
    samples = pairs + [make(g, 0, 10, rng.randint(1, 60)) for g in range(20, 30)]
    rng.shuffle(samples)
    parts = pack(samples, 100, share)
    assert sorted(s.key for p in parts for s in p) == sorted(s.key for s in samples)
    where: dict[int, set[int]] = {}
    for number, part in enumerate(parts):
        for s in part:
            if s.unit is not None:
                where.setdefault(s.unit, set()).add(number)
    assert len(where) == 12 and all(len(rows) == 1 for rows in where.values())
    for part in parts:
        tokens = len(lay_out(part, share).tokens_T) + len(part)  # the last token of each sample is left out
        assert tokens <= 100 or len({(s.group, s.unit) for s in part}) == 1, "too long: alone"


def test_the_prompt_of_a_unit_is_counted_once_where_it_is_shared() -> None:
    """A prompt of 40 and two responses of 10 are 60 tokens, and two such pairs fit into 120."""
    pairs = [make(g, i, 40, 10, unit=g) for g in range(4) for i in range(2)]
    assert [len(part) for part in pack(pairs, 120)] == [4, 4]
    assert [len(part) for part in pack(pairs, 120, share_prompts=False)] == [2, 2, 2, 2]


def test_groups_with_the_same_prompt_have_it_once_in_a_row() -> None:
    """Six samples of 40 + 10 tokens in three groups: 100 tokens in one row."""
    samples = [replace(make(7, i, 40, 10), group=i // 2) for i in range(6)]
    assert [len(part) for part in pack(samples, 100)] == [6]
    assert len(lay_out(samples).tokens_T) == 40 + 6 * 9


@pytest.mark.parametrize("multiple", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_rows_that_are_missing_for_a_multiple_are_empty(multiple: int, count: int) -> None:
    samples = [make(g, 0, 10, 50) for g in range(count)]
    parts = pack(samples, 100, multiple=multiple)
    assert len(parts) % multiple == 0 and len(parts) - count < multiple
    assert [len(p) for p in parts] == [1] * count + [0] * (len(parts) - count)
    assert parts[:count] == pack(samples, 100), "the others are as they would be"


def test_a_row_is_made_of_arrays_and_nothing_else() -> None:
    """It travels between processes."""
    samples = [make(0, i, 4, 2 + i).with_columns(advantage=np.arange(6 + i, dtype=np.float32)) for i in range(2)]
    row = lay_out(samples)
    assert row.tokens_T.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert (row.lengths, row.source_N.tolist(), row.target_N.tolist()) == ((2, 3), [3, 4, 3, 5, 6], [0, 1, 0, 1, 2])
    assert row.columns["advantage"].tolist() == [4, 5, 4, 5, 6]
    assert [part.tolist() for part in row.split(row.columns["advantage"])] == [[4, 5], [4, 5, 6]]
    for made in (row, Row.empty()):
        arrays = [made.tokens_T, made.positions_T, made.source_N, made.target_N, made.weight_N, *made.columns.values()]
        assert all(type(a) is np.ndarray for a in arrays)
        integers = [a.dtype == np.int64 for a in arrays]
        assert integers == [True] * 4 + [False] * (len(arrays) - 4)
        assert all(a.dtype == np.float32 for a in arrays[4:])


def test_nothing_is_laid_out_as_an_empty_row() -> None:
    row = lay_out([])
    assert (len(row.tokens_T), row.loss_tokens, row.lengths, row.columns) == (1, 0, (), {})
    assert row.split(np.zeros(0, dtype=np.float32)) == []


def test_columns_that_not_every_sample_of_a_row_has_are_left_out() -> None:
    blank = np.zeros(6, dtype=np.float32)
    samples = [make(0, 0, 4, 2).with_columns(a=blank, b=blank), make(0, 1, 4, 2).with_columns(b=blank, c=blank)]
    assert list(lay_out(samples).columns) == ["b"]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_what_predicts_a_loss_token_is_the_token_before_it(seed: int, share: bool) -> None:
    """With responses that are empty, and masks with holes."""
    rng = random.Random(seed)
    samples = [make(g, i, rng.randint(2, 9), rng.choice([0, 1, 5])) for g in range(4) for i in range(3)]
    mixed = np.random.default_rng(seed)
    samples = [replace(s, mask_T=s.mask_T & (mixed.random(s.length) < 0.7), unit=None) for s in samples]
    samples = [replace(s, weight_T=mixed.random(s.length).astype(np.float32)) for s in samples]
    row = lay_out(samples, share)
    expected = [(s, i) for s in samples for i in np.flatnonzero(s.mask_T)]
    assert row.lengths == tuple(s.loss_tokens for s in samples)
    assert row.target_N.tolist() == [np.asarray(s.tokens_T)[i] for s, i in expected]
    assert row.weight_N.tolist() == [s.weight_T[i] for s, i in expected]
    assert row.tokens_T[row.source_N].tolist() == [np.asarray(s.tokens_T)[i - 1] for s, i in expected]
    assert row.positions_T[row.source_N].tolist() == [i - 1 for _, i in expected]
