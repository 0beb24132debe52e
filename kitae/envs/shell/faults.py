"""Single faults in Python source: an operator, a number, a word exchanged for another, the rest as it is."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

At = Callable[[int, int], int]  # from a line and a column to a place

_COMPARED = {"<=": "<", ">=": ">", "==": "!=", "!=": "==", "<": "<=", ">": ">=", "not in": "in", "is not": "is",
             "in": "not in", "is": "is not"}  # fmt: skip
_COMPUTED = {"//": "%", "**": "*", "+": "-", "-": "+", "*": "+", "/": "*", "%": "//"}
_NAMES = {"max": "min", "min": "max", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
_METHODS = {"ljust": "rjust", "rjust": "ljust", "lstrip": "strip", "append": "extend", "isdigit": "isalpha"}


@dataclass(frozen=True, slots=True)
class Fault:
    """`Fault("…", 17, "<=", "<")`: the changed source, the line, what stood there and what stands there now."""

    source: str
    line: int
    before: str
    after: str


def faults(source: str) -> Iterator[Fault]:
    """All of them, in the order of the source."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    for node in ast.walk(ast.parse(source)):
        for low, high, text in _changes(node, data, lambda line, column: starts[line - 1] + column):
            changed = data[:low] + text.encode() + data[high:]
            yield Fault(changed.decode(), data[:low].count(b"\n") + 1, data[low:high].decode(), text)


def _changes(node: ast.AST, data: bytes, at: At) -> Iterator[tuple[int, int, str]]:
    """Places of the source, as bytes, and what could stand there."""
    if isinstance(node, ast.Compare):
        for a, b in pairwise([node.left, *node.comparators]):
            yield from _between(a, b, _COMPARED, data, at)
    elif isinstance(node, ast.BinOp):
        yield from _between(node.left, node.right, _COMPUTED, data, at)
    elif isinstance(node, ast.BoolOp):
        for a, b in pairwise(node.values):
            yield from _between(a, b, {"and": "or", "or": "and"}, data, at)
    elif isinstance(node, ast.AugAssign):
        yield from _between(node.target, node.value, {"+=": "-=", "-=": "+="}, data, at)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield *_span(node, at), str(value)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield *_span(node, at), str(not node.value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield _span(node, at)[0], _span(node.operand, at)[0], ""
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield *_span(node.func, at), _NAMES[node.func.id]
    elif isinstance(node, ast.Attribute) and node.attr in _METHODS:
        end = _span(node, at)[1]
        yield end - len(node.attr), end, _METHODS[node.attr]
    elif isinstance(node, ast.Break | ast.Continue):
        yield *_span(node, at), "continue" if isinstance(node, ast.Break) else "break"


def _between(a: ast.expr, b: ast.expr, words: dict[str, str], data: bytes, at: At) -> Iterator[tuple[int, int, str]]:
    low, high = _span(a, at)[1], _span(b, at)[0]
    pattern = "|".join(sorted(map(_spelled, words), key=len, reverse=True))
    found = re.search(pattern, data[low:high].decode())
    if found is not None:
        yield low + found.start(), low + found.end(), words[found[0]]


def _spelled(word: str) -> str:
    return rf"\b{word}\b" if word[0].isalpha() else re.escape(word)


def _span(node: ast.AST, at: At) -> tuple[int, int]:
    place: ast.expr = node  # type: ignore[assignment]  # statements have these, too
    assert place.end_lineno is not None and place.end_col_offset is not None
    return at(place.lineno, place.col_offset), at(place.end_lineno, place.end_col_offset)
