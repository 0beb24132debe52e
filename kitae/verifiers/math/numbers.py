"""The value of a tree at a point: for `2x` at the point where x is 1/3, `value_at(tree, point)` → `Fraction(2, 3)`.

Values are exact fractions as long as possible, and else mpmath numbers of 30 digits. Size is checked before anything is
computed: `TooBig` for what would take long, `Undefined` if there is no value.
"""

import operator
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from math import comb, factorial, gcd, isqrt, lcm, log2, prod
from typing import Any

from kitae.verifiers.math.tree import (
    UNKNOWN_FUNCTIONS,
    Node,
    OutsideDomain,
    TooBig,
    Undefined,
    Unreadable,
    mentions,
)

DIGITS = 30
POINTS = 5  # points tried, of which the last two have negative values
WIDE_POINTS = 6  # further points, far from zero and next to it on both sides, where a function may have corners
_MAX_BITS = 130_000  # of an exact number
_MAX_TERMS = 1_000  # of a sum or product
_MAX_NESTED_TERMS = 30  # of each of two nested sums
_MAX_POWER = 10**6
NUMBER_CONSTANTS = ("pi", "e", "i", "inf")
_INVERSES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "arsinh": "arcsinh", "arcosh": "arccosh",
             "artanh": "arctanh"}  # fmt: skip
_PLAIN_CALLS = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "arctan": "atan",
    "arccot": "acot", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "coth": "coth", "sech": "sech", "csch": "csch",
    "arcsinh": "asinh",
}  # fmt: skip
_BOUNDED_CALLS = {"arcsin": "asin", "arccos": "acos", "arcsec": "asec", "arccsc": "acsc", "arccosh": "acosh",
                  "arctanh": "atanh"}  # fmt: skip


@lru_cache(maxsize=1)
def load_mpmath() -> Any:
    mpmath = import_module("mpmath")
    mpmath.mp.dps = DIGITS
    return mpmath


def to_mp(value: Any) -> Any:
    mpmath = load_mpmath()
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


@dataclass(frozen=True, slots=True)
class Point:
    """Values for the variables.

    real: values outside the reals are undefined. decimal_log: log is to base 10. whole: the variables are small
    positive integers. bound: the values of the indices of sums. turned: the name whose value has the opposite sign.
    reach: how far from zero the wide points are.
    """

    index: int
    real: bool
    decimal_log: bool
    whole: bool = False
    bound: tuple[tuple[str, Fraction], ...] = ()
    turned: str = ""
    reach: int = 1

    def value(self, name: str) -> Fraction:
        for index_name, value in self.bound:
            if index_name == name:
                return value
        if self.whole:
            return Fraction(2 + _drawn(name, self.index) % 8)
        if self.index >= POINTS:
            return self._wide_value(name)
        size = Fraction(_drawn(name, self.index), 997)
        return -size if (self.index >= POINTS - 2) != (name == self.turned) else size

    def _wide_value(self, name: str) -> Fraction:
        """Integers of the size of `reach` and of its square, and the inverses of the latter."""
        order, negative = divmod(self.index - POINTS, 2)
        factor = 2 + _drawn(name, self.index) % 97
        size = Fraction(factor * self.reach ** min(order + 1, 2))
        return (-1 if negative else 1) * (1 / size if order == 2 else size)


@lru_cache(maxsize=4096)
def _drawn(name: str, index: int) -> int:
    """A pseudo-random number, the same in every process."""
    return random.Random(f"{name}/{index}").randint(301, 2_500)


def value_at(node: Node, point: Point) -> Any:
    """A Fraction if the value is rational by construction, or else an mpmath number. Raises `Undefined`."""
    try:
        return _evaluate(node, point)
    except (ArithmeticError, ValueError, TypeError) as error:  # TypeError: complex numbers have no order
        raise Undefined(str(error)) from None


def _evaluate(node: Node, point: Point) -> Any:
    kind = node.kind
    if kind == "number":
        return node.value
    if kind == "name":
        return point.value(node.value)
    if kind == "constant":
        return _constant(node.value)
    if kind == "series":
        return _series(node, point)
    if kind == "cases":
        return _evaluate(_case_at(node, point), point)
    if kind in ("list", "set", "sequence", "relation", "union", "matrix", "text", "pm", "ratio", "based"):
        raise Unreadable(f"a {kind} is no number")
    values = [_evaluate(part, point) for part in node.args]
    if kind == "call":
        return _call(node.value, values, point)
    return _checked(_arithmetic(kind, values, point))


