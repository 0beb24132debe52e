"""An exact calculator, for integers and fractions.

It is bounded: an expression has at most 1,000 characters and a number at most 4,000 digits, and no operation is started
whose result would be longer. So each answer takes milliseconds.
"""

import ast
import math
import re
from collections.abc import Callable
from fractions import Fraction

from kitae.envs.tools.base import ToolRefusal, describe
from kitae.types import ToolCall

_LONGEST = 1_000  # characters
_DIGITS = 4_000
_BITS = int(_DIGITS * math.log2(10))
_SHOWN = 12  # decimals of a fraction that has no end

Number = Fraction


class Calculator:
    """An `EpisodeTool` without state."""

    tool = describe(
        "calculator",
        "Computes an arithmetic expression exactly.",
        expression="Numbers, + - * / // % **, parentheses, and abs, ceil, factorial, floor, gcd, lcm, max, min, round, "
        "sqrt.",
    )

    async def call(self, call: ToolCall) -> str:
        return compute(str(call.arguments["expression"]))

    async def close(self) -> None:
        pass


def compute(expression: str) -> str:
    """`"0.125"` for `"1/8"`, `"1/3 = 0.333333333333…"` for `"1/3"`. Raises `ToolRefusal` with what is wrong."""
    if len(expression) > _LONGEST:
        raise ToolRefusal(f"an expression must have at most {_LONGEST} characters, got {len(expression)}")
    text = expression.strip().rstrip("=").replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text) if "(" not in text else text
    try:
        tree = ast.parse(text, mode="eval")
        return _spelled(_value(tree.body, text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolRefusal(f"this is no arithmetic expression: {expression[:100]!r}") from None
    except ZeroDivisionError:
        raise ToolRefusal("division by zero") from None


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _number(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return -_value(operand, text) if isinstance(sign, ast.USub) else _value(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _fits(_OPERATORS[type(op)](_value(left, text), _value(right, text)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _fits(_called(name, [_value(argument, text) for argument in arguments]))
    raise ToolRefusal(f"the calculator knows numbers, operators and {', '.join(sorted(_FUNCTIONS))}, no {_kind(node)}")


def _number(written: str) -> Number:
    """The exact value of a literal: 0.1 is a tenth. Exponents are checked first, as they make short literals long."""
    _, exponential, exponent = written.lower().partition("e")
    if exponential and not written.lower().startswith("0x") and abs(int(exponent)) > _DIGITS:
        raise ToolRefusal(f"a number has more than {_DIGITS} digits")
    whole = written.isalnum() and not exponential
    return _fits(Fraction(int(written, 0) if whole else Fraction(written.replace("_", ""))))


def _power(base: Number, exponent: Number) -> Number:
    if exponent == Fraction(1, 2):
        return _root(base)
    if exponent.denominator != 1:
        raise ToolRefusal("an exponent must be a whole number")
    power = int(exponent)
    if base in (0, 1, -1):
        return Fraction(1) if power == 0 else Fraction(base ** (2 - power % 2 if power > 0 else -(2 - power % 2)))
    if abs(power) * _bits(base) > 2 * _BITS:
        raise ToolRefusal(f"the result has more than {_DIGITS} digits")
    return Fraction(base**power)


def _root(value: Number) -> Number:
    if value < 0:
        raise ToolRefusal("a root of a negative number")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom)
    raise ToolRefusal(f"the root of {_spelled(value)[:50]} is no fraction, and the calculator is exact")


def _called(name: str, values: list[Number]) -> Number:
    least, most, function = _FUNCTIONS[name]
    if not least <= len(values) <= most:
        raise ToolRefusal(f"{name} takes {least if least == most else f'at least {least}'} numbers, got {len(values)}")
    return function(*values)


def _factorial(value: Number) -> Number:
    if value.denominator != 1 or not 0 <= value <= 1_400:
        raise ToolRefusal("factorial takes a whole number from 0 to 1400")
    return Fraction(math.factorial(int(value)))


def _whole(function: Callable[..., int]) -> Callable[..., Number]:
    def of(*values: Number) -> Number:
        if any(value.denominator != 1 for value in values):
            raise ToolRefusal("gcd and lcm take whole numbers")
        return Fraction(function(*map(int, values)))

    return of


def _rounded(value: Number, digits: Number = Fraction(0)) -> Number:
    """Round half up, not to even."""
    if digits.denominator != 1 or abs(digits) > 100:
        raise ToolRefusal("round takes a whole number of digits")
    scale = Fraction(10) ** int(digits)
    return Fraction(math.floor(abs(value) * scale + Fraction(1, 2))) / scale * (-1 if value < 0 else 1)


def _fits(value: Number) -> Number:
    if _bits(value) > 2 * _BITS or max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise ToolRefusal(f"a number has more than {_DIGITS} digits")
    return value


def _bits(value: Number) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length() - 1


def _spelled(value: Number) -> str:
    """The decimal form of a number; a fraction without an end, and the beginning of its decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0 and count <= 60:
            rest, count = rest // prime, count + 1
        digits = max(digits, count)
    if rest == 1:
        return _decimal(value, digits)
    return f"{value.numerator}/{value.denominator} = {_decimal(value, _SHOWN)}…"


def _decimal(value: Number, digits: int) -> str:
    scaled = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{scaled[:-digits]}.{scaled[-digits:]}"


def _kind(node: ast.expr) -> str:
    return f"{ast.unparse(node)[:40]!r}" if isinstance(node, ast.Name | ast.Call) else type(node).__name__


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
    ast.Pow: _power,
}
_MANY = 64
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Number]]] = {
    "abs": (1, 1, abs),
    "ceil": (1, 1, lambda value: Fraction(math.ceil(value))),
    "factorial": (1, 1, _factorial),
    "floor": (1, 1, lambda value: Fraction(math.floor(value))),
    "gcd": (1, _MANY, _whole(math.gcd)),
    "lcm": (1, _MANY, _whole(math.lcm)),
    "max": (1, _MANY, lambda *values: max(values)),
    "min": (1, _MANY, lambda *values: min(values)),
    "round": (1, 2, _rounded),
    "sqrt": (1, 1, _root),
}
