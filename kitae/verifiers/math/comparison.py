"""Are two answers the same? `same(tree of "x = 5", tree of "5")` → True; None where nobody knows.

`same` is the heart of the verifier: it picks the rule for this kind of answer. The rules call it again for the parts,
which is why they all stand in this file.
"""

from fractions import Fraction

from kitae.verifiers.math.cleanup import plain_words
from kitae.verifiers.math.equality import any_true, same_curve, same_inequalities, same_number
from kitae.verifiers.math.numbers import NUMBER_CONSTANTS
from kitae.verifiers.math.sets import same_real_sets
from kitae.verifiers.math.tree import (
    Node,
    TooBig,
    Unreadable,
    is_collection,
    is_name,
    items_of,
    mentions,
    mentions_collection,
    names_in,
    spelled,
)
from kitae.verifiers.math.units import DEGREE, scaled, unit_of


def same(gold: Node, got: Node, tolerance: float = 0.0) -> bool | None:
    """Are two answers the same? The heart of the verifier; each kind of answer has a rule of its own below."""
    if gold.kind == "relation" or got.kind == "relation":
        return _same_relations(gold, got, tolerance)
    if "text" in (gold.kind, got.kind):
        return _sense(gold) is not None and _sense(gold) == _sense(got)
    if any(node.kind in ("unit", "percent", "degree") for node in (gold, got)):
        return _same_quantity(gold, got, tolerance)
    if is_collection(gold) or is_collection(got):
        return _same_collections(gold, got, tolerance)
    if "matrix" in (gold.kind, got.kind):
        return _same_matrices(gold, got, tolerance)
    if "based" in (gold.kind, got.kind):
        return _same_based(gold, got)
    if "ratio" in (gold.kind, got.kind):
        return _same_ratio(gold, got, tolerance)
    if any(node.kind == "constant" and node.value not in NUMBER_CONSTANTS for node in (gold, got)):
        return gold == got
    if mentions(gold, "text") or mentions(got, "text"):  # "October 30": the same words are the same answer by now
        return False
    try:
        return same_number(gold, got, tolerance)
    except Unreadable:
        return None


def _sense(node: Node) -> str | None:
    """What words, or a sign that has words for it, say."""
    if node.kind == "text":
        return plain_words(node.value)
    return {"empty": "nosolution", "set R": "allreals"}.get(node.value) if node.kind == "constant" else None


