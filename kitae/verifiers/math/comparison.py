"""Whether two answers are equivalent: `same(tree of "x = 5", tree of "5")` → True; None if it cannot be decided.

`same` is the heart of the verifier: it chooses the rule for a kind of answer. The rules call it again for parts, which
is why they are all in this file.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import partial, reduce
from itertools import permutations
from math import gcd

from kitae.verifiers.math.cleanup import plain_words
from kitae.verifiers.math.equality import any_true, rounds_to, same_curve, same_inequalities, same_number
from kitae.verifiers.math.numbers import NUMBER_CONSTANTS, Point, to_mp, value_at
from kitae.verifiers.math.sets import same_real_sets
from kitae.verifiers.math.tree import (
    UNKNOWN_FUNCTIONS,
    Node,
    TooBig,
    Undefined,
    Unreadable,
    is_collection,
    is_name,
    is_quantity,
    items_of,
    mentions,
    mentions_collection,
    mentions_sign,
    names_in,
    negated,
    number_node,
    spelled,
    substituted,
)
from kitae.verifiers.math.units import DEGREE, measure_of, scaled

_MAX_ITEMS = 100
_MAX_FAMILIES = 16
_UNCLEAR = ("based", "text")  # kinds whose value is unclear
_TEMPERATURES = ((("celsius", 1),), (("fahrenheit", 1),))


def same(gold: Node, got: Node, tolerance: float = 0.0) -> bool | None:
    """Whether two answers are equivalent; each kind of answer has a rule of its own below."""
    if "whole" in (gold.kind, got.kind):
        return (gold.kind, gold.value) == (got.kind, got.value) and same(gold.args[0], got.args[0], tolerance)
    if gold.kind == "relation" or got.kind == "relation":
        return _same_relations(gold, got, tolerance)
    if "family" in (gold.kind, got.kind) and not mentions_sign(gold) and not mentions_sign(got):
        return _same_families(gold, got, tolerance)
    if "text" in (gold.kind, got.kind):
        left, right = (_MEANINGS.get(_sense(node) or "", node) for node in (gold, got))
        if (left, right) != (gold, got):
            return same(left, right, tolerance)
        return _sense(gold) is not None and _sense(gold) == _sense(got)
    if any(node.kind in ("unit", "percent", "degree") for node in (gold, got)):
        return _same_quantity(gold, got, tolerance)
    if is_collection(gold) or is_collection(got):
        return _same_collections(gold, got, tolerance)
    if "matrix" in (gold.kind, got.kind):
        return _same_matrices(gold, got, tolerance)
    if gold.kind == got.kind == "cases":
        return _matched(gold.args, got.args, tolerance)
    if gold.kind == got.kind == "row":
        return _all_same(gold.args, got.args, tolerance)
    if "based" in (gold.kind, got.kind):
        return _same_based(gold, got)
    if "ratio" in (gold.kind, got.kind):
        return _same_ratio(gold, got, tolerance)
    if any(node.kind == "constant" and node.value not in NUMBER_CONSTANTS for node in (gold, got)):
        return gold == got
    if mentions(gold, "text") or mentions(got, "text"):  # "October 30": equal words were found equal before
        return False
    try:
        return same_number(gold, got, tolerance)
    except Unreadable:
        return None
    except TooBig:
        if gold.kind == got.kind == "pow" and gold.args[0] == got.args[0] and is_large(gold.args[0]):
            return same(gold.args[1], got.args[1])  # of a tower, storey by storey
        raise


def is_large(node: Node) -> bool:
    return node.kind == "number" and bool(node.value > 1)


def _sense(node: Node) -> str | None:
    """The meaning of words, or of a sign that can be expressed in words."""
    if node.kind == "text":
        return plain_words(node.value)
    return {"empty": "nosolution", "inf": "infinitelymany"}.get(node.value) if node.kind == "constant" else None


_MEANINGS = {"allreals": Node("constant", value="set R"), "infinity": Node("constant", value="inf")}


def _same_families(gold: Node, got: Node, tolerance: float) -> bool | None:
    """π/4 + kπ and πn - 3π/4: the values are the same, whatever the letter. A letter may go without its ∈ ℤ."""
    if gold.kind != got.kind:
        family, other = (gold, got) if gold.kind == "family" else (got, gold)
        free = sorted(names_in(other) - names_in(family.args[0]) or names_in(other) & {family.value[0]})
        if len(free) != 1 or other.kind in ("relation", "text", "list", "set"):
            return False
        bare = Node("family", (other,), (free[0], family.value[1]))
        return _same_families(family, bare, tolerance) if family is gold else _same_families(bare, family, tolerance)
    (left_name, domain), (right_name, other_domain) = gold.value, got.value
    if domain != other_domain:
        return False
    left, right = gold.args[0], substituted(got.args[0], {right_name: Node("name", value=left_name)})
    if domain != "set Z" or {left_name} != names_in(left) | names_in(right):
        return same(left, right, tolerance)
    line, other_line = _line(left, left_name), _line(right, left_name)
    if line is None or other_line is None:
        return same(left, right, tolerance)
    (start, step), (other_start, other_step) = line, other_line
    shift = Node("div", (Node("add", (start, negated(other_start))), step))
    turned = any(same_number(step, width) for width in (other_step, negated(other_step)))
    return turned and same_number(shift, Node("call", (Node("add", (shift, _HALF)),), "floor")) is True


_HALF = Node("number", value=Fraction(1, 2))


def _line(node: Node, name: str) -> tuple[Node, Node] | None:
    """The start and the step of a + bk; None where it is no line."""
    start, first, second = (substituted(node, {name: number_node(str(at))}) for at in range(3))
    step = Node("add", (first, negated(start)))
    try:
        even = same_number(step, Node("add", (second, negated(first))))
        return (start, step) if even and not same_number(step, number_node("0")) else None
    except Unreadable:
        return None


def _same_quantity(gold: Node, got: Node, tolerance: float) -> bool | None:
    """Numbers with a percent sign, a degree sign or a unit on one side or both."""
    if gold.kind == got.kind == "unit":
        return _same_measured(gold, got, tolerance)
    if gold.kind == got.kind:
        return same(gold.args[0], got.args[0], tolerance)
    if {gold.kind, got.kind} == {"percent", "degree"}:
        return False
    for node, other in ((gold, got), (got, gold)):  # π/2 radians and 90°
        if node.kind == "unit" and other.kind == "degree" and measure_of(node.value).dimensions == (("angle", 1),):
            pair = (node.args[0], Node("mul", (other.args[0], DEGREE)))
            return same(*(pair if node is gold else pair[::-1]), tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind == "unit":
            measure = measure_of(node.value)
            temperature = measure.dimensions in _TEMPERATURES and other.kind == "degree"
            if measure.altering or (measure.dimensions and other.kind in ("percent", "degree") and not temperature):
                return False
            plain = other.args[0] if temperature else other
            pair = (node.args[0], plain) if node is gold else (plain, node.args[0])
            return same(*pair, tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind in ("percent", "degree"):
            size = Fraction(1, 100) if node.kind == "percent" else None
            value = scaled(node.args[0], size) if size else Node("mul", (node.args[0], DEGREE))
            sized = (value, other) if node is gold else (other, value)
            if node is got and node.kind == "percent" and _is_below_one(node.args[0]):  # 0.25% is not 0.25
                return same(*sized, tolerance)
            plain_pair = (node.args[0], other) if node is gold else (other, node.args[0])
            return any_true(same(*pair, tolerance) for pair in (plain_pair, sized))
    return None


def _is_below_one(node: Node) -> bool:
    if names_in(node) or is_collection(node):
        return False
    try:
        return bool(abs(to_mp(value_at(node, Point(0, False, False)))) < 1)
    except (Undefined, Unreadable):
        return False


def _same_measured(gold: Node, got: Node, tolerance: float) -> bool | None:
    """Numbers with units on both sides: the same unit, one in more words, or units that can be converted."""
    left, right = measure_of(gold.value), measure_of(got.value)
    if left.altering or right.altering:
        return left == right and same(gold.args[0], got.args[0], tolerance)
    if not (left.words <= right.words or right.words <= left.words):
        return False
    if moduli := [int(measure.modulus) for measure in (left, right) if measure.modulus]:
        difference = Node(
            "call", (Node("add", (gold.args[0], negated(got.args[0]))), number_node(str(moduli[0]))), "mod"
        )
        return same(Node("number", value=Fraction(0)), difference)
    if left.dimensions == right.dimensions:
        return same(scaled(gold.args[0], left.size), scaled(got.args[0], right.size), tolerance)
    nothing = any(not measure.dimensions and not measure.words for measure in (left, right))
    sterling = {"£", "pound", "pounds"} >= {gold.value.strip(), got.value.strip()}  # of money or of mass
    rate = left.currency is not None and left.currency == right.currency  # $8 per hour may be written $8
    return same(gold.args[0], got.args[0], tolerance) if nothing or sterling or rate else False


def _same_based(gold: Node, got: Node) -> bool:
    """Numbers with a base: "1010_2". The base may be omitted, like a unit."""
    if gold.kind == got.kind:
        return bool(gold.value == got.value)
    based, other = (gold, got) if gold.kind == "based" else (got, gold)
    return other.kind == "number" and bool(other.value == based.value[0])


def _same_ratio(gold: Node, got: Node, tolerance: float) -> bool | None:
    """5:6 equals 10:12 and the fraction 5/6; but the reference 12:30 may be a time, which equals neither 2:5 nor
    2/5."""
    if gold.kind == got.kind:
        if len(gold.args) != len(got.args):
            return False
        verdict = _all_same(gold.args, got.args, tolerance)
        if verdict or _is_clock(gold):
            return verdict
        left, right = (tuple(Node("div", (part, node.args[0])) for part in node.args[1:]) for node in (gold, got))
        return _all_same(left, right, tolerance)
    ratio, other = (gold, got) if gold.kind == "ratio" else (got, gold)
    return len(ratio.args) == 2 and not _is_clock(ratio) and same(Node("div", ratio.args), other, tolerance)


def _is_clock(ratio: Node) -> bool:
    """Whether a ratio like 12:30 may be a time: it is not in lowest terms."""
    if len(ratio.args) != 2 or any(part.kind != "number" or part.value.denominator != 1 for part in ratio.args):
        return False
    hours, minutes = (int(part.value) for part in ratio.args)
    return 0 <= hours <= 24 and (minutes == 0 or (10 <= minutes < 60 and gcd(hours, minutes) > 1))


def _all_same(golds: tuple[Node, ...], gots: tuple[Node, ...], tolerance: float) -> bool | None:
    if len(golds) != len(gots):
        return False
    unsure = False
    for left, right in zip(golds, gots, strict=True):
        verdict = same(left, right, tolerance)
        if verdict is False:
            return False
        unsure |= verdict is None
    return None if unsure else True


def _matched(golds: tuple[Node, ...], gots: tuple[Node, ...], tolerance: float) -> bool | None:
    """The same items in any order."""
    if len(golds) != len(gots):
        return False
    left = list(gots)
    for gold in golds:
        found = next(
            (at for at, got in enumerate(left) if _is_set(gold) == _is_set(got) and same(gold, got, tolerance)), None
        )
        if found is None:
            return False
        del left[found]
    return True


def _is_set(node: Node) -> bool:
    return node.kind == "set" or node == Node("constant", value="empty")


def _distinct(items: tuple[Node, ...]) -> tuple[Node, ...]:
    kept: list[Node] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _same_collections(gold: Node, got: Node, tolerance: float) -> bool | None:
    gold, got = _rounds(gold), _rounds(got)
    if gold.kind != got.kind and any(node.kind == "set" and any(map(_is_set, node.args)) for node in (gold, got)):
        return False  # {∅} is not ∅
    if gold.kind == got.kind == "sequence":
        return _same_sequences(gold, got, tolerance)
    for node, other in sorted(((gold, got), (got, gold)), key=lambda pair: pair[0].kind != "union"):
        if node.kind == "sequence" and other.kind == "matrix":
            return _same_matrices(gold, got, tolerance)
        if node.kind == "union" and other.kind not in ("union", "sequence", "set", "list", "constant"):
            return False
        if node.kind == "union" and other.kind == "sequence" and len(other.args) != 2:
            return False
        if node.kind == "union" or (node.kind == "sequence" and other.kind == "constant"):
            verdict = same_real_sets(gold, got)
            if verdict is None and gold.kind == got.kind and gold.value == got.value in ("∪", "∩"):
                return _matched(gold.args, got.args, tolerance)
            return verdict
        if node.kind == "sequence":
            if other.kind == "list" and all(item.kind == "relation" and "=" not in item.value for item in other.args):
                return same_real_sets(gold, got)
            if other.kind != "list" or (node.value != "()" and len(node.args) == 2):
                return False
            return _all_same(_in_order(gold.args), _in_order(got.args), tolerance)
    if _joined_otherwise(gold, got):
        return same_real_sets(gold, got) or False
    golds, gots = items_of(gold), items_of(got)
    most = _MAX_FAMILIES if any(item.kind == "family" for item in (*golds, *gots)) else _MAX_ITEMS
    if max(len(golds), len(gots)) > most:
        raise TooBig(f"a set of more than {most} items")
    offered = 1 in (len(golds), len(gots)) and "or" in (gold.value, got.value)
    if offered and len(_distinct(golds)) == len(_distinct(gots)) == 1:  # "0.6 or 60%": one number in two forms
        return any_true(same(left, right, tolerance) for left in golds for right in gots)
    if "set" in (gold.kind, got.kind):
        golds, gots = _distinct(golds), _distinct(gots)
    elif _named_apart(golds) != _named_apart(gots):
        return _all_same(_in_order(golds), _in_order(gots), tolerance)
    return _matched(golds, gots, tolerance)


def _joined_otherwise(gold: Node, got: Node) -> bool:
    """Whether two lists differ in "and" and "or", as in x > 1 and x < 5. For numbers, and for values of one name, there
    is no difference."""
    if {gold.value, got.value} != {"and", "or"} or gold.kind != "list" or got.kind != "list":
        return False
    items = (*gold.args, *got.args)
    values = all(item.kind == "relation" and item.value == ("=",) and is_name(item.args[0]) for item in items)
    if values and len({spelled(item.args[0]) for item in items}) == 1:
        return False
    return any(names_in(item) for item in items)


def _rounds(node: Node) -> Node:
    """x = 1, y = 2, x = 3, y = 4 → (x = 1, y = 2), (x = 3, y = 4)."""
    if node.kind != "list" or not all(item.kind == "relation" and is_name(item.args[0]) for item in node.args):
        return node
    names = [spelled(item.args[0]) for item in node.args]
    size = len(set(names))
    rounds = [node.args[start : start + size] for start in range(0, len(names), size)]
    whole = all(len(set(names[start : start + size])) == size for start in range(0, len(names), size))
    if not whole or size == 1 or len(rounds) == 1:
        return node
    return Node("list", tuple(Node("list", items, "and") for items in rounds), ",")


def _named_apart(items: tuple[Node, ...]) -> bool:
    """Whether the items of a list name their values, as in x = 1, y = 2."""
    names = {spelled(item.args[0]) for item in items if item.kind == "relation"}
    return len(names) > 1


def _in_order(items: tuple[Node, ...]) -> tuple[Node, ...]:
    """y = 3, x = 2 → x = 2, y = 3, if the names are successive letters: the order of (x, y)."""
    names = [item.args[0].value if item.kind == "relation" and item.args[0].kind == "name" else "" for item in items]
    ordered = sorted(names)
    if any(len(name) != 1 for name in names) or ord(ordered[-1]) - ord(ordered[0]) != len(names) - 1:
        return items
    return tuple(item for _, item in sorted(zip(names, items, strict=True), key=lambda pair: pair[0]))


def _spread(relation: Node) -> Node:
    """(x, y) = (2, 3) → x = 2 and y = 3."""
    names, values = relation.args[0], relation.args[-1]
    if relation.value != ("=",) or names.kind != "sequence" or values.kind != "sequence":
        return relation
    if len(names.args) != len(values.args) or not all(map(is_name, names.args)):
        return relation
    pairs = zip(names.args, values.args, strict=True)
    return Node("list", tuple(Node("relation", pair, ("=",)) for pair in pairs), "and")


def _same_sequences(gold: Node, got: Node, tolerance: float) -> bool | None:
    """Tuples, vectors and intervals. The kind of brackets matters if it may be an interval."""
    if gold.value != got.value and len(gold.args) == 2 and gold.args[0].kind != "sequence":
        return False
    return _all_same(gold.args, got.args, tolerance)


_Rows = tuple[tuple[Node, ...], ...]


def _rows(node: Node) -> _Rows | None:
    """The cells of a matrix, a vector, or a sum or product of them."""
    if node.kind == "matrix":
        return tuple(row.args for row in node.args)
    if node.kind == "sequence":
        nested = all(item.kind == "sequence" for item in node.args)
        return tuple(item.args for item in node.args) if nested else tuple((item,) for item in node.args)
    if node.kind == "pow" and node.args[1] == Node("name", value="T") and (rows := _rows(node.args[0])):
        return tuple(zip(*rows, strict=True)) if len({len(row) for row in rows}) == 1 else None
    if node.kind == "neg" and (rows := _rows(node.args[0])):
        return tuple(tuple(negated(cell) for cell in row) for row in rows)
    if node.kind in ("add", "mul", "div"):
        return _computed_rows(node.kind, node.args, _rows(node.args[0]), _rows(node.args[1]))
    return None


def _computed_rows(kind: str, args: tuple[Node, ...], left: _Rows | None, right: _Rows | None) -> _Rows | None:
    if left and right and kind == "add" and [*map(len, left)] == [*map(len, right)]:
        pairs = (zip(*rows, strict=True) for rows in zip(left, right, strict=True))
        return tuple(tuple(Node("add", pair) for pair in row) for row in pairs)
    if left and right and kind == "mul" and all(len(row) == len(right) for row in left):
        return tuple(tuple(_dot(row, column) for column in zip(*right, strict=False)) for row in left)
    if right and not left and kind == "mul":
        return tuple(tuple(Node("mul", (args[0], cell)) for cell in row) for row in right)
    if left and not right and kind in ("mul", "div"):
        return tuple(tuple(Node(kind, (cell, args[1])) for cell in row) for row in left)
    return None


def _dot(row: tuple[Node, ...], column: tuple[Node, ...]) -> Node:
    products = [Node("mul", pair) for pair in zip(row, column, strict=True)]
    return reduce(lambda total, product: Node("add", (total, product)), products)


def _same_matrices(gold: Node, got: Node, tolerance: float) -> bool | None:
    left, right = _rows(gold), _rows(got)
    if left is None or right is None:
        unread = gold if left is None else got
        return None if mentions(unread, "matrix") else False
    flat = "sequence" in (gold.kind, got.kind) and len(left) != len(right) and 1 in (len(left), len(right))
    if flat:  # a row vector and a tuple
        left, right = (tuple((cell,) for row in rows for cell in row) for rows in (left, right))
    if [len(row) for row in left] != [len(row) for row in right]:
        return False
    return _all_same(tuple(c for row in left for c in row), tuple(c for row in right for c in row), tolerance)


def _same_relations(gold: Node, got: Node, tolerance: float) -> bool | None:
    if "list" in (gold.kind, got.kind):
        left, right = (_spread(node) if node.kind == "relation" else node for node in (gold, got))
        if (left, right) != (gold, got):
            return same(left, right, tolerance)
    if gold.kind == got.kind:
        return _same_pair(gold, got, tolerance)
    relation, other = (gold, got) if gold.kind == "relation" else (got, gold)
    operators = set(relation.value)
    if operators <= {"=", "≈"}:
        return _same_equation_and_value(gold, got, tolerance)
    if operators == {"∈"}:
        value = relation.args[-1]
        return same(*((value, got) if relation is gold else (gold, value)), tolerance)
    if other.kind in ("sequence", "union", "list", "constant", "set"):
        return same_real_sets(gold, got)
    return False


def _same_equation_and_value(gold: Node, got: Node, tolerance: float) -> bool | None:
    """x = 5 and 5. An answer may be more than the reference requires ("2a + b = 5"); a reference must name a
    quantity."""
    relation = gold if gold.kind == "relation" else got
    if relation is gold and not _names_a_value(gold):
        return False
    values = _values(relation)
    if relation is gold:
        return any_true(same(value, got, tolerance) for value in values) if values else False
    return any_true(same(gold, value, tolerance) for value in values) if values else False


def _names_a_value(equation: Node) -> bool:
    """Whether an equation gives a value, like x = 5, y = 2x, AB/CD = 2, 6 · 7 = 42, and is no answer in itself, like 2x
    + 1 = 7 or x + y = 5."""
    left, right = equation.args[0], equation.args[-1]
    return is_name(left) or not names_in(left) or (is_quantity(left) and not names_in(right))


def _values(relation: Node) -> list[Node]:
    """The values that "a = b = c ≈ d" gives: c, and d if it is c rounded. Empty if the equation is false.

    Many write 2√3 = 3.46: if c is b rounded, both count.
    """
    operators = ("=", *relation.value)
    about = operators.index("≈") if "≈" in operators else len(operators)
    exact = [part for part in relation.args[:about] if not is_name(part)]
    rounded = [part for part in relation.args[about:] if not is_name(part)]
    if not exact:
        return rounded[:1] or [relation.args[-1]]
    value = exact[-1]
    if names_in(value) and not names_in(exact[0]):  # 7 = 11a + c
        return []
    claims = [part for part in exact[:-1] if not names_in(part) and not any(map(partial(mentions, part), _UNCLEAR))]
    unequal = [] if names_in(value) else [claim for claim in claims if same(claim, value) is False]
    if any(not _is_rounded(claim, value) for claim in unequal):  # 3 = 4
        return []
    if any(same_number(value, part, 0.1) is False for part in rounded):  # 7 ≈ 8
        return []
    return [value, *unequal[-1:], *(part for part in rounded if _is_rounded(value, part))]


def _is_rounded(value: Node, short: Node) -> bool:
    """Whether `short` is `value` rounded, as 0.333 is of 1/3. Units and percents must agree if both have them."""
    while "unit" in (value.kind, short.kind):
        if value.kind == short.kind and measure_of(value.value) != measure_of(short.value):
            return same(value, short) is True
        value, short = (node.args[0] if node.kind == "unit" else node for node in (value, short))
    if short.kind in ("percent", "degree") and value.kind == short.kind:
        return _is_rounded(value.args[0], short.args[0])
    if short.kind == "percent":
        return _is_rounded(Node("mul", (value, number_node("100"))), short.args[0])
    return same(value, short) is True or rounds_to(value, short)


def _same_pair(gold: Node, got: Node, tolerance: float) -> bool | None:
    operators = set(gold.value) | set(got.value)
    if operators <= {"=", "≈"}:
        return _same_equations(gold, got, tolerance)
    if "!=" in operators and (verdict := same_real_sets(gold, got)) is not None:
        return verdict
    if operators & {"=", "≈", "!="}:
        return gold.value == got.value and _all_same(gold.args, got.args, tolerance)
    if operators == {"∈"}:
        return _all_same(gold.args, got.args, tolerance)
    verdict = same_real_sets(gold, got)
    return same_inequalities(gold, got) if verdict is None else verdict


def _same_equations(gold: Node, got: Node, tolerance: float) -> bool | None:
    """The same name with the same value, or the same curve: one equation is a multiple of the other."""
    if is_name(gold.args[0]) and is_name(got.args[0]):
        called = _is_function(gold.args[0]) and got.args[0].value == "y"
        named = called or spelled(gold.args[0]) == spelled(got.args[0])
        if named:
            return _any_same(_values(gold), _values(got), tolerance)
        if gold.args[0].kind == got.args[0].kind == "call":  # f(2) = 5 and f(5) = 2
            return False
    if not names_in(gold) and not names_in(got):  # 1/3 = 0.333…
        return _any_same(_values(gold), _values(got), tolerance)
    if mentions_collection(gold) or mentions_collection(got):
        return False
    return same_curve(gold, got)


def _is_function(node: Node) -> bool:
    """Whether the node is f(x), whose value may be called y."""
    return node.kind == "call" and node.value in UNKNOWN_FUNCTIONS and all(part.kind == "name" for part in node.args)


def _any_same(golds: list[Node], gots: list[Node], tolerance: float) -> bool | None:
    return any_true(same(left, right, tolerance) for left in golds for right in gots) if golds and gots else False


_CONSTANT_NAME_RE = re.compile(r"[A-DKcdk](_[0-9A-Za-z])?")


def with_constants_of(gold: Node, got: Node) -> Iterator[Node]:
    """The answer with its constants of integration called as in the reference: + K as + C, c₁ and c₂ as C₂ and C₁."""
    theirs, own = names_in(gold), names_in(got)
    wanted = sorted(name for name in theirs if _CONSTANT_NAME_RE.fullmatch(name))
    if len(own) != len(theirs) or not 0 < len(wanted) <= 3:
        return
    given = sorted(name for name in own - (theirs - set(wanted)) if _CONSTANT_NAME_RE.fullmatch(name))
    if len(given) == len(wanted):
        for order in permutations(wanted):
            yield substituted(got, {name: Node("name", value=new) for name, new in zip(given, order, strict=True)})
