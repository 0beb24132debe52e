"""From the text of an answer to its readings, as trees: `read("1,234")` → `(1234, the list of 1 and 234)`.

Here is decided what a comma or a space between digits means. Most answers are plain numbers and need no parser.
"""

import re
from contextlib import suppress
from functools import lru_cache

from kitae.verifiers.math.cleanup import tidy
from kitae.verifiers.math.parser import Parser
from kitae.verifiers.math.tokens import split_tokens
from kitae.verifiers.math.tree import Node, Unreadable, negated, number_node

_GROUPED_RE = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:\{,\}|,)[0-9]{3})+)(?![0-9]|,[0-9])")
_SPACED_RE = re.compile(r"(?<![0-9.,/])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9/])")
_DECIMAL_COMMA_RE = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_PLAIN_RE = re.compile(r"([-+]?)(?:\\?\$)?\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(\.[0-9]*)?")


def plain_number(text: str) -> Node | None:
    """A number that needs no parser: "-1,234.5"."""
    match = _PLAIN_RE.fullmatch(text.strip())
    if match is None or len(text) > 60 or not (match[2] or (match[3] and len(match[3]) > 1)):
        return None
    fraction = match[3] if match[3] and len(match[3]) > 1 else ""
    node = number_node((match[2] or "0").replace(",", "") + fraction)
    return negated(node) if match[1] == "-" else node


@lru_cache(maxsize=1024)
def read(text: str) -> tuple[Node, ...]:
    """The readings of an answer, best first: "1,234" is a number, or else a list. Empty where it cannot be read."""
    plain = tidy(text)
    joined = _GROUPED_RE.sub(_join_thousands, plain)
    joined = _SPACED_RE.sub(lambda m: m[0].replace(" ", ""), joined)
    readings = []
    for version in dict.fromkeys((joined, plain)):
        with suppress(Unreadable):
            tokens = split_tokens(_DECIMAL_COMMA_RE.sub(".", version))
            if tokens:
                readings.append(Parser(tokens).parse())
    return tuple(readings)


def _join_thousands(match: re.Match[str]) -> str:
    """`1,234` → `1234`, but `(1,234)` is a point."""
    around = match.string[: match.start()].rstrip()[-1:] + match.string[match.end() :].lstrip()[:1]
    pair = "{,}" not in match[0] and match[0].count(",") == 1 and around in ("()", "[]", "(]", "[)")
    return match[0] if pair else re.sub(r"[{},]", "", match[0])
