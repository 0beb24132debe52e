r"""Answers with a notation of their own: times of day, dates, numbers in a base, several choices at once.

same_form("3:30 PM", "15:30")                → True
same_form("March 4, 2020", "4 March 2020")   → True
same_form("2A_{16}", "0x2a")                 → True
same_form("A, C", "C and A")                 → True
same_form("5", "6")                          → None: neither is such an answer
"""

import re
from collections.abc import Callable
from typing import Any

from kitae.verifiers.math.cleanup import TEXT_RE, tidy

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_LONG_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_AROUND_DATES = (
    "of", "the", "on", "in", "st", "nd", "rd", "th", "year", "monday", "tuesday", "wednesday", "thursday", "friday",
    "saturday", "sunday", "mon", "tue", "wed", "thu", "fri", "sat", "sun",
)  # fmt: skip
_ISO_RE = re.compile(r"([0-9]{4})[-/.]([0-9]{1,2})[-/.]([0-9]{1,2})")
_PIECE_RE = re.compile(r"[A-Za-z]+|[0-9]+|[^\s.,A-Za-z0-9]")
_CLOCK_RE = re.compile(
    r"([0-9]{1,2})(?:[:.h]([0-9]{2}))?(?::([0-9]{2}))?\s*(?:([ap])\.?\s?m\.?|o['’]clock)?", re.IGNORECASE
)
_BASED_RE = re.compile(r"\(?([0-9A-Za-z]{1,60})\)?\s*_\s*\{?\s*\(?([0-9]{1,2})\)?\s*\}?|0([xXbBoO])([0-9A-Fa-f]{1,60})")
_PREFIXED = {"x": "16", "b": "2", "o": "8"}
_CHOICES_RE = re.compile(
    r"[(\[]?\s*[A-J]\s*[)\].]?(?:\s*(?:,|;|&|\\&|and|,\s*and)\s*[(\[]?\s*[A-J]\s*[)\].]?)+", re.IGNORECASE
)
_HINT_RE = re.compile(  # what all such references have; most references have not
    r"[0-9][:.h][0-9]{2}|[0-9]\s?[ap]\.?\s?m|noon|midnight|[0-9]_|[A-Z]\)?_|0[xXbBoO]|(?:^|\W)[A-J](?:\W|$)|^[A-J]{2,10}$"
    rf"|[0-9][-/.][0-9]{{1,2}}[-/.][0-9]|\b(?i:{'|'.join(_MONTHS)})"
)
_LETTER_RE = re.compile(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])")


def same_form(gold: str, answer: str) -> bool | None:
    """Whether two answers of such a kind are the same; None where one of them is of none of the kinds."""
    if len(gold) > 60 or len(answer) > 100 or not _HINT_RE.search(gold):
        return None
    want, have = (TEXT_RE.sub(r" \1 ", TEXT_RE.sub(r" \1 ", tidy(text))).strip() for text in (gold, answer))
    rules: tuple[tuple[Callable[[str], Any], Callable[[str, str], Any], Callable[[Any, Any], bool | None]], ...] = (
        (_clock, lambda _, text: _clock(text), _same_time),
        (_date, lambda _, text: _date(text), lambda left, right: bool(left == right)),
        (_based, _based_like, lambda left, right: bool(left == right)),
        (
            lambda text: _choices(text, joined=len(have) > len(text)),
            lambda _, text: _choices(text, joined=True),
            lambda left, right: bool(left == right),
        ),
    )
    for read, read_answer, same in rules:
        if (left := read(want)) is not None and (right := read_answer(want, have)) is not None:
            return same(left, right)
    return None


_Time = tuple[int, int, int, str]


def _clock(text: str) -> _Time | None:
    """Hours, minutes, seconds and a or p: `"3:30 p.m."` → `(3, 30, 0, "p")`."""
    if text.lower() in ("noon", "midnight"):
        return 12, 0, 0, "p" if text.lower() == "noon" else "a"
    match = _CLOCK_RE.fullmatch(text)
    if match is None or not (match[2] or match[4]):
        return None
    hours, minutes, seconds = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    half = (match[4] or "").lower()
    return (hours, minutes, seconds, half) if hours < 25 and minutes < 60 and seconds < 60 else None


def _same_time(gold: _Time, got: _Time) -> bool | None:
    if not (gold[3] or got[3]):
        return None  # may be a ratio, or a decimal
    if gold[3] and got[3]:
        return _hour(gold) == _hour(got) and gold[1:3] == got[1:3]
    return (gold[0] == got[0] or _hour(gold) == _hour(got)) and gold[1:3] == got[1:3]


def _hour(time: _Time) -> int:
    return time[0] % 12 + 12 * (time[3] == "p") if time[3] else time[0]


def _date(text: str) -> tuple[int, int, int] | None:
    """Year, month and day, 0 where there is none: `"4th of March, 2020"` → `(2020, 3, 4)`."""
    if iso := _ISO_RE.fullmatch(text):
        year, month, day = map(int, iso.groups())
        return year, month, day
    year = month = day = 0
    for piece in _PIECE_RE.findall(text):
        word = piece.lower()
        if piece.isdigit():
            value = int(piece)
            if not day and 1 <= value <= 31 and len(piece) <= 2:
                day = value
            elif not year and len(piece) == 4:
                year = value
            else:
                return None
        elif not month and (word in _MONTHS or word in _LONG_MONTHS or word == "sept"):
            month = _MONTHS.index(word[:3]) + 1
        elif word not in _AROUND_DATES:
            return None
    return (year, month, day) if month and (year or day) else None


def _based(text: str) -> tuple[str, str] | None:
    """Digits and base, where a digit is a letter or the base is a prefix: `"2a_{16}"` → `("2A", "16")`."""
    match = _BASED_RE.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    digits, base = (match[4], _PREFIXED[match[3].lower()]) if match[3] else (match[1], match[2])
    known = 2 <= int(base) <= 36 and all(int(digit, 36) < int(base) for digit in digits)
    return (digits.upper().lstrip("0") or "0", base) if known and (match[3] or not digits.isdigit()) else None


def _based_like(gold: str, text: str) -> tuple[str, str] | None:
    """The same of an answer that may leave out the base."""
    known = _based(gold)
    if known and re.fullmatch(r"\(?[0-9A-Za-z]{1,60}\)?", text) and not text[:2].lower().startswith(("0x", "0b", "0o")):
        return text.strip("()").upper().lstrip("0") or "0", known[1]
    return _based(text)


def _choices(text: str, *, joined: bool = False) -> frozenset[str] | None:
    """The letters of several choices; with `joined`, of AC too."""
    if _CHOICES_RE.fullmatch(text):
        return frozenset(letter.upper() for letter in _LETTER_RE.findall(text))
    plain = text.strip("()[]. ")
    return (
        frozenset(plain) if joined and re.fullmatch(r"[A-J]{1,10}", plain) and len(set(plain)) == len(plain) else None
    )
