"""Sentences and words as the public checkers count them, without their data downloads.

`sentences` ends a sentence at a full stop, question or exclamation mark, unless the stop belongs to an abbreviation,
initials, a number or an ellipsis and what follows does not look like a beginning. Units ("5 kg.") are no abbreviations.
`words` follows the conventions of the Penn Treebank: "can't" is "ca" and "n't", the last full stop stands alone, "U.S."
keeps its dots.

Not covered: the public checkers learnt their abbreviations and sentence starters from newspapers. Ours are short lists
of common ones, so a rare word after an abbreviation, an ellipsis or an initial opens no sentence. Every language gets
English rules.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import regex

_SHORT = (
    "adm capt cmdr col dr fr gen gov hon jr lt maj messrs mr mrs ms mx pres prof rep reps rev sen sgt sr st supt"
    " ave blvd bldg dept hwy mt rd co corp cos inc ltd bros assn univ"  # places and companies
    " ariz calif colo fla kan mich minn nev okla pa tenn tex va vt wis"
    " jan feb apr aug sept oct nov dec tues thurs a.m p.m a.d b.c yr"  # time
    " vs v eds vol vols pp et cf viz approx mg ph.d m.d b.a m.a d.c u.k u.n u.s u.s.a"
)
_ABBREVIATIONS = frozenset(_SHORT.split())
_OPENERS = (
    "a after all also although an and another any are as at because before both but by can despite do each even every"
    " few finally first for from he hence her here his how however i if in indeed instead is it its last later let many"
    " meanwhile moreover most my nevertheless next nonetheless nor not now of on once one only or other our overall"
    " perhaps second several she similarly since so some still such that the their then there therefore these they this"
    " those though through thus to under until we what when where which while who why with without yes yet you your"
)
_STARTERS = frozenset(_OPENERS.split())  # begin a sentence when capitalised after an abbreviation, initial or ellipsis
_NUMBER = "##number##"  # stands for any number

_QUOTES = "\u2018\u2019\u201c\u201d\xab\xbb"
_CLOSER = rf"[)\";}}\]*:@'({{\[!?{_QUOTES}]"  # ends a token wherever it stands
_RUN = r"(?:-{2,}|\.{2,}|(?:\.\s){2,}\.)"
_END_RE = re.compile(rf"[.?!](?=(?P<after>{_CLOSER}|\s+(?P<next>\S+)))")
_TOKEN_RE = re.compile(
    rf"{_RUN}|(?=[^(\"`{{\[:;&#*@)}}\]\-,])\S+?(?=\s|$|{_CLOSER}|{_RUN}|,(?=$|\s|{_CLOSER}|{_RUN}))|\S"
)
_REALIGN_RE = re.compile(rf"[\"')\]}}{_QUOTES}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
_NUMBER_RE = re.compile(r"-?[.,]?\d[\d,.-]*")
_INITIAL_RE = re.compile(r"[^\W\d]\.")
_INITIALS_RE = re.compile(r"(?!P\.(?:P\.)?S\.)(?:[A-Z]\.){2,}")  # J.K., but a postscript begins anew
_PLAIN_RE = re.compile(r"([A-Za-z]{2,30})(?:[?!]|(\.))[^.?!]")
_WORD_RE = re.compile(r"\w+")
_NO_START = frozenset(";:,.!?")


@lru_cache(maxsize=32)
def sentences(text: str) -> tuple[str, ...]:
    """`'Dr. No came. "Why?" he asked.'` → `('Dr. No came.', '"Why?"', 'he asked.')`"""
    found = []
    spans = list(_spans(text))
    moved = 0  # characters at the head of a span that belong to the sentence before it
    for (start, stop), following in zip(spans, [*spans[1:], None], strict=True):
        first, last, moved = start + moved, stop, 0
        if following and (closing := _REALIGN_RE.match(text, *following)):
            moved = closing.end() - following[0]
            last = following[0] + len(closing[0].rstrip())
        if first < last:
            found.append(text[first:last])
    return tuple(found)


@lru_cache(maxsize=32)
def words(text: str) -> tuple[str, ...]:
    """`"I can't, Mr. No."` → `("I", "ca", "n't", ",", "Mr.", "No", ".")`"""
    return tuple(token for sentence in sentences(text) for token in _treebank(sentence))


def plain_words(text: str) -> list[str]:
    """Runs of letters, digits and underscores; outside ASCII the marks of a letter belong to it, as in "हिंदी"."""
    if text.isascii():
        return _WORD_RE.findall(text)
    return list(regex.findall(r"\w+", text))


def first_words(text: str, count: int) -> list[str]:
    return list(islice((token for sentence in sentences(text) for token in _treebank(sentence)), count))


def _spans(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for end, following, context in _candidates(text):
        if _has_break(context):
            yield start, end
            start = following
    yield start, len(text.rstrip())


def _candidates(text: str) -> Iterator[tuple[int, int, str]]:
    """The places where a sentence may end: the end, the start of what follows, and the words on both sides.

    Marks without white space between them, as in "what?!", are one candidate: the last.
    """
    start = stop = 0  # of the word before the mark
    last: re.Match[str] | None = None
    for match in _END_RE.finditer(text):
        space = max(text.rfind(char, stop, match.start()) for char in " \n\t\r\x0b\x0c")
        word = space + 1 if space > stop else start
        if last and stop <= word:
            yield _candidate(text, start, last)
        start, stop, last = word, match.start(), match
    if last:
        yield _candidate(text, start, last)


def _candidate(text: str, start: int, match: re.Match[str]) -> tuple[int, int, str]:
    following = match.start("next") if match["next"] else match.end()
    return match.end(), following, text[start : match.end()] + match["after"]


def _has_break(context: str) -> bool:
    plain = _PLAIN_RE.match(context)  # most words: spares the tokens
    if plain and not (plain[2] and plain[1].lower() in _ABBREVIATIONS):
        return True
    tokens = [token for line in context.split("\n") for token in _TOKEN_RE.findall(line)]
    return any(map(_ends_sentence, tokens, tokens[1:]))


def _ends_sentence(token: str, after: str) -> bool:
    """Whether a sentence ends with `token`, given the token after it."""
    if token in (".", "?", "!"):
        return True
    if not token.endswith("."):
        return False
    kind, next_kind = _kind(token).removesuffix("."), _kind(after)
    if after.endswith(".") and not _is_open(after):
        next_kind = next_kind.removesuffix(".")
    initial, upper = _INITIAL_RE.fullmatch(token), after[0].isupper()
    starts = upper and next_kind in _STARTERS
    if _is_open(token) or initial:
        return starts
    return not (kind == _NUMBER and (after in _NO_START or after[0].islower()))


def _is_open(token: str) -> bool:
    """Whether the token is an ellipsis or an abbreviation, whose dot may or may not end a sentence."""
    stem = token[:-1].lower()
    if token.endswith("..") or _INITIALS_RE.fullmatch(token):
        return True
    return stem in _ABBREVIATIONS or stem.rpartition("-")[2] in _ABBREVIATIONS


def _kind(token: str) -> str:
    return _NUMBER if _NUMBER_RE.fullmatch(token) else token.lower()


_OPENING_RE = re.compile(r"[«“‘„]|`+")
_OPENED_RE = re.compile(r"\"(?<=[ (\[{<].)|''(?<=[ (\[{<]..)")  # a pattern that starts with its mark is found faster
_LONE_QUOTE_RE = re.compile(r"'(?<!\w.)(?!(?:[rR][eE]|[vV][eE]|[lL][lL]|[mMtTsSdDnN])\b)(?=\w)")
_COLON_RE = re.compile(r"([:,])([^\d])")
_PAD_RE = re.compile(r"\.{2,}|[;@#$%&?!\u2012-\u2015]")
_QUOTE_SPACE_RE = re.compile(r"' (?<=[^']..)")
_PAD_MORE_RE = re.compile(r"[*\]\[(){}<>»”’]|--")
_CLITIC_RE = re.compile(r"'(?<=[^' ].)[sSmMdD]? ")
_LONG_CLITIC_RE = re.compile(r"(?:'(?:ll|LL|re|RE|ve|VE)|n't|N'T)(?<=[^' ]...) ")
_CONTRACTION_RE = re.compile(
    r"\b(?:(can)(not)|(d)('ye)|(gim)(me)|(gon)(na)|(got)(ta)|(lem)(me)|(more)('n))\b|\b(wan)(na)(?=\s)", re.IGNORECASE
)
_MAY_CONTRACT_RE = re.compile(r"nnot|'ye|mme|nna|tta|e'n", re.IGNORECASE)


def _treebank(sentence: str) -> list[str]:
    """The tokens of one sentence. Spaces are put around them rule by rule; each rule relies on those before it."""
    text = _OPENING_RE.sub(r" \g<0> ", sentence)
    if text.startswith('"'):
        text = "``" + text[1:]
    text = _OPENED_RE.sub(" `` ", text.replace("``", " `` "))
    if "'" in text:
        text = _LONE_QUOTE_RE.sub("' ", text)
    text = _COLON_RE.sub(r" \1 \2", _apart_last_dot(text))
    if text.endswith((":", ",")):
        text = f"{text[:-1]} {text[-1]} "
    text = _PAD_RE.sub(r" \g<0> ", text)
    if "'" in text:
        text = _QUOTE_SPACE_RE.sub(" ' ", text)
    text = _PAD_MORE_RE.sub(r" \g<0> ", text).replace("''", " '' ").replace('"', " '' ")
    if "'" in text:
        text = f" {' '.join(text.split())} "
        text = _LONG_CLITIC_RE.sub(r" \g<0>", _CLITIC_RE.sub(r" \g<0>", text))
    if _MAY_CONTRACT_RE.search(text):
        text = _CONTRACTION_RE.sub(lambda match: " {} {} ".format(*filter(None, match.groups())), f"{text} ")
    return text.split()


def _apart_last_dot(text: str) -> str:
    """`He said "no."` → `He said "no . " `"""
    whole = text.rstrip()
    body = whole.rstrip(" ])}>\"'»”’")
    if not body.endswith(".") or body[-2:-1] in ("", "."):
        return text
    return f"{body[:-1]} . {whole[len(body) :]} "
