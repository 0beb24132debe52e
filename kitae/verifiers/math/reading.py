"""From the text of an answer to its possible readings, as trees: `read("1,234")` → `(1234, the list of 1 and 234)`.

The meaning of a comma or a space between digits is decided here. Most answers are plain numbers and need no parser.
"""

import re
from contextlib import suppress
from functools import lru_cache

from kitae.verifiers.math.cleanup import tidy
from kitae.verifiers.math.lexer import split_tokens
from kitae.verifiers.math.number_words import digits_for_words
from kitae.verifiers.math.parser import Parser
from kitae.verifiers.math.tree import Node, Unreadable, as_tuple, negated, number_node
from kitae.verifiers.math.units import is_known_unit

_GROUPED_RE = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2})((?:(?:\{,\}|,)[0-9]{3})+)(?![0-9]|,[0-9])")
_SPACED_RE = re.compile(r"(?<![0-9.,/])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9/])")
_LAKH_RE = re.compile(r"(?<![0-9.,])[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9]|,[0-9])")  # 10,00,000
_POINTED_RE = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\.[0-9]{3}){2,}(?:,[0-9]+)?|\.[0-9]{3},[0-9]{1,2})(?![0-9.,])")
_CHAIN_RE = re.compile(
    r"(?!.*(?:\b(?:not|wrong|or)\b|\\forall|\\to|rrow|[<>]|\\[lg]e|,))[^=]*[0-9\\][^=]*=.*", re.DOTALL
)
LIMIT_RE = re.compile(r"\\lim\s*_\s*\{[^{}]*\}")
_IMPLIED_RE = re.compile(r"(?:.*=.*)?\\(?:Rightarrow|Longrightarrow|implies)(?![A-Za-z])([^=]*=.*)", re.DOTALL)
_DATE_RE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_PERIOD_RE = re.compile(
    r"(?<![0-9.])(?P<start>[0-9]*\.)(?P<fixed>[0-9]{0,40})(?:"
    r"\\(?:dot|bar)\s*(?:\{(?P<first>[0-9]+)\}|(?P<digit>[0-9]))(?:(?P<middle>[0-9]*)\\dot\s*\{?(?P<last>[0-9])\}?)?"
    r"|(?<=\.)\((?P<round>[0-9]+)\)|(?<![1-9]\.)(?<=[0-9])\((?P<late>[0-9]+)\)"
    r"|(?<=[0-9])(?:\.\.\.|…|\\l?dots)(?P<dots>))"
)
_REPEATED_RE = re.compile(r"([0-9]*?)(?:([0-9])\2\2+|([0-9]{2,}?)\3+)")
_TRAILING_UNIT_RE = re.compile(
    r"(?P<head>.*[0-9}])(?P<space>\s*)(?P<unit>(?<![A-Za-z])[A-Za-zµμ]+(?:\s*\^\s*\{?-?[0-9]\}?)?"
    r"(?:\s*/\s*[A-Za-z]+(?:\s*\^\s*\{?-?[0-9]\}?)?)*)"
)
_PLAIN_AMOUNT_RE = re.compile(r"[-+]?\s*[0-9.,]+(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{[-+0-9]+\}|[0-9]))?")
_WHOLE_COMMA_RE = re.compile(r"-?(?:0,[0-9]+|[1-9][0-9]*,(?![0-9]{3}$)[0-9]+)")  # 3,5 may be 3.5
_ZERO_COMMA_RE = re.compile(r"(?<![^-])0,(?=[0-9]+(?![0-9,]))")  # at the start; 0,25 is never a pair
_DECIMAL_COMMA_RE = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_PLAIN_RE = re.compile(r"([-+]?)(?:\\?\$)?\s*([1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)?(\.[0-9]*)?")


