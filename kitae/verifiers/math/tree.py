"""Answers as trees: the nodes that the parser makes, and properties of trees that need no evaluation.

    x = 2   →   Node("relation", (Node("name", value="x"), Node("number", value=Fraction(2))), ("=",))

Kinds: number, name, constant, text; add, neg, mul, div, pow, root, factorial, call, pm; percent, degree, unit, based,
ratio; list, set, sequence (with its brackets), union, matrix and cases (of rows), relation (with its operators); series
(the sum or product over an index); family (all values of 2k with k ∈ ℤ) and whole (the integers among some numbers).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

_MAX_DIGITS = 4_000  # digits of a number; Python refuses to print more than 4,300


class Unreadable(Exception):
    """The notation is unknown to the parser."""


class TooBig(Exception):
    """Parsing or evaluating would take too long."""


class Undefined(Exception):
    """The expression has no (real) value at this point."""


class OutsideDomain(Undefined):
    """Nor does it have one around the point: the root or logarithm of a negative number, the arcsine of 2."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an answer: `Node("add", (x, y))`, `Node("number", value=Fraction(1, 2))`."""

    kind: str
    args: tuple["Node", ...] = ()
    value: Any = None


def number_node(literal: str) -> Node:
    """`"1.50"` → 3/2. The node of a decimal also records its number of digits, and how many are after the point."""
    mantissa, _, exponent = literal.lower().partition("e")
    if len(mantissa) + abs(int(exponent or 0)) > _MAX_DIGITS:
        raise TooBig(f"a number like {literal[:40]}")
    digits = mantissa.replace(".", "").lstrip("0")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0)
    precise = len(digits) if "." in mantissa or exponent else 0
    return Node("number", (Node("literal", value=(precise, places)),) if precise else (), Fraction(literal))


def repeating_decimal(start: str, period: str) -> Node:
    whole, _, fixed = start.partition(".")
    scale = 10 ** len(fixed)
    tail = Fraction(int(period), (10 ** len(period) - 1) * scale)
    return Node("number", value=Fraction(int(whole or 0)) + Fraction(int(fixed or 0), scale) + tail)


def negated(node: Node) -> Node:
    if node.kind == "number":
        return Node("number", node.args, -node.value)
    if node.kind in ("unit", "percent", "degree"):
        return Node(node.kind, (negated(node.args[0]),), node.value)
    if node.kind == "based":
        return Node("based", value=(-node.value[0], node.value[1]))
    return Node("neg", (node,))


UNKNOWN_FUNCTIONS = ("f", "g")  # names of functions without a definition


def spelled(node: Node) -> str:
    inside = "".join(spelled(part) for part in node.args if part.kind != "literal")
    return f"{node.value if node.value is not None else node.kind}{f'({inside})' if inside else ''}"


def names_in(node: Node) -> set[str]:
    unknown = node.kind == "call" and node.value in UNKNOWN_FUNCTIONS
    found = {node.value} if node.kind == "name" or unknown else set()
    found = found.union(*(names_in(part) for part in node.args))
    return found - {node.args[0].value} if node.kind == "series" else found


def mentions(node: Node, kind: str, value: Any = None) -> bool:
    own = node.kind == kind and (value is None or node.value == value)
    return own or any(mentions(part, kind, value) for part in node.args)


def is_name(node: Node) -> bool:
    """Whether the node can be the name of the answer, before "=": x, AB, x_1, f(x), f(2), P(X > 2), (x, y), ∠ABC."""
    if node.kind in ("name", "text"):
        return True
    if node.kind == "call" and node.value in UNKNOWN_FUNCTIONS:
        return True
    if node.kind == "mul" and node.args[0].kind == "name" and node.args[1].kind in ("relation", "union"):
        return True
    if node.kind == "call" and node.value == "abs":
        return is_name(node.args[0])
    if node.kind == "pow":  # f^{-1}(x)
        return is_name(node.args[0]) and node.args[1].kind == "number" and node.args[1].value == -1
    return node.kind in ("mul", "sequence") and all(is_name(part) or part.kind == "constant" for part in node.args)


_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")


def is_quantity(node: Node) -> bool:
    r"""Whether the node names a number, like AB/CD, a:b, a + b, \sin A, \log_2 N, and is no equation to be solved, like
    2x + 1 or x².

    A sum of x and y is a line, so it is none.
    """
    if is_name(node):
        return True
    if node.kind == "call":
        return node.value in _TRIGONOMETRIC or all(is_quantity(part) or not names_in(part) for part in node.args)
    if node.kind == "add" and names_in(node) >= {"x", "y"}:
        return False
    return node.kind in ("add", "neg", "mul", "div", "ratio") and all(map(is_quantity, node.args))


