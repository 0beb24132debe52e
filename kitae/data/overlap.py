"""Texts that say the same: duplicates in training data, and training data that is known from an evaluation.

Two texts are the same if they differ in nothing but case, spaces and forms of a character; they are nearly the same if
four fifths of their runs of five words and signs are in both. An item of training data is known from an evaluation
text if it has half of the text's runs of 13 words. A shorter text must occur in it whole; one of fewer than eight words
must be one of its messages, and counts only where it is a question: "42" is no finding.

Hashes of 64 bits stand for runs of words, so that 100,000 items take seconds. Near duplicates are found by MinHash,
which misses about one in fifty pairs at the border, and fewer the more they have in common.
Legend: W words of all texts, one after another.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kitae.data.data_files import DataRow, File, local_file, read_rows
from kitae.types import IntArray

Deduplicate = Literal["none", "exact", "near"]
HashArray = npt.NDArray[np.uint64]

SHORT = 8
"""Words from which on a text is looked for inside of others."""

SHARE = 0.5
"""Of an evaluation text's runs of words; less is a common phrase, or an instruction that many texts carry."""

COMMON = 20
"""Runs of words in more evaluation texts than so many belong to none of them."""

SHINGLE = 5
ALIKE = 0.8
BANDS, BAND = 8, 4
CROWD = 100
"""Kept texts of one bucket that another is compared with, at most."""

_WORD = re.compile(r"\w+")
_SIGN = re.compile(r"\w+|[^\w\s]")
_ASKED = ("question", "prompt", "problem", "instruction", "input", "query", "text", "messages", "conversations")
_SAID = ("content", "value", "text")


class Passage(NamedTuple):
    """A text of an evaluation: `Passage("test.jsonl:3", "Natalia sold clips to 48 friends …", question=True)`."""

    where: str
    text: str
    question: bool


@dataclass(frozen=True, slots=True)
class Overlap:
    """What items of training data to leave out: `Overlap({7: 2}, {9: "test.jsonl:3"})`.

    Item 7 repeats item 2; item 9 is known from row 3 of an evaluation.
    """

    duplicates: Mapping[int, int]
    known: Mapping[int, str]

    def notes(self, names: Sequence[str]) -> Iterator[tuple[set[str], str]]:
        """Which items go, by name, and why."""
        if self.duplicates:
            late, early = next(iter(self.duplicates.items()))
            gone = {names[index] for index in self.duplicates}
            yield (
                gone,
                f"are left out as duplicates (data.deduplicate); the first: {names[late]} repeats {names[early]}",
            )
        if self.known:
            index, where = next(iter(self.known.items()))
            gone = {names[index] for index in self.known} - {names[index] for index in self.duplicates}
            yield gone, f"are left out as known (data.decontaminate); the first: {names[index]} overlaps with {where}"


def find_overlap(
    items: Sequence[Sequence[str]],
    deduplicate: Deduplicate,
    evaluations: Sequence[str],
    labels: Sequence[object] = (),
) -> Overlap:
    """What the settings say is to be left out of items, each of which is the texts of its messages."""
    texts = ["\n".join(said) for said in items]
    repeats = {} if deduplicate == "none" else duplicates(texts, deduplicate == "near", labels)
    known = chain.from_iterable(passages(local_file("data.decontaminate", path)) for path in evaluations)
    return Overlap(repeats, known_from(items, list(known)))


def passages(file: File) -> Iterator[Passage]:
    """All texts of an evaluation's file, whatever its columns are called."""
    for row in read_rows(file):
        if isinstance(row, DataRow):
            for column, value in row.values.items():
                for text, question in _leaves(value, column in _ASKED):
                    yield Passage(row.id, text, question)


