r"""The `math` verifier: is the final answer of a response the same mathematics as the reference?

    response ─► find_answers ─► the same text? ─► two plain numbers? ─► read both ─► compare part by part
                (answers.py)     (no parsing)      (exact fractions)       │   (at random points, exact or 30 digits)
                                                                       └─► cannot be read: math-verify, cross-checked

Decisions, where usage differs:

- percent: 50% is 50% and 0.5 and 50, but 0.5 is not 50. Degrees: 60° is 60 and π/3.
- units, currency and names of things may be left out; where both sides have one that we know, it is converted, so that
  5 m is not 5 cm, and 1 h is 60 min.
- a decimal of six or more significant digits stands for every number within one unit of its last digit
  (0.333333 is 1/3, 0.333 is not); all other numbers are exact. `tolerance` widens this, relative to the reference.
- (1, 2) is ordered and its brackets count; {1, 2} and a bare "1, 2" are not ordered; a bare list also matches a tuple
  in its order. A column vector matches a tuple.
- x = 5 matches 5, and x > 3 matches (3, ∞), but x = 5 does not match y = 5. Of an answer "a = b = c", the last counts.
- functions are compared on real points where both are real, so that √(x²) is |x| and not x.
- "1,234" is a number, "1, 2" a list. log without a base is natural or decimal, whichever makes both sides equal.

Size is checked before anything is evaluated: towers of powers, factorials of large numbers, deep nesting and long texts
are wrong answers at once. What math-verify does with the rest has no limit in here: the worker's deadline is the one.
Not covered: answers that must be solved to be compared (x² = 4 for ±2), differential forms, dates in other spellings.
"""

import logging
import random
import re
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from math import comb, factorial, gcd, isqrt, lcm
from typing import Any

from kitae.types import Score
from kitae.verifiers.answers import (
    DEFAULT_ORDER,
    boxed_answer,
    find_answers,
    hash_answer,
    last_boxed,
    parse_order,
    phrase_answer,
)

__all__ = ["last_boxed", "math", "same_answer"]

_MAX_ANSWER = 2_000  # characters; what is longer is no answer
_MAX_DEPTH = 40  # of brackets in brackets
_MAX_BITS = 50_000  # of an exact number
_MAX_POWER = 10**6
_MAX_FALLBACK = 500  # characters that math-verify may read
_DIGITS = 30
_POINTS = 5  # values tried for each variable; the last two are negative


def math(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    extract: str = DEFAULT_ORDER,
    strict: bool = False,
    tolerance: float = 0.0,
) -> Score:
    """1 where the final answer equals the reference, which may be bare ("3/4"), in $…$, in a \\boxed{} or after ####.

    `extract` lists the ways to find the answer, in order: boxed, tag (<answer>), hash (####), phrase ("the answer is",
    in some thirty languages), last (the last formula or number). The first that finds something decides. With
    `strict`, only boxed and hash count. `tolerance` is relative to a reference that is a number.
    """
    order = parse_order(extract, strict=strict)
    gold = _reference_answer(str(reference))
    if not gold or len(gold) > _MAX_ANSWER:
        return Score.error(f"the reference of 'math' must be an expression, got {str(reference)[:100]!r}")
    answer = next(find_answers(response, order), None)
    if answer is None:
        return Score(0.0, detail="no answer in the response")
    if len(answer) > _MAX_ANSWER:
        return Score(0.0, detail=f"the answer must have at most {_MAX_ANSWER} characters, got {len(answer)}")
    if same_answer(gold, answer, tolerance):
        return Score(1.0)
    return Score(0.0, detail=f"got {answer[:100]!r}, want {gold[:100]!r}")


def same_answer(gold: str, answer: str, tolerance: float = 0.0) -> bool:
    """Do two bare answers mean the same? `same_answer("1/2", "0.5")` → True. Never raises."""
    if _key(gold) == _key(answer):
        return True
    try:
        verdict = _compare_texts(gold, answer, tolerance)
        return _fallback(gold, answer) if verdict is None else verdict
    except (_TooBig, RecursionError):
        return False


def _reference_answer(text: str) -> str:
    text = text.strip()
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed.strip()
    marked = hash_answer(text) if "####" in text else None
    if marked is None and len(text.split()) > 3:
        marked = phrase_answer(text)
    return text if marked is None else marked


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\uff0d": "-",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "∕": "/", "⁄": "/",
        "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ",
        "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "°": r"\degree ", "º": r"\degree ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∖": r"\setminus ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
        "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle ",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
        "√": r"\sqrt ", "∛": r"\sqrt[3] ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "、": ",", "\u200b": "",
    }
)  # fmt: skip
_SUPERSCRIPT_RE = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPT_RE = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_NOISE_RE = re.compile(
    r"(\\\\)(?:\s*\[[0-9.]+\s*[a-z]+\])?"  # the end of a row, with the space after it: kept
    r"|\\(?:left|right|[bB]igg?[lrm]?|middle)(?![A-Za-z])\.?"
    r"|\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|hline|phantom)(?![A-Za-z])"
    r"|\\(?:hspace|vspace)\s*\{[^{}]*\}|\\!|\\[()\[\]]|\$\$|</?[a-z]+>"
)
_SPACE_RE = re.compile(r"(\\\\)|\\[,;:> ]|\\q?quad(?![A-Za-z])|\\(?:thinspace|enspace|medspace)(?![A-Za-z])|~")
_MODULUS_RE = re.compile(
    r"\(?\s*(?:\\(?:p|b)?mod|\\(?:text|mathrm|operatorname)\s*\{\s*\(?\s*mod\s*\})\s*\{?\s*([0-9a-z]+)\s*\}?\s*\)?"
)
_FRAC_RE = re.compile(r"\\[dtc]frac")
_DEGREE_RE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\(?:degree|deg)(?![A-Za-z])|\^\s*\{\s*o\s*\}")
_TEXT = (
    r"text|mbox|hbox|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathcal|operatorname|emph"
    r"|bf|bm|boldsymbol|unit"
)
_TEXT_RE = re.compile(rf"\\(?:{_TEXT})\*?\s*\{{([^{{}}]*)\}}")
_GROUPED_RE = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:\{,\}|,)[0-9]{3})+)(?![0-9]|,[0-9])")
_SPACED_RE = re.compile(r"(?<![0-9.,/])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9/])")
_DECIMAL_COMMA_RE = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")