def _case_at(node: Node, point: Point) -> Node:
    """The value of the first case whose condition holds: of x if x ≥ 0, else -x."""
    for row in node.args:
        if len(row.args) != 2:
            raise Unreadable("cases without conditions")
        value, condition = row.args
        if condition.kind == "text" and condition.value.strip().lower() in ("otherwise", "else"):
            return value
        if condition.kind != "relation" or not set(condition.value) <= _ORDERS.keys():
            raise Unreadable("a condition that is no inequality")
        sides = [_evaluate(side, point) for side in condition.args]
        if all(_ORDERS[sign](*pair) for sign, pair in zip(condition.value, pairwise(sides), strict=True)):
            return value
    raise Undefined("no case")


_ORDERS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}


def _series(node: Node, point: Point) -> Any:
    index, start, end, body = node.args
    low, high = _evaluate(start, point), _evaluate(end, point)
    if not all(isinstance(value, Fraction) and value.denominator == 1 for value in (low, high)):
        raise Undefined("a sum that does not go over whole numbers")
    nested = bool(point.bound) or mentions(body, "series")
    if high - low > (_MAX_NESTED_TERMS if nested else _MAX_TERMS) or len(point.bound) > 1:
        raise TooBig("a sum of many terms")
    total: Any = Fraction(node.value == "prod")
    for value in range(int(low), int(high) + 1):
        term = _evaluate(body, replace(point, bound=((index.value, Fraction(value)), *point.bound)))
        total = _checked(_arithmetic("mul" if node.value == "prod" else "add", [total, term], point))
    return total


def _arithmetic(kind: str, values: list[Any], point: Point) -> Any:
    first = values[0]
    exact = all(isinstance(value, Fraction) for value in values)
    if not exact and kind in ("add", "mul", "div"):
        values = [to_mp(value) for value in values]
    match kind:
        case "add":
            return values[0] + values[1]
        case "neg":
            return -first
        case "mul":
            return values[0] * values[1]
        case "div":
            if values[1] == 0:
                raise Undefined("division by zero")
            return values[0] / values[1]
        case "pow":
            return _power(first, _evaluated_exponent(values[1]), point)
        case "root":
            return _root(first, values[1], point)
        case "factorial":
            return _factorial(first)
        case "percent":
            return first / 100
        case "degree":
            return to_mp(first) * load_mpmath().pi / 180
        case "unit":
            return first
    raise Unreadable(kind)


def _evaluated_exponent(value: Any) -> Any:
    mpmath = load_mpmath()
    if isinstance(value, mpmath.mpf) and mpmath.isint(value) and abs(value) < 10**9:
        return Fraction(int(value))
    return value


def _constant(name: str) -> Any:
    mpmath = load_mpmath()
    match name:
        case "pi":
            return +mpmath.pi
        case "e":
            return +mpmath.e
        case "i":
            return mpmath.mpc(0, 1)
        case "inf":
            return mpmath.inf
    raise Unreadable(f"{name} is no number")


def _checked(value: Any) -> Any:
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() <= _MAX_BITS:
            return value
        if value.denominator == 1:
            raise TooBig("an integer that is too long")
        return to_mp(value)
    if load_mpmath().isnan(value):
        raise Undefined("not a number")
    return value


def _power(base: Any, exponent: Any, point: Point) -> Any:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _integer_power(base, int(exponent))
    mpmath = load_mpmath()
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and _is_negative(base):
        size = _power(-base, exponent, point)  # the real root, as in (-8)^{1/3} = -2
        return -size if exponent.numerator % 2 else size
    if abs(exponent) > _MAX_POWER:
        raise TooBig("a power that is too high")
    if base == 0:
        if isinstance(exponent, mpmath.mpc) or exponent < 0:
            raise Undefined("a negative power of zero")
        return Fraction(0)
    if point.real and _is_negative(base):
        raise OutsideDomain("a broken power of a negative number")
    return mpmath.power(to_mp(base), to_mp(exponent))


