"""In which order a stream visits what it has: a pure function of seed and position."""

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from kitae.types import IntArray


class Epochs:
    """The order of `size` things, epoch after epoch: `Epochs(100, seed=0, shuffle=True).at(250)` is in the third.

    Each epoch visits everything once, in a seeded order of its own when `shuffle` is set. `source` tells several
    orders of one seed apart.
    """

    def __init__(self, size: int, *, seed: int, shuffle: bool, source: int = 0) -> None:
        assert size > 0, f"epochs are of at least one thing, got {size}"
        self._size = size
        # Two epochs are kept: readers that run ahead and readers that lag may straddle the border between them.
        self._epoch = lru_cache(maxsize=2)(partial(_epoch, size, seed, source)) if shuffle else None

    def at(self, position: int) -> int:
        epoch, index = divmod(position, self._size)
        return int(self._epoch(epoch)[index]) if self._epoch else index


def _epoch(size: int, seed: int, source: int, epoch: int) -> IntArray:
    return permutation(size, (seed, epoch, source))


def permutation(size: int, key: tuple[int, ...]) -> IntArray:
    """`permutation(4, (seed, epoch))` → `[2, 0, 3, 1]`; zeros at the end of the key do not change it."""
    # Sorting raw random bits, because numpy promises the same bits in every release, but not the same `permutation`.
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits, kind="stable")


BLOCK = 1000
"""Positions over which the shares of a mixture are exact, to a thousandth."""


class Mixture:
    """Who has which turn: `Mixture([2, 1], seed=0).at(17)` → `(0, 11)`, source 0 for the twelfth time.

    In every block of 1000 turns each source has its share, at least once, in a seeded order.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        assert 0 < len(weights) <= BLOCK, f"a mixture has 1 to {BLOCK} sources, got {len(weights)}"
        self._counts = _shares(weights)
        self._alone = len(weights) == 1
        self._block = lru_cache(maxsize=2)(partial(_block, self._counts, seed))

    def at(self, position: int) -> tuple[int, int]:
        if self._alone:
            return 0, position
        block, index = divmod(position, BLOCK)
        sources, turns = self._block(block)
        source = int(sources[index])
        return source, block * self._counts[source] + int(turns[index])


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The block cut by the weights: whole numbers of at least 1; the largest remainders are rounded up."""
    free = BLOCK - len(weights)
    exact = np.array(weights) / sum(weights) * BLOCK - 1
    exact = np.maximum(exact, 0)
    exact = exact / max(exact.sum(), 1e-12) * free
    counts = np.floor(exact).astype(int)
    remainders = np.argsort(counts - exact, kind="stable")
    counts[remainders[: free - counts.sum()]] += 1
    return tuple(int(count) + 1 for count in counts)


def _block(counts: tuple[int, ...], seed: int, block: int) -> tuple[IntArray, IntArray]:
    """Of each position of a block, its source and how often that had a turn in the block before."""
    sources = np.repeat(np.arange(len(counts)), counts)[permutation(BLOCK, (seed, block, len(counts)))]
    turns = np.empty(BLOCK, dtype=np.int64)
    for source, count in enumerate(counts):
        turns[sources == source] = np.arange(count)
    return sources, turns