def _tidy(text: str) -> str:
    """Plain LaTeX: without delimiters, size commands and Unicode signs."""
    if not text.isascii():
        text = text.translate(_UNICODE)
        text = _SUPERSCRIPT_RE.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
        text = _SUBSCRIPT_RE.sub(lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
        text = unicodedata.normalize("NFKC", text)
    text = _DEGREE_RE.sub(r"\\degree ", text.replace("\x08oxed", r"\boxed"))
    text = _NOISE_RE.sub(lambda m: m[1] or "", text.replace("**", "^"))
    text = _FRAC_RE.sub(r"\\frac", re.sub(r"\\boxed\s*\{", "{", text))
    text = _MODULUS_RE.sub(r" \\text{mod \1}", text)
    text = _SPACE_RE.sub(lambda m: m[1] or " ", text)
    text = _currency(text).strip()
    return text[:-1].rstrip() if text.endswith((".", ",", ";")) and not text.endswith(r"\,") else text


def _currency(text: str) -> str:
    r"""`$5` and `\$5` → `\$5`, but `$5$` → `5`."""
    if "$" not in text:
        return text
    bare = re.sub(r"\\\$", "\x00", text)
    if bare.count("$") % 2 and re.search(r"\$\s*[-\d.]", bare):
        return bare.replace("$", "\x00", 1).replace("$", "").replace("\x00", r"\$")
    return bare.replace("$", "").replace("\x00", r"\$")


@lru_cache(maxsize=2048)
def _key(text: str) -> str:
    """Texts with the same key are the same answer."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", _TEXT_RE.sub(r"\1", _tidy(text))).rstrip(".")


_WORD_RE = re.compile(r"[0-9]+(?:[.,:][0-9]+)*|[^\W\d_]+")
_FORMULA_RE = re.compile(
    r"[+*/^=<>|_%$€£¥()\[\]{}&]|-(?![A-Za-z]{2})|\\(?!emptyset|varnothing|infty)[A-Za-z]", re.IGNORECASE
)
_SYNONYMS = {
    "nosolutions": "nosolution", "none": "nosolution", "norealsolution": "nosolution", "norealsolutions": "nosolution",
    "therearenosolutions": "nosolution", "emptyset": "nosolution", "theemptyset": "nosolution", "empty": "nosolution",
    "varnothing": "nosolution", "dne": "doesnotexist", "limitdoesnotexist": "doesnotexist",
    "allrealnumbers": "allreals", "reals": "allreals", "allreal": "allreals", "realnumbers": "allreals",
    "infinite": "infinitelymany", "infinitelymanysolutions": "infinitelymany",
}  # fmt: skip


def _words(text: str) -> str:
    """The letters and digits of a text answer: `"\\text{ The cat.}"` → `"cat"`."""
    plain = _TEXT_RE.sub(r" \1 ", _tidy(text)).casefold()
    words = (word for word in _WORD_RE.findall(plain) if word not in ("the", "an", "and"))
    joined = "".join(f" {word} " if word[0].isdigit() else word for word in words)
    return _SYNONYMS.get(joined, joined)


_CHOICE_RE = re.compile(r"(?:(?:option|choice|answer)\s*)?[(\[]?\s*([A-Za-z])\s*[)\].:]?", re.IGNORECASE)
_CHOICE_START_RE = re.compile(
    r"[(\[]\s*([A-Z])\s*[)\]]\s*[:.]?\s*\S|([A-Z])\s*[).:]\s*\S|(?:[Oo]ption|[Cc]hoice)\s+([A-Z])\b"
)


def _choice(text: str, *, start: bool) -> str | None:
    """The letter of a multiple-choice answer: `"\\text{(B)}"` → `"B"`; with `start`, of "(B) 12 cm" too."""
    plain = _TEXT_RE.sub(r"\1", _tidy(text)).strip()
    if (match := _CHOICE_RE.fullmatch(plain)) and (match[1].isupper() or plain[0] in "([" or len(plain) > 3):
        return match[1].upper()
    if start and (found := _CHOICE_START_RE.match(plain)) and "," not in plain[:4]:
        return next(group for group in found.groups() if group)
    return None


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Unreadable(Exception):
    """The parser does not know this notation."""


class _TooBig(Exception):
    """Reading or evaluating this would take too long."""


class _Undefined(Exception):
    """There is no (real) value at this point."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # number, name, function, constant, text, op
    value: str
    spaced: bool = field(default=False, compare=False)  # is there white space before it


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of an answer: `_Node("add", (x, y))`, `_Node("number", value=Fraction(1, 2))`."""

    kind: str
    args: tuple["_Node", ...] = ()
    value: Any = None


_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "coth", "sech", "csch", "arcsinh", "arccosh", "arctanh", "ln", "log", "lg",
    "exp", "sqrt", "abs", "floor", "ceil", "min", "max", "gcd", "lcm", "sgn", "Re", "Im", "cbrt",
}  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
)  # fmt: skip
_COMMANDS: dict[str, tuple[str, str]] = {
    **{name: ("function", name) for name in _FUNCTIONS},
    **{name: ("name", name) for name in _GREEK},
    "cdot": ("op", "*"), "times": ("op", "*"), "ast": ("op", "*"), "div": ("op", "/"), "pm": ("op", "±"),
    "mp": ("op", "∓"), "le": ("op", "<="), "leq": ("op", "<="), "leqslant": ("op", "<="), "ge": ("op", ">="),
    "geq": ("op", ">="), "geqslant": ("op", ">="), "lt": ("op", "<"), "gt": ("op", ">"), "ne": ("op", "!="),
    "neq": ("op", "!="), "approx": ("op", "≈"), "simeq": ("op", "≈"), "doteq": ("op", "≈"), "equiv": ("op", "="),
    "in": ("op", "∈"), "cup": ("op", "∪"), "cap": ("op", "∩"), "setminus": ("op", "∖"), "backslash": ("op", "∖"),
    "infty": ("constant", "inf"), "pi": ("constant", "pi"), "emptyset": ("constant", "empty"),
    "varnothing": ("constant", "empty"), "{": ("op", "{{"), "}": ("op", "}}"), "lbrace": ("op", "{{"),
    "rbrace": ("op", "}}"), "langle": ("op", "⟨"), "rangle": ("op", "⟩"), "lfloor": ("op", "⌊"),
    "rfloor": ("op", "⌋"), "lceil": ("op", "⌈"), "rceil": ("op", "⌉"), "vert": ("op", "|"), "lvert": ("op", "|"),
    "rvert": ("op", "|"), "mid": ("op", "mid"), "|": ("op", "|"), "colon": ("op", ":"), "degree": ("op", "°"),
    "%": ("op", "%"), "$": ("op", "$"), "lor": ("op", "or"), "vee": ("op", "or"), "land": ("op", "and"),
    "wedge": ("op", "and"), "prime": ("op", "'"), "iff": ("op", "="), "lbrack": ("op", "["), "rbrack": ("op", "]"),
    "euro": ("op", "€"), "pounds": ("op", "£"), "&": ("op", "and"), "imath": ("constant", "i"),
    "\\": ("op", "\\\\"), "lparen": ("op", "("), "rparen": ("op", ")"),
}  # fmt: skip
_STRUCTURES = ("frac", "sqrt", "binom", "dbinom", "tbinom", "begin", "end", "overline", "mathbb", "hat", "vec", "bar",
               "overrightarrow", "widehat", "angle", "triangle", "dot")  # fmt: skip
_WORDS = {
    "infinity": ("constant", "inf"), "inf": ("constant", "inf"), "oo": ("constant", "inf"), "pi": ("constant", "pi"),
    "Pi": ("constant", "pi"), "and": ("op", "and"), "or": ("op", "or"), "union": ("op", "∪"),
    "theta": ("name", "theta"), "alpha": ("name", "alpha"), "beta": ("name", "beta"), "lambda": ("name", "lambda"),
    "percent": ("op", "%"), "degrees": ("op", "°"), "degree": ("op", "°"), "deg": ("op", "°"), "plus": ("op", "+"),
    "minus": ("op", "-"), "times": ("op", "*"), "und": ("op", "and"), "oder": ("op", "or"),
}  # fmt: skip
_TEXT_WORDS = {
    "yes", "odd", "the", "per", "for", "not", "sun", "mon", "tue", "wed", "thu", "fri", "sat", "jan", "feb", "mar",
    "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec", "red", "bob", "tom", "amy", "dne", "all", "no",
    "cat", "dog", "day", "one", "two", "six", "ten", "eur", "usd", "am", "pm", "egg", "cup", "and", "man", "men", "boy",
}  # fmt: skip
_SMALL_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_NUMBER_WORDS = {word: value for value, word in enumerate(_SMALL_NUMBERS)} | {
    "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90, "hundred": 100,
}  # fmt: skip

_GREEK_RE = re.compile("GREEK SMALL LETTER ([A-Z]+)")
_TOKEN_RE = re.compile(
    rf"(?P<space>\s+)|\\(?:{_TEXT})\*?\s*\{{(?P<text>[^{{}}]*)\}}"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,9}(?![0-9A-Za-z.]))?)"
    r"|\\(?P<command>[A-Za-z]+|.)|(?P<word>[A-Za-z]+)|(?P<foreign>[^\W\d_]+)|(?P<op><=|>=|!=|==|\.\.\.|.)",
    re.DOTALL,
)
_BRACKETS = {"(": ")", "[": "]", "{": "}", "{{": "}}"}


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    spaced = False
    for match in _TOKEN_RE.finditer(text):
        kind, value = match.lastgroup or "", match[match.lastgroup or 0]
        if kind == "space":
            spaced = True
            continue
        tokens.extend(_classify(kind, value, spaced, tokens))
        spaced = False
    return tokens


def _classify(kind: str, value: str, spaced: bool, before: list[_Token]) -> Iterator[_Token]:
    if kind == "number":
        yield _Token("number", value, spaced)
    elif kind == "command":
        if value in _COMMANDS:
            yield _Token(*_COMMANDS[value], spaced)
        elif value in _STRUCTURES:
            yield _Token("command", value, spaced)
        else:
            raise _Unreadable(f"\\{value}")
    elif kind == "text":
        yield from _text_tokens(value, spaced)
    elif kind == "word":
        after_number = bool(before) and (before[-1].kind == "number" or before[-1].value in ("}", ")"))
        yield from _word_tokens(value, spaced, after_number)
    elif kind == "foreign":
        greek = _GREEK_RE.fullmatch(unicodedata.name(value, "")) if len(value) == 1 else None
        yield _Token("name", greek[1].lower(), spaced) if greek else _Token("text", value, spaced)
    else:
        yield _Token("op", "=" if value == "==" else "≈" if value == "≃" else value, spaced)


def _text_tokens(words: str, spaced: bool) -> Iterator[_Token]:
    plain = words.strip()
    if plain in ("and", "or", "und", "oder", ",", "if"):
        yield _Token("op", "or" if plain in ("or", "oder") else "and", spaced)
    elif plain in _FUNCTIONS and plain not in _UNITS:
        yield _Token("function", plain, spaced)
    elif plain in ("i", "e"):
        yield _Token("constant", plain, spaced)
    elif plain and set(plain) <= set("0123456789.+-*/^()=<>, "):
        yield from _tokens(plain)
    elif plain.lower() in _NUMBER_WORDS:
        yield _Token("number", str(_NUMBER_WORDS[plain.lower()]), spaced)
    elif plain.lower().rstrip(".") in ("percent", "degrees", "degree"):
        yield _Token("op", "%" if plain.lower().startswith("p") else "°", spaced)
    elif plain:
        yield _Token("text", plain, True)


def _word_tokens(word: str, spaced: bool, after_number: bool) -> Iterator[_Token]:
    """One word, or a product of letters: `"sinx"` → sin, x; `"ab"` → a, b; `"apples"` → the word."""
    if after_number and word in _UNITS and (len(word) > 1 or spaced):
        yield _Token("text", word, spaced)
    elif word in _FUNCTIONS:
        yield _Token("function", word, spaced)
    elif word in _WORDS:
        yield _Token(*_WORDS[word], spaced)
    elif word.lower() in _NUMBER_WORDS:
        yield _Token("number", str(_NUMBER_WORDS[word.lower()]), spaced)
    elif split := re.match(r"(?:arc)?(?:sin|cos|tan)|sqrt|ln|log", word):
        yield _Token("function", split[0], spaced)
        yield from _word_tokens(word[split.end() :], False, False)
    elif word.lower() in _TEXT_WORDS or len(word) > 3:
        yield _Token("text", word, spaced)
    elif word.endswith("pi") and len(word) == 3:
        yield from (_Token("name", word[0], spaced), _Token("constant", "pi"))
    else:
        for position, letter in enumerate(word):
            yield _letter(letter, spaced and position == 0)


def _letter(letter: str, spaced: bool) -> _Token:
    return _Token("constant" if letter in "ie" else "name", letter, spaced)


# ── units ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

_UNITS: dict[str, tuple[str, Fraction]] = {}  # name → dimension, size
for _dimension, _sizes in {
    "length": "mm:1/1000 millimeter:1/1000 millimetre:1/1000 cm:1/100 centimeter:1/100 centimetre:1/100 dm:1/10 m:1 "
    "meter:1 metre:1 km:1000 kilometer:1000 kilometre:1000 in:127/5000 inch:127/5000 inche:127/5000 ft:381/1250 "
    "foot:381/1250 feet:381/1250 yd:1143/1250 yard:1143/1250 mi:201168/125 mile:201168/125",
    "mass": "mg:1/1000 g:1 gram:1 kg:1000 kilogram:1000 lb:45359237/100000 pound:45359237/100000 oz:45359237/1600000 "
    "ounce:45359237/1600000",
    "time": "s:1 sec:1 second:1 min:60 minute:60 h:3600 hr:3600 hour:3600 day:86400 week:604800",
    "volume": "ml:1/1000 mL:1/1000 milliliter:1/1000 l:1 L:1 liter:1 litre:1 gal:1 gallon:1",
    "money": "$:1 dollar:1 usd:1 USD:1 buck:1 cent:1/100 ¢:1/100",
    "euro": "€:1 euro:1 eur:1 EUR:1",
    "pound": "£:1 gbp:1 GBP:1",
}.items():
    for _entry in _sizes.split():
        _name, _, _size = _entry.rpartition(":")
        _UNITS[_name] = (_dimension, Fraction(_size))
        if len(_name) > 1 and not _name.endswith("s"):
            _UNITS[f"{_name}s"] = _UNITS[_name]
_UNITS["gallon"] = _UNITS["gallons"] = _UNITS["gal"] = ("gallon", Fraction(1))
_UNITS["mph"] = ("mph", Fraction(1))


def _unit(text: str) -> tuple[str, Fraction] | None:
    words = text.strip().rstrip(".").split("^")[0].split()
    if len(words) > 1 and words[0].lower() in ("square", "sq", "cubic", "sq."):
        words = words[1:]
    return None if len(words) != 1 else _UNITS.get(words[0]) or _UNITS.get(words[0].lower())


# ── parser ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "≈", "∈")
_END = _Token("end", "")
_ZERO = _Node("number", value=Fraction(0))


class _Parser:
    """Recursive descent over: list → relation → union → sum → product → power → primary."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.no_bar = 0  # inside |…|, or before the bar of {x | …}: a bar does not open
        self.in_interval = 0

    def parse(self) -> _Node:
        node = self.listing()
        if self.at < len(self.tokens):
            raise _Unreadable(f"{self.peek().value!r} is left over")
        return node

    def peek(self, ahead: int = 0) -> _Token:
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else _END

    def is_op(self, *values: str) -> bool:
        token = self.peek()
        return token.kind == "op" and token.value in values

    def take(self) -> _Token:
        token = self.peek()
        if token is _END:
            raise _Unreadable("it ends too early")
        self.at += 1
        return token

    def accept(self, *values: str) -> bool:
        if self.is_op(*values):
            self.at += 1
            return True
        return False

    def expect(self, *values: str) -> str:
        if not self.is_op(*values):
            raise _Unreadable(f"{' or '.join(values)} is missing")
        return self.take().value

    def listing(self) -> _Node:
        items, separator = [self.relation()], ""
        while self.is_op(",", ";", "and", "or"):
            while self.is_op(",", ";", "and", "or"):
                word = self.take().value
                separator = word if not separator or word in ("and", "or") else separator
            if self.peek() is _END or self.is_op(")", "]", "}", "}}", "⟩"):
                break
            items.append(self.relation())
        items = [item for item in items if not _is_integer_condition(item)] or items
        return items[0] if len(items) == 1 else _Node("list", tuple(items), separator)

    def relation(self) -> _Node:
        operands: list[_Node] = []
        operators: list[str] = []
        if self.is_op(*_RELATIONS):
            if self.is_op("=", "≈"):
                self.at += 1
            else:
                operands.append(_Node("name", value="?"))
        if not operands:
            operands.append(self.union())
        while self.is_op(*_RELATIONS):
            operators.append(self.take().value)
            operands.append(self.union())
        return _Node("relation", tuple(operands), tuple(operators)) if operators else operands[0]

    def union(self) -> _Node:
        node = self.sum()
        while self.is_op("∪", "∩", "∖"):
            operator = self.take().value
            node = _Node("union", (node, self.sum()), operator)
        return node

    def sum(self) -> _Node:
        node = self.product()
        while self.is_op("+", "-", "±", "∓"):
            operator = self.take().value
            right = self.product()
            if operator in "±∓":
                node = _Node("pm", (node, right), operator)
            else:
                node = _Node("add", (node, right if operator == "+" else _Node("neg", (right,))))
        return node

    def product(self) -> _Node:
        if self.accept("-"):
            return _negated(self.product())
        if self.accept("+"):
            return self.product()
        if self.is_op("±", "∓"):
            operator = self.take().value
            return _Node("pm", (_ZERO, self.product()), operator)
        if self.is_op("$", "€", "£", "¥", "₹"):
            sign = self.take().value
            return _Node("unit", (self.product(),), sign)
        node = self.power()
        while True:
            if self.accept("*"):
                node = _Node("mul", (node, self.signed_power()))
            elif self.is_op("/") and self.peek(1).kind == "text":
                self.at += 1
                node = _Node("unit", (node,), "per " + self.unit_words())
            elif self.accept("/"):
                node = _Node("div", (node, self.signed_power()))
            elif self.accept(":"):
                node = _Node("ratio", (*(node.args if node.kind == "ratio" else (node,)), self.signed_power()))
            elif self.is_op("€", "£", "¥", "₹", "$", "¢"):
                node = _Node("unit", (node,), self.take().value)
            elif self.peek().kind == "text":
                if node.kind == "text":
                    node = _Node("text", value=f"{node.value} {self.take().value}")
                else:
                    node = _Node("unit", (node,), self.unit_words())
            elif self.starts_factor():
                node = self.juxtaposed(node)
            else:
                return node

    def juxtaposed(self, left: _Node) -> _Node:
        """`2x` is a product, and `1\\frac{1}{2}` and `1 1/2` are mixed numbers."""
        whole = left.kind == "number" and left.value.denominator == 1 and self.tokens[self.at - 1].kind == "number"
        token = self.peek()
        if whole and token.kind == "number":
            if not (token.spaced and self.peek(1) == _Token("op", "/") and self.peek(2).kind == "number"):
                raise _Unreadable("two numbers side by side")
            top, _, bottom = self.take(), self.take(), self.take()
            if not (top.value.isdigit() and bottom.value.isdigit() and int(top.value) < int(bottom.value)):
                raise _Unreadable("two numbers side by side")
            return _Node("number", value=left.value + Fraction(int(top.value), int(bottom.value)))
        right = self.power()
        if whole and token == _Token("command", "frac"):
            fraction = right.args[0] if right.kind in ("percent", "degree") else right
            if fraction.kind == "div" and all(part.kind == "number" for part in fraction.args):
                top_value, bottom_value = (part.value for part in fraction.args)
                if 0 < top_value < bottom_value:
                    mixed = _Node("number", value=left.value + top_value / bottom_value)
                    return mixed if fraction is right else _Node(right.kind, (mixed,))
        return _Node("mul", (left, right))

    def unit_words(self) -> str:
        """`cm^2`, `square feet`, `miles / hour`, `miles per hour`."""
        words = [self.take().value]
        while True:
            if self.accept("^"):
                words.append(f"^{self.tex_argument().value}")
            elif self.is_op("/") and self.peek(1).kind == "text":
                self.at += 1
                words.append("per")
            elif self.peek().kind == "text" or (self.is_op("*") and self.peek(1).kind == "text"):
                self.accept("*")
                words.append(self.take().value)
            elif (self.is_op("-") or self.peek() == _Token("name", "a")) and self.peek(1).kind == "text":
                self.at += 1  # "foot-pounds", "dollars a day"
            else:
                return " ".join(words)

    def starts_factor(self) -> bool:
        token = self.peek()
        if token.kind == "op":
            opens = ("(", "{", "{{", "⌊", "⌈", "⟨") if self.in_interval else ("(", "{", "{{", "[", "⌊", "⌈", "⟨")
            return token.value in opens or (token.value == "|" and not self.no_bar)
        return token.kind in ("number", "name", "function", "constant") or (
            token.kind == "command" and token.value != "end"
        )

    def signed_power(self) -> _Node:
        if self.accept("-"):
            return _negated(self.signed_power())
        return self.signed_power() if self.accept("+") else self.power()

    def power(self) -> _Node:
        node = self.postfix(self.primary())
        if self.accept("^"):
            if self.is_op("'"):
                self.at += 1
                return node
            return self.postfix(_Node("pow", (node, self.exponent())))
        return node

    def exponent(self) -> _Node:
        """Tower of powers: to the right first."""
        if self.accept("-"):
            return _negated(self.exponent())
        self.accept("+")
        node = self.group() if self.is_op("{") else self.postfix(self.primary())
        return _Node("pow", (node, self.exponent())) if self.accept("^") else node

    def postfix(self, node: _Node) -> _Node:
        while True:
            if self.accept("!"):
                node = _Node("factorial", (node,))
            elif self.accept("%"):
                node = _Node("percent", (node,))
            elif self.accept("°"):
                scale = self.peek()
                if scale.kind == "name" and scale.value in "CF":
                    self.at += 1
                node = _Node("degree", (node,))
            elif self.accept("'"):
                node = _Node("name", value=f"{_spelled(node)}'")
            elif self.accept("_"):
                node = self.subscript(node)
            else:
                return node

    def subscript(self, node: _Node) -> _Node:
        index = self.tex_argument()
        if node.kind == "number" and index.kind == "number":
            return _Node("based", value=(str(node.value), int(index.value)))
        return _Node("name", value=f"{_spelled(node)}_{_spelled(index)}")

    def tex_argument(self) -> _Node:
        """`{…}`, or the one token that follows; of a number, its first digit: `\\frac12` is 1/2."""
        if self.is_op("{"):
            return self.group()
        token = self.peek()
        if token.kind == "number" and len(token.value) > 1:
            self.tokens[self.at] = _Token("number", token.value[1:])
            return _number(token.value[0])
        return self.primary()

    def group(self) -> _Node:
        self.expect("{")
        with self.deeper():
            node = self.listing()
        self.expect("}")
        return node

    def deeper(self) -> "_Depth":
        return _Depth(self)

    def primary(self) -> _Node:
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "name":
            return _Node("name", value=token.value)
        if token.kind == "constant":
            return _Node("constant", value=token.value)
        if token.kind == "text":
            return _Node("text", value=token.value)
        if token.kind == "function":
            return self.function(token.value)
        if token.kind == "command":
            return self.command(token.value)
        with self.deeper():
            return self.bracketed(token.value)

    def number(self, token: _Token) -> _Node:
        """A literal, with the period of a repeating decimal: `0.\\overline{3}`."""
        following = self.peek()
        if following == _Token("op", ".") and self.peek(1) == _Token("command", "overline"):
            self.at += 1
            return _repeating(token.value + ".", self.overlined())
        if following == _Token("command", "overline") and "." in token.value:
            return _repeating(token.value, self.overlined())
        return _number(token.value)

    def overlined(self) -> str:
        self.take()
        self.expect("{")
        digits = self.take()
        self.expect("}")
        if digits.kind != "number" or not digits.value.isdigit():
            raise _Unreadable("the period of a decimal must be digits")
        return digits.value

    def bracketed(self, opening: str) -> _Node:
        if opening == "|":
            self.no_bar += 1
            inside = self.listing()
            self.no_bar -= 1
            self.expect("|")
            return _Node("call", (inside,), "abs")
        if opening in "⌊⌈":
            inside = self.listing()
            self.expect("⌋" if opening == "⌊" else "⌉")
            return _Node("call", (inside,), "floor" if opening == "⌊" else "ceil")
        if opening == "⟨":
            inside = self.listing()
            self.expect("⟩")
            return _Node("sequence", inside.args if inside.kind == "list" else (inside,), "()")
        if opening == "{{" or (opening == "{" and self.at == 1):
            return self.set_of("}}" if opening == "{{" else "}")
        if opening == "{":
            inside = self.listing()
            self.expect("}")
            return inside
        if opening in "([" or opening == "]":
            return self.sequence(opening)
        raise _Unreadable(f"{opening!r} cannot start an expression")

    def sequence(self, opening: str) -> _Node:
        if self.is_op(")"):
            raise _Unreadable("empty brackets")
        bars, self.no_bar = self.no_bar, 0
        self.in_interval += opening != "("
        inside = self.listing()
        self.in_interval -= opening != "("
        self.no_bar = bars
        closing = self.expect(")", "]", "[")
        brackets = ("(" if opening == "]" else opening) + (")" if closing == "[" else closing)
        if brackets in ("(]", "[)") and not (inside.kind == "list" and len(inside.args) == 2):
            raise _Unreadable("brackets that do not match")
        if inside.kind == "list" and inside.value in (",", ";"):
            return _Node("sequence", inside.args, brackets)
        if brackets == "[]" and inside.kind == "sequence":
            return _Node("sequence", (inside,), brackets)
        return inside

    def set_of(self, closing: str) -> _Node:
        if self.accept(closing):
            return _Node("constant", value="empty")
        self.no_bar += 1
        inside = self.listing()
        self.no_bar -= 1
        if self.accept("|", "mid", ":"):
            inside = self.listing()
            self.expect(closing)
            return inside
        if inside.kind == "ratio" and self.is_op(*_RELATIONS):
            raise _Unreadable("a set with a condition")
        self.expect(closing)
        if closing == "}" and inside.kind != "list":
            return inside
        return _Node("set", inside.args if inside.kind == "list" else (inside,))

    def function(self, name: str) -> _Node:
        if name == "sqrt":
            return self.root()
        exponent = base = None
        while self.is_op("^", "_"):
            if self.take().value == "^":
                exponent = self.exponent()
            else:
                base = self.tex_argument()
        if self.is_op("(", "{", "["):
            opening = self.take().value
            with self.deeper():
                argument = self.bracketed(opening)
        else:
            argument = self.signed_power() if self.is_op("-") else self.power()
            while self.starts_factor() and self.peek().kind != "function":
                argument = _Node("mul", (argument, self.power()))
        arguments = argument.args if argument.kind in ("list", "sequence") else (argument,)
        if name == "log" and base is not None:
            return _Node("call", (*arguments, base), "logb")
        node = _Node("call", arguments, name)
        if exponent is None:
            return node
        if exponent == _Node("neg", (_number("1"),)) or (exponent.kind == "number" and exponent.value == -1):
            return _Node("call", arguments, f"arc{name}")
        return _Node("pow", (node, exponent))

    def root(self) -> _Node:
        degree: _Node | None = None
        if self.accept("["):
            degree = self.listing()
            self.expect("]")
        argument = self.group() if self.is_op("{") else self.primary()
        return _Node("root", (argument, degree if degree is not None else _number("2")))

    def command(self, name: str) -> _Node:
        if name == "frac":
            return _Node("div", (self.tex_argument(), self.tex_argument()))
        if name == "sqrt":
            return self.root()
        if name in ("binom", "dbinom", "tbinom"):
            return _Node("call", (self.tex_argument(), self.tex_argument()), "binom")
        if name == "begin":
            return self.environment()
        if name == "mathbb":
            return _Node("constant", value=f"set {_spelled(self.tex_argument())}")
        if name in ("overline", "hat", "vec", "bar", "overrightarrow", "widehat", "dot"):
            return _Node("name", value=f"{name} {_spelled(self.tex_argument())}")
        if name in ("angle", "triangle"):
            letters = ""
            while self.peek().kind in ("name", "text", "constant"):
                letters += self.take().value
            return _Node("name", value=f"{name} {letters}")
        raise _Unreadable(f"\\{name}")

    def environment(self) -> _Node:
        name = self.environment_name()
        if name == "array":
            self.skip_group()
        elif name not in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix"):
            raise _Unreadable(f"the environment {name}")
        rows: list[_Node] = [_Node("row")]
        with self.deeper():
            while self.peek() != _Token("command", "end"):
                if self.accept("\\\\"):
                    rows.append(_Node("row"))
                elif self.accept("&"):
                    continue
                else:
                    cell = self.relation()
                    rows[-1] = _Node("row", (*rows[-1].args, cell))
        self.take()
        self.environment_name()
        return _Node("matrix", tuple(row for row in rows if row.args))

    def environment_name(self) -> str:
        self.expect("{")
        name = ""
        while not self.is_op("}"):
            name += self.take().value
        self.take()
        return name

    def skip_group(self) -> None:
        self.expect("{")
        while not self.accept("}"):
            self.take()


class _Depth:
    """Counts brackets in brackets."""

    def __init__(self, parser: _Parser) -> None:
        self.parser = parser

    def __enter__(self) -> None:
        self.parser.depth += 1
        if self.parser.depth > _MAX_DEPTH:
            raise _TooBig(f"more than {_MAX_DEPTH} brackets in brackets")

    def __exit__(self, *_: object) -> None:
        self.parser.depth -= 1


def _is_integer_condition(node: _Node) -> bool:
    """k ∈ ℤ, which says what the k before it may be."""
    if node.kind != "relation" or node.value != ("∈",):
        return False
    return node.args[0].kind == "name" and node.args[1].kind == "constant" and node.args[1].value in ("set Z", "set N")


def _number(literal: str) -> _Node:
    mantissa, _, exponent = literal.lower().partition("e")
    if abs(int(exponent or 0)) > 10_000:
        raise _TooBig(f"a number like {literal[:40]}")
    digits = mantissa.replace(".", "").lstrip("0")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0)
    precise = len(digits) if "." in mantissa or exponent else 0
    return _Node("number", (_Node("literal", value=(precise, places)),) if precise else (), Fraction(literal))