def is_integer_condition(node: Node) -> bool:
    """Whether the node is like k ∈ ℤ, a condition on a letter used before it."""
    if node.kind != "relation" or node.value != ("∈",):
        return False
    return node.args[0].kind == "name" and node.args[1].kind == "constant" and node.args[1].value in ("set Z", "set N")


def over_integers(node: Node, domains: Mapping[str, str]) -> Node:
    """2k with k ∈ ℤ, as the set of all its values; of x = 2k, the right side is that."""
    if node.kind == "relation" and node.value == ("=",):
        return Node("relation", (node.args[0], over_integers(node.args[1], domains)), node.value)
    index = sorted(names_in(node) & domains.keys())
    return Node("family", (node,), (index[0], domains[index[0]])) if len(index) == 1 else node


def integers_in(condition: Node) -> Node | None:
    """The integers between two bounds, as a set: -2 < x < 3 → {-1, 0, 1, 2}; None if there are no such bounds."""
    low = high = None
    for relation in condition.args if condition.kind == "list" else (condition,):
        if relation.kind != "relation":
            return None
        for left, operator, right in zip(relation.args, relation.value, relation.args[1:], strict=False):
            bound, turned = (left, operator) if is_name(right) else (right, TURNED.get(operator, ""))
            value = _plain_value(bound)
            if value is None or not is_name(right if bound is left else left):
                return None
            match turned:
                case "<" | "<=":
                    at = floor(value) + 1 if turned == "<" else ceil(value)
                    low = at if low is None else max(low, at)
                case ">" | ">=":
                    at = ceil(value) - 1 if turned == ">" else floor(value)
                    high = at if high is None else min(high, at)
                case _:
                    return None
    if low is None or high is None or high - low >= 100:
        return None
    whole = tuple(Node("number", value=Fraction(value)) for value in range(low, high + 1))
    return Node("set", whole) if whole else Node("constant", value="empty")


TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _plain_value(node: Node) -> Fraction | None:
    if node.kind == "neg":
        value = _plain_value(node.args[0])
        return None if value is None else -value
    return node.value if node.kind == "number" else None


def substituted(node: Node, values: Mapping[str, Node]) -> Node:
    """The tree with other trees for some names."""
    if node.kind == "name" and node.value in values:
        return values[node.value]
    parts = tuple(substituted(part, values) for part in node.args)
    return node if parts == node.args else Node(node.kind, parts, node.value)


_UNIT_VECTORS = ("vec i", "vec j", "vec k")


def as_tuple(node: Node) -> Node:
    """2**i** - 3**j** → (2, -3)."""
    used = names_in(node) & set(_UNIT_VECTORS)
    if not used or not _is_linear(node):
        return node
    size = 3 if "vec k" in used else 2
    zero, one = number_node("0"), number_node("1")
    return Node(
        "sequence",
        tuple(
            substituted(node, {name: one if name == unit else zero for name in _UNIT_VECTORS})
            for unit in _UNIT_VECTORS[:size]
        ),
        "()",
    )


def _is_linear(node: Node) -> bool:
    """Whether the tree is a sum of multiples of unit vectors."""
    if node.kind in ("add", "neg"):
        return all(map(_is_linear, node.args))
    if node.kind == "mul":
        return sum(bool(names_in(part) & set(_UNIT_VECTORS)) for part in node.args) == 1 and any(
            map(_is_linear, node.args)
        )
    if node.kind == "div":
        return _is_linear(node.args[0]) and not names_in(node.args[1]) & set(_UNIT_VECTORS)
    return node.kind == "name" and node.value in _UNIT_VECTORS


def is_collection(node: Node) -> bool:
    return node.kind in ("list", "set", "sequence", "union") or mentions_sign(node)


_SIGNED = ("add", "neg", "mul", "div", "family", "unit", "degree", "percent")


def mentions_sign(node: Node) -> bool:
    return node.kind == "pm" or (node.kind in _SIGNED and any(map(mentions_sign, node.args)))


def mentions_collection(node: Node) -> bool:
    return is_collection(node) or node.kind in ("matrix", "text", "unit") or any(map(mentions_collection, node.args))


def items_of(node: Node) -> tuple[Node, ...]:
    """The items of a list or set, with both signs of each ±."""
    items = node.args if node.kind in ("list", "set") else (node,)
    return tuple(version for item in items for version in _both_signs(item))


def _both_signs(node: Node) -> tuple[Node, ...]:
    if not mentions_sign(node):
        return (node,)
    return _with_sign(node, upper=True), _with_sign(node, upper=False)


def _with_sign(node: Node, *, upper: bool) -> Node:
    if node.kind != "pm" and node.kind not in _SIGNED:
        return node
    parts = tuple(_with_sign(part, upper=upper) for part in node.args)
    if node.kind != "pm":
        return Node(node.kind, parts, node.value)
    return Node("add", (parts[0], parts[1] if (node.value == "±") == upper else negated(parts[1])))
