r"""math-verify, for notation that the parser cannot read: `math_verify_agrees(r"\int_0^1 x\,dx", "1/2")` → True.

It knows more notation, through sympy, which is slow to import and has no limit on time or memory. So texts that look
like bombs are not passed to it, and it has two seconds. Two answers are equal if their numerical values are.
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kitae.verifiers.math.cleanup import tidy
from kitae.verifiers.math.lexer import COMMANDS
from kitae.verifiers.math.numbers import DIGITS, Point
from kitae.verifiers.math.reading import LIMIT_RE
from kitae.workers.interruptible_calls import foreign

_MAX_FALLBACK = 500  # characters that math-verify may read
_MAX_SECONDS = 2.0  # of processor time
_BOMB_RE = re.compile(
    r"\^\s*\{?[^{}]*[0-9)]\s*\^|\^\s*[{(]?\s*[0-9]{4,}|[0-9]{4,}\s*\)?\s*!|!\s*!|[0-9]{60}|factorial"
    r"|\^\s*\{[^{}]*\{[^{}]*\{"
)
_UNKNOWN_RE = re.compile(  # words, and signs of alternatives, which it would ignore
    r"\.\.|[A-Za-z]{4}|[^\x00-\x7f]|[?;:~]|=>|->|^[^|]*\|[^|]*$|\b(?:or|and|so|it|is|not|if|to|of|by|no|but|nor)\b"
)
_READABLE = frozenset(COMMANDS) | {"frac", "binom", "sum", "prod", "int", "iint", "iiint", "infty", "lim", "partial"}


class _OutOfTime(BaseException):
    """Not an `Exception`, because sympy catches those and goes on."""


def math_verify_agrees(gold: str, answer: str) -> bool:
    """Whether math-verify finds two answers equal, of which the parser could not read one; never against their
    numerical values.

    It ignores what it cannot read ("8 → 9" is 9 to it), so it gets only notation that it is known to read.
    """
    gold, answer = tidy(gold), tidy(answer)
    if max(len(gold), len(answer)) > _MAX_FALLBACK or _BOMB_RE.search(gold) or _BOMB_RE.search(answer):
        return False
    if not _is_readable(gold) or not _is_readable(answer):
        return False
    with foreign():
        import_module("math_verify")  # slow to import (sympy), few answers need it, and its time does not count

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    try:
        with foreign(), _limited(_MAX_SECONDS):
            want, have = _math_verify_parse(gold), _math_verify_parse(answer)
            return bool(want and have) and _numerically_equal(want[0], have[0])
    except _OutOfTime:
        return False


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTime` after this much processor time, if this is the main thread; other threads have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)  # repeated, in case something catches it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _is_readable(text: str) -> bool:
    plain = LIMIT_RE.sub(r"\\lim ", text)
    commands = re.findall(r"\\([A-Za-z]+)", plain)
    return set(commands) <= _READABLE and not _UNKNOWN_RE.search(re.sub(r"\\[A-Za-z]+", " ", plain))


def _math_verify_parse(text: str) -> list[Any]:
    from math_verify import parse

    text = re.sub(r"\\sqrt\s*(\\[A-Za-z]+|[A-Za-z0-9])", r"\\sqrt{\1}", text)  # misread without braces
    try:
        return list(parse(rf"\boxed{{{text}}}", parsing_timeout=None))
    except Exception:  # any failure of math-verify's parser is due to the answer
        return []


def _numerically_equal(want: Any, have: Any) -> bool:
    """Whether two sympy expressions, or the sides of two equations, are equal wherever they can be computed."""
    sympy = import_module("sympy")
    if isinstance(want, sympy.Equality) and isinstance(have, sympy.Equality):
        return all(_numerically_equal(left, right) for left, right in zip(want.args, have.args, strict=True))
    if not isinstance(want, sympy.Expr) or not isinstance(have, sympy.Expr):
        return False
    if want == have:
        return not want.has(sympy.zoo, sympy.nan)
    agreed = 0
    for index in range(3):
        point = Point(index, True, False)
        values = {
            symbol: sympy.Rational(str(point.value(symbol.name))) for symbol in want.free_symbols | have.free_symbols
        }
        try:
            left, right = (sympy.N(_done(side).subs(values), DIGITS) for side in (want, have))
            if not left.is_finite or not right.is_finite:
                continue
            if bool(abs(left - right) > sympy.Rational(1, 10**20) * abs(left) + sympy.Rational(1, 10**25)):
                return False
            agreed += 1
        except Exception:  # there is no value at this point
            continue
    return agreed > 0


def _done(expression: Any) -> Any:
    """Evaluate limits, which have no numerical value; sums and integrals are evaluated numerically later."""
    return expression.doit() if expression.has(import_module("sympy").Limit) else expression
