"""Curves as pictures: where the points lie, what is said of them, and how many there are."""

import re

import pytest

from kitae.ui.report.charts import MOST_POINTS, Curve, bars, chart, labels, thinned, ticks


def points(picture: str) -> list[tuple[float, float]]:
    (found,) = re.findall(r'<polyline class="s1 line" points="([^"]*)"', picture)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found.split())]


def test_points_lie_where_their_values_say() -> None:
    values = [0.5, 2.0, None, 1.25]
    drawn = points(chart("loss", [Curve("loss", [1, 2, 3, 5], values)], (1, 5)))
    (x1, y1), (x2, y2), (x3, y3) = drawn
    assert (x2 - x1) / (x3 - x1) == pytest.approx(1 / 4, abs=0.01)
    assert (y1 - y3) / (y1 - y2) == pytest.approx(0.75 / 1.5, abs=0.02) and y2 < y3 < y1


def test_every_step_says_its_values() -> None:
    held = Curve("held out", [0, 2], [0.25, 0.5], [0.2, 0.4], [0.3, 0.6])
    picture = chart("reward", [Curve("reward", [1, 2], [0.1, 0.2]), held], (0, 2))
    texts = dict(
        zip(*(re.findall(p, picture) for p in (r'data-step="(\d+)"', r'class="read"[^>]*>([^<]*)<')), strict=True)
    )
    assert texts == {
        "0": "step 0 · held out 0.25 [0.2, 0.3]",
        "1": "step 1 · reward 0.1",
        "2": "step 2 · reward 0.2 · held out 0.5 [0.4, 0.6]",
    }
    assert picture.count('class="s2 whisker"') == 2


def test_names_are_hostile_too() -> None:
    picture = chart("<b>", [Curve("<script>", [1], [1.0]), Curve('"x', [1], [1.0])], (1, 1))
    assert "<script" not in picture and "<b>&lt;b&gt;</b>" in picture and "&lt;script&gt;" in picture


def test_nothing_is_drawn_of_nothing() -> None:
    assert chart("x", [Curve("x", [1, 2], [None, None])], (1, 2)) == "" == bars("x", [Curve("x", [], [])])


@pytest.mark.parametrize("value", [0.0, 1e-30, -5.0, 1e12])
def test_a_curve_that_does_not_move_is_drawn(value: float) -> None:
    (_, a), (_, b) = points(chart("x", [Curve("x", [1, 2], [value, value])], (1, 2)))
    assert a == b and 24 < a <= 158


@pytest.mark.parametrize("count", [0, 1, 199, 200, 201, 1000, 12_345])
def test_long_runs_are_thinned_and_end_where_they_end(count: int) -> None:
    shown = thinned(range(1, count + 1))
    assert len(shown) <= MOST_POINTS and shown == sorted(set(shown))
    assert not count or ((shown[-1] == count and len(shown) > MOST_POINTS // 2) or count <= MOST_POINTS)


def test_ticks_are_round() -> None:
    assert ticks(0.03, 1.02, 5) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-0.021, 0.011, 5) == [-0.02, -0.01, 0.0, 0.01]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([5.25, 5.255, 5.26], ["5.250", "5.255", "5.260"]),
        ([0.2, 0.4], ["0.2", "0.4"]),
        ([0.0, 1000.0], ["0", "1000"]),
        ([1e-6, 2e-6], ["1e-06", "2e-06"]),
        ([0.5], ["0.5"]),
        ([], []),
    ],
)
def test_labels_tell_ticks_apart(values: list[float], shown: list[str]) -> None:
    assert labels(values) == shown


def test_bars_stand_on_each_other() -> None:
    picture = bars("seconds", [Curve("wait", [1], [1.0]), Curve("train", [1], [3.0])])
    (low, first), (high, second) = (
        (float(y), float(h))
        for y, h in re.findall(r'<rect class="f\d" [^>]*y="([\d.]+)"[^>]*height="([\d.]+)"', picture)
    )
    assert high + second == pytest.approx(low, abs=0.02) and second == pytest.approx(3 * first, rel=0.01)