def _repeating(start: str, period: str) -> _Node:
    whole, _, fixed = start.partition(".")
    scale = 10 ** len(fixed)
    tail = Fraction(int(period), (10 ** len(period) - 1) * scale)
    return _Node("number", value=Fraction(int(whole or 0)) + Fraction(int(fixed or 0), scale) + tail)


def _negated(node: _Node) -> _Node:
    if node.kind == "number":
        return _Node("number", node.args, -node.value)
    if node.kind in ("unit", "percent", "degree"):
        return _Node(node.kind, (_negated(node.args[0]),), node.value)
    if node.kind == "based":
        return _Node("based", value=(f"-{node.value[0]}", node.value[1]))
    return _Node("neg", (node,))


def _spelled(node: _Node) -> str:
    inside = "".join(_spelled(part) for part in node.args if part.kind != "literal")
    return f"{node.value if node.value is not None else node.kind}{f'({inside})' if inside else ''}"


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=1)
def _mpmath() -> Any:
    mpmath = import_module("mpmath")
    mpmath.mp.dps = _DIGITS
    return mpmath


def _mp(value: Any) -> Any:
    mpmath = _mpmath()
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


@dataclass(frozen=True, slots=True)
class _Point:
    """Values for the variables. `real`: leave the reals and it is undefined; `decimal_log`: log is to base 10."""

    index: int
    real: bool
    decimal_log: bool

    def value(self, name: str) -> Fraction:
        size = Fraction(random.Random(f"{name}/{self.index}").randint(301, 2_500), 997)
        return -size if self.index >= _POINTS - 2 else size


