"""Curves as SVG. Who points at a step reads its values: that is done by the style sheet, without a script.

A picture has at most `MOST_POINTS` steps, so that a file stays small however long a run is; which are left out is said.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kitae.ui.report.markup import Markup, element, empty, joined
from kitae.ui.report.number_text import number

MOST_POINTS = 200
_WIDTH, _HEIGHT = 420.0, 180.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 408.0, 24.0, 158.0

Column = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line over steps: `Curve("reward", [1, 2], [0.3, 0.5])`; with low and high it is points with intervals."""

    name: str
    steps: Sequence[int]
    values: Column
    low: Column = ()
    high: Column = ()

    @property
    def is_points(self) -> bool:
        return bool(self.low)

    def known(self) -> Iterator[tuple[int, float, float, float]]:
        """Step, value, low and high, where there is a value."""
        for i, (step, value) in enumerate(zip(self.steps, self.values, strict=True)):
            if value is not None:
                low, high = (side[i] if side else None for side in (self.low, self.high))
                yield step, value, value if low is None else low, value if high is None else high


def thinned(steps: Sequence[int]) -> list[int]:
    """At most `MOST_POINTS` of them, evenly, the last one among them."""
    every = -(-len(steps) // MOST_POINTS)
    return list(steps[::-1][::every][::-1]) if steps else []


def chart(title: str, curves: Sequence[Curve], span: tuple[int, int]) -> Markup:
    """The curves with axes; nothing is drawn where there is no value. span: the first and last step of all charts."""
    points = [point for curve in curves for point in curve.known()]
    if not points:
        return Markup("")
    at = sorted({point[0] for point in points})
    frame = _Frame.around(span, min(p[2] for p in points), max(p[3] for p in points))
    lines = joined(_line(curve, frame, i + 1) for i, curve in enumerate(curves))
    return _card(title, _legend(curves, values=True), frame, joined([lines, _readouts(curves, at, frame)]))


def bars(title: str, curves: Sequence[Curve]) -> Markup:
    """The values of each step on top of each other: parts of a whole."""
    at = sorted({step for curve in curves for step, *_ in curve.known()})
    if not at:
        return Markup("")
    by_step = [{step: value for step, value, *_ in curve.known()} for curve in curves]
    most = max(sum(found.get(step, 0.0) for found in by_step) for step in at)
    frame = _Frame(at[0] - 0.5, at[-1] + 0.5, 0.0, most * 1.05 or 1.0)
    width = max(1.0, 0.84 * (frame.x(at[0] + 1) - frame.x(at[0])) * (at[1] - at[0] if len(at) > 1 else 1))
    drawn = []
    for step in at:
        height = 0.0
        for i, found in enumerate(by_step):
            part = found.get(step, 0.0)
            if part > most / 400:
                top, bottom = frame.y(height + part), frame.y(height)
                x = frame.x(step) - width / 2
                drawn.append(empty("rect", class_=f"f{i + 1}", x=x, y=top, width=width, height=bottom - top))
            height += part
    return _card(
        title, _legend(curves, values=False), frame, joined([*drawn, _readouts(curves, at, frame, marks=False)])
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is where in a picture."""

    first: float
    last: float
    low: float
    high: float

    @staticmethod
    def around(span: tuple[int, int], low: float, high: float) -> "_Frame":
        """With room; a curve that does not move lies in the middle."""
        room = (high - low) * 0.08 or abs(high) * 0.1 or 0.5
        bottom = 0.0 if 0 <= low < room else low - room
        first, last = span
        return _Frame(first - (first == last), last + (first == last), bottom, high + room)

    def x(self, step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - self.low) / (self.high - self.low)


def _card(title: str, legend: Markup, frame: _Frame, drawn: Markup) -> Markup:
    picture = element(
        "svg",
        _axes(frame),
        drawn,
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        role="img",
        aria_label=f"{title} over steps",
    )
    return element("figure", element("figcaption", element("b", title), legend), picture, class_="card chart")


def _legend(curves: Sequence[Curve], values: bool) -> Markup:
    """Each curve, with its last value if that is wanted; one alone needs no name."""
    found = []
    for i, curve in enumerate(curves):
        *_, last = [None, *curve.known()]
        swatch = empty("circle", class_=f"f{i + 1}", cx=5, cy=5, r=4)
        mark = [element("svg", swatch, viewBox="0 0 10 10", class_="swatch"), f"{curve.name} "]
        value = element("span", number(last[1]) if last else "–", class_="value") if values else None
        found.append(element("span", *(mark if len(curves) > 1 else []), value))
    return element("span", *found, class_="legend")


def _axes(frame: _Frame) -> Markup:
    drawn = []
    heights = ticks(frame.low, frame.high, 5)
    for value, label in zip(heights, labels(heights), strict=True):
        y = frame.y(value)
        drawn.append(empty("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        drawn.append(element("text", label, class_="tick end", x=_LEFT - 6, y=y + 3.5))
    for value in ticks(frame.first, frame.last, 6):
        if value == int(value):
            drawn.append(element("text", number(value), class_="tick mid", x=frame.x(value), y=_BOTTOM + 15))
    return joined(drawn)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers in a range, about so many."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """With as many digits as tell them apart."""
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0 if values else 1.0
    if max(map(abs, values), default=0.0) >= 1e5 or step < 1e-5:
        return [f"{value:.3g}" for value in values]
    digits = max(0, math.ceil(-math.log10(step) - 1e-9))
    return [f"{value:.{digits}f}" for value in values]


def _line(curve: Curve, frame: _Frame, colour: int) -> Markup:
    known = list(curve.known())
    at = [(frame.x(step), frame.y(value)) for step, value, *_ in known]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    drawn = [empty("polyline", class_=f"s{colour} {'dashed' if curve.is_points else 'line'}", points=path)]
    for (x, _), (_, _, low, high) in zip(at, known, strict=True):
        if curve.is_points and high > low:
            bottom, top = frame.y(low), frame.y(high)
            shape = f"M{x:.1f} {bottom:.1f}V{top:.1f}M{x - 3:.1f} {top:.1f}h6M{x - 3:.1f} {bottom:.1f}h6"
            drawn.append(empty("path", class_=f"s{colour} whisker", d=shape))
    if curve.is_points or len(at) <= 40:
        drawn += [empty("circle", class_=f"f{colour}", cx=x, cy=y, r=3.5 if curve.is_points else 2) for x, y in at]
    return joined(drawn)


def _readouts(curves: Sequence[Curve], at: Sequence[int], frame: _Frame, marks: bool = True) -> Markup:
    """For each step a strip of the picture that shows its values when somebody points at it."""
    by_step = [{point[0]: point for point in curve.known()} for curve in curves]
    edges = [_LEFT, *((frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(at)), _RIGHT]
    drawn = []
    for i, step in enumerate(at):
        values, dots = [f"step {step}"], []
        for colour, (curve, found) in enumerate(zip(curves, by_step, strict=True), 1):
            if (point := found.get(step)) is not None:
                name = f"{curve.name} " if len(curves) > 1 else ""
                span = f" [{number(point[2])}, {number(point[3])}]" if curve.is_points else ""
                if marks or point[1]:
                    values.append(f"{name}{number(point[1])}{span}")
                if marks:
                    dots.append(empty("circle", class_=f"f{colour}", cx=frame.x(step), cy=frame.y(point[1]), r=4))
        x = frame.x(step)
        drawn.append(
            element(
                "g",
                empty("rect", class_="hit", x=edges[i], y=0, width=edges[i + 1] - edges[i], height=_BOTTOM),
                empty("line", class_="rule", x1=x, x2=x, y1=_TOP, y2=_BOTTOM),
                *dots,
                element("text", " · ".join(values), class_="read", x=_RIGHT, y=12),
                class_="at",
                data_step=step,
            )
        )
    return joined(drawn)
