r"""Text clean-up: an answer as plain LaTeX, and the answers that are compared as text alone.

tidy(r"$\left(½,\;2\right)$.")          → r"(\frac{1}{2}, 2)"
text_key(r"\text{yes} .")               → "yes", the same for all texts that are the same answer without any parsing
plain_words(r"\text{The cat.}")         → "cat"
choice_letter(r"\text{(B)}", start=False) → "B"
"""

import re
import unicodedata
from functools import lru_cache

from kitae.verifiers.hedges import LETTER, is_hedged
from kitae.verifiers.visible_text import spaced

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
        "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
        "⅚": r"\frac{5}{6}", "⅐": r"\frac{1}{7}", "⅑": r"\frac{1}{9}", "⅒": r"\frac{1}{10}",
        "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
        "√": r"\sqrt ", "∛": r"\sqrt[3] ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "、": ",",
    }
)  # fmt: skip
_OVERLINED_RE = re.compile("(?:[0-9][\u0304\u0305])+|[A-Za-z][\u0302\u0304\u0305\u20d7]")
_SUPERSCRIPT_RE = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPT_RE = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SYSTEM_RE = re.compile(  # rows behind one brace
    r"\\left\s*\\(?:\{|lbrace)\s*\\begin\{(array|aligned|matrix)\}(?:\{[lcr| ]*\})?(.*?)\\end\{\1\}\s*\\right\s*\.",
    re.DOTALL,
)
_NOISE_RE = re.compile(
    r"(\\\\)(?:\s*\[[0-9.]+\s*[a-z]+\])?"  # the end of a row, with the space after it, which is kept
    r"|\\(?:left|right|[bB]igg?[lrm]?|middle)(?![A-Za-z])\.?"
    r"|\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|hline|phantom|underline|tiny|small|large|Large|LARGE|huge|Huge"
    r"|checkmark)(?![A-Za-z])|\\(?:text)?color\s*(?:\[[a-z]+\])?\s*\{[^{}]*\}"
    r"|\\(?:hspace|vspace)\s*\{[^{}]*\}|(?<=,)\\!\s*(?=[0-9]{3})|\\!|\\[()\[\]]|\$\$|</?[a-z]+>"
)
_WIDE_SPACE_RE = re.compile(  # separates two items, but not an item from its words, its brackets or its relation
    r"(?<=[0-9A-Za-z})\]])\s*\\q?quad\s*(?=[-+]?\s*(?:[0-9]|\\[dt]?frac|\\sqrt|\\pi|[A-Za-z](?![A-Za-z])))"
)
_SPACE_RE = re.compile(r"(\\\\)|\\[,;:> ]|\\q?quad|\\(?:thinspace|enspace|medspace)(?![A-Za-z])|~")
_MODULUS_RE = re.compile(
    r"(?P<open>\(?)\s*(?P<word>\\[pb]?mod|\\(?:text|mathrm|operatorname)\s*\{\s*(?P<inside>\(?)\s*mod\s*\}|(?<![A-Za-z\\])mod)"
    r"(?![A-Za-z])\s*\{?\s*(?P<number>[0-9]+|[a-z](?![A-Za-z]))\s*\}?\s*\)?"
)
_TH = r"\s*(?:st|nd|rd|th)\s*"
_ORDINAL_RE = re.compile(  # 5th, 5^{th}, 5^{\text{th}}
    rf"(?<=[0-9])\s*(?:\^\s*\{{\s*\\(?:text|mathrm)\s*\{{{_TH}\}}\s*\}}|\^?\s*\\(?:text|mathrm)\s*\{{{_TH}\}}|\^\s*\{{{_TH}\}}"
    r"|(?:st|nd|rd|th)(?![A-Za-z]))"
)
_DOMAIN_RE = re.compile(  # "for all n", "where a, b ∈ ℝ": conditions on the letters before
    r"(?<=\S)[\s,]*(?:\\forall|\\(?:text|mbox)\s*\{[\s,]*(?:for (?:all|any|every|each)|where)\s*\}|for all)"
    r"(?![A-Za-z])[\s$]*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*(?:\\in\s*\\mathbb\s*\{?\s*[NZQRC]\s*\}?[\^+_*>0{}\s]*)?$"
)
_REMARK_RE = re.compile(
    r"(?<=\S)\s*(?:\\text\s*\{\s*)?\((?![^()]*\b(?:or|between)\b)(?:i\.e\.|(?:since|because|rounded|approximately|about|correct\s+to|to\s+[0-9]|[0-9]+\s*"
    r"(?:d\.?\s?p|s\.?\s?f|sig|dec))\b)[^()]*\)\s*\}?$",
    re.IGNORECASE,
)
_OVER_RE = re.compile(r"(?:\{|^)([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)(?:\}|$)")
_CLOCK_RE = re.compile(r"(?<=[0-9])\s*([AaPp])\.?\s?[Mm](?![A-Za-z])\.?")
_APOSTROPHE_RE = re.compile(r"(?<=[0-9])['’](?=[0-9]{3}(?![0-9]))")  # 12'345
_FRAC_RE = re.compile(r"\\[dtc]frac")
_UNIT_VECTOR_HINT_RE = re.compile(r"\\(?:mathbf|boldsymbol|bm|textbf|hat|widehat|vec|overrightarrow)\b")
_BOLD = r"\\(?:mathbf|boldsymbol|bm|textbf|hat|widehat|vec|overrightarrow)"
_UNIT_VECTOR_RE = re.compile(
    rf"(?:{_BOLD}\s*\{{?\s*)?{_BOLD}\s*(?:\{{\s*)?(?:\\(?=[ij]math))?([ijk])(?:math)?(?![A-Za-z])\s*\}}?(?:(?<=\}})\s*\}})?"
)
_DEGREE_RE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\(?:degree|deg)(?![A-Za-z])|\^\s*\{\s*o\s*\}")
TEXT_COMMANDS = (
    r"text|mbox|hbox|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathcal|operatorname|emph"
    r"|bm|boldsymbol|unit"
)
TEXT_RE = re.compile(rf"\\(?:{TEXT_COMMANDS})\*?\s*\{{([^{{}}]*)\}}")
_WORD_RE = re.compile(r"[0-9]+(?:[.,:][0-9]+)*|[^\W\d_]+")
_FORMULA_RE = re.compile(
    r"[+*/^=<>|_%$€£¥()\[\]{}&]|-(?![A-Za-z]{2})|\\(?!emptyset|varnothing|infty)[A-Za-z]", re.IGNORECASE
)
SHORT_WORDS = {  # words, not products of letters
    "yes", "odd", "the", "per", "for", "not", "sun", "mon", "tue", "wed", "thu", "fri", "sat", "jan", "feb", "mar",
    "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec", "red", "bob", "tom", "amy", "dne", "all", "no",
    "cat", "dog", "day", "one", "two", "six", "ten", "eur", "usd", "am", "pm", "egg", "cup", "and", "man", "men", "boy",
}  # fmt: skip
_SYNONYMS = {
    "nosolutions": "nosolution", "none": "nosolution", "norealsolution": "nosolution", "norealsolutions": "nosolution",
    "therearenosolutions": "nosolution", "emptyset": "nosolution", "empty": "nosolution",
    "varnothing": "nosolution", "dne": "doesnotexist", "undefined": "doesnotexist", "limitdoesnotexist": "doesnotexist",
    "allrealnumbers": "allreals", "reals": "allreals", "allreal": "allreals", "realnumbers": "allreals",
    "infinite": "infinitelymany", "infinitelymanysolutions": "infinitelymany",
}  # fmt: skip
_CHOICE_RE = re.compile(r"(?:(?:option|choice|answer)\s*)?[(\[]?\s*([A-Za-z])\s*[)\].:]?", re.IGNORECASE)
_CHOICE_START_RE = re.compile(
    r"[(\[]\s*([A-Z])\s*[)\]]\s*[:.]?\s*\S|([A-Z])\s*[).:]\s*\S|(?:[Oo]ption|[Cc]hoice)\s+([A-Z])\b"
)