def _value(node: _Node, point: _Point) -> Any:
    """A Fraction where the value is rational by construction, or else an mpmath number. Raises `_Undefined`."""
    try:
        return _evaluate(node, point)
    except (ArithmeticError, ValueError, TypeError) as error:  # TypeError: complex numbers have no order
        raise _Undefined(str(error)) from None


def _evaluate(node: _Node, point: _Point) -> Any:
    kind = node.kind
    if kind == "number":
        return node.value
    if kind == "name":
        return point.value(node.value)
    if kind == "constant":
        return _constant(node.value)
    if kind in ("list", "set", "sequence", "relation", "union", "matrix", "text", "pm", "ratio", "based"):
        raise _Unreadable(f"a {kind} is no number")
    values = [_evaluate(part, point) for part in node.args]
    if kind == "call":
        return _call(node.value, values, point)
    return _checked(_arithmetic(kind, values, point))


def _arithmetic(kind: str, values: list[Any], point: _Point) -> Any:
    first = values[0]
    exact = all(isinstance(value, Fraction) for value in values)
    if not exact and kind in ("add", "mul", "div"):
        values = [_mp(value) for value in values]
    match kind:
        case "add":
            return values[0] + values[1]
        case "neg":
            return -first
        case "mul":
            return values[0] * values[1]
        case "div":
            if values[1] == 0:
                raise _Undefined("division by zero")
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
            return _mp(first) * _mpmath().pi / 180
        case "unit":
            return first
    raise _Unreadable(kind)


