"""Estimates over the problems of a suite, and the paired comparison of two models on the same ones.

    estimate        of one problem with n judged samples                                        over problems
    avg             the mean score                                                              mean, 95 % interval
    pass@k          chance that one of k samples scores 1                                       mean, 95 % interval
    maj@k           expected score of the majority's answer among k; ties are split evenly      mean, 95 % interval

pass@k and maj@k are exact over all subsets of k samples, drawn without replacement: no subset is chosen by chance, and
the order of the samples does not matter. Seeds are fixed, so the same values give the same interval.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kitae.types import FloatArray

_RESAMPLES = 2000
_Z = 1.959964
_ALL_FLIPS = 14  # up to this many differing problems, every choice of signs is tried
_FLIPS = 20_000  # choices of signs that are tried for more
_CHUNK = 2_000_000  # numbers drawn at a time

DoubleArray = npt.NDArray[np.float64]
Test = Literal["McNemar", "sign flips"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts and its 95 % interval: `Interval(0.62, 0.54, 0.70)`."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of two models on the same problems: `Difference(64, Interval(.1, .02, .18), .01, "McNemar")`.

    problems: how many both were judged on. interval: second minus first. p: the chance of a difference at least as
    large in either direction, if the two models were equally good.
    """

    problems: int
    interval: Interval
    p: float
    test: Test


# Of one problem.


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, have a correct one: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """The expected score of the majority's answer among k of the samples, drawn without replacement.

    A sample without an answer (None) has no vote; if no sample has one, the score is 0. Answers that tie for the most
    votes share the score evenly, as a fair draw between them would. An answer's score is the mean score of the samples
    that give it.
    """
    assert 1 <= k <= len(answers) == len(scores), f"k must be from 1 to {len(answers)}, got {k}"
    given: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            given.setdefault(answer, []).append(score)
    counts = [len(found) for found in given.values()]
    silent = len(answers) - sum(counts)
    wins = {count: _chance_to_win(count, counts, silent, k) for count in set(counts)}
    return sum(wins[len(found)] * sum(found) / len(found) for found in given.values())


def _chance_to_win(count: int, counts: Sequence[int], silent: int, k: int) -> float:
    """The expected share of the win for an answer that `count` samples give, in a draw of k.

    Each sample is drawn independently with chance p = k / n, and the result is conditioned on exactly k being drawn. So
    all terms are probabilities, and nothing overflows. `chance_KT[i, t]`: the chance that i are drawn so far and t
    other answers have as many votes.
    """
    n = sum(counts) + silent
    others = list(counts)
    others.remove(count)
    p = k / n
    total = 0.0
    for votes in range(1, min(count, k) + 1):
        if not _binomial(count, votes, p):  # if all samples are drawn, so are all votes
            continue
        most_tied = sum(other >= votes for other in others)
        chance_KT = np.zeros((k + 1, most_tied + 1))
        chance_KT[votes, 0] = _binomial(count, votes, p)
        chance_KT = _drawn(chance_KT, [_binomial(silent, i, p) for i in range(silent + 1)])
        for other in others:
            fewer = _drawn(chance_KT, [_binomial(other, i, p) for i in range(min(other + 1, votes))])
            level = np.zeros_like(chance_KT)
            if other >= votes:
                level[votes:, 1:] = chance_KT[: k + 1 - votes, :-1] * _binomial(other, votes, p)
            chance_KT = fewer + level
        total += float((chance_KT[k] / np.arange(1, most_tied + 2)).sum())
    return total / _binomial(n, k, p)


def _drawn(chance_KT: DoubleArray, chances: Sequence[float]) -> DoubleArray:
    """The table after i more samples were drawn, with chance `chances[i]`."""
    after = np.zeros_like(chance_KT)
    for i, chance in enumerate(chances[: len(chance_KT)]):
        after[i:] += chance_KT[: len(chance_KT) - i] * chance
    return after


def _binomial(n: int, k: int, p: float) -> float:
    if p in (0.0, 1.0):
        return float(k == n * p)
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(choices + k * math.log(p) + (n - k) * math.log1p(-p))


# Over problems.


def interval_of(values: FloatArray) -> Interval:
    """The mean and 95 % interval over prompts: Wilson's if all values are 0 or 1, else a seeded bootstrap."""
    if len(values) == 0:
        return Interval(math.nan, math.nan, math.nan)
    if is_binary(values):
        return _wilson(float(values.mean()), len(values))
    low, high = _bootstrap(values)
    return Interval(float(values.mean()), low, high)


def is_binary(values: FloatArray) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def _wilson(mean: float, n: int) -> Interval:
    centre = (mean + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * math.sqrt(mean * (1 - mean) / n + _Z * _Z / (4 * n * n))
    return Interval(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))  # rounding apart


def _bootstrap(values: FloatArray) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


# Two models.


def compare(first: FloatArray, second: FloatArray) -> Difference:
    """Compare the scores of two models on the same problems, one value each.

    If all are 0 or 1: an exact McNemar test, and the interval of Bonett and Price, which has a width even if the models
    never differ. Else: a test by flipping the signs of the differences, exact for up to 14 differing problems, and a
    bootstrap over problems.
    """
    assert first.shape == second.shape, f"as many scores for both, got {first.shape} and {second.shape}"
    if not len(first):
        return Difference(0, Interval(math.nan, math.nan, math.nan), math.nan, "sign flips")
    differences = second.astype(np.float64) - first.astype(np.float64)
    if is_binary(first) and is_binary(second):
        gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
        return Difference(len(first), _bonett_price(gained, lost, len(first)), mcnemar(gained, lost), "McNemar")
    low, high = _bootstrap(differences.astype(np.float32))
    interval = Interval(float(differences.mean()), low, high)
    return Difference(len(first), interval, sign_flips(differences.tolist()), "sign flips")


def mcnemar(gained: int, lost: int) -> float:
    """The two-sided chance of a split at least as uneven, if each differing problem were a fair coin."""
    n, fewer = gained + lost, min(gained, lost)
    return min(1.0, float(2 * sum(math.comb(n, i) for i in range(fewer + 1)) / 2**n))


def sign_flips(differences: Sequence[float]) -> float:
    """The two-sided chance of a sum at least as far from 0, if the sign of each difference were random."""
    values = np.array([d for d in differences if d != 0])
    if not len(values):
        return 1.0
    observed = abs(values.sum()) - 1e-9 * np.abs(values).sum()  # sums in another order round differently
    if len(values) <= _ALL_FLIPS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(values))))
        return int((np.abs(signs @ values) >= observed).sum()) / len(signs)
    rng = np.random.default_rng(0)
    as_far, left = 0, _FLIPS
    while left:
        rows = min(left, max(1, _CHUNK // len(values)))
        signs = rng.integers(0, 2, (rows, len(values))) * 2.0 - 1.0
        as_far += int((np.abs(signs @ values) >= observed).sum())
        left -= rows
    return (as_far + 1) / (_FLIPS + 1)  # the actual signs count too, so p is never 0


def _bonett_price(gained: int, lost: int, n: int) -> Interval:
    """The difference of paired shares, with one problem added as gained and one as lost before the usual interval."""
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return Interval((gained - lost) / n, max(-1.0, up - down - half), min(1.0, up - down + half))