@lru_cache(maxsize=2048)
def tidy(text: str) -> str:
    """Plain LaTeX: without delimiters, size commands and Unicode signs."""
    if not text.isascii():
        text = _OVERLINED_RE.sub(_accented, unicodedata.normalize("NFC", text))
        text = ascii_digits(spaced(text)).translate(_UNICODE)
        text = _SUPERSCRIPT_RE.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
        text = _SUBSCRIPT_RE.sub(lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
        text = unicodedata.normalize("NFKC", text)
    if "\\\\" in text and r"\begin" not in text:  # a command whose backslash was escaped
        text = re.sub(r"\\\\(?=[A-Za-z{}])", r"\\", text)
    if _UNIT_VECTOR_HINT_RE.search(text):
        text = _UNIT_VECTOR_RE.sub(lambda m: rf"\vec{{{m[1]}}}", text)
    text = _DEGREE_RE.sub(r"\\degree ", text.replace("{:}", ":").replace("\x08oxed", r"\boxed"))
    if r"\right" in text and r"\begin" in text:
        text = _SYSTEM_RE.sub(_system, text)
    text = _NOISE_RE.sub(lambda m: m[1] or "", text.replace("**", "^"))
    text = _FRAC_RE.sub(r"\\frac", re.sub(r"\\boxed\s*\{", "{", text))
    if r"\over" in text or r"\choose" in text:
        text = _OVER_RE.sub(lambda m: rf"\{'frac' if m[2] == 'over' else 'binom'}{{{m[1]}}}{{{m[3]}}}", text)
    if "mod" in text:
        text = _MODULUS_RE.sub(_modulus, text)
    if r"quad" in text:
        text = _WIDE_SPACE_RE.sub(", ", text)
    text = _SPACE_RE.sub(lambda m: m[1] or " ", text)
    text = _currency(text).strip()
    if "'" in text or "’" in text:
        text = _APOSTROPHE_RE.sub("", text)
    if "all" in text or "where" in text or "every" in text or "any" in text:
        text = _DOMAIN_RE.sub("", text)
    if text.endswith((")", ")}")):
        text = _REMARK_RE.sub("", text)
    if "m" in text or "M" in text:
        text = _CLOCK_RE.sub(r" \\text{\1m}", text)
    if "t" in text or "d" in text:
        text = _ORDINAL_RE.sub("", text)
    if text.endswith("}") and text.count("}") == text.count("{") + 1:
        text = text[:-1].rstrip()
    if text.endswith("\\") and not text.endswith("\\\\"):
        text = text[:-1]
    return text[:-1].rstrip() if text.endswith((".", ",", ";")) and not text.endswith((r"\,", "..")) else text


def _accented(match: re.Match[str]) -> str:
    r"""`0.3̅` → `0.\overline{3}`, `x̂` → `\hat{x}`"""
    accent = {"\u0302": "hat", "\u20d7": "vec"}.get(match[0][-1], "overline")
    return rf"\{accent}{{{match[0][::2]}}}"


def _system(match: re.Match[str]) -> str:
    rows = match[2].replace("&", "") if match[1] == "aligned" else match[2]
    return rf"\begin{{cases}}{rows}\end{{cases}}"


def _modulus(match: re.Match[str]) -> str:
    r"""In a congruence, `3 (mod 7)`, the modulus is like a unit; otherwise `17 \bmod 5` is a remainder."""
    bracketed = match["open"] or match["inside"] or match["word"] == r"\pmod"
    if bracketed or r"\equiv" in match.string or "≡" in match.string:
        return rf" \text{{mod {match['number']}}}"
    return rf" \bmod {{{match['number']}}}"


def ascii_digits(text: str) -> str:
    """The digits of every script as 0 to 9: `"٤٢"` → `"42"`."""
    return text if text.isascii() else re.sub(r"[^\W0-9a-zA-Z_]", _ascii_digit, text)


def _ascii_digit(match: re.Match[str]) -> str:
    value = unicodedata.decimal(match[0], None)
    return match[0] if value is None else str(value)


def _currency(text: str) -> str:
    r"""`$5` and `\$5` → `\$5`, but `$5$` → `5`."""
    if "$" not in text:
        return text
    bare = re.sub(r"\\\$", "\x00", text)
    if bare.count("$") % 2 and re.search(r"\$\s*[-\d.]", bare):
        return bare.replace("$", "\x00", 1).replace("$", "").replace("\x00", r"\$")
    return bare.replace("$", "").replace("\x00", r"\$")


@lru_cache(maxsize=2048)
def text_key(text: str) -> str:
    """A key that is equal for texts that are the same answer."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", TEXT_RE.sub(r"\1", tidy(text))).rstrip(".")


def plain_words(text: str) -> str:
    """The letters and digits of a text answer: `"\\text{ The cat.}"` → `"cat"`."""
    plain = TEXT_RE.sub(r" \1 ", tidy(text)).casefold()
    words = [word for word in _WORD_RE.findall(plain) if word not in ("the", "an", "and")]
    if len(words) > 1 and len(words[1]) > 1 and words[0] in ("a", "on", "in", "at", "by"):
        del words[0]
    joined = "".join(f" {word} " if word[0].isdigit() else word for word in words)
    return _SYNONYMS.get(joined, joined)


def are_texts(*texts: str) -> bool:
    """Whether the texts are words rather than formulas: one of them has a word, and none has a sign of a formula."""
    plain = [TEXT_RE.sub(r" \1 ", tidy(text)) for text in texts]
    words = [word for text in plain for word in _WORD_RE.findall(text)]
    return any(
        not word[0].isdigit() and (len(word) > 3 or word.lower() in SHORT_WORDS or not word.isascii()) for word in words
    ) and not any(_FORMULA_RE.search(text) for text in plain)


def choice_letter(text: str, *, start: bool) -> str | None:
    """The letter of a multiple-choice answer: `"\\text{(B)}"` → `"B"`; with `start`, of "(B) 12 cm" too."""
    plain = TEXT_RE.sub(r"\1", tidy(text)).strip()
    if (match := _CHOICE_RE.fullmatch(plain)) and (match[1].isupper() or plain[0] in "([" or len(plain) > 3):
        return match[1].upper()
    if start and (found := _CHOICE_START_RE.match(plain)) and "," not in plain[:4]:
        group = next(group for group in (1, 2, 3) if found[group])
        return None if is_hedged(plain, *found.span(group), LETTER) else found[group]
    return None
