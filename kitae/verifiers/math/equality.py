"""Are two expressions equal as numbers or functions? `same_number((x+1)², x²+2x+1)` → True.

They are compared at a few random points, the same ones in every process. An answer is True, False, or None where nobody
knows.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from kitae.verifiers.math.numbers import (
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
from kitae.verifiers.math.tree import Node, TooBig, Undefined, Unreadable, mentions, names_in


def same_number(gold: Node, got: Node, tolerance: float = 0.0) -> bool | None:
    """Are two expressions the same at every point that we try? None: there is no point at which both have a value."""
    if not names_in(gold) and not names_in(got):
        return same_constant(gold, got, tolerance)
    bare_log = mentions(gold, "call", "log") or mentions(got, "call", "log")
    return any_true(
        _same_at_points(gold, got, decimal_log=decimal_log) for decimal_log in ((False, True) if bare_log else (False,))
    )


def any_true(verdicts: Iterator[bool | None]) -> bool | None:
    """True if one is, False if one is and none is True, None if nobody knows."""
    result: bool | None = None
    for verdict in verdicts:
        if verdict:
            return True
        result = verdict if verdict is not None else result
    return result


def _same_at_points(gold: Node, got: Node, *, decimal_log: bool) -> bool | None:
    real = not mentions(gold, "constant", "i") and not mentions(got, "constant", "i")
    whole = mentions(gold, "series") or mentions(got, "series")
    bent = not whole and (_is_bent(gold) or _is_bent(got))
    agreed = 0
    for index in range(POINTS + bent * WIDE_POINTS):
        point = Point(index, real, decimal_log, whole)
        try:
            left, right = value_at(gold, point), value_at(got, point)
        except Undefined:
            continue
        except TooBig:
            if index < POINTS:
                raise
            continue
        if not _equal(gold, got, point, left, right):
            return False
        agreed += 1
    return True if agreed >= 2 else None


def _is_bent(node: Node) -> bool:
    """Functions with corners can agree on a few numbers around zero and nowhere else: max(x, 3) and 3."""
    bent = node.kind == "root" or (node.kind == "call" and node.value in ("min", "max", "abs", "floor", "ceil", "sgn"))
    return bent or any(map(_is_bent, node.args))


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
    """The rounding that a decimal of many digits allows, or the tolerance that the recipe does."""
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
    """12 and 1.25 say all their digits; 1/3 and 0.333… do not."""
    return node.kind == "number" and 10**40 % int(node.value.denominator) == 0


def rounds_to(value: Node, short: Node) -> bool:
    """Is `short` a number that `value` is rounded to? 1/3 to 0.333, 1234567 to 1230000 or 1.23 · 10^6."""
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
    """Is the ratio of two functions the same number, above 0 if `positive`, at every point? None: who knows."""
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
    """Do two equations hold at the same points? y = 2x and 2y - 4x = 0: one is a multiple of the other."""
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
