r"""Tokens of an answer: `split_tokens(r"2\sin x")` → number 2, function sin, name x.

Adjacent letters are a product ("ab"), unless they are a function, a unit, a number word, or a word of more than three
letters. Raises `Unreadable` for an unknown command.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

from kitae.verifiers.math.cleanup import SHORT_WORDS, TEXT_COMMANDS
from kitae.verifiers.math.tree import TooBig, Unreadable
from kitae.verifiers.math.units import UNITS, is_known_unit

_MAX_DEPTH = 40  # of brackets in brackets
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "coth", "sech", "csch", "arcsinh", "arccosh", "arctanh", "ln", "log", "lg",
    "exp", "sqrt", "abs", "floor", "ceil", "min", "max", "gcd", "lcm", "sgn", "Re", "Im", "cbrt", "cis", "arsinh",
    "arcosh", "artanh",
}  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
)  # fmt: skip
COMMANDS: dict[str, tuple[str, str]] = {
    **{name: ("function", name) for name in _FUNCTIONS},
    **{name: ("name", name.removeprefix("var")) for name in _GREEK},
    "cdot": ("op", "*"), "times": ("op", "×"), "ast": ("op", "*"), "div": ("op", "/"), "pm": ("op", "±"),
    "mp": ("op", "∓"), "le": ("op", "<="), "leq": ("op", "<="), "leqslant": ("op", "<="),
    "leqq": ("op", "<="), "geqq": ("op", ">="), "ge": ("op", ">="),
    "geq": ("op", ">="), "geqslant": ("op", ">="), "lt": ("op", "<"), "gt": ("op", ">"), "ne": ("op", "!="),
    "neq": ("op", "!="), "approx": ("op", "≈"),
    "sim": ("op", "≈"), "simeq": ("op", "≈"), "doteq": ("op", "≈"), "equiv": ("op", "≡"),
    "in": ("op", "∈"), "cup": ("op", "∪"), "cap": ("op", "∩"), "setminus": ("op", "∖"), "backslash": ("op", "∖"),
    "infty": ("constant", "inf"), "pi": ("constant", "pi"), "emptyset": ("constant", "empty"),
    "varnothing": ("constant", "empty"), "{": ("op", "{{"), "}": ("op", "}}"), "lbrace": ("op", "{{"),
    "rbrace": ("op", "}}"), "langle": ("op", "⟨"), "rangle": ("op", "⟩"), "lfloor": ("op", "⌊"),
    "rfloor": ("op", "⌋"), "lceil": ("op", "⌈"), "rceil": ("op", "⌉"), "vert": ("op", "|"), "lvert": ("op", "|"),
    "rvert": ("op", "|"), "mid": ("op", "mid"), "|": ("op", "|"), "colon": ("op", ":"), "degree": ("op", "°"),
    "%": ("op", "%"), "$": ("op", "$"), "lor": ("op", "or"), "vee": ("op", "or"), "land": ("op", "and"),
    "wedge": ("op", "and"), "prime": ("op", "'"), "iff": ("op", "="), "lbrack": ("op", "["), "rbrack": ("op", "]"),
    "euro": ("op", "€"), "pounds": ("op", "£"), "&": ("op", "and"), "imath": ("constant", "i"),
    "\\": ("op", "\\\\"), "top": ("name", "T"), "intercal": ("name", "T"), "lparen": ("op", "("), "rparen": ("op", ")"),
}  # fmt: skip
_STRUCTURES = ("frac", "binom", "dbinom", "tbinom", "begin", "end", "overline", "mathbb", "hat", "vec", "bar",
               "overrightarrow", "widehat", "angle", "triangle", "dot", "sum", "prod", "partial", "bmod")  # fmt: skip
_WORDS = {
    "to": ("op", ":"),
    "infinity": ("constant", "inf"), "inf": ("constant", "inf"), "oo": ("constant", "inf"), "pi": ("constant", "pi"),
    "Pi": ("constant", "pi"), "and": ("op", "and"), "or": ("op", "or"), "union": ("op", "∪"),
    "theta": ("name", "theta"), "alpha": ("name", "alpha"), "beta": ("name", "beta"), "lambda": ("name", "lambda"),
    "percent": ("op", "%"), "pct": ("op", "%"),
    "degrees": ("op", "°"), "degree": ("op", "°"), "deg": ("op", "°"), "plus": ("op", "+"),
    "minus": ("op", "-"), "times": ("op", "*"), "und": ("op", "and"), "oder": ("op", "or"),
}  # fmt: skip
_FOREIGN_WORDS = {
    "或": "or", "或者": "or", "또는": "or", "или": "or", "または": "or",
    "和": "and", "и": "and", "と": "and", "그리고": "and",
}  # fmt: skip
_GREEK_RE = re.compile("GREEK SMALL LETTER ([A-Z]+)")
_MATH_FONT_RE = re.compile(r"(?!.*[A-Za-z]{3}).*[=<>+].*")  # \\mathbf{x=7}
_AMOUNT_RE = re.compile(r"([0-9][0-9.,/:]*)\s+([A-Za-z].*)")
_TOKEN_RE = re.compile(
    rf"(?P<space>\s+)|\\(?:{TEXT_COMMANDS})\*?\s*\{{(?P<text>[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*){{0,8}})\}}"
    r"|(?P<hex>0x[0-9A-F]+(?![0-9A-Za-z]))|(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,9}(?![0-9A-Za-z.]))?)"
    r"|\\(?P<command>[A-Za-z]+|.)|(?P<word>[A-Za-z]+)|(?P<foreign>[^\W\d_]+)|(?P<op><=|>=|!=|==|\.\.\.|.)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # number, name, function, constant, text, op
    value: str
    spaced: bool = field(default=False, compare=False)  # whether white space precedes it


END = Token("end", "")


def split_tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    spaced = False
    for match in _TOKEN_RE.finditer(text):
        kind, value = match.lastgroup or "", match[match.lastgroup or 0]
        if kind == "space":
            spaced = True
            continue
        tokens.extend(_classify(kind, value, spaced, tokens))
        spaced = False
    if tokens and tokens[-1] == Token("op", "*") and text.rstrip().endswith("times"):  # "5 times"
        tokens[-1] = Token("text", "times", True)
    return tokens


def _classify(kind: str, value: str, spaced: bool, before: list[Token]) -> Iterator[Token]:
    if kind == "number":
        yield Token("number", value, spaced)
    elif kind == "hex":
        yield Token("number", str(int(value, 16)), spaced)
    elif kind == "command":
        if value in COMMANDS:
            yield Token(*COMMANDS[value], spaced)
        elif value in _STRUCTURES:
            yield Token("command", value, spaced)
        else:
            raise Unreadable(f"\\{value}")
    elif kind == "text":
        yield from _text_tokens(value, spaced)
    elif kind == "word":
        after_number = bool(before) and (before[-1].kind == "number" or before[-1].value in ("}", ")"))
        yield from _word_tokens(value, spaced, after_number)
    elif kind == "foreign":
        if value in _FOREIGN_WORDS:
            yield Token("op", _FOREIGN_WORDS[value], spaced)
            return
        greek = _GREEK_RE.fullmatch(unicodedata.name(value, "")) if len(value) == 1 else None
        yield Token("name", greek[1].lower(), spaced) if greek else Token("text", value, spaced)
    else:
        yield Token("op", "=" if value == "==" else "≈" if value == "≃" else value, spaced)


def _text_tokens(words: str, spaced: bool) -> Iterator[Token]:
    plain = words.strip()
    if "{" in plain:  # m s^{-1}, or a formula
        if is_known_unit(plain):
            yield Token("text", plain, True)
        else:
            yield from split_tokens(plain)
        return
    if plain in ("and", "or", "und", "oder", ",", "if"):
        yield Token("op", "or" if plain in ("or", "oder") else "and", spaced)
    elif plain == "to":
        yield Token("op", ":", spaced)
    elif plain in _FUNCTIONS and plain not in UNITS:
        yield Token("function", plain, spaced)
    elif plain in ("i", "e"):
        yield Token("constant", plain, spaced)
    elif plain and (set(plain) <= set("0123456789.+-*/^()=<>, ") or _MATH_FONT_RE.fullmatch(plain)):
        yield from split_tokens(plain)
    elif amount := _AMOUNT_RE.fullmatch(plain):  # "100 square units"
        yield from split_tokens(amount[1])
        yield from _text_tokens(amount[2], True)
    elif plain.lower().rstrip(".") in ("percent", "pct", "degrees", "degree"):
        yield Token("op", "%" if plain.lower().startswith("p") else "°", spaced)
    elif plain:
        yield Token("text", plain, True)


def _word_tokens(word: str, spaced: bool, after_number: bool) -> Iterator[Token]:
    """A word, or a product of letters: `"sinx"` → sin, x; `"ab"` → a, b; `"apples"` → the word."""
    if after_number and word in UNITS and len(word) > 1:
        yield Token("text", word, spaced)
    elif word in _FUNCTIONS:
        yield Token("function", word, spaced)
    elif word in _WORDS:
        yield Token(*_WORDS[word], spaced)
    elif split := re.match(r"(?:arc)?(?:sin|cos|tan)|sqrt|ln|log", word):
        yield Token("function", split[0], spaced)
        yield from _word_tokens(word[split.end() :], False, False)
    elif word.lower() in SHORT_WORDS or len(word) > 3:
        yield Token("text", word, spaced)
    elif word.endswith("pi") and len(word) == 3:
        yield from (Token("name", word[0], spaced), Token("constant", "pi"))
    else:
        for position, letter in enumerate(word):
            yield _letter(letter, spaced and position == 0)


def is_spelled_out(text: str) -> bool:
    """ABC, tea: letters whose order matters; "xy" is a product, and "pi" a word."""
    if not text.isalpha() or not text.isascii() or not (len(text) > 2 or (len(text) == 2 and not text.islower())):
        return False
    return all(len(token.value) == 1 for token in split_tokens(text))


def _letter(letter: str, spaced: bool) -> Token:
    return Token("constant" if letter in "ie" else "name", letter, spaced)


class Cursor:
    """A place in a list of tokens, which moves on as they are read."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def peek(self, ahead: int = 0) -> Token:
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else END

    def is_op(self, *values: str) -> bool:
        token = self.peek()
        return token.kind == "op" and token.value in values

    def take(self) -> Token:
        token = self.peek()
        if token is END:
            raise Unreadable("it ends too early")
        self.at += 1
        return token

    def accept(self, *values: str) -> bool:
        if self.is_op(*values):
            self.at += 1
            return True
        return False

    def expect(self, *values: str) -> str:
        if not self.is_op(*values):
            raise Unreadable(f"{' or '.join(values)} is missing")
        return self.take().value


class Depth:
    """Counts brackets in brackets."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise TooBig(f"more than {_MAX_DEPTH} brackets in brackets")

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
