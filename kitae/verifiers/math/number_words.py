"""Number words as digits: `digits_for_words("one hundred and five")` → `"105"`, `"two-thirds"` → `"(2/3)"`."""

import re

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUES = {word: value for value, word in enumerate(_SMALL)} | {word: 10 * ten for ten, word in enumerate(_TENS, 2)}
_FACTORS = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
          "eighth": 8, "ninth": 9, "tenth": 10}  # fmt: skip
_NUMBER_RE = re.compile(
    rf"(?<![A-Za-z\\])(?P<number>(?:{'|'.join(_VALUES)})(?![A-Za-z])"
    rf"(?:(?:[\s-]+|\s+and\s+)(?:{'|'.join([*_VALUES, *_FACTORS])})(?![A-Za-z]))*)"
    rf"(?:[\s-]+(?P<part>{'|'.join(_PARTS)})s?(?![A-Za-z]))?",
    re.IGNORECASE,
)


def digits_for_words(text: str) -> str:
    return _NUMBER_RE.sub(_digits, text)


def _digits(match: re.Match[str]) -> str:
    value = _value([word for word in re.split(r"[\s-]+", match["number"].lower()) if word != "and"])
    if value is None:
        return match[0]
    return f"({value}/{_PARTS[match['part'].lower()]})" if match["part"] else str(value)


def _value(words: list[str]) -> int | None:
    """The number that the words express; None if they express several: "two three"."""
    total, group, room = 0, 0, 1_000
    for word in words:
        if word in _VALUES:
            value = _VALUES[word]
            if value >= room:
                return None
            group, room = group + value, 10 if value >= 20 else 0
        elif word == "hundred":
            group, room = group * 100, 100
        else:
            total, group, room = total + group * _FACTORS[word], 0, 1_000
    return total + group
