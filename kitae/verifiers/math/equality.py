"""Whether two expressions are equal as numbers or functions: `same_number((x+1)², x²+2x+1)` → True.

Expressions are compared at a few random points, which are the same in every process. The result is True, False, or None
if it cannot be decided.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from kitae.verifiers.math.numbers import (
    DIGITS,
    POINTS,
    WIDE_POINTS,
    Point,
    close,
    is_positive,
    load_mpmath,
    settled,
    to_mp,
    value_at,
)
from kitae.verifiers.math.tree import Node, OutsideDomain, TooBig, Undefined, Unreadable, mentions, names_in

_INVERSE = ("arcsin", "arccos", "arctan", "asin", "acos", "atan", "arccot", "arcsec", "arccsc")
_BENT = ("min", "max", "abs", "floor", "ceil", "sgn", "mod", *_INVERSE)
_BOUNDED = ("ln", "log", "lg", "logb", "arccosh", "arcosh", "arctanh", "artanh", *_INVERSE)
_NEVER_NEGATIVE = frozenset("ijklmnNC")  # indices and constants of integration
_MAX_REACH = 10**30


def same_number(gold: Node, got: Node, tolerance: float = 0.0) -> bool | None:
    """Whether two expressions are equal at every point that is tried. None: at no point do both have a value."""
    if not names_in(gold) and not names_in(got):
        return same_constant(gold, got, tolerance)
    bare_log = mentions(gold, "call", "log") or mentions(got, "call", "log")
    return any_true(
        _same_at_points(gold, got, decimal_log=decimal_log) for decimal_log in ((False, True) if bare_log else (False,))
    )


def any_true(verdicts: Iterator[bool | None]) -> bool | None:
    """True if any verdict is, else False if any is, else None."""
    result: bool | None = None
    for verdict in verdicts:
        if verdict:
            return True
        result = verdict if verdict is not None else result
    return result


def _same_at_points(gold: Node, got: Node, *, decimal_log: bool) -> bool | None:
    real = not mentions(gold, "constant", "i") and not mentions(got, "constant", "i")
    whole = mentions(gold, "series") or mentions(got, "series")
    bounded = real and not whole and (_is_bounded(gold) or _is_bounded(got))
    variables = sorted((names_in(gold) | names_in(got)) - _NEVER_NEGATIVE) if bounded else []
    agreed: list[Point] = []
    for index in range(POINTS):
        point = Point(index, real, decimal_log, whole)
        left, right = _value_or_none(gold, point), _value_or_none(got, point)
        if left is not None and right is not None:
            if not _equal(gold, got, point, left, right):
                return False
            agreed.append(point)
        elif len(variables) == 1 and _domains_differ(gold, got, point):
            return False
    if agreed and any(_domains_differ(gold, got, replace(agreed[0], turned=name)) for name in variables):
        return False
    if not whole and (_is_bent(gold) or _is_bent(got)):
        zero = Point(0, real, decimal_log, bound=tuple((name, Fraction(0)) for name in names_in(gold) | names_in(got)))
        left, right = _value_or_none(gold, zero), _value_or_none(got, zero)
        if left is not None and right is not None and not close(left, right):  # x + 0^|x|
            return False
        wide = _same_at_wide_points(gold, got, Point(0, real, decimal_log), strict=len(variables) == 1)
        if wide is None:
            return False
        return True if len(agreed) + wide >= 2 else None
    return True if len(agreed) >= 2 else None


def _same_at_wide_points(gold: Node, got: Node, near: Point, *, strict: bool) -> int | None:
    """At how many of the points far from zero and next to it the expressions are equal; None if they differ at one.

    With `strict`, they also differ at a point where only one of them is within its domain. Large values lose digits, so
    three times as many are computed.
    """
    same, reach = 0, 2 + int(max(_largest(gold), _largest(got)))
    with load_mpmath().workdps(3 * DIGITS):
        for index in range(POINTS, POINTS + WIDE_POINTS):
            point = replace(near, index=index, reach=reach)
            try:
                left, right = _value_or_none(gold, point), _value_or_none(got, point)
                differ = strict and None in (left, right) and _domains_differ(gold, got, point)
            except TooBig:
                continue
            if left is not None and right is not None:
                differ = not close(left, right)
                same += not differ
            if differ:
                return None
    return same


def _value_or_none(node: Node, point: Point) -> Any:
    try:
        return value_at(node, point)
    except Undefined:
        return None


def _domains_differ(gold: Node, got: Node, point: Point) -> bool:
    """Whether one of the two is outside its domain here and the other has a value: ln(-x) and ln|x| for positive x."""
    outside = []
    for node in (gold, got):
        try:
            value_at(node, point)
            outside.append(False)
        except OutsideDomain:
            outside.append(True)
        except Undefined:
            return False
    return outside[0] != outside[1]


def _is_bent(node: Node) -> bool:
    """Whether a function has corners. Such functions can agree near zero and differ elsewhere: max(x, 3) and 3."""
    bent = node.kind in ("root", "cases") or (node.kind == "call" and node.value in _BENT)
    return bent or any(map(_is_bent, node.args))


def _is_bounded(node: Node) -> bool:
    """Whether the domain of the expression may be less than all real numbers."""
    broken = node.kind == "pow" and not (node.args[1].kind == "number" and node.args[1].value.denominator == 1)
    bounded = node.kind == "root" or broken or (node.kind == "call" and node.value in _BOUNDED)
    return bounded or any(map(_is_bounded, node.args))


def _largest(node: Node) -> Any:
    """The largest magnitude, or inverse of one, among the numbers in it: its corners may be there."""
    if names_in(node):
        return max(map(_largest, node.args), default=1)
    value = _value_or_none(node, Point(0, False, False))
    size = abs(to_mp(value)) if value else 1
    return min(size if size >= 1 else 1 / size, _MAX_REACH)


def _equal(gold: Node, got: Node, point: Point, left: Any, right: Any) -> bool:
    if not close(left, right):
        return False
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return True
    try:
        return settled(gold, got, point, abs(to_mp(left) - to_mp(right)))
    except Undefined:
        return False


def same_constant(gold: Node, got: Node, tolerance: float) -> bool | None:
    bare_log = mentions(gold, "call", "log") or mentions(got, "call", "log")
    verdict: bool | None = None
    for decimal_log in (False, True) if bare_log else (False,):
        point = Point(0, False, decimal_log)
        try:
            want = value_at(gold, point)
        except Undefined:
            continue
        try:
            have = value_at(got, point)
        except Undefined:
            verdict = False
            continue
        verdict = _equal(gold, got, point, want, have) or _within(want, have, gold, got, tolerance)
        if verdict:
            return True
    return verdict


def _within(want: Any, have: Any, gold: Node, got: Node, tolerance: float) -> bool:
    """Whether the difference is within the rounding of a decimal of many digits, or within the recipe's tolerance."""
    exact = isinstance(want, Fraction) and isinstance(have, Fraction)
    difference = abs(want - have) if exact else abs(to_mp(want) - to_mp(have))
    if tolerance and to_mp(difference) <= abs(to_mp(want)) * tolerance:
        return True
    for literal, other in ((gold, got), (got, gold)):
        if literal.kind == "number" and literal.args:
            precise, places = literal.args[0].value
            last_digit = Fraction(1, 10) ** places
            rounded = precise >= 6 and not _is_finite_decimal(other)
            if rounded and difference < (last_digit if exact else to_mp(last_digit)):
                return True
            noise = abs(to_mp(want)) * load_mpmath().mpf(10) ** -9  # 0.30000000000000004
            if precise >= 9 and places >= 9 and to_mp(difference) <= noise:
                return True
    return False


