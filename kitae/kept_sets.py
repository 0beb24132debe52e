"""Which tokens a sampler could have drawn, for each token of an answer: what top-k, top-p, min-p and constraints left.

Whoever computes such a log-prob again must renormalise over the same set. The set itself is recorded, and not the
setting that made it: logits that differ in the last bit, or those of newer weights, would put another token at the edge
of a nucleus. A set is the ids of its tokens, or a bit for each token of the vocabulary where that is shorter; equal
sets of an answer, as grammars make them, are kept once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kitae.errors import CorruptError

Words = npt.NDArray[np.uint32]
WHOLE = -1
"""The number of the set that is the whole vocabulary."""


class KeptSets(Sequence[Words | None]):
    """One set for each of T tokens, as words (`words_of`); None: nothing was left out.

    `KeptSets(49152, numbers=[-1, 0, 0], starts=[0, 2], words=[7, 42])`: the first token was drawn from the whole
    vocabulary, the other two from the tokens 7 and 42.
    """

    __slots__ = ("numbers", "starts", "vocabulary", "words")

    def __init__(self, vocabulary: int, numbers: Any, starts: Any, words: Any) -> None:
        self.vocabulary = vocabulary
        self.numbers = np.asarray(numbers, np.int32)
        self.starts = np.asarray(starts, np.int64)
        self.words: Words = np.asarray(words, np.uint32)

    @staticmethod
    def whole(tokens: int) -> "KeptSets":
        """Of tokens from which nothing was left out."""
        return KeptSets(0, np.full(tokens, WHOLE), [0], [])

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, key: int) -> Words | None: ...
    @overload
    def __getitem__(self, key: slice | npt.NDArray[Any]) -> "KeptSets": ...
    def __getitem__(self, key: int | slice | npt.NDArray[Any]) -> "Words | KeptSets | None":
        if not isinstance(key, int):
            return KeptSets(self.vocabulary, self.numbers[key], self.starts, self.words)._pruned()
        number = int(self.numbers[key])
        return None if number == WHOLE else self.words[self.starts[number] : self.starts[number + 1]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptSets) or len(self) != len(other):
            return False
        return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(self.numbers.tobytes())

    def __repr__(self) -> str:
        return f"<{len(self)} tokens with {len(self.starts) - 1} sets in {4 * len(self.words)} bytes>"

    @property
    def any(self) -> bool:
        """Whether anything was left out for one of the tokens."""
        return len(self.starts) > 1

    def _pruned(self) -> "KeptSets":
        """Without sets that no token has."""
        used, numbers = np.unique(self.numbers, return_inverse=True)
        skipped = int(len(used) > 0 and used[0] == WHOLE)
        used = used[skipped:]
        if len(used) == len(self.starts) - 1:
            return self
        parts = [self.words[self.starts[n] : self.starts[n + 1]] for n in used]
        return KeptSets(self.vocabulary, numbers.reshape(-1) - skipped, *_laid_out(parts))

    def sizes(self) -> npt.NDArray[np.int64]:
        """The number of tokens in each token's set."""
        bits, counts = -(-self.vocabulary // 32), np.diff(self.starts)
        for number in np.flatnonzero(counts == bits) if bits else ():
            counts[number] = len(ids_of(self.words[self.starts[number] : self.starts[number + 1]], self.vocabulary))
        return np.append(counts, self.vocabulary)[self.numbers]

    def bits(self) -> Words:
        """A row of bits for each set, the lowest of the first word that of token 0; at last one for the vocabulary."""
        width = -(-self.vocabulary // 32)
        found = np.zeros((len(self.starts), width), np.uint32)
        found[-1] = np.uint32(0xFFFFFFFF)
        for row, a, b in zip(found, self.starts, self.starts[1:], strict=False):
            ids = self.words[a:b]
            if len(ids) < width:
                np.bitwise_or.at(row, ids // 32, np.uint32(1) << (ids % 32))
            else:
                row[:] = ids
        return found

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As it travels and is journalled; `of_arrays` is the inverse."""
        shape = np.array([self.vocabulary], np.int64)
        return {"kept": self.numbers, "kept.starts": self.starts, "kept.words": self.words, "kept.of": shape}

    @staticmethod
    def of_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> "KeptSets | None":
        if "kept" not in arrays:
            return None
        numbers, starts, words = (arrays[name] for name in ("kept", "kept.starts", "kept.words"))
        found = KeptSets(int(arrays["kept.of"][0]), numbers, starts, words)
        if len(starts) < 1 or starts[-1] != len(words) or (len(numbers) and numbers.max() >= len(starts) - 1):
            raise CorruptError(f"kept sets must have words for each set, got {found!r}")
        return found


class KeptLog:
    """The sets of an answer while it is sampled: `add` those of one token after the other."""

    def __init__(self, vocabulary: int, before: KeptSets | None = None, tokens: int = 0) -> None:
        """before: those of the first `tokens` tokens; None: nothing was left out."""
        self._vocabulary = vocabulary
        self._numbers: list[int] = []
        self._sets: list[Words] = []
        self._known: dict[bytes, int] = {}
        for words in [None] * tokens if before is None else before:
            self.add(words)

    def add(self, words: Words | None) -> None:
        if words is None:
            self._numbers.append(WHOLE)
            return
        number = self._known.setdefault(words.tobytes(), len(self._sets))
        if number == len(self._sets):
            self._sets.append(words)
        self._numbers.append(number)

    def between(self, start: int, stop: int) -> KeptSets:
        numbers = self._numbers[start:stop]
        sets = self._sets[: max(numbers, default=WHOLE) + 1]
        return KeptSets(self._vocabulary, numbers, *_laid_out(sets))._pruned()


def words_of(ids: npt.NDArray[Any], vocabulary: int) -> Words:
    """The ids, in their order, or a bit for each token of the vocabulary where that is shorter."""
    if len(ids) < -(-vocabulary // 32):
        return ids.astype(np.uint32)
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def ids_of(words: Words, vocabulary: int) -> npt.NDArray[np.int64]:
    """The inverse of `words_of`."""
    if len(words) < -(-vocabulary // 32):
        return words.astype(np.int64)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocabulary])


def joined_sets(parts: Sequence[tuple[KeptSets | None, int]]) -> KeptSets | None:
    """Those of tokens one after the other; parts: the sets and the number of tokens, None where they have none."""
    known = [sets for sets, _ in parts if sets is not None and sets.any]
    if not known:
        return None
    vocabulary, numbers, count, words = known[0].vocabulary, list[Any](), 0, 0
    starts = [np.zeros(1, np.int64)]
    for sets, tokens in parts:
        if sets is None or not sets.any:
            numbers.append(np.full(tokens, WHOLE))
            continue
        assert len(sets) == tokens and sets.vocabulary == vocabulary, f"{sets} of {tokens} tokens"
        numbers.append(np.where(sets.numbers == WHOLE, WHOLE, sets.numbers + count))
        starts.append(sets.starts[1:] + words)
        count, words = count + len(sets.starts) - 1, words + len(sets.words)
    each = np.concatenate([sets.words for sets in known])
    return KeptSets(vocabulary, np.concatenate(numbers), np.concatenate(starts), each)


def _laid_out(parts: Sequence[Words]) -> tuple[npt.NDArray[np.int64], Words]:
    starts = np.cumsum([0, *map(len, parts)])
    return starts, np.concatenate([np.zeros(0, np.uint32), *parts])