def normal(text: str) -> str:
    """`"Ｔhe  end\\n"` → `"the end"`."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def duplicates(texts: Sequence[str], near: bool = False, labels: Sequence[object] = ()) -> dict[int, int]:
    """Which texts repeat an earlier one of the same label: `{7: 2}`; the earlier one is none of the repeats."""
    labels = labels or [None] * len(texts)
    first: dict[tuple[str, object], int] = {}
    repeats: dict[int, int] = {}
    for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if (earlier := first.setdefault((normal(text), label), index)) != index:
            repeats[index] = earlier
    if near:
        left = sorted(first.values())
        found = _near([texts[index] for index in left], [labels[index] for index in left])
        repeats |= {left[a]: left[b] for a, b in found.items()}
        repeats = {index: repeats.get(earlier, earlier) for index, earlier in repeats.items()}
    return dict(sorted(repeats.items()))


def known_from(items: Sequence[Sequence[str]], evaluations: Sequence[Passage], words: int = 13) -> dict[int, str]:
    """Which items an evaluation has, and where: `{9: "test.jsonl:3"}`."""
    if not evaluations or not items:
        return {}
    vocabulary = _vocabulary()
    asked = _Words([e.text for e in evaluations], _WORD, vocabulary)
    trained = _Words([text for texts in items for text in texts], _WORD, vocabulary)
    owner = np.repeat(np.arange(len(items)), [len(texts) for texts in items])
    found = _whole(items, evaluations, asked.counts < min(SHORT, words))
    for length, texts in _by_length(asked.counts, words).items():
        for item, text in _shared(asked.grams(length, texts), trained.grams(length), owner):
            found.setdefault(item, evaluations[text].where)
    return dict(sorted(found.items()))


def _leaves(value: Any, question: bool) -> Iterator[tuple[str, bool]]:
    """The texts in a value, and whether they are asked: of messages, what the user says is."""
    if isinstance(value, str):
        yield value, question
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, question)
    elif isinstance(value, Mapping):
        speaker = value.get("role", value.get("from"))
        for key, inner in value.items():
            if speaker is None or key in _SAID:
                yield from _leaves(inner, question and speaker in (None, "user", "human"))


def _whole(
    items: Sequence[Sequence[str]], evaluations: Sequence[Passage], short: npt.NDArray[np.bool_]
) -> dict[int, str]:
    """Items with a message that is a short question of an evaluation."""
    asked = {normal(e.text): e.where for e, brief in zip(evaluations, short, strict=True) if brief and e.question}
    asked.pop("", None)
    if not asked:
        return {}
    hits = ((i, asked.get(normal(text))) for i, texts in enumerate(items) for text in texts)
    return {i: where for i, where in hits if where is not None}


def _by_length(counts_N: IntArray, words: int) -> dict[int, IntArray]:
    """Which texts are looked for by runs of which length: long ones by parts, others whole."""
    lengths = np.minimum(counts_N, words)
    return {
        length: np.flatnonzero(lengths == length)
        for length in range(min(SHORT, words), words + 1)
        if (lengths == length).any()
    }


def _vocabulary() -> Mapping[str, int]:
    """Numbers words as they come."""
    return defaultdict(count().__next__)


class _Words:
    """Texts as words, one after another; equal words are equal numbers."""

    def __init__(self, texts: Sequence[str], pattern: re.Pattern[str], vocabulary: Mapping[str, int]) -> None:
        number = vocabulary.__getitem__
        found = [np.fromiter(map(number, pattern.findall(normal(text))), dtype=np.uint64) for text in texts]
        self.counts = np.array([len(words) for words in found], dtype=np.int64)
        numbers = np.concatenate([np.zeros(0, dtype=np.uint64), *found])
        self._value_W = _mixed(numbers)
        self._text_W = np.repeat(np.arange(len(texts)), self.counts)
        ends = np.repeat(np.cumsum(self.counts), self.counts)
        self._left_W = ends - np.arange(len(numbers))

    def grams(self, length: int, texts: IntArray | None = None) -> tuple[HashArray, IntArray]:
        """A hash for each run of so many words, and the text that it is in; of all texts, or some."""
        total = max(0, len(self._value_W) - length + 1)
        hashes = np.zeros(total, dtype=np.uint64)
        for offset in range(length):
            hashes *= _FACTOR
            hashes += self._value_W[offset : offset + total]
        inside = self._left_W[:total] >= length
        if texts is not None:
            inside &= np.isin(self._text_W[:total], texts)
        return hashes[inside], self._text_W[:total][inside]


_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def _mixed(numbers: HashArray) -> HashArray:
    """Every bit of the result depends on every bit of the number (splitmix64)."""
    z = (numbers + np.uint64(1)) * _FACTOR
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _shared(
    asked: tuple[HashArray, IntArray], trained: tuple[HashArray, IntArray], owner: IntArray
) -> Iterator[tuple[int, int]]:
    """Pairs of an item and an evaluation text of whose runs it has a share."""
    grams, texts = _distinct(*asked)
    _, place, times = np.unique(grams, return_inverse=True, return_counts=True)
    grams, texts = grams[times[place] <= COMMON], texts[times[place] <= COMMON]
    if not len(grams):
        return
    totals = np.bincount(texts)
    hit = _among(trained[0], grams)
    runs, items = _distinct(trained[0][hit], owner[trained[1][hit]])
    first, last = np.searchsorted(grams, runs, "left"), np.searchsorted(grams, runs, "right")
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for item, start, end in zip(items.tolist(), first.tolist(), last.tolist(), strict=True):
        for text in texts[start:end].tolist():
            pairs[item, text] += 1
    yield from sorted(pair for pair, times in pairs.items() if times >= SHARE * totals[pair[1]])


def _among(hashes: HashArray, few: HashArray) -> npt.NDArray[np.bool_]:
    """Which hashes are among a few; a table of 24 bits of each sorts most of the others out."""
    bits = np.uint64(40)
    table = np.zeros(2**24, dtype=np.bool_)
    table[few >> bits] = True
    hit: npt.NDArray[np.bool_] = table[hashes >> bits]
    hit[hit] = np.isin(hashes[hit], few)
    return hit


def _distinct(hashes: HashArray, owners: IntArray) -> tuple[HashArray, IntArray]:
    """Each hash of each owner once, sorted by hash."""
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    new = np.ones(len(hashes), dtype=np.bool_)
    new[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    return hashes[new], owners[new]


def _near(texts: Sequence[str], labels: Sequence[object]) -> dict[int, int]:
    """Which texts nearly repeat an earlier one that is kept."""
    words = _Words(texts, _SIGN, _vocabulary())
    hashes, owners = words.grams(SHINGLE)  # sorted by text; texts of fewer words have none, and no near duplicates
    long = np.flatnonzero(words.counts >= SHINGLE)
    if not len(long):
        return {}
    starts = np.searchsorted(owners, long)
    signatures = _signatures(hashes, starts)
    shingles = np.split(hashes, starts[1:])
    buckets: dict[tuple[object, int, bytes], list[int]] = defaultdict(list)
    repeats: dict[int, int] = {}
    for index, text in enumerate(long.tolist()):
        bands = signatures[index].reshape(BANDS, BAND)
        keys = [(labels[text], number, band.tobytes()) for number, band in enumerate(bands)]
        candidates = sorted({other for key in keys for other in buckets[key][:CROWD]})
        same = next((other for other in candidates if _alike(shingles[index], shingles[other])), None)
        if same is None:
            for key in keys:
                buckets[key].append(index)
        else:
            repeats[text] = int(long[same])
    return repeats


def _signatures(hashes: HashArray, starts: IntArray) -> HashArray:
    """Of each text, the least of its hashes in many orders."""
    hashes = _mixed(hashes)
    orders = _mixed(np.arange(BANDS * BAND, dtype=np.uint64)) | np.uint64(1)  # an odd factor makes another order
    return np.stack([np.minimum.reduceat(hashes * order, starts) for order in orders], axis=1)


def _alike(one: HashArray, other: HashArray) -> bool:
    a, b = set(one.tolist()), set(other.tolist())
    return len(a & b) >= ALIKE * len(a | b)