def _integer_power(base: Any, exponent: int) -> Any:
    if base == 0 and exponent < 0:
        raise Undefined("a negative power of zero")
    if isinstance(base, Fraction):
        bits = log2(max(abs(base.numerator), base.denominator))
        if base in (0, 1, -1) or bits * abs(exponent) <= _MAX_BITS:
            return base**exponent if abs(exponent) <= _MAX_BITS else base ** (exponent % 2 + 2 * (base == 0))
        if base.denominator == 1 and exponent > 0:
            raise TooBig("an integer that is too long")
    if abs(exponent) > _MAX_POWER:
        raise TooBig("a power that is too high")
    size = abs(load_mpmath().log(abs(to_mp(base)))) if base else 0
    if size * abs(exponent) > 10 * _MAX_POWER:
        raise TooBig("a power that is too high")
    return to_mp(base) ** exponent


def _root(value: Any, degree: Any, point: Point) -> Any:
    if not isinstance(degree, Fraction) or degree == 0:
        return _power(value, 1 / degree, point) if degree else _undefined("the root of degree 0")
    if isinstance(value, Fraction) and degree == 2 and value >= 0 and value.denominator < 2**64:
        top, bottom = _exact_sqrt(value.numerator), _exact_sqrt(value.denominator)
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    if degree == 2:
        if point.real and _is_negative(value):
            raise OutsideDomain("the root of a negative number")
        return load_mpmath().sqrt(to_mp(value))
    return _power(value, 1 / degree, point)


def _exact_sqrt(value: int) -> int | None:
    root = isqrt(value)
    return root if root * root == value else None


def _undefined(reason: str) -> Any:
    raise Undefined(reason)


def _is_negative(value: Any) -> bool:
    return not isinstance(value, load_mpmath().mpc) and value < 0


def is_positive(value: Any) -> bool:
    return not isinstance(value, load_mpmath().mpc) and value > 0


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 5_000:
        return Fraction(factorial(int(value)))
    if abs(value) > 100_000:
        raise TooBig("a factorial that is too high")
    if isinstance(value, Fraction) and value.denominator == 1 and value < 0:
        raise Undefined("a factorial of a negative number")
    return load_mpmath().gamma(to_mp(value) + 1)


def _call(name: str, values: list[Any], point: Point) -> Any:
    mpmath = load_mpmath()
    name = _INVERSES.get(name, name)
    first = values[0]
    if name in ("min", "max", "gcd", "lcm"):
        return _call_on_list(name, values)
    if name == "binom":
        return _binomial(*values)
    if name == "det":
        return _determinant(values)
    if name == "mod":
        return values[0] % values[1] if isinstance(values[0], Fraction) else _undefined("a remainder of no fraction")
    if name in UNKNOWN_FUNCTIONS:
        return _unknown_function(name, values)
    if len(values) > (2 if name == "logb" else 1):
        raise Unreadable(f"{name} of several numbers")
    if name in ("ln", "log", "lg", "logb"):
        return _logarithm(name, values, point)
    if name in ("abs", "floor", "ceil", "sgn", "Re", "Im"):
        return _rounded(name, first)
    if name == "exp":
        return _power(_constant("e"), _evaluated_exponent(first), point)
    if name == "fac2":
        return _double_factorial(first)
    if name == "cis":
        return mpmath.expj(to_mp(first))
    if name == "cbrt":
        return _power(first, Fraction(1, 3), point)
    if name in _PLAIN_CALLS:
        if abs(first) > _MAX_POWER:
            raise TooBig(f"{name} of a large number")
        return _checked(getattr(mpmath, _PLAIN_CALLS[name])(to_mp(first)))
    if name in _BOUNDED_CALLS:
        value = getattr(mpmath, _BOUNDED_CALLS[name])(to_mp(first))
        if point.real and isinstance(value, mpmath.mpc):
            raise OutsideDomain(f"{name} outside its domain")
        return _checked(value)
    raise Unreadable(name)


def _unknown_function(name: str, values: list[Any]) -> Any:
    """A function without a definition; equal arguments give equal values."""
    mpmath = load_mpmath()
    total = mpmath.mpf(ord(name)) / 7
    for place, value in enumerate(values, 1):
        if abs(value) > _MAX_POWER:
            raise TooBig(f"{name} of a large number")
        total += mpmath.sin(to_mp(value) * (place + mpmath.mpf(5) / 7) + ord(name)) + to_mp(value) ** 2 / (place + 2)
    return total


