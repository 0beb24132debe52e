"""The value of a tree at a point: of `2x` at the point where x is 1/3, `value_at(tree, point)` → `Fraction(2, 3)`.

Values are exact fractions as long as they can be, and else mpmath numbers of 30 digits. Size is checked before anything
is computed: `TooBig` for what would take long, `Undefined` where there is no value.
"""

import random
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from math import comb, factorial, gcd, isqrt, lcm
from typing import Any

from kitae.verifiers.math.tree import Node, TooBig, Undefined, Unreadable

DIGITS = 30
POINTS = 5  # values tried for each variable; the last two are negative
_MAX_BITS = 50_000  # of an exact number
_MAX_POWER = 10**6
NUMBER_CONSTANTS = ("pi", "e", "i", "inf")
_INVERSES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
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
    """Values for the variables. `real`: leave the reals and it is undefined; `decimal_log`: log is to base 10."""

    index: int
    real: bool
    decimal_log: bool

    def value(self, name: str) -> Fraction:
        size = Fraction(random.Random(f"{name}/{self.index}").randint(301, 2_500), 997)
        return -size if self.index >= POINTS - 2 else size


def value_at(node: Node, point: Point) -> Any:
    """A Fraction where the value is rational by construction, or else an mpmath number. Raises `Undefined`."""
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
    if kind in ("list", "set", "sequence", "relation", "union", "matrix", "text", "pm", "ratio", "based"):
        raise Unreadable(f"a {kind} is no number")
    values = [_evaluate(part, point) for part in node.args]
    if kind == "call":
        return _call(node.value, values, point)
    return _checked(_arithmetic(kind, values, point))


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
        if value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
            return to_mp(value)
        return value
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
        raise Undefined("a broken power of a negative number")
    return mpmath.power(to_mp(base), to_mp(exponent))


def _integer_power(base: Any, exponent: int) -> Any:
    if base == 0 and exponent < 0:
        raise Undefined("a negative power of zero")
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base in (0, 1, -1) or bits * abs(exponent) <= _MAX_BITS:
            return base**exponent if abs(exponent) <= _MAX_BITS else base ** (exponent % 2 + 2 * (base == 0))
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
            raise Undefined("the root of a negative number")
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
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 1_000:
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
    if len(values) > (2 if name == "logb" else 1):
        raise Unreadable(f"{name} of several numbers")
    if name in ("ln", "log", "lg", "logb"):
        return _logarithm(name, values, point)
    if name in ("abs", "floor", "ceil", "sgn", "Re", "Im"):
        return _rounded(name, first)
    if name == "exp":
        return _power(_constant("e"), _evaluated_exponent(first), point)
    if name == "cbrt":
        return _power(first, Fraction(1, 3), point)
    if name in _PLAIN_CALLS:
        if abs(first) > _MAX_POWER:
            raise TooBig(f"{name} of a large number")
        return _checked(getattr(mpmath, _PLAIN_CALLS[name])(to_mp(first)))
    if name in _BOUNDED_CALLS:
        value = getattr(mpmath, _BOUNDED_CALLS[name])(to_mp(first))
        if point.real and isinstance(value, mpmath.mpc):
            raise Undefined(f"{name} outside its domain")
        return _checked(value)
    raise Unreadable(name)


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
    if any(value == 0 for value in values) or (point.real and any(_is_negative(value) for value in values)):
        raise Undefined("the logarithm of zero or of a negative number")
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


def close(left: Any, right: Any) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = to_mp(left), to_mp(right)
    mpmath = load_mpmath()
    if mpmath.isinf(left) or mpmath.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= max(abs(left), abs(right)) * mpmath.mpf(10) ** -15 + mpmath.mpf(10) ** -24)
