r"""math-verify, for what our parser cannot read: `math_verify_agrees(r"\int_0^1 x\,dx", "1/2")` → True.

It reads more notation than we do and decides by sympy, which is slow to import and has no limit on time or memory:
texts that look like bombs are not shown to it. What it finds equal must also be equal in numbers.
"""

import logging
import re
from importlib import import_module
from typing import Any

from kitae.verifiers.math.cleanup import tidy
from kitae.verifiers.math.numbers import DIGITS, Point

_MAX_FALLBACK = 500  # characters that math-verify may read
_BOMB_RE = re.compile(
    r"\^\s*\{?[^{}]*\^|\^\s*[{(]?\s*[0-9]{4,}|[0-9]{4,}\s*\)?\s*!|!\s*!|[0-9]{60}|factorial|\\prod|\^\s*\{[^{}]*\{[^{}]*\{"
)


def math_verify_agrees(gold: str, answer: str) -> bool:
    """What math-verify says of two answers of which our parser cannot read one; never True against the numbers."""
    if max(len(gold), len(answer)) > _MAX_FALLBACK or _BOMB_RE.search(gold) or _BOMB_RE.search(answer):
        return False
    if not any(sign in gold + answer for sign in "\\0123456789+=") or not _might_be_formula(answer):
        return False
    from math_verify import verify  # slow to import (sympy), and few answers need it

    want, have = _math_verify_parse(gold), _math_verify_parse(answer)
    if not want or not have or not verify(want, have, timeout_seconds=None):
        return False
    return not _numerically_different(want[0], have[0])


def _might_be_formula(text: str) -> bool:
    return bool(re.search(r"[0-9\\^=+*/<>]|^.{1,3}$", text))


def _math_verify_parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    try:
        return list(parse(rf"\boxed{{{tidy(text)}}}", parsing_timeout=None))
    except Exception:  # whatever the parser of math-verify stumbles over, the answer is the reason
        return []


def _numerically_different(want: Any, have: Any) -> bool:
    """Do two sympy expressions with the same variables have different values at some point?"""
    sympy = import_module("sympy")
    if not isinstance(want, sympy.Expr) or not isinstance(have, sympy.Expr):
        return False
    if want.free_symbols != have.free_symbols:
        return False
    for index in range(3):
        point = Point(index, True, False)
        values = {symbol: sympy.Rational(str(point.value(symbol.name))) for symbol in want.free_symbols}
        try:
            difference = sympy.N((want - have).subs(values), DIGITS)
            size = abs(sympy.N(want.subs(values), DIGITS))
            if difference.is_number and bool(abs(difference) > 1e-6 * (1 + size)):
                return True
        except Exception:  # no value here
            continue
    return False
