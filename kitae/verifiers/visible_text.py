r"""What a reader sees of a text, which is what every reward for the shape of a response looks at.

visible("a\u200bb\u0338")          → "ab"
has_content("&nbsp;<br>\u2800")    → False
said_words("one_two-Three, 4 …")   → ["one_two-Three", "4"]
said_words("one_two_three_four_5") → ["one", "two", "three", "four", "5"]
"""

import html
import re
import unicodedata
from collections.abc import Iterator
from string import punctuation

import regex

_UNSEEN = r"[[\p{Mn}\p{Me}\p{C}\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]--[\s]]"
_UNSEEN_RE = regex.compile(_UNSEEN, regex.V1)
_ASCII_UNSEEN_RE = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_MARKUP_RE = re.compile(r"<!--.*?(?:-->|\Z)|</?[A-Za-z][^<>]{0,200}>", re.DOTALL)
_EMPTY_RE = re.compile(r"(?:\s|\*\*|__|~~|``)*")  # marks of Markdown around nothing
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_UNSHOWN_RE = re.compile(  # comments, what is struck out, and what has the colour of the page
    r"<!--.*?(?:-->|\Z)|<(del|s|strike)\b[^<>]{0,200}>.*?(?:</\1\s*>|\Z)"
    r"|<(\w{1,20})\b[^<>]{0,200}(?:\bhidden\b|display\s*:\s*none|visibility\s*:\s*hidden)[^<>]{0,200}>.*?(?:</\2\s*>|\Z)"
    r"|(?<![~\w\\}])~~(?![\s~])[^~\n]{1,400}(?<!\s)~~(?![~\w\\{])"
    rf"|\\(?:[hv]?phantom|[bx]?cancel|sout|st|color\s*\{{white\}}|textcolor\s*\{{white\}})\s*{_BRACED}"
    rf"|\{{\\color\s*\{{white\}}(?:[^{{}}]|{_BRACED})*+\}}|\\iffalse\b.*?(?:\\fi\b|\Z)|^[ \t]*%[^\n]*"
    r"|\[//\]:[^\n]*",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
_UNSHOWN_COMMANDS = ("phantom", "cancel", "\\sout", "\\st", "white", "\\iffalse")
_STRUCK_RE = re.compile(r"\w[\u0335-\u0338\u20d2\u20d3\u20dd\u20e0\u20e5\u20eb]+")
_MAX_PIECES = 4  # of one word: state-of-the-art
_MAX_LETTERS = 20  # of a word of several pieces
_LONG_WORD = 32  # letters; a longer one is no word
_SOLITARY = (  # scripts written without spaces: one character is one token
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
_TOKEN_RE = re.compile(rf"[{_SOLITARY}]|[^\s{_SOLITARY}]+")
_PIECE_RE = re.compile(r"[^\W\d_a-z]*[^\W\d_A-Z]+|[^\W\d_]+|[0-9]+")  # camelCase is two
_PROSE_RE = re.compile(r"\s*+(?:[^\w\s]*+(?:[A-Za-z][a-z]{0,31}+|[0-9]{1,20}+)[^\w\s]*+(?:\s++|\Z))*+")
_WORD_RE = re.compile(r"[^\W_](?:.*[^\W_])?", re.DOTALL)


def visible(text: str) -> str:
    """The text without what cannot be seen or is joined to another character: marks over and under letters, zero-width
    and direction characters, soft hyphens, variation selectors, tags, fillers and control characters. White space
    stays."""
    if text.isascii():
        return text if _is_plain(text) else _ASCII_UNSEEN_RE.sub("", text)
    return str(_UNSEEN_RE.sub("", unicodedata.normalize("NFKC", text)))


def shown(text: str) -> str:
    """The text without what a page would not show, or would strike out: `"~~8~~ 7 <!-- 9 -->"` → `"  7  "`."""
    if not text.isascii():
        text = _STRUCK_RE.sub(" ", text)
    may_hide = "~~" in text or "<" in text or "%" in text or "[//]" in text
    may_hide = may_hide or ("\\" in text and any(command in text for command in _UNSHOWN_COMMANDS))
    return _UNSHOWN_RE.sub(" ", text) if may_hide else text


def spaced(text: str) -> str:
    """The text with a space for everything unseen, so that digits with it between them are no number; wide digits and
    letters become plain ones."""
    if text.isascii():
        return text if _is_plain(text) else _ASCII_UNSEEN_RE.sub(" ", text)
    return str(_UNSEEN_RE.sub(" ", unicodedata.normalize("NFC", text).translate(_WIDE)))


def _is_plain(text: str) -> bool:
    """Whether a text in ASCII has no control characters but line breaks: far faster than to look for them."""
    return text.replace("\n", "").isprintable()


def has_content(text: str) -> bool:
    """Whether there is anything to see, markup and entities such as &nbsp; aside."""
    plain = html.unescape(text) if "&" in text else text
    return not _EMPTY_RE.fullmatch(visible(_MARKUP_RE.sub("", plain)))


def tokens(text: str) -> list[str]:
    """Words, and single characters of scripts without spaces: `"go 東京"` → `["go", "東", "京"]`."""
    return _TOKEN_RE.findall(text)


def said_words(text: str) -> list[str]:
    """The words of a text without the marks around them. Several that are joined by other signs than spaces are several
    words, and a run of letters that is longer than any word is split into letters."""
    text = visible(text)
    if not text.isascii():
        return [word for token in tokens(text) for word in _words_in(token)]
    if _PROSE_RE.fullmatch(text):  # most, and twice as fast
        return [token.strip(punctuation) for token in text.split()]
    return [word for token in text.split() for word in _words_in(token)]


def _words_in(token: str) -> Iterator[str]:
    if token.isalpha() and len(token) <= _LONG_WORD:
        yield token
        return
    word = _WORD_RE.search(token)
    if word is None:
        return
    pieces = _PIECE_RE.findall(token)
    if len(pieces) <= _MAX_PIECES and sum(map(len, pieces)) <= _MAX_LETTERS:
        yield word[0]
        return
    for piece in pieces:
        if len(piece) > _LONG_WORD:
            yield from piece
        else:
            yield piece
