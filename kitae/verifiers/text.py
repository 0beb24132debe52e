"""Verifiers of plain text: `exact` compares strings, `number` compares one number with another.

Both are linear in the length of the response and never raise, whatever its text.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any

from kitae.types import Score

_NUMBER = (
    r"(?:(?<![A-Za-z0-9)\]}])[-+\u2212])?+"  # a sign, but not the minus of 5-3
    r"(?:\\?[$€£¥])?+"
    r"(?<![A-Za-z0-9])(?<![0-9]\.)"  # not the 2 of m2, nor the 3 of 1.2.3
    r"(?:[0-9]++(?:,[0-9]++)*+(?:\.[0-9]++)?+|(?<!\.)\.[0-9]++)"
    r"(?:[eE][-+]?[0-9]{1,9}+)?+(?![0-9]|[eE][-+]?[0-9])"
)
_NUMBER_RE = re.compile(_NUMBER)
_ONLY_NUMBER_RE = re.compile(rf"({_NUMBER})\s*+(?:\\?%)?\.?")
_THOUSANDS_RE = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:[.eE].*)?")
_MARK_RE = re.compile(
    r"\banswer\b\**\s*(?:is\b|[:=])[\s*:=]*"
    r"|\\boxed\s*\{"
    rf"|\#{{4}}(?=[ \t]*{_NUMBER}[ \t]*%?\.?[ \t\r]*$)",  # not the heading "#### 2. Add up"
    re.IGNORECASE | re.MULTILINE,
)
_MARKS = 8  # so many of the last marks are looked at
_MARK_REACH = 200  # characters after a mark that can belong to its answer
_SENTENCE_END_RE = re.compile(r"\n|[.?](?=\s|$)")
_PLAIN = str.maketrans({"\u2212": "-"} | dict.fromkeys("+\\$€£¥"))
_EXACT = Context(prec=10_000, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def exact(response: str, reference: Any, context: Mapping[str, Any], *, ignore_case: bool = False) -> Score:
    """1 where response and reference are the same text, white space around them aside."""
    got, want = response.strip(), str(reference).strip()
    if ignore_case:
        got, want = got.casefold(), want.casefold()
    return Score(float(got == want))


def number(
    response: str, reference: Any, context: Mapping[str, Any], *, strict: bool = False, tolerance: float = 0
) -> Score:
    r"""1 where the response's number is the reference, give or take `tolerance`, in exact decimal arithmetic.

    The response's number is the one after its last mark ("#### 12", "the answer is 12", "\boxed{12}"), or else the
    last one in the text; with `strict` it must be all there is. Thousands separators, a currency sign and a percent
    sign are read over: "50%" is 50. Not read: fractions, number words, "2 x 10^5", decimal commas.
    """
    want = _reference_number(str(reference))
    if want is None:
        return Score.error(f"the reference of 'number' must be one number, got {str(reference)[:100]!r}")
    got = _only_number(response) if strict else _final_number(response)
    if got is None:
        return Score(0.0, detail="no number in the response")
    margin = Decimal(str(tolerance))
    return Score(float(_EXACT.subtract(want, margin) <= got <= _EXACT.add(want, margin)))


def marked_answers(text: str) -> Iterator[str]:
    """What follows each of the last answer marks, up to the end of its sentence, last one first.

    "The answer is 12. Bye" → "12"
    """
    for mark in reversed(deque(_MARK_RE.finditer(text), maxlen=_MARKS)):
        answer = text[mark.end() : mark.end() + _MARK_REACH]
        end = _SENTENCE_END_RE.search(answer)
        yield answer[: end.start()] if end else answer


def _reference_number(text: str) -> Decimal | None:
    only = _only_number(text)
    return _marked_number(text) if only is None else only


def _final_number(text: str) -> Decimal | None:
    marked = _marked_number(text)
    return _last_number(text) if marked is None else marked


def _only_number(text: str) -> Decimal | None:
    match = _ONLY_NUMBER_RE.fullmatch(text.strip())
    return None if match is None or _is_list(match[1]) else _decimal(match[1])


def _marked_number(text: str) -> Decimal | None:
    """The first number of the last marked answer that has one: 5 in "the answer is 2 + 3 = 5 apples"."""
    for answer in marked_answers(text):
        if match := _NUMBER_RE.search(answer, answer.rfind("=") + 1):
            return _decimal(match[0])
    return None


def _last_number(text: str) -> Decimal | None:
    last = deque(_NUMBER_RE.finditer(text), maxlen=1)
    return _decimal(last[0][0]) if last else None


def _is_list(token: str) -> bool:
    return "," in token and not _THOUSANDS_RE.fullmatch(token.translate(_PLAIN))


def _decimal(token: str) -> Decimal:
    """`"-$1,234.50"` → `-1234.50`; of a list such as "1,2,3", the last."""
    last = token.rpartition(",")[2] if _is_list(token) else token.replace(",", "")
    return Decimal(last.translate(_PLAIN))