def _evaluated_exponent(value: Any) -> Any:
    mpmath = _mpmath()
    if not isinstance(value, Fraction) and isinstance(value, mpmath.mpf) and mpmath.isint(value) and abs(value) < 10**9:
        return Fraction(int(value))
    return value


_NUMBER_CONSTANTS = ("pi", "e", "i", "inf")


def _constant(name: str) -> Any:
    mpmath = _mpmath()
    match name:
        case "pi":
            return +mpmath.pi
        case "e":
            return +mpmath.e
        case "i":
            return mpmath.mpc(0, 1)
        case "inf":
            return mpmath.inf
    raise _Unreadable(f"{name} is no number")


def _checked(value: Any) -> Any:
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
            return _mp(value)
        return value
    if _mpmath().isnan(value):
        raise _Undefined("not a number")
    return value


def _power(base: Any, exponent: Any, point: _Point) -> Any:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _integer_power(base, int(exponent))
    mpmath = _mpmath()
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and _is_negative(base):
        size = _power(-base, exponent, point)  # the real root, as in (-8)^{1/3} = -2
        return -size if exponent.numerator % 2 else size
    if abs(exponent) > _MAX_POWER:
        raise _TooBig("a power that is too high")
    if base == 0:
        if isinstance(exponent, mpmath.mpc) or exponent < 0:
            raise _Undefined("a negative power of zero")
        return Fraction(0)
    if point.real and _is_negative(base):
        raise _Undefined("a broken power of a negative number")
    return mpmath.power(_mp(base), _mp(exponent))


def _integer_power(base: Any, exponent: int) -> Any:
    if base == 0 and exponent < 0:
        raise _Undefined("a negative power of zero")
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base in (0, 1, -1) or bits * abs(exponent) <= _MAX_BITS:
            return base**exponent if abs(exponent) <= _MAX_BITS else base ** (exponent % 2 + 2 * (base == 0))
    if abs(exponent) > _MAX_POWER:
        raise _TooBig("a power that is too high")
    size = abs(_mpmath().log(abs(_mp(base)))) if base else 0
    if size * abs(exponent) > 10 * _MAX_POWER:
        raise _TooBig("a power that is too high")
    return _mp(base) ** exponent


def _root(value: Any, degree: Any, point: _Point) -> Any:
    if not isinstance(degree, Fraction) or degree == 0:
        return _power(value, 1 / degree, point) if degree else _undefined("the root of degree 0")
    if isinstance(value, Fraction) and degree == 2 and value >= 0 and value.denominator < 2**64:
        top, bottom = _exact_sqrt(value.numerator), _exact_sqrt(value.denominator)
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    if degree == 2:
        if point.real and _is_negative(value):
            raise _Undefined("the root of a negative number")
        return _mpmath().sqrt(_mp(value))
    return _power(value, 1 / degree, point)


def _exact_sqrt(value: int) -> int | None:
    root = isqrt(value)
    return root if root * root == value else None


def _undefined(reason: str) -> Any:
    raise _Undefined(reason)


def _is_negative(value: Any) -> bool:
    return not isinstance(value, _mpmath().mpc) and value < 0


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 1_000:
        return Fraction(factorial(int(value)))
    if abs(value) > 100_000:
        raise _TooBig("a factorial that is too high")
    if isinstance(value, Fraction) and value.denominator == 1 and value < 0:
        raise _Undefined("a factorial of a negative number")
    return _mpmath().gamma(_mp(value) + 1)


_INVERSES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_PLAIN_CALLS = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "arctan": "atan",
    "arccot": "acot", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "coth": "coth", "sech": "sech", "csch": "csch",
    "arcsinh": "asinh",
}  # fmt: skip
_BOUNDED_CALLS = {"arcsin": "asin", "arccos": "acos", "arcsec": "asec", "arccsc": "acsc", "arccosh": "acosh",
                  "arctanh": "atanh"}  # fmt: skip


def _call(name: str, values: list[Any], point: _Point) -> Any:
    mpmath = _mpmath()
    name = _INVERSES.get(name, name)
    first = values[0]
    if name in ("min", "max", "gcd", "lcm"):
        return _call_on_list(name, values)
    if name == "binom":
        return _binomial(*values)
    if len(values) > (2 if name == "logb" else 1):
        raise _Unreadable(f"{name} of several numbers")
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
            raise _TooBig(f"{name} of a large number")
        return _checked(getattr(mpmath, _PLAIN_CALLS[name])(_mp(first)))
    if name in _BOUNDED_CALLS:
        value = getattr(mpmath, _BOUNDED_CALLS[name])(_mp(first))
        if point.real and isinstance(value, mpmath.mpc):
            raise _Undefined(f"{name} outside its domain")
        return _checked(value)
    raise _Unreadable(name)


def _call_on_list(name: str, values: list[Any]) -> Any:
    if name in ("min", "max"):
        return (min if name == "min" else max)(values, key=_mp)
    if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
        raise _Undefined(f"{name} of broken numbers")
    return Fraction((gcd if name == "gcd" else lcm)(*(int(value) for value in values)))


def _binomial(top: Any, bottom: Any) -> Any:
    whole = all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (top, bottom))
    if whole and top <= 2_000:
        return Fraction(comb(int(top), int(bottom)))
    if abs(top) > 100_000 or abs(bottom) > 100_000:
        raise _TooBig("a binomial coefficient that is too large")
    return _mpmath().binomial(_mp(top), _mp(bottom))


