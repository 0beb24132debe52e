"""The estimators against enumeration, the tests and intervals against values computed by hand."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.evaluation.statistics import compare, interval_of, maj_at_k, mcnemar, pass_at_k, sign_flips

fast = settings(deadline=None, max_examples=40)


@fast
@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(case: tuple[int, int, int]) -> None:
    n, correct, k = case
    draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


shares = st.floats(0, 1, width=32)


@fast
@given(st.lists(shares, min_size=1, max_size=40) | st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_interval_contains_the_mean_and_stays_between_0_and_1(values: list[float]) -> None:
    found = interval_of(np.array(values, dtype=np.float32))
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert 0 <= found.low <= found.mean + 1e-6
    assert found.mean - 1e-6 <= found.high <= 1
    if not {*values} <= {0.0, 1.0}:
        assert min(values) - 1e-6 <= found.low and found.high <= max(values) + 1e-6


def test_interval_of_right_and_wrong_is_wilsons() -> None:
    """Known values: 10 of 10 and 1 of 20; it does not shrink to a point where all agree."""
    found = interval_of(np.ones(10, dtype=np.float32))
    assert (found.low, found.high) == pytest.approx((0.7225, 1.0), abs=1e-4)
    found = interval_of(np.array([1.0] + [0.0] * 19, dtype=np.float32))
    assert (found.low, found.high) == pytest.approx((0.0089, 0.2361), abs=1e-4)


def test_interval_of_unanimous_answers_contains_their_mean_exactly() -> None:
    for size, value in itertools.product(range(1, 130), (0.0, 1.0)):
        found = interval_of(np.full(size, value, dtype=np.float32))
        assert found.low <= found.mean <= found.high, (size, value)


def test_bootstrap_interval_is_about_two_standard_errors_and_repeatable() -> None:
    values = np.array([0.25, 0.75] * 200, dtype=np.float32)
    found = interval_of(values)
    standard_error = 0.25 / math.sqrt(400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)
    assert interval_of(values) == found


def test_nothing_to_average_is_nan() -> None:
    found = interval_of(np.array([], dtype=np.float32))
    assert all(math.isnan(x) for x in (found.mean, found.low, found.high))


# Majority votes.


def by_enumeration(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """The mean over all subsets of the mean score of the answers that most of them give."""
    worth = {a: np.mean([s for b, s in zip(answers, scores, strict=True) if a == b]) for a in answers}

    def prize(drawn: tuple[str | None, ...]) -> float:
        votes = Counter(answer for answer in drawn if answer is not None)
        best = [answer for answer, count in votes.items() if count == max(votes.values())]
        return float(np.mean([worth[answer] for answer in best])) if best else 0.0

    return float(np.mean([prize(drawn) for drawn in itertools.combinations(answers, k)]))


samples = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1)


@settings(deadline=None, max_examples=150)
@given(samples.filter(lambda found: len(found) <= 9), st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(found: list[tuple[str | None, float]], data: st.DataObject) -> None:
    answers, scores = zip(*found, strict=True)
    k = data.draw(st.integers(1, len(found)))
    assert maj_at_k(answers, scores, k) == pytest.approx(by_enumeration(answers, scores, k), abs=1e-9)


def test_maj_at_k_by_hand() -> None:
    right, wrong = ("18", 1.0), ("7", 0.0)
    for found, k, value in (
        ([right, right, wrong], 3, 1.0),
        ([right, right, wrong], 2, (1 + 0.5 + 0.5) / 3),
        ([right, wrong], 2, 0.5),
        ([right, (None, 0.0), (None, 0.0)], 3, 1.0),
        ([right, (None, 0.0), (None, 0.0)], 1, 1 / 3),
        ([(None, 0.0)] * 4, 2, 0.0),
        ([right, wrong, ("9", 0.0), ("8", 0.0)], 4, 0.25),
    ):
        answers, scores = zip(*found, strict=True)
        assert maj_at_k(answers, scores, k) == pytest.approx(value), (found, k)


@fast
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12))
def test_one_vote_decides_as_often_as_it_is_right(scores: list[float]) -> None:
    answers = ["right" if score else "wrong" for score in scores]
    assert maj_at_k(answers, scores, 1) == pytest.approx(np.mean(scores))


def test_many_samples_neither_overflow_nor_take_long() -> None:
    answers = [str(i % 40) for i in range(600)] + ["right"] * 424
    scores = [0.0] * 600 + [1.0] * 424
    assert maj_at_k(answers, scores, 1024) == pytest.approx(1.0)
    few = maj_at_k(answers, scores, 4)
    assert 0.414 < few < 1.0
    assert few < maj_at_k(answers, scores, 16) <= 1.0 + 1e-9


# Two models.


def array(values: Sequence[float]) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, dtype=np.float32)


def test_mcnemar_is_the_binomial_test_of_those_that_differ() -> None:
    """By hand: 2 (C(6,0) + C(6,1)) / 64 and 2 / 1024."""
    assert mcnemar(5, 1) == mcnemar(1, 5) == 14 / 64
    assert mcnemar(10, 0) == 2 / 1024
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0


@fast
@given(st.integers(0, 6), st.integers(0, 6))
def test_flipping_signs_of_equal_differences_is_mcnemar(gained: int, lost: int) -> None:
    assert sign_flips([1.0] * gained + [-1.0] * lost + [0.0] * 3) == pytest.approx(mcnemar(gained, lost))


@fast
@given(st.lists(st.integers(-4, 4).map(lambda i: i / 4), min_size=1, max_size=8))
def test_sign_flips_against_enumeration(differences: list[float]) -> None:
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((-1, 1), repeat=len(differences))]  # fmt: skip
    expected = np.mean([found >= abs(sum(differences)) for found in sums])
    assert sign_flips(differences) == pytest.approx(float(expected))


def test_sign_flips_of_many_come_close_to_the_exact_value() -> None:
    """Twenty equal differences and six of the other sign: McNemar is the exact answer. It is never 0."""
    differences = [0.5] * 20 + [-0.5] * 6
    assert sign_flips(differences) == pytest.approx(mcnemar(20, 6), abs=0.003)
    assert sign_flips([0.5] * 60) == pytest.approx(1 / 20_001)


def test_a_paired_difference_of_right_and_wrong() -> None:
    """Bonett and Price by hand, for 20 problems, 6 gained and 1 lost."""
    first = [0.0] * 6 + [1.0] * 14
    second = [1.0] * 6 + [0.0] + [1.0] * 13
    found = compare(array(first), array(second))
    up, down = 7 / 22, 2 / 22
    half = 1.959964 * math.sqrt((up + down - (up - down) ** 2) / 22)
    assert (found.problems, found.test, found.p) == (20, "McNemar", mcnemar(6, 1))
    assert found.interval.mean == pytest.approx(5 / 20)
    assert (found.interval.low, found.interval.high) == pytest.approx((up - down - half, up - down + half))


def test_models_that_never_differ_still_have_an_interval() -> None:
    found = compare(array([1, 0, 1, 0]), array([1, 0, 1, 0]))
    assert found.interval.mean == 0 and found.p == 1
    assert found.interval.low < 0 < found.interval.high


def test_pairing_sees_what_two_intervals_do_not() -> None:
    """Problems differ much, models little but always: unpaired intervals overlap."""
    first = np.linspace(0, 0.9, 40, dtype=np.float32)
    second = first + np.float32(0.05)
    found = compare(first, second)
    assert found.test == "sign flips" and found.p < 0.001
    assert found.interval.low == pytest.approx(0.05, abs=1e-5)
    assert interval_of(first).high > interval_of(second).low
    back = compare(second, first)
    assert (back.interval.mean, back.p) == pytest.approx((-found.interval.mean, found.p))


def test_nothing_to_compare() -> None:
    found = compare(array([]), array([]))
    assert found.problems == 0 and math.isnan(found.interval.mean) and math.isnan(found.p)
