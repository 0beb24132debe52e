"""Orders of visits: every epoch a permutation, every block of a mixture with its shares."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.data.epochs import BLOCK, Epochs, Mixture, permutation

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=8)


@given(size=st.integers(1, 60), seed=st.integers(0, 2**63), source=st.integers(0, 3), epoch=st.integers(0, 5))
def test_every_epoch_is_a_permutation(size, seed, source, epoch):
    epochs = Epochs(size, seed=seed, shuffle=True, source=source)
    assert sorted(epochs.at(epoch * size + i) for i in range(size)) == list(range(size))


def test_without_shuffling_the_order_is_the_file_s():
    assert [Epochs(3, seed=0, shuffle=False).at(i) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_sources_of_one_seed_have_orders_of_their_own():
    first, second = (Epochs(50, seed=0, shuffle=True, source=s) for s in (0, 1))
    assert [first.at(i) for i in range(50)] != [second.at(i) for i in range(50)]


def test_orders_are_fixed_for_good():
    assert permutation(8, (3, 1)).tolist() == permutation(8, (3, 1, 0)).tolist() == [0, 6, 2, 1, 3, 7, 4, 5]
    mixture = Mixture([2, 1, 1], seed=5)
    assert [mixture.at(i) for i in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (0, 4)]


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 2**40), block=st.integers(0, 3))
def test_every_block_has_the_shares_and_every_source_its_own_sequence(weights, seed, block):
    mixture = Mixture(weights, seed)
    turns = [mixture.at(p) for p in range(block * BLOCK, (block + 1) * BLOCK)]
    counts = Counter(source for source, _ in turns)
    for source, weight in enumerate(weights):
        visits = [turn for s, turn in turns if s == source]
        start = visits[0]
        assert visits == list(range(start, start + len(visits))), "each once, in order"
        assert start == block * len(visits)
        share = weight / sum(weights) * BLOCK
        assert counts[source] >= 1 and (counts[source] <= share + 1.01 or share < 1)
        assert counts[source] >= share - len(weights) - 1, "but for what the smallest are given"


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, positions=st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_a_position_means_the_same_in_every_instance_and_order(weights, positions):
    there, back = Mixture(weights, 7), Mixture(weights, 7)
    forward = {p: there.at(p) for p in positions}
    assert all(back.at(p) == forward[p] for p in reversed(positions))


@pytest.mark.parametrize(
    ("weights", "counts"), [([2, 1], [667, 333]), ([1, 1, 2], [250, 250, 500]), ([1e-6, 1], [1, 999])]
)
def test_shares(weights, counts):
    mixture = Mixture(weights, 0)
    found = Counter(mixture.at(p)[0] for p in range(BLOCK))
    assert [found[s] for s in range(len(weights))] == counts