def plain_number(text: str) -> Node | None:
    """A number that needs no parser, such as "-1,234.5"."""
    match = _PLAIN_RE.fullmatch(text.strip())
    if match is None or len(text) > 60 or not (match[2] or (match[3] and len(match[3]) > 1)):
        return None
    fraction = match[3] if match[3] and len(match[3]) > 1 else ""
    node = number_node((match[2] or "0").replace(",", "") + fraction)
    return negated(node) if match[1] == "-" else node


def comma_number(text: str) -> Node | None:
    """3,5 as 3.5, if the comma cannot separate thousands and the other answer has no comma."""
    plain = text.strip()
    return number_node(plain.replace(",", ".")) if _WHOLE_COMMA_RE.fullmatch(plain) and len(plain) < 60 else None


@lru_cache(maxsize=1024)
def read(text: str) -> tuple[Node, ...]:
    """The readings of an answer, best first: "1,234" is a number, or else a list. Empty if it cannot be parsed."""
    plain = _PERIOD_RE.sub(_with_bar, digits_for_words(tidy(text)))
    if _DATE_RE.fullmatch(plain):
        return (Node("text", value=plain),)
    joined = _POINTED_RE.sub(lambda m: m[0].replace(".", "").replace(",", "."), plain)
    joined = _LAKH_RE.sub(lambda m: m[0].replace(",", ""), joined)
    joined = _GROUPED_RE.sub(_join_thousands, joined)
    joined = _SPACED_RE.sub(lambda m: m[0].replace(" ", ""), joined)
    versions, readings = [joined, plain, _with_unit(joined)], []
    if "0," in joined:
        versions.append(_with_unit(_ZERO_COMMA_RE.sub("0.", joined)))
    for version in dict.fromkeys(versions):
        with suppress(Unreadable):
            tokens = split_tokens(_DECIMAL_COMMA_RE.sub(".", version))
            if tokens:
                tree = Parser(tokens).parse()
                readings.append(as_tuple(tree) if r"\vec" in version else tree)
    if not readings and (implied := _IMPLIED_RE.fullmatch(plain)):  # 2x = 6 ⇒ x = 3
        return read(implied[1])
    if not readings and _CHAIN_RE.fullmatch(
        LIMIT_RE.sub(r"\\lim", plain)
    ):  # the result of a calculation that cannot be parsed
        return read(plain.rpartition("=")[2])
    return tuple(readings)


def _join_thousands(match: re.Match[str]) -> str:
    """`1,234` → `1234`, but `(1,234)` is a point."""
    around = match.string[: match.start()].rstrip()[-1:] + match.string[match.end() :].lstrip()[:1]
    pair = "{,}" not in match[0] and match[0].count(",") == 1 and around in ("()", "[]", "(]", "[)")
    return match[0] if pair else re.sub(r"[{},]", "", match[0])


def _with_bar(match: re.Match[str]) -> str:
    r"""`0.(3)`, `0.\dot{3}` and `0.333...` → `0.\overline{3}`."""
    if match["dots"] is None:
        middle = (match["middle"] or "") + (match["last"] or "")
        period = (match["first"] or match["digit"] or match["round"] or match["late"] or "") + middle
        return rf"{match['start']}{match['fixed']}\overline{{{period}}}"
    repeated = _REPEATED_RE.fullmatch(match["fixed"])
    if repeated is None:
        return match[0]
    return rf"{match['start']}{repeated[1]}\overline{{{repeated[2] or repeated[3]}}}"


def _with_unit(text: str) -> str:
    r"""`5 m/s` → `5 \text{m/s}`. One letter is a unit only after a plain number: `\frac{1}{2} m` is a product."""
    match = _TRAILING_UNIT_RE.fullmatch(text)
    if match is None or not is_known_unit(match["unit"]):
        return text
    single = re.search(r"[A-Za-z]{2}|/", match["unit"]) is None
    if single and not (match["space"] and _PLAIN_AMOUNT_RE.fullmatch(match["head"])):
        return text
    if re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", match["head"]):
        return text
    return rf"{match['head']} \text{{{re.sub('[{}]', '', match['unit'])}}}"