def _determinant(cells: list[Any]) -> Any:
    """The determinant, by elimination. cells: those of a square matrix, row by row."""
    size = isqrt(len(cells))
    if size * size != len(cells) or size > 12:
        raise Unreadable("a determinant that is no small square")
    if not all(isinstance(cell, Fraction) for cell in cells):
        cells = [to_mp(cell) for cell in cells]
    rows = [cells[start : start + size] for start in range(0, len(cells), size)]
    result: Any = Fraction(1)
    for column in range(size):
        pivot = next((at for at in range(column, size) if rows[at][column] != 0), None)
        if pivot is None:
            return Fraction(0)
        if pivot != column:
            rows[pivot], rows[column] = rows[column], rows[pivot]
            result = -result
        result = rows[column][column] * (result if isinstance(rows[column][column], Fraction) else to_mp(result))
        for at in range(column + 1, size):
            factor = rows[at][column] / rows[column][column]
            rows[at] = [cell - factor * above for cell, above in zip(rows[at], rows[column], strict=True)]
    return _checked(result)


def _double_factorial(value: Any) -> Any:
    if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 1_000):
        raise (
            Undefined("a double factorial of a broken number") if abs(value) <= 1_000 else TooBig("a double factorial")
        )
    return Fraction(prod(range(int(value), 0, -2)))


def _call_on_list(name: str, values: list[Any]) -> Any:
    if name in ("min", "max"):
        return (min if name == "min" else max)(values, key=to_mp)
    if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
        raise Undefined(f"{name} of broken numbers")
    return Fraction((gcd if name == "gcd" else lcm)(*(int(value) for value in values)))


def _binomial(top: Any, bottom: Any) -> Any:
    whole = all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (top, bottom))
    if whole and top <= 2_000:
        return Fraction(comb(int(top), int(bottom)))
    if abs(top) > 100_000 or abs(bottom) > 100_000:
        raise TooBig("a binomial coefficient that is too large")
    return load_mpmath().binomial(to_mp(top), to_mp(bottom))


def _logarithm(name: str, values: list[Any], point: Point) -> Any:
    mpmath = load_mpmath()
    if any(value == 0 for value in values):
        raise Undefined("the logarithm of zero")
    if point.real and any(_is_negative(value) for value in values):
        raise OutsideDomain("the logarithm of a negative number")
    value = mpmath.log(to_mp(values[0]))
    if name == "logb":
        base = mpmath.log(to_mp(values[1]))
        return value / base if base else _undefined("a logarithm to base 1")
    return value / mpmath.log(10) if name == "lg" or (name == "log" and point.decimal_log) else value


def _rounded(name: str, value: Any) -> Any:
    mpmath = load_mpmath()
    match name:
        case "abs":
            return abs(value)
        case "floor":
            return mpmath.floor(to_mp(value))
        case "ceil":
            return mpmath.ceil(to_mp(value))
        case "sgn":
            return mpmath.sign(to_mp(value))
        case "Re":
            return mpmath.re(to_mp(value))
    return mpmath.im(to_mp(value))


def close(left: Any, right: Any, digits: int = 15) -> bool:
    """Whether two values may be equal. This is exact for fractions; for other numbers, check `settled` too."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = to_mp(left), to_mp(right)
    mpmath = load_mpmath()
    if mpmath.isinf(left) or mpmath.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= max(abs(left), abs(right)) * mpmath.mpf(10) ** -digits + mpmath.mpf(10) ** -24)


def settled(gold: Node, got: Node, point: Point, coarse: Any) -> bool:
    """Whether the difference of two close values, `coarse`, is a rounding error: it vanishes with twice the digits."""
    mpmath = load_mpmath()
    with mpmath.workdps(2 * DIGITS):
        left, right = to_mp(value_at(gold, point)), to_mp(value_at(got, point))
        if mpmath.isinf(left) or mpmath.isinf(right):
            return bool(left == right)
        fine, size = abs(left - right), max(abs(left), abs(right))
        return bool(fine <= size * mpmath.mpf(10) ** -48 or fine <= coarse * mpmath.mpf(10) ** -15)
