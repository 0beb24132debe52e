"""Sets of real numbers, in any notation: x > 3, (3, ∞) and {x | x > 3} are all the interval from 3 up.

A set is a list of intervals; a single number is an interval of length zero. `_real_set` returns None for what is no set
of numbers, or has variables in its ends.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kitae.verifiers.math.numbers import Point, close, load_mpmath, to_mp, value_at
from kitae.verifiers.math.tree import (
    TURNED,
    Node,
    Undefined,
    Unreadable,
    is_name,
    items_of,
    mentions_sign,
    names_in,
    spelled,
)


@dataclass(frozen=True, slots=True)
class _Interval:
    low: Any
    high: Any
    low_open: bool
    high_open: bool


def same_real_sets(gold: Node, got: Node) -> bool | None:
    """Whether two sets of real numbers are equal: x > 3, (3, ∞), {x | x > 3}. None: an end has a variable."""
    if gold.kind == got.kind == "relation":
        subjects = names_in(gold), names_in(got)
        if subjects[0] != subjects[1] and "?" not in subjects[0] | subjects[1]:
            return False
    left, right = _real_set(gold), _real_set(got)
    if left is None or right is None:
        return None
    left, right = _merged(left), _merged(right)
    return len(left) == len(right) and all(map(_same_interval, left, right))


def _same_interval(left: _Interval, right: _Interval) -> bool:
    opened = (left.low_open, left.high_open) == (right.low_open, right.high_open)
    return opened and close(left.low, right.low, 24) and close(left.high, right.high, 24)


def _real_set(node: Node) -> list[_Interval] | None:
    infinity = load_mpmath().inf
    if node.kind == "constant":
        return {"empty": [], "set R": [_Interval(-infinity, infinity, True, True)]}.get(node.value)
    if node.kind == "sequence" and len(node.args) == 2:
        low, high = _real(node.args[0]), _real(node.args[1])
        if low is None or high is None:
            return None
        return [
            _Interval(low, high, node.value[0] == "(" or low == -infinity, node.value[1] == ")" or high == infinity)
        ]
    if node.kind in ("set", "list") and not any(item.kind in ("relation", "sequence", "union") for item in node.args):
        values = [_real(item) for item in items_of(node)]
        return None if None in values else [_Interval(value, value, False, False) for value in values]
    if node.kind == "relation":
        return _relation_set(node)
    if node.kind in ("union", "list"):
        parts = [_real_set(part) for part in _repeated(node)]
        if node.kind == "list" and node.value in (",", ";") and any(_excludes(part) for part in node.args):
            return _combined(parts, "∩")  # x ≠ 2, x ≠ -2
        if node.kind == "list" and node.value == "," and None not in parts:
            either = _combined(parts, "∪")
            if either and len(_merged(either)) == 1 and _merged(either)[0].low == -infinity == -_merged(either)[0].high:
                return _combined(parts, "∩")  # x > 2, x < 5
            return either
        return _combined(parts, "∩" if node.value == "and" else "∪" if node.kind == "list" else node.value)
    return None


def _excludes(node: Node) -> bool:
    return node.kind == "relation" and "!=" in node.value


def _repeated(node: Node) -> tuple[Node, ...]:
    """The parts of a list, where "x ≠ -2, 2" says that x is neither."""
    first = node.args[0]
    if not _excludes(first) or node.kind != "list":
        return node.args
    return tuple(
        part if part.kind == "relation" else Node("relation", (first.args[0], part), ("!=",)) for part in node.args
    )


def _combined(parts: list[list[_Interval] | None], operator: str) -> list[_Interval] | None:
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    if operator == "∪":
        return [interval for part in known for interval in part]
    result = known[0]
    for part in known[1:]:
        result = _intersection(result, part if operator == "∩" else _complement(part))
    return result


def _real(node: Node) -> Any:
    """The real value of a constant, or None."""
    if node.kind == "unit":
        return _real(node.args[0])
    if names_in(node):
        return None
    try:
        value = value_at(node, Point(0, True, False))
    except (Undefined, Unreadable):
        return None
    return None if isinstance(value, load_mpmath().mpc) else to_mp(value)


def _relation_set(node: Node) -> list[_Interval] | None:
    """The values that x may have: a < x <= b, x > a, x != a, x ∈ S."""
    infinity = load_mpmath().inf
    if node.value == ("∈",):
        return _real_set(node.args[1])
    subjects = {spelled(operand) for operand in node.args if _real(operand) is None and not mentions_sign(operand)}
    if len(subjects) != 1 or not any(is_name(operand) for operand in node.args):
        return None
    result = [_Interval(-infinity, infinity, True, True)]
    for (left, right), written in zip(pairwise(node.args), node.value, strict=True):
        if written == "!=" and is_name(left) and mentions_sign(right):  # x ≠ ±2
            values = [_real(value) for value in items_of(right)]
            if None in values:
                return None
            result = _intersection(result, _complement([_Interval(value, value, False, False) for value in values]))
            continue
        low, high = _real(left), _real(right)
        if low is None and high is None:
            return None
        bound = low if low is not None else high
        operator = TURNED.get(written, written) if low is not None else written
        strict = operator in ("<", ">")
        match operator:
            case "<" | "<=":
                part = [_Interval(-infinity, bound, True, strict)]
            case ">" | ">=":
                part = [_Interval(bound, infinity, strict, True)]
            case "!=":
                part = _complement([_Interval(bound, bound, False, False)])
            case "=" | "≈":
                part = [_Interval(bound, bound, False, False)]
            case _:
                return None
        result = _intersection(result, part)
    subject = next(operand for operand in node.args if _real(operand) is None)
    return _unsigned(result) if subject.kind == "call" and subject.value == "abs" else result


def _unsigned(intervals: list[_Interval]) -> list[_Interval]:
    """The numbers whose absolute value is in one of the intervals."""
    mpmath = load_mpmath()
    sizes = _intersection(intervals, [_Interval(mpmath.mpf(0), mpmath.inf, False, True)])
    return sizes + [_Interval(-size.high, -size.low, size.high_open, size.low_open) for size in sizes]


def _intersection(left: list[_Interval], right: list[_Interval]) -> list[_Interval]:
    result = []
    for a in left:
        for b in right:
            low = max((a.low, a.low_open), (b.low, b.low_open))
            high = min((a.high, not a.high_open), (b.high, not b.high_open))
            if low[0] < high[0] or (low[0] == high[0] and not low[1] and high[1]):
                result.append(_Interval(low[0], high[0], low[1], not high[1]))
    return result


def _complement(intervals: list[_Interval]) -> list[_Interval]:
    infinity = load_mpmath().inf
    result = [_Interval(-infinity, infinity, True, True)]
    for part in intervals:
        below = _Interval(-infinity, part.low, True, not part.low_open)
        above = _Interval(part.high, infinity, not part.high_open, True)
        result = _intersection(result, [side for side in (below, above) if side.low < side.high])
    return result


def _merged(intervals: list[_Interval]) -> list[_Interval]:
    """The intervals in order, with those that touch joined."""
    result: list[_Interval] = []
    for interval in sorted(intervals, key=lambda i: (i.low, i.low_open)):
        last = result[-1] if result else None
        touching = last is not None and (
            interval.low < last.high or (close(interval.low, last.high) and not (interval.low_open and last.high_open))
        )
        if last is None or not touching:
            result.append(interval)
        else:
            high, closed = max((last.high, not last.high_open), (interval.high, not interval.high_open))
            result[-1] = _Interval(last.low, high, last.low_open, not closed)
    return result