def _is_finite_decimal(node: Node) -> bool:
    """Whether the number has finitely many decimals, like 12 and 1.25, unlike 1/3 and 0.333…"""
    return node.kind == "number" and 10**40 % int(node.value.denominator) == 0


def rounds_to(value: Node, short: Node) -> bool:
    """Whether `short` is `value` rounded: 1/3 to 0.333, 1234567 to 1230000 or 1.23 · 10^6."""
    scale = Fraction(1)
    if short.kind == "mul" and short.args[1].kind == "pow" and not names_in(short):
        short, scale = short.args[0], value_at(short.args[1], Point(0, False, False))
    if short.kind != "number" or not isinstance(scale, Fraction):
        return False
    try:
        exact = to_mp(value_at(value, Point(0, False, False)))
    except (Undefined, Unreadable):
        return False
    digits = str(abs(short.value))
    zeros = len(digits) - len(digits.rstrip("0"))
    places = short.args[0].value[1] if short.args else -zeros
    last_digit = to_mp(Fraction(1, 10) ** places * scale)
    error = abs(exact - to_mp(short.value * scale))
    if short.args:
        return bool(error < last_digit)
    return bool(error <= last_digit / 2 and error <= abs(exact) / 20)


def _proportional(gold: Node, got: Node, *, positive: bool) -> bool | None:
    """Whether the ratio of two functions is constant, and above 0 if `positive`. None: it cannot be decided."""
    real = not mentions(gold, "constant", "i") and not mentions(got, "constant", "i")
    ratios = []
    for index in range(POINTS):
        point = Point(index, real, False)
        try:
            left, right = value_at(gold, point), value_at(got, point)
        except Undefined:
            continue
        except Unreadable:
            return None
        if left == 0 or right == 0:
            return False
        ratios.append(left / right if isinstance(left, type(right)) else to_mp(left) / to_mp(right))
    if len(ratios) < 2:
        return None
    return all(close(ratios[0], ratio) for ratio in ratios[1:]) and (not positive or is_positive(ratios[0]))


def same_curve(gold: Node, got: Node) -> bool | None:
    """Whether two equations have the same solutions, as y = 2x and 2y - 4x = 0 do: one is a multiple of the other."""
    if len(gold.args) != 2 or len(got.args) != 2 or names_in(gold) != names_in(got):
        return False
    return _proportional(_difference(gold), _difference(got), positive=False)


def same_inequalities(gold: Node, got: Node) -> bool | None:
    if len(gold.args) != 2 or len(got.args) != 2 or names_in(gold) != names_in(got):
        return False
    left, right = (_less_first(relation) for relation in (gold, got))
    if left.value != right.value:
        return False
    return _proportional(_difference(left), _difference(right), positive=True)


def _less_first(relation: Node) -> Node:
    (operator,) = relation.value
    if operator in ("<", "<="):
        return relation
    return Node("relation", relation.args[::-1], ("<" if operator == ">" else "<=",))


def _difference(relation: Node) -> Node:
    return Node("add", (relation.args[0], Node("neg", (relation.args[1],))))