def _logarithm(name: str, values: list[Any], point: _Point) -> Any:
    mpmath = _mpmath()
    if any(value == 0 for value in values) or (point.real and any(_is_negative(value) for value in values)):
        raise _Undefined("the logarithm of zero or of a negative number")
    value = mpmath.log(_mp(values[0]))
    if name == "logb":
        base = mpmath.log(_mp(values[1]))
        return value / base if base else _undefined("a logarithm to base 1")
    return value / mpmath.log(10) if name == "lg" or (name == "log" and point.decimal_log) else value


def _rounded(name: str, value: Any) -> Any:
    mpmath = _mpmath()
    match name:
        case "abs":
            return abs(value)
        case "floor":
            return mpmath.floor(_mp(value))
        case "ceil":
            return mpmath.ceil(_mp(value))
        case "sgn":
            return mpmath.sign(_mp(value))
        case "Re":
            return mpmath.re(_mp(value))
    return mpmath.im(_mp(value))


def _close(left: Any, right: Any) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _mp(left), _mp(right)
    mpmath = _mpmath()
    if mpmath.isinf(left) or mpmath.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= max(abs(left), abs(right)) * mpmath.mpf(10) ** -15 + mpmath.mpf(10) ** -24)


def _names(node: _Node) -> set[str]:
    found = {node.value} if node.kind == "name" else set()
    return found.union(*(_names(part) for part in node.args))


def _mentions(node: _Node, kind: str, value: Any = None) -> bool:
    own = node.kind == kind and (value is None or node.value == value)
    return own or any(_mentions(part, kind, value) for part in node.args)


def _same_number(gold: _Node, got: _Node, tolerance: float = 0.0) -> bool | None:
    """Are two expressions the same at every point that we try? None: there is no point at which both have a value."""
    if not _names(gold) and not _names(got):
        return _same_constant(gold, got, tolerance)
    bare_log = _mentions(gold, "call", "log") or _mentions(got, "call", "log")
    return _any_true(
        _same_at_points(gold, got, decimal_log=decimal_log) for decimal_log in ((False, True) if bare_log else (False,))
    )


def _any_true(verdicts: Iterator[bool | None]) -> bool | None:
    """True if one is, False if one is and none is True, None if nobody knows."""
    result: bool | None = None
    for verdict in verdicts:
        if verdict:
            return True
        result = verdict if verdict is not None else result
    return result


def _same_at_points(gold: _Node, got: _Node, *, decimal_log: bool) -> bool | None:
    real = not _mentions(gold, "constant", "i") and not _mentions(got, "constant", "i")
    agreed = 0
    for index in range(_POINTS):
        point = _Point(index, real, decimal_log)
        try:
            left, right = _value(gold, point), _value(got, point)
        except _Undefined:
            continue
        if not _close(left, right):
            return False
        agreed += 1
    return True if agreed >= 2 else None