def _same_quantity(gold: Node, got: Node, tolerance: float) -> bool | None:
    """Numbers with a percent sign, a degree sign or a unit on one side or both."""
    if gold.kind == got.kind == "unit":
        left, right = unit_of(gold.value), unit_of(got.value)
        if left and right and left.power == right.power and "per" not in gold.value + got.value:
            if left.dimension != right.dimension:
                return False
            return same(scaled(gold.args[0], left.size), scaled(got.args[0], right.size), tolerance)
        return same(gold.args[0], got.args[0], tolerance)
    if gold.kind == got.kind:
        return same(gold.args[0], got.args[0], tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind == "unit" and unit_of(node.value) and other.kind in ("percent", "degree"):
            return False
        if node.kind == "unit":
            pair = (node.args[0], other) if node is gold else (other, node.args[0])
            return same(*pair, tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind in ("percent", "degree"):
            plain = (node.args[0], other) if node is gold else (other, node.args[0])
            size = Fraction(1, 100) if node.kind == "percent" else None
            value = scaled(node.args[0], size) if size else Node("mul", (node.args[0], DEGREE))
            sized = (value, other) if node is gold else (other, value)
            return any_true(same(*pair, tolerance) for pair in (plain, sized))
    return None


def _same_based(gold: Node, got: Node) -> bool:
    """Numbers with a base: "1010_2". The base may be left out, as a unit may."""
    if gold.kind == got.kind:
        return bool(gold.value == got.value)
    based, other = (gold, got) if gold.kind == "based" else (got, gold)
    return other.kind == "number" and bool(other.value == based.value[0])


def _same_ratio(gold: Node, got: Node, tolerance: float) -> bool | None:
    """5:6 is 5:6, or the fraction 5/6."""
    if gold.kind == got.kind:
        return _all_same(gold.args, got.args, tolerance)
    ratio, other = (gold, got) if gold.kind == "ratio" else (got, gold)
    return len(ratio.args) == 2 and same(Node("div", ratio.args), other, tolerance)


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
    if len(golds) > 100:
        raise TooBig("a set of more than 100 items")
    left = list(gots)
    for gold in golds:
        found = next((index for index, got in enumerate(left) if same(gold, got, tolerance)), None)
        if found is None:
            return False
        del left[found]
    return True


def _distinct(items: tuple[Node, ...]) -> tuple[Node, ...]:
    kept: list[Node] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _same_collections(gold: Node, got: Node, tolerance: float) -> bool | None:
    if gold.kind == got.kind == "sequence":
        return _same_sequences(gold, got, tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind == "sequence" and other.kind == "matrix":
            return _same_matrices(gold, got, tolerance)
        if node.kind == "union" and other.kind not in ("union", "sequence", "set", "list", "constant"):
            return False
        if node.kind == "union" or (node.kind == "sequence" and other.kind == "constant"):
            return same_real_sets(gold, got)
        if node.kind == "sequence":
            if other.kind != "list" or (node.value != "()" and len(node.args) == 2):
                return False
            return _all_same(gold.args, got.args, tolerance)
    golds, gots = items_of(gold), items_of(got)
    if 1 in (len(golds), len(gots)) and "or" in (gold.value, got.value):  # "15 39/40 or 639/40": one number, twice
        golds, gots = (items[:1] if len(_distinct(items)) == 1 else items for items in (golds, gots))
    if "set" in (gold.kind, got.kind):
        golds, gots = _distinct(golds), _distinct(gots)
    elif _named_apart(golds) != _named_apart(gots):
        return _all_same(golds, gots, tolerance)
    return _matched(golds, gots, tolerance)


def _named_apart(items: tuple[Node, ...]) -> bool:
    """x = 1, y = 2: a list in which every item says what it is the value of."""
    names = {spelled(item.args[0]) for item in items if item.kind == "relation"}
    return len(names) > 1


def _same_sequences(gold: Node, got: Node, tolerance: float) -> bool | None:
    """Tuples, vectors and intervals; brackets count where it can be an interval."""
    if gold.value != got.value and len(gold.args) == 2 and gold.args[0].kind != "sequence":
        return False
    return _all_same(gold.args, got.args, tolerance)


def _rows(node: Node) -> tuple[tuple[Node, ...], ...] | None:
    if node.kind == "matrix":
        return tuple(row.args for row in node.args)
    if node.kind == "sequence":
        nested = all(item.kind == "sequence" for item in node.args)
        return tuple(item.args for item in node.args) if nested else tuple((item,) for item in node.args)
    if node.kind in ("mul", "div"):
        return _scaled_rows(node)
    return None


def _scaled_rows(node: Node) -> tuple[tuple[Node, ...], ...] | None:
    left, right = node.args
    if right.kind == "matrix" and node.kind == "mul":
        return tuple(tuple(Node("mul", (left, cell)) for cell in row.args) for row in right.args)
    if left.kind == "matrix":
        return tuple(tuple(Node(node.kind, (cell, right)) for cell in row.args) for row in left.args)
    return None


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
    """x = 5 and 5. An answer may say more than the reference asks: "a + b = 5"; a reference must be "name = value"."""
    if got.kind == "relation":
        values = got.args if "≈" in got.value else got.args[-1:]
        return any_true(same(gold, value, tolerance) for value in values)
    if not is_name(gold.args[0]) and names_in(gold.args[0]):
        return False
    values = gold.args[1:] if "≈" in gold.value else gold.args[-1:]
    return any_true(same(value, got, tolerance) for value in values)


def _same_pair(gold: Node, got: Node, tolerance: float) -> bool | None:
    operators = set(gold.value) | set(got.value)
    if operators <= {"=", "≈"}:
        return _same_equations(gold, got, tolerance)
    if operators & {"=", "≈", "!="}:
        return gold.value == got.value and _all_same(gold.args, got.args, tolerance)
    if operators == {"∈"}:
        return _all_same(gold.args, got.args, tolerance)
    verdict = same_real_sets(gold, got)
    return same_inequalities(gold, got) if verdict is None else verdict


def _same_equations(gold: Node, got: Node, tolerance: float) -> bool | None:
    """The same name for the same value, or the same curve: one is a multiple of the other."""
    if is_name(gold.args[0]) and is_name(got.args[0]):
        named = spelled(gold.args[0]) == spelled(got.args[0])
        if named:
            return same(gold.args[-1], got.args[-1], tolerance)
    if not names_in(gold) and not names_in(got):  # 1/3 = 0.333…
        golds, gots = (node.args if "≈" in node.value else node.args[-1:] for node in (gold, got))
        return any_true(same(left, right, tolerance) for left in golds for right in gots)
    if mentions_collection(gold) or mentions_collection(got):
        return False
    return same_curve(gold, got)