def _same_constant(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    bare_log = _mentions(gold, "call", "log") or _mentions(got, "call", "log")
    verdict: bool | None = None
    for decimal_log in (False, True) if bare_log else (False,):
        point = _Point(0, False, decimal_log)
        try:
            want = _value(gold, point)
        except _Undefined:
            continue
        try:
            have = _value(got, point)
        except _Undefined:
            verdict = False
            continue
        verdict = _close(want, have) or _within(want, have, gold, got, tolerance)
        if verdict:
            return True
    return verdict


def _within(want: Any, have: Any, gold: _Node, got: _Node, tolerance: float) -> bool:
    """The rounding that a decimal of many digits allows, or the tolerance that the recipe does."""
    exact = isinstance(want, Fraction) and isinstance(have, Fraction)
    difference = abs(want - have) if exact else abs(_mp(want) - _mp(have))
    if tolerance and _mp(difference) <= abs(_mp(want)) * tolerance:
        return True
    for literal, other in ((gold, have), (got, want)):
        if literal.kind == "number" and literal.args:
            precise, places = literal.args[0].value
            last_digit = Fraction(1, 10) ** places
            if precise >= 6 and difference < (last_digit if exact else _mp(last_digit)):
                return True
            if precise >= 9 and _mp(difference) <= abs(_mp(other)) * _mpmath().mpf(10) ** -9:
                return True
    return False


# ── comparison ────────────────────────────────────────────────────────────────────────────────────────────────────────

_PLAIN_RE = re.compile(r"([-+]?)(?:\\?\$)?\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(\.[0-9]*)?")


def _plain_number(text: str) -> _Node | None:
    """A number that needs no parser: "-1,234.5"."""
    match = _PLAIN_RE.fullmatch(text.strip())
    if match is None or len(text) > 60 or not (match[2] or (match[3] and len(match[3]) > 1)):
        return None
    fraction = match[3] if match[3] and len(match[3]) > 1 else ""
    node = _number((match[2] or "0").replace(",", "") + fraction)
    return _negated(node) if match[1] == "-" else node


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[_Node, ...]:
    """The readings of an answer, best first: "1,234" is a number, or else a list. Empty where it cannot be read."""
    tidy = _tidy(text)
    joined = _GROUPED_RE.sub(_join_thousands, tidy)
    joined = _SPACED_RE.sub(lambda m: m[0].replace(" ", ""), joined)
    readings = []
    for version in dict.fromkeys((joined, tidy)):
        with suppress(_Unreadable):
            tokens = _tokens(_DECIMAL_COMMA_RE.sub(".", version))
            if tokens:
                readings.append(_Parser(tokens).parse())
    return tuple(readings)


def _join_thousands(match: re.Match[str]) -> str:
    """`1,234` → `1234`, but `(1,234)` is a point."""
    around = match.string[: match.start()].rstrip()[-1:] + match.string[match.end() :].lstrip()[:1]
    pair = "{,}" not in match[0] and match[0].count(",") == 1 and around in ("()", "[]", "(]", "[)")
    return match[0] if pair else re.sub(r"[{},]", "", match[0])


def _compare_texts(gold: str, answer: str, tolerance: float) -> bool | None:
    """Are they the same? None: we cannot read one of them."""
    want, have = _plain_number(gold), _plain_number(answer)
    if want is not None and have is not None:
        return _same_constant(want, have, tolerance)
    letter = _choice(gold, start=False)
    if letter is not None and (got_letter := _choice(answer, start=True)) is not None:
        return letter == got_letter
    words = _words(gold)
    if words and words == _words(answer) and _are_texts(gold, answer):
        return True
    golds, answers = _read(gold), _read(answer)
    if not golds or not answers:
        return None
    verdicts = (_same(left, right, tolerance) for left in golds for right in answers)
    return _any_true(verdicts)


def _are_texts(*texts: str) -> bool:
    """Words rather than formulas: a word in one of them, and no sign of a formula in any."""
    plain = [_TEXT_RE.sub(r" \1 ", _tidy(text)) for text in texts]
    words = [word for text in plain for word in _WORD_RE.findall(text)]
    return any(
        not word[0].isdigit() and (len(word) > 3 or word.lower() in _TEXT_WORDS or not word.isascii()) for word in words
    ) and not any(_FORMULA_RE.search(text) for text in plain)


def _same(gold: _Node, got: _Node, tolerance: float = 0.0) -> bool | None:
    """Are two answers the same? The heart of the verifier; each kind of answer has a rule of its own below."""
    if gold.kind == "relation" or got.kind == "relation":
        return _same_relations(gold, got, tolerance)
    if "text" in (gold.kind, got.kind):
        return _sense(gold) is not None and _sense(gold) == _sense(got)
    if any(node.kind in ("unit", "percent", "degree") for node in (gold, got)):
        return _same_quantity(gold, got, tolerance)
    if _is_collection(gold) or _is_collection(got):
        return _same_collections(gold, got, tolerance)
    if "matrix" in (gold.kind, got.kind):
        return _same_matrices(gold, got, tolerance)
    if "based" in (gold.kind, got.kind):
        return _same_based(gold, got)
    if "ratio" in (gold.kind, got.kind):
        return _same_ratio(gold, got, tolerance)
    if any(node.kind == "constant" and node.value not in _NUMBER_CONSTANTS for node in (gold, got)):
        return gold == got
    if _mentions(gold, "text") or _mentions(got, "text"):  # "October 30": the same words are the same answer by now
        return False
    try:
        return _same_number(gold, got, tolerance)
    except _Unreadable:
        return None


def _sense(node: _Node) -> str | None:
    """What words, or a sign that has words for it, say."""
    if node.kind == "text":
        return _words(node.value)
    return {"empty": "nosolution", "set R": "allreals"}.get(node.value) if node.kind == "constant" else None


def _is_collection(node: _Node) -> bool:
    return node.kind in ("list", "set", "sequence", "union") or _mentions_sign(node)


def _mentions_sign(node: _Node) -> bool:
    return node.kind == "pm" or (node.kind in ("add", "neg", "mul", "div") and any(map(_mentions_sign, node.args)))


def _same_quantity(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    """Numbers with a percent sign, a degree sign or a unit on one side or both."""
    if gold.kind == got.kind == "unit":
        left, right = _unit(gold.value), _unit(got.value)
        if left and right and ("^" in gold.value) == ("^" in got.value) and "per" not in gold.value + got.value:
            if left[0] != right[0]:
                return False
            return _same(_scaled(gold.args[0], left[1]), _scaled(got.args[0], right[1]), tolerance)
        return _same(gold.args[0], got.args[0], tolerance)
    if gold.kind == got.kind:
        return _same(gold.args[0], got.args[0], tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind == "unit" and _unit(node.value) and other.kind in ("percent", "degree"):
            return False
        if node.kind == "unit":
            pair = (node.args[0], other) if node is gold else (other, node.args[0])
            return _same(*pair, tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind in ("percent", "degree"):
            plain = (node.args[0], other) if node is gold else (other, node.args[0])
            size = Fraction(1, 100) if node.kind == "percent" else None
            value = _scaled(node.args[0], size) if size else _Node("mul", (node.args[0], _DEGREE))
            sized = (value, other) if node is gold else (other, value)
            return _any_true(_same(*pair, tolerance) for pair in (plain, sized))
    return None


_DEGREE = _Node("div", (_Node("constant", value="pi"), _Node("number", value=Fraction(180))))


def _scaled(node: _Node, size: Fraction) -> _Node:
    if size == 1:
        return node
    if node.kind == "number":
        return _Node("number", node.args and (_shifted(node.args[0], size),), node.value * size)
    return _Node("mul", (node, _Node("number", value=size)))


def _shifted(literal: _Node, size: Fraction) -> _Node:
    precise, places = literal.value
    return _Node("literal", value=(precise if size == Fraction(1, 100) else 0, places + 2))


def _same_based(gold: _Node, got: _Node) -> bool:
    """Numbers with a base: "1010_2". The base may be left out, as a unit may."""
    if gold.kind == got.kind:
        return bool(gold.value == got.value)
    based, other = (gold, got) if gold.kind == "based" else (got, gold)
    return other.kind == "number" and str(other.value) == based.value[0]


def _same_ratio(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    """5:6 is 5:6, or the fraction 5/6."""
    if gold.kind == got.kind:
        return _all_same(gold.args, got.args, tolerance)
    ratio, other = (gold, got) if gold.kind == "ratio" else (got, gold)
    return len(ratio.args) == 2 and _same(_Node("div", ratio.args), other, tolerance)


def _all_same(golds: tuple[_Node, ...], gots: tuple[_Node, ...], tolerance: float) -> bool | None:
    if len(golds) != len(gots):
        return False
    unsure = False
    for left, right in zip(golds, gots, strict=True):
        verdict = _same(left, right, tolerance)
        if verdict is False:
            return False
        unsure |= verdict is None
    return None if unsure else True


def _matched(golds: tuple[_Node, ...], gots: tuple[_Node, ...], tolerance: float) -> bool | None:
    """The same items in any order."""
    if len(golds) != len(gots):
        return False
    if len(golds) > 100:
        raise _TooBig("a set of more than 100 items")
    left = list(gots)
    for gold in golds:
        found = next((index for index, got in enumerate(left) if _same(gold, got, tolerance)), None)
        if found is None:
            return False
        del left[found]
    return True


def _distinct(items: tuple[_Node, ...]) -> tuple[_Node, ...]:
    kept: list[_Node] = []
    for item in items:
        if not any(_same(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _items(node: _Node) -> tuple[_Node, ...]:
    """The items of a list or set, both signs of ± written out."""
    items = node.args if node.kind in ("list", "set") else (node,)
    return tuple(version for item in items for version in _both_signs(item))


def _both_signs(node: _Node) -> tuple[_Node, ...]:
    if not _mentions_sign(node):
        return (node,)
    return _with_sign(node, upper=True), _with_sign(node, upper=False)


def _with_sign(node: _Node, *, upper: bool) -> _Node:
    if node.kind not in ("pm", "add", "neg", "mul", "div"):
        return node
    parts = tuple(_with_sign(part, upper=upper) for part in node.args)
    if node.kind != "pm":
        return _Node(node.kind, parts, node.value)
    return _Node("add", (parts[0], parts[1] if (node.value == "±") == upper else _negated(parts[1])))


def _same_collections(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    if gold.kind == got.kind == "sequence":
        return _same_sequences(gold, got, tolerance)
    for node, other in ((gold, got), (got, gold)):
        if node.kind == "sequence" and other.kind == "matrix":
            return _same_matrices(gold, got, tolerance)
        if node.kind == "union" and other.kind not in ("union", "sequence", "set", "list", "constant"):
            return False
        if node.kind == "union" or (node.kind == "sequence" and other.kind == "constant"):
            return _same_real_sets(gold, got)
        if node.kind == "sequence":
            if other.kind != "list" or (node.value != "()" and len(node.args) == 2):
                return False
            return _all_same(gold.args, got.args, tolerance)
    golds, gots = _items(gold), _items(got)
    if 1 in (len(golds), len(gots)) and "or" in (gold.value, got.value):  # "15 39/40 or 639/40": one number, twice
        golds, gots = (items[:1] if len(_distinct(items)) == 1 else items for items in (golds, gots))
    if "set" in (gold.kind, got.kind):
        golds, gots = _distinct(golds), _distinct(gots)
    elif _named_apart(golds) != _named_apart(gots):
        return _all_same(golds, gots, tolerance)
    return _matched(golds, gots, tolerance)


def _named_apart(items: tuple[_Node, ...]) -> bool:
    """x = 1, y = 2: a list in which every item says what it is the value of."""
    names = {_spelled(item.args[0]) for item in items if item.kind == "relation"}
    return len(names) > 1


def _same_sequences(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    """Tuples, vectors and intervals; brackets count where it can be an interval."""
    if gold.value != got.value and len(gold.args) == 2 and gold.args[0].kind != "sequence":
        return False
    return _all_same(gold.args, got.args, tolerance)


def _rows(node: _Node) -> tuple[tuple[_Node, ...], ...] | None:
    if node.kind == "matrix":
        return tuple(row.args for row in node.args)
    if node.kind == "sequence":
        nested = all(item.kind == "sequence" for item in node.args)
        return tuple(item.args for item in node.args) if nested else tuple((item,) for item in node.args)
    if node.kind in ("mul", "div"):
        return _scaled_rows(node)
    return None


def _scaled_rows(node: _Node) -> tuple[tuple[_Node, ...], ...] | None:
    left, right = node.args
    if right.kind == "matrix" and node.kind == "mul":
        return tuple(tuple(_Node("mul", (left, cell)) for cell in row.args) for row in right.args)
    if left.kind == "matrix":
        return tuple(tuple(_Node(node.kind, (cell, right)) for cell in row.args) for row in left.args)
    return None


def _same_matrices(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    left, right = _rows(gold), _rows(got)
    if left is None or right is None:
        unread = gold if left is None else got
        return None if _mentions(unread, "matrix") else False
    flat = "sequence" in (gold.kind, got.kind) and len(left) != len(right) and 1 in (len(left), len(right))
    if flat:  # a row vector and a tuple
        left, right = (tuple((cell,) for row in rows for cell in row) for rows in (left, right))
    if [len(row) for row in left] != [len(row) for row in right]:
        return False
    return _all_same(tuple(c for row in left for c in row), tuple(c for row in right for c in row), tolerance)


# ── relations and sets of real numbers ────────────────────────────────────────────────────────────────────────────────


def _same_relations(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    if gold.kind == got.kind:
        return _same_pair(gold, got, tolerance)
    relation, other = (gold, got) if gold.kind == "relation" else (got, gold)
    operators = set(relation.value)
    if operators <= {"=", "≈"}:
        return _same_equation_and_value(gold, got, tolerance)
    if operators == {"∈"}:
        value = relation.args[-1]
        return _same(*((value, got) if relation is gold else (gold, value)), tolerance)
    if other.kind in ("sequence", "union", "list", "constant", "set"):
        return _same_real_sets(gold, got)
    return False


def _same_equation_and_value(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    """x = 5 and 5. An answer may say more than the reference asks: "a + b = 5"; a reference must be "name = value"."""
    if got.kind == "relation":
        values = got.args if "≈" in got.value else got.args[-1:]
        return _any_true(_same(gold, value, tolerance) for value in values)
    if not _is_name(gold.args[0]) and _names(gold.args[0]):
        return False
    values = gold.args[1:] if "≈" in gold.value else gold.args[-1:]
    return _any_true(_same(value, got, tolerance) for value in values)


def _is_name(node: _Node) -> bool:
    """x, AB, x_1, f(x), P(A), (x, y), \angle ABC"""
    if node.kind in ("name", "text"):
        return True
    if node.kind == "call" and node.value == "abs":
        return _is_name(node.args[0])
    if node.kind == "pow":  # f^{-1}(x)
        return _is_name(node.args[0]) and node.args[1].kind == "number" and node.args[1].value == -1
    return node.kind in ("mul", "sequence") and all(_is_name(part) or part.kind == "constant" for part in node.args)


def _same_pair(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    operators = set(gold.value) | set(got.value)
    if operators <= {"=", "≈"}:
        return _same_equations(gold, got, tolerance)
    if operators & {"=", "≈", "!="}:
        return gold.value == got.value and _all_same(gold.args, got.args, tolerance)
    if operators == {"∈"}:
        return _all_same(gold.args, got.args, tolerance)
    verdict = _same_real_sets(gold, got)
    return _same_inequalities(gold, got) if verdict is None else verdict


def _same_equations(gold: _Node, got: _Node, tolerance: float) -> bool | None:
    """The same name for the same value, or the same curve: one is a multiple of the other."""
    if _is_name(gold.args[0]) and _is_name(got.args[0]):
        named = _spelled(gold.args[0]) == _spelled(got.args[0])
        if named:
            return _same(gold.args[-1], got.args[-1], tolerance)
    if not _names(gold) and not _names(got):  # 1/3 = 0.333…
        golds, gots = (node.args if "≈" in node.value else node.args[-1:] for node in (gold, got))
        return _any_true(_same(left, right, tolerance) for left in golds for right in gots)
    if _mentions_collection(gold) or _mentions_collection(got):
        return False
    if len(gold.args) != 2 or len(got.args) != 2 or _names(gold) != _names(got):
        return False
    return _proportional(_difference(gold), _difference(got), positive=False)


def _mentions_collection(node: _Node) -> bool:
    return _is_collection(node) or node.kind in ("matrix", "text", "unit") or any(map(_mentions_collection, node.args))


def _difference(relation: _Node) -> _Node:
    return _Node("add", (relation.args[0], _Node("neg", (relation.args[1],))))


def _proportional(gold: _Node, got: _Node, *, positive: bool) -> bool | None:
    """Is the ratio of two functions the same number at every point?"""
    real = not _mentions(gold, "constant", "i") and not _mentions(got, "constant", "i")
    ratios = []
    for index in range(_POINTS):
        with suppress(_Undefined):
            point = _Point(index, real, False)
            left, right = _value(gold, point), _value(got, point)
            if left == 0 or right == 0:
                return False
            ratios.append(left / right if isinstance(left, type(right)) else _mp(left) / _mp(right))
    if len(ratios) < 2:
        return None
    return all(_close(ratios[0], ratio) for ratio in ratios[1:]) and (not positive or ratios[0] > 0)


def _same_inequalities(gold: _Node, got: _Node) -> bool | None:
    if len(gold.args) != 2 or len(got.args) != 2 or _names(gold) != _names(got):
        return False
    left, right = (_less_first(relation) for relation in (gold, got))
    if left.value != right.value:
        return False
    try:
        return _proportional(_difference(left), _difference(right), positive=True)
    except _Unreadable:
        return None


def _less_first(relation: _Node) -> _Node:
    (operator,) = relation.value
    if operator in ("<", "<="):
        return relation
    return _Node("relation", relation.args[::-1], ("<" if operator == ">" else "<=",))


@dataclass(frozen=True, slots=True)
class _Interval:
    low: Any
    high: Any
    low_open: bool
    high_open: bool


def _same_real_sets(gold: _Node, got: _Node) -> bool | None:
    """Sets of real numbers, however they are written: x > 3, (3, ∞), {x | x > 3}. None: with variables in the ends."""
    if "relation" in (gold.kind, got.kind) and gold.kind == got.kind:
        subjects = _names(gold), _names(got)
        if subjects[0] != subjects[1] and "?" not in subjects[0] | subjects[1]:
            return False
    left, right = _real_set(gold), _real_set(got)
    if left is None or right is None:
        return None
    left, right = _merged(left), _merged(right)
    return len(left) == len(right) and all(map(_same_interval, left, right))


def _same_interval(left: _Interval, right: _Interval) -> bool:
    opened = (left.low_open, left.high_open) == (right.low_open, right.high_open)
    return opened and _close(left.low, right.low) and _close(left.high, right.high)


def _real_set(node: _Node) -> list[_Interval] | None:
    infinity = _mpmath().inf
    if node.kind == "constant":
        return {"empty": [], "set R": [_Interval(-infinity, infinity, True, True)]}.get(node.value)
    if node.kind == "sequence" and len(node.args) == 2:
        low, high = _real(node.args[0]), _real(node.args[1])
        if low is None or high is None:
            return None
        return [
            _Interval(low, high, node.value[0] == "(" or low == -infinity, node.value[1] == ")" or high == infinity)
        ]
    if node.kind in ("set", "list") and not any(item.kind in ("relation", "sequence", "union") for item in node.args):
        values = [_real(item) for item in _items(node)]
        return None if None in values else [_Interval(value, value, False, False) for value in values]
    if node.kind == "relation":
        return _relation_set(node)
    if node.kind in ("union", "list"):
        parts = [_real_set(part) for part in node.args]
        return _combined(parts, "∩" if node.value == "and" else "∪" if node.kind == "list" else node.value)
    return None


def _combined(parts: list[list[_Interval] | None], operator: str) -> list[_Interval] | None:
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    if operator == "∪":
        return [interval for part in known for interval in part]
    result = known[0]
    for part in known[1:]:
        result = _intersection(result, part if operator == "∩" else _complement(part))
    return result


def _real(node: _Node) -> Any:
    """The real value of a constant, or None."""
    if node.kind == "unit":
        return _real(node.args[0])
    if _names(node):
        return None
    try:
        value = _value(node, _Point(0, True, False))
    except (_Undefined, _Unreadable):
        return None
    return None if isinstance(value, _mpmath().mpc) else _mp(value)


def _relation_set(node: _Node) -> list[_Interval] | None:
    """a < x <= b, x > a, x != a, x ∈ S: what x may be."""
    infinity = _mpmath().inf
    if node.value == ("∈",):
        return _real_set(node.args[1])
    subjects = {_spelled(operand) for operand in node.args if _real(operand) is None}
    if len(subjects) != 1 or not any(_is_name(operand) for operand in node.args):
        return None
    result = [_Interval(-infinity, infinity, True, True)]
    for left, written, right in zip(node.args, node.value, node.args[1:], strict=False):
        low, high = _real(left), _real(right)
        if low is None and high is None:
            return None
        bound = low if low is not None else high
        turned = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
        operator = turned.get(written, written) if low is not None else written
        strict = operator in ("<", ">")
        match operator:
            case "<" | "<=":
                part = [_Interval(-infinity, bound, True, strict)]
            case ">" | ">=":
                part = [_Interval(bound, infinity, strict, True)]
            case "!=":
                part = _complement([_Interval(bound, bound, False, False)])
            case "=" | "≈":
                part = [_Interval(bound, bound, False, False)]
            case _:
                return None
        result = _intersection(result, part)
    subject = next(operand for operand in node.args if _real(operand) is None)
    return _unsigned(result) if subject.kind == "call" and subject.value == "abs" else result


def _unsigned(intervals: list[_Interval]) -> list[_Interval]:
    """The x whose |x| is in one of the intervals."""
    mpmath = _mpmath()
    sizes = _intersection(intervals, [_Interval(mpmath.mpf(0), mpmath.inf, False, True)])
    return sizes + [_Interval(-size.high, -size.low, size.high_open, size.low_open) for size in sizes]


def _intersection(left: list[_Interval], right: list[_Interval]) -> list[_Interval]:
    result = []
    for a in left:
        for b in right:
            low = max((a.low, a.low_open), (b.low, b.low_open))
            high = min((a.high, not a.high_open), (b.high, not b.high_open))
            if low[0] < high[0] or (low[0] == high[0] and not low[1] and high[1]):
                result.append(_Interval(low[0], high[0], low[1], not high[1]))
    return result


def _complement(intervals: list[_Interval]) -> list[_Interval]:
    infinity = _mpmath().inf
    result = [_Interval(-infinity, infinity, True, True)]
    for part in intervals:
        below = _Interval(-infinity, part.low, True, not part.low_open)
        above = _Interval(part.high, infinity, not part.high_open, True)
        result = _intersection(result, [side for side in (below, above) if side.low < side.high])
    return result


def _merged(intervals: list[_Interval]) -> list[_Interval]:
    """In order, and those that touch as one."""
    result: list[_Interval] = []
    for interval in sorted(intervals, key=lambda i: (i.low, i.low_open)):
        last = result[-1] if result else None
        touching = last is not None and (
            interval.low < last.high or (_close(interval.low, last.high) and not (interval.low_open and last.high_open))
        )
        if last is None or not touching:
            result.append(interval)
        else:
            high, closed = max((last.high, not last.high_open), (interval.high, not interval.high_open))
            result[-1] = _Interval(last.low, high, last.low_open, not closed)
    return result


# ── math-verify, for what the parser cannot read ──────────────────────────────────────────────────────────────────────

_BOMB_RE = re.compile(
    r"\^\s*\{?[^{}]*\^|\^\s*[{(]?\s*[0-9]{4,}|[0-9]{4,}\s*\)?\s*!|!\s*!|[0-9]{60}|factorial|\\prod|\^\s*\{[^{}]*\{[^{}]*\{"
)


def _fallback(gold: str, answer: str) -> bool:
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
        return list(parse(rf"\boxed{{{_tidy(text)}}}", parsing_timeout=None))
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
        point = _Point(index, True, False)
        values = {symbol: sympy.Rational(str(point.value(symbol.name))) for symbol in want.free_symbols}
        try:
            difference = sympy.N((want - have).subs(values), _DIGITS)
            size = abs(sympy.N(want.subs(values), _DIGITS))
            if difference.is_number and bool(abs(difference) > 1e-6 * (1 + size)):
                return True
        except Exception:  # no value here
            continue
    return False
