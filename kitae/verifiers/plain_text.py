"""Verifiers of plain text: does it equal the reference (`exact`, `normalised`), or its number, words, letter or
pattern?

None of them raises, whatever the response. All but `regex` take time linear in its length; a pattern that backtracks
without end is stopped at the worker's deadline. A senseless option is an error of the check, which stops a run before
it begins.
"""

import re
import unicodedata
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import lru_cache
from typing import Any, Literal

from kitae.data.boxes import last_boxed
from kitae.types import Score
from kitae.verifiers.final_answer import boxed_answer
from kitae.verifiers.hedges import is_hedged
from kitae.verifiers.math.units import MAGNITUDES
from kitae.verifiers.visible_text import shown, spaced, tokens

_NUMBER = (
    r"(?:(?<![A-Za-z0-9)\]}])[-+\u2212])?+"  # a sign, but not the minus of 5-3
    r"(?:\\?[$€£¥])?+"
    r"(?<![A-Za-z0-9])(?<![0-9]\.)"  # not the 2 of m2, nor the 3 of 1.2.3
    r"(?:[0-9]++(?:,[0-9]++)*+(?:\.[0-9]++)?+|(?<!\.)\.[0-9]++)"
    r"(?:[eE][-+]?[0-9]{1,9}+)?+(?![0-9]|[eE][-+]?[0-9])"
)
_NUMBER_RE = re.compile(_NUMBER)
_ONLY_NUMBER_RE = re.compile(rf"({_NUMBER})\s*+(?:\\?%)?\.?")
_THOUSANDS_RE = re.compile(r"-?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:[.eE].*)?")
_DECIMAL_COMMA_RE = re.compile(r"-?[0-9]+,[0-9]+")
_GAP = r"(?:\s|~|\\[,;:! ]|\\(?:text|mathrm)\s*+\{)*+"
_MAGNITUDE_RE = re.compile(rf"{_GAP}({'|'.join(MAGNITUDES)})(?<!dozen)s?\b", re.IGNORECASE)  # a dozen is a unit here
_GOES_ON_RE = re.compile(  # what follows a number that is part of a formula: 3/4, 3^4, 3x, 3 + 4, 3 or 4, 3 1/4
    r"\s*+(?:/\s*+(?:[0-9(\\{]|[a-z](?![a-z]))|\^(?!\s*+\{?\s*+(?:\\circ|\\degree|\\text|th|st|nd|rd))|!(?=\s*+[}$])"
    r"|\\(?:[dt]?frac|sqrt|pi|times|cdot|div|pm|d?binom|[lc]?dots)(?![A-Za-z])|[*×·÷±+]\s*+[\\(0-9]|[-\u2212]\s*+[0-9(]"
    r"|[²³¼½¾⅓⅔]|\s+and\s+(?:a|one)\s+(?:half|third|quarter)\b"
    r"|[a-ceikn-rt-z](?![A-Za-z])(?<=[0-9].)|x\s*+[0-9]|[0-9]+\s*+/\s*+[0-9]"
    r"|,?\s*+(?:\\text\s*+\{\s*+)?(?:or|oder|ou)\b[^\n.0-9]{0,8}+[0-9])"
)
_WENT_BEFORE_RE = re.compile(  # what precedes such a number: x^3, \frac{2}{3}, \sqrt 3, 2 * 3, x > 3
    r"(?:(?:[0-9)}]|(?<![A-Za-z])[A-Za-z])\s*[\^_/*×·÷+]|[√<>≤≥]"
    r"|[\}\]]\s*\{|[-\u2212]\(|(?<![A-Za-z])(?:log|ln|sqrt|sin|cos|tan|exp)\s*\(?\s*\Z|\\(?:[dt]?frac|sqrt|d?binom|log|ln|times|cdot|div|pm|[lg]eq?)(?:\[[^\[\]]*\])?)\s*[{(]?\s*\Z"
)
_REASON_RE = re.compile(r"[0-9%](?:\s[A-Za-z]+){0,3}?,?\s\(?(?:because|since|that is|i\.e\.)(?!\w)")
_EXPONENT_RE = re.compile(r"[A-Za-z}][\^_]\{?-?\Z")  # before the 2 of m^2
_NO_NUMBER_RE = re.compile(  # 12:30, not 12
    r"(?<![0-9])[0-9]{1,2}:[0-9]{2}(?![0-9])"
    r"|(?:(?<!\bif )\b(?:not|never|nicht|pas|rather\s+than|instead\s+of)|n['\u2019]t)\b"
    rf"(?:\s++(?:be|is|equal|to|just|only|the|a)\b)*+\s++{_NUMBER}",
    re.IGNORECASE,
)
_MARK_RE = re.compile(
    r"\banswer\b\**\s*(?:is\b|[:=])[\s*:=]*"
    r"|\\boxed\s*\{"
    rf"|\#{{4}}(?=[ \t]*{_NUMBER}[ \t]*%?\.?[ \t\r]*$)",  # not the heading "#### 2. Add up"
    re.IGNORECASE | re.MULTILINE,
)
_MARKS = 8  # how many of the last marks are examined
_LATEX_COMMA_RE = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;: ])(?=[0-9]{3}(?![0-9]))")  # 1{,}234, 1,\!234, 1\,234
_WORD_RE = re.compile(r"[A-Za-z]{2}")
_SHORT = 60  # characters of a response that is an answer rather than a solution
_MARK_REACH = 200  # characters after a mark that can belong to its answer
_SENTENCE_END_RE = re.compile(
    r"\n|[.?](?=\s|$)(?![.?\s]*(?i:no(?=\s*[,;!])|or|alternatively|otherwise|unless|if (?:that|this|it|not))\b)"
)
_PLAIN = str.maketrans({"\u2212": "-"} | dict.fromkeys("+\\$€£¥"))
_EXACT = Context(prec=10_000, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])

_THOUSANDS_COMMA_RE = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_DELETED_RE = re.compile(r"['\u2019\u02bc`]|\.(?![0-9])")  # don't = dont, U.S. = US; but 3.5 is not 35
_CYRILLIC_RE = re.compile(r"(?<![^\W_])[АВСЕавсе](?![^\W_])")  # typed on another keyboard
_MARKUP_RE = re.compile(r"</?(?!answer>)[A-Za-z][^<>\n]{0,100}>")
_CIRCLED = {  # Ⓑ, ⓑ, 🅑, 🄱, 🅱
    start + place: chr(65 + place) for start in (0x24B6, 0x24D0, 0x1F150, 0x1F130, 0x1F170) for place in range(26)
}
_LATIN = str.maketrans("АВСЕавсе", "ABCEabce")
_WORDLIKE = r"A-Za-z0-9\u00c0-\u024f\u0400-\u04ff"
_LETTER = rf"(?P<NAME>[LETTERS])(?![{_WORDLIKE}]|['\u2019-][{_WORDLIKE}])"
_LATEX_OPENER = r"\\(?:[(\[]|(?:text|textbf|mathbf|mathrm|bf|rm)\b\s*\{?)"
_WRAP = rf"(?:[\s*_`\"'$({{\[<\u201c\u300c\uff08]|{_LATEX_OPENER})*+"  # what may stand between a mark and its letter
_UNWRAP = r"[\s)*_\]}\"'$`]*+"
_UNWRAP_LINE = r"[ \t)*_\]}\"'$`]*+"
_NOUN = r"(?:the|correct|right|best|final|option|choice|answer|letter)\b"
_FEW = "{0,6}+"  # bounded, because *+ would read a text of nothing but nouns from each of them to its end
_TO_BE = r"(?:(?:would|should|must|will|has\s+to)\s+be|is|are|was|ist|lautet|es|est|è|é)\b"
_ADVERB = r"(?:thus|hence|therefore|then|indeed|[a-z]+ly)\b,?"  # "the answer is clearly B"
_BOXED_CHOICE = rf"\\boxed\s*+\{{\s*+(?:{_LATEX_OPENER}\s*+)?+\(?{_LETTER}"
_TAGGED_CHOICE = rf"<answer>{_WRAP}(?i:{_NOUN}\s*+){_FEW}{_WRAP}{_LETTER}"
_MARKED_CHOICE = (
    r"(?:\b(?:answer|choice|option|antwort|respuesta|réponse|reponse|risposta|resposta|ответ)\b"
    r"|答案|选项|選項|答え|正解|정답)"
    r"(?:\s+(?:correct[ao]?|correcte|corretta|correta|finale?|to\s[^.:\n]{1,80}?(?=\sis\b)))?+"
    rf"[\s*_\"']*+(?:{_TO_BE}|[:=：]|[-–—](?=\s)|是|为|為|は|은|는)"
    rf"(?:[\s*_:：]*+(?:{_NOUN}|{_ADVERB}|选项|選項)){_FEW}(?:\s*+[:=：])?+"
    rf"(?:\s+not\s+\(?[A-Za-z]\)?,?\s+but\b)?+{_WRAP}{_LETTER}"
)
_HEADED_CHOICE = (
    r"(?:^|\n)[ \t#*_]*+(?:(?:the|my|correct|right|best|final)[ \t]++)*+answer[*_: \t]*+\n"
    rf"{_WRAP}{_LETTER}(?={_UNWRAP_LINE}(?:[.:)]|\n|\Z))"
)
_CHOSEN = (
    r"(?:\b(?:choose|chose|pick|select|go with|opt for|it is|it's|must be|should be|left with|leaves(?: us with)?"
    r"|only option left is)|\bnot\s+\(?[A-Z]\)?,?\s+but)\s+"
    rf"(?:{_NOUN}\s+){_FEW}{_WRAP}{_LETTER}"
)
_SO = rf"\b(?:hence|thus|therefore|so),?\s+(?:{_NOUN}\s+){_FEW}{_WRAP}{_LETTER}(?={_UNWRAP_LINE}\.?[ \t]*+(?:\n|\Z))"
_IS_RIGHT = rf"(?<![{_WORDLIKE}]){_LETTER}{_UNWRAP}\bis\s+(?:the\s+)?(?:correct|right|best|true|answer)\b"
_JSON_KEY = r"\s*+[{\[]\s*+[\"']"  # {"a": 5} chooses nothing
_LEADING = (
    rf"\A(?!{_JSON_KEY}){_WRAP}(?:(?:option|choice)\s+)?{_LETTER}"
    rf"(?={_UNWRAP_LINE}(?:[.:)\],]|\Z|\n|(?<=\s)[-–—]\s))"
)
_LONE = rf"^[ \t>*_#$`(\[]*+{_LETTER}{_UNWRAP_LINE}[.:]?{_UNWRAP_LINE}$"  # a letter alone on its line
_AFTER_QUESTION = rf"(?<=\?)\s+{_LETTER}{_UNWRAP_LINE}[.:]?{_UNWRAP_LINE}\Z"
_JOINED_LETTERS_RE = re.compile(r"(?<=\b[A-J])\s*[\\=]+\s*(?=[A-J]\b)")
_ON_A_LINE = rf"^[ \t>*-]*+{_LETTER}[).:]"
_IN_BRACKETS = rf"\({_LETTER}\)"
_IN_BOLD = rf"\*\*\(?{_LETTER}[).:]*+\s*+\*\*"
_ALSO_RE = re.compile(
    r"[\s)*_\]}\"'$`.]*+(?:\\(?:text|mathrm|textbf)\s*\{\s*)?+((?:or|and|oder|und|ou|et|o|y)\b|[/&+或和]|または|[,、])"
    r"(?:[\s,]*(?:maybe|perhaps|possibly|also|even|option|choice|answer|the)\b)*"
    rf"(?:[\s*_(\"'$`}}]|{_LATEX_OPENER}|\\boxed\s*\{{)*+([A-Za-z])(?![{_WORDLIKE}'\u2019-])[)\]}}*_\"$`]*+"
)


def exact(response: str, reference: Any, context: Mapping[str, Any], *, ignore_case: bool = False) -> Score:
    """1 where response and reference are the same text, thoughts before `</think>` and outer white space aside."""
    got, want = after_thought(response).strip(), str(reference).strip()
    if ignore_case:
        got, want = got.casefold(), want.casefold()
    return Score(float(got == want))


def normalised(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    ignore_case: bool = True,
    ignore_punctuation: bool = True,
    ignore_accents: bool = False,
    ignore_spaces: bool = False,
    articles: str = "a an the",
) -> Score:
    """1 where response and reference are the same after Unicode NFKC and the chosen simplifications.

    What is thought before `</think>` does not count. A reference that is a list holds several right answers. White
    space is always collapsed; `ignore_spaces` removes it, for scripts that do not use it. `articles` are words to drop
    ("der die das"); "" drops none. Punctuation goes, but not where it carries meaning: the point of 3.5, a sign before
    a digit, the marks % # & @ and all symbols stay.
    Where nothing of a reference would be left ("The", "?"), it is compared with only case and outer space aside.
    Not covered: synonyms, number words, spelling variants.
    """
    answers = _answers(reference)
    if not answers:
        return Score.error("the reference of 'normalised' must be text or a list of texts, got an empty list")

    def simplify(text: str) -> str:
        return _simplify(text, ignore_case, ignore_punctuation, ignore_accents, ignore_spaces, articles)

    response = after_thought(response)
    got, plain = simplify(response), _casefold(response.strip(), ignore_case)
    for answer in answers:
        want = simplify(answer)
        if (want and got == want) or (not want and plain == _casefold(answer.strip(), ignore_case)):
            return Score(1.0)
    return Score(0.0, detail=f"read as {got[:100]!r}")


def f1(response: str, reference: Any, context: Mapping[str, Any], *, articles: str = "a an the") -> Score:
    """The harmonic mean of precision and recall of the response's tokens, against the best of the references.

    What is thought before `</think>` does not count. Tokens are words after the simplifications of `normalised`; in
    scripts without spaces (Chinese, Japanese, Thai …) every character is one. Repeated tokens count as often as they
    occur in both. Word order plays no part.
    """
    answers = _answers(reference)
    if not answers:
        return Score.error("the reference of 'f1' must be text or a list of texts, got an empty list")
    response = after_thought(response)
    got = Counter(tokens(_simplify(response, True, True, False, False, articles)))
    return max((_overlap(got, response, answer, articles) for answer in answers), key=lambda score: score.value)


def number(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    strict: bool = False,
    tolerance: float = 0,
    relative: float = 0,
) -> Score:
    r"""1 where the response's number is the reference, give or take a tolerance, in exact decimal arithmetic.

    The margin is `tolerance`, or the share `relative` of the reference (0.01 is one per cent) where that is more.
    The response is what comes after `</think>`, or inside its last <answer></answer>. Its number is the one after its
    last mark ("#### 12", "the answer is 12", "\boxed{12}"), or else the last one in the text; with `strict` it must be
    all there is, thoughts and tags included. A number that is part of a formula (3/4, 3^4, 3x, "3 or 4") is none, nor
    is one that is denied ("not 3"). Thousands separators, those of LaTeX too, a currency sign and a percent sign are
    read over: "50%" is 50. "3 million" is 3000000, and 0,5 is 0.5. Not read: fractions, number words, "2 x 10^5".
    """
    want = _reference_number(str(reference))
    if want is None:
        return Score.error(f"the reference of 'number' must be one number, got {str(reference)[:100]!r}")
    margins = [_margin(tolerance), _margin(relative)]
    if None in margins:
        return Score.error(f"tolerance and relative must be numbers from 0 up, got {tolerance!r} and {relative!r}")
    got = only_number(response) if strict else final_number(response)
    if got is None:
        return Score(0.0, detail="no number in the response")
    absolute, share = margins
    assert absolute is not None and share is not None
    margin = max(absolute, _EXACT.multiply(share, _EXACT.abs(want)))
    right = _EXACT.subtract(want, margin) <= got <= _EXACT.add(want, margin)
    return Score(float(right), detail="" if right else f"read as {str(got)[:100]}")


def regex(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    pattern: str = "",
    full: bool = False,
    ignore_case: bool = False,
) -> Score:
    """1 where the pattern is found in the response; with `full`, where it matches all of it, outer white space aside.

    The pattern is the option, or the reference where the option is empty; Python's syntax, with inline flags such as
    (?s). There is no time limit in here: a pattern that backtracks without end is stopped by the worker's deadline.
    """
    source = pattern or reference
    if not isinstance(source, str) or not source:
        return Score.error(f"the pattern of 'regex' must be text, as reference or option, got {source!r}"[:200])
    compiled = _compile(source, ignore_case)
    if isinstance(compiled, str):
        return Score.error(f"the pattern of 'regex' must be valid, got {source[:100]!r}: {compiled}")
    found = compiled.fullmatch(response.strip()) if full else compiled.search(response)
    return Score(float(found is not None), detail="" if found else "no match")


def choice(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    letters: str = "ABCDEFGHIJ",
    pick: Literal["last", "first"] = "last",
) -> Score:
    r"""1 where the response chooses the reference's letter: "B", "(B)", "B. Paris", or the number 1 for B.

    What is thought before `</think>` does not count. Looked for, in this order: \boxed{B}; <answer>B; "the answer is
    B", "Answer: (B)", "I choose B", "option B is correct", and their like in other languages; a letter alone on its
    line; a response that begins with its letter ("B", "b)", "**B.** Paris"). Of several marks, `pick` says which
    counts. Without any mark, the letters that stand alone as "(B)", "**B**" or at the start of a line as "B." count,
    if they are all the same one. Two letters at one mark ("A or B") are no choice. Not covered: the text of an option
    without its letter.
    """
    if not (letters.isascii() and letters.isalpha()):
        return Score.error(f"letters must be letters from A to Z, got {letters!r}")
    want = _reference_letter(reference, letters)
    if want is None:
        return Score.error(
            f"the reference of 'choice' must be one of the letters {letters}, got {str(reference)[:80]!r}"
        )
    if pick not in ("last", "first"):
        return Score.error(f"pick must be 'last' or 'first', got {pick!r}")
    text = spaced(shown(after_thought(response)))
    if not text.isascii():
        text = _CYRILLIC_RE.sub(lambda c: c[0].translate(_LATIN), text.translate(_CIRCLED))
    text = _MARKUP_RE.sub(" ", text)
    got = _chosen_letter(text, letters.upper(), pick)
    return Score(float(got == want), detail=f"chose {got}" if len(got) == 1 else got)


def after_thought(response: str) -> str:
    """The text after the reasoning: `"<think>2?</think>3"` → `"3"`; nothing if the reasoning does not end."""
    said = response.rpartition("</think>")[2]
    return "" if said.lstrip().startswith("<think>") else said


def inside_tag(text: str, name: str) -> str | None:
    """The contents of the last complete `<name>…</name>`: `inside_tag("<a>1</a><a>2</a>", "a")` → `"2"`."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return text[start + len(name) + 2 : end].strip() if end >= 0 and start >= 0 else None


def _answers(reference: Any) -> list[str]:
    return [str(r) for r in reference] if isinstance(reference, list | tuple) else [str(reference)]


def _casefold(text: str, ignore_case: bool) -> str:
    text = unicodedata.normalize("NFKC", text)
    return unicodedata.normalize("NFKC", text.casefold()) if ignore_case else text


def _simplify(
    text: str, ignore_case: bool, ignore_punctuation: bool, ignore_accents: bool, ignore_spaces: bool, articles: str
) -> str:
    text = _casefold(text, ignore_case)
    if ignore_accents:
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    if ignore_punctuation:
        text = _DELETED_RE.sub("", _THOUSANDS_COMMA_RE.sub("", text))
        text = "".join(_spaced(text))
    dropped = frozenset(_casefold(articles, ignore_case).split())
    return ("" if ignore_spaces else " ").join(word for word in text.split() if word not in dropped)


def _spaced(text: str) -> Iterator[str]:
    """The characters, with a space for each mark of punctuation that carries no meaning."""
    for i, c in enumerate(text):
        signs = c in ".-" and text[i + 1 : i + 2].isdigit() and (c == "." or not text[max(0, i - 1) : i].isalnum())
        yield c if signs or c in "%#&@" or not unicodedata.category(c).startswith("P") else " "


def _overlap(got: Counter[str], response: str, answer: str, articles: str) -> Score:
    want = Counter(tokens(_simplify(answer, True, True, False, False, articles)))
    if not want:
        same = float(_casefold(response.strip(), True) == _casefold(answer.strip(), True))
        return Score(same, {"precision": same, "recall": same})
    shared = sum((got & want).values())
    if not shared:
        return Score(0.0, {"precision": 0.0, "recall": 0.0}, detail="no token in common")
    precision, recall = shared / got.total(), shared / want.total()
    return Score(2 * precision * recall / (precision + recall), {"precision": precision, "recall": recall})


def _margin(value: object) -> Decimal | None:
    try:
        margin = Decimal(str(value))
    except ArithmeticError:
        return None
    return margin if margin.is_finite() and margin >= 0 else None


@lru_cache(maxsize=256)
def _compile(source: str, ignore_case: bool) -> re.Pattern[str] | str:
    """The compiled pattern, or what is wrong with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "[[" is legal, and Python only warns that it may one day mean a set
        try:
            return re.compile(source, re.IGNORECASE if ignore_case else 0)
        except (re.error, OverflowError, RecursionError) as error:
            return str(error)


def _reference_letter(reference: Any, letters: str) -> str | None:
    if isinstance(reference, int) and not isinstance(reference, bool):
        return letters.upper()[reference] if 0 <= reference < len(letters) else None
    found = re.match(r"[\W_]*+([A-Za-z])(?=[\W_]*+\Z|[).:])", str(reference))
    return found[1].upper() if found and found[1].upper() in letters.upper() else None


def _chosen_letter(text: str, letters: str, pick: Literal["last", "first"]) -> str:
    """The letter that the text chooses, or the reason why it chooses none."""
    *surest, lone, mention = _choice_patterns(letters)
    for pattern in surest:
        if marks := [m for m in pattern.finditer(text) if _is_letter(text, m)]:
            mark, before = (marks[-1], marks[-2:-1]) if pick == "last" else (marks[0], [])
            joined = any(_another(text, m, letters) == _place(mark) for m in before)
            several = joined or _another(text, mark, letters) is not None or _is_hedged_letter(text, mark, letters)
            return "more than one letter" if several else _captured(mark)
    alone = {_captured(m) for m in lone.finditer(text)}
    if len(alone) == 1:
        return alone.pop()
    mentioned = {_captured(m) for m in mention.finditer(text)}
    if len(mentioned) > 1:
        return "more than one letter, and none marked as the answer"
    leading = re.match(_pattern(_LEADING, letters + letters.lower()), text, re.IGNORECASE)
    if leading and _is_letter(text, leading) and mentioned <= {_captured(leading)}:
        several = _another(text, leading, letters) is not None or _is_hedged_letter(text, leading, letters)
        return "more than one letter" if several else _captured(leading)
    if any(_is_hedged_letter(text, m, letters) for m in mention.finditer(text)):
        return "more than one letter"
    return mentioned.pop() if mentioned else "no letter in the response"


def _captured(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()


def _place(match: re.Match[str]) -> int:
    return max(match.start(group) for group in match.groupdict())


def _is_letter(text: str, match: re.Match[str]) -> bool:
    """Whether it is a choice, rather than a word as in "the answer is a whale" and "the answer is I think …"."""
    letter = next(group for group in match.groups() if group)
    return not ((letter.islower() or letter == "I") and _word_follows(text, _place(match) + 1))


def _is_hedged_letter(text: str, match: re.Match[str], letters: str) -> bool:
    """Whether a sentence offers other letters besides the one it chooses, or denies it: "B (or A)", "B is wrong"."""
    place = _place(match)
    start = max(text.rfind("\n", 0, place) + 1, place - 80)
    line = text[start : place + _MARK_REACH].partition("\n")[0]
    at = place - start
    line = _JOINED_LETTERS_RE.sub(lambda sign: "&" * len(sign[0]), line)
    return is_hedged(line, at, at + 1, _lone_letter(letters), bounds=False)


@lru_cache(maxsize=16)
def _lone_letter(letters: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?<![{_WORDLIKE}'\u2019]|\\)[{letters}](?![{_WORDLIKE}'\u2019])(?!\s+(?:(?!(?:as\s+well|too|also|or|and|both)\b)[a-z]{{2}}|is\b))"
    )


def _word_follows(text: str, end: int) -> bool:
    return text[end : end + 1] == " " and text[end + 1 : end + 2].isalpha()


def _another(text: str, match: re.Match[str], letters: str) -> int | None:
    """The position of C if "or C" follows; None if it begins a sentence: "B, I think", "B, a city"."""
    end = _place(match) + 1
    tail = text[end : end + 60]
    also = _ALSO_RE.match(tail)
    if also is None or also[2].upper() not in letters or also[2].upper() == _captured(match):
        return None
    sentence = _word_follows(tail, also.end()) and (also[1] in (",", "、") or also[2] in ("I", "a"))
    return None if sentence else end + also.start(2)


def _pattern(source: str, letters: str, name: str = "letter") -> str:
    return source.replace("LETTERS", letters).replace("NAME", name)


@lru_cache(maxsize=16)
def _choice_patterns(letters: str) -> Sequence[re.Pattern[str]]:
    """One pattern for each way to state a choice, the clearest first and loose mentions last."""

    def either(letters: str, *sources: str) -> str:
        return "|".join(_pattern(source, letters, f"c{i}") for i, source in enumerate(sources))

    marked = either(letters + letters.lower(), _MARKED_CHOICE, _HEADED_CHOICE, _CHOSEN, _SO, _IS_RIGHT)
    return (
        re.compile(_pattern(_BOXED_CHOICE, letters + letters.lower())),
        re.compile(_pattern(_TAGGED_CHOICE, letters + letters.lower())),
        re.compile(marked, re.IGNORECASE),
        re.compile(either(letters, _LONE, _AFTER_QUESTION), re.MULTILINE),
        re.compile(either(letters, _IN_BRACKETS, _IN_BOLD, _ON_A_LINE), re.MULTILINE),
    )


def marked_answers(text: str) -> Iterator[str]:
    """The text after each of the last answer marks, up to the end of its sentence, last one first.

    "The answer is 12. Bye" → "12"
    """
    for mark in reversed(deque(_MARK_RE.finditer(text), maxlen=_MARKS)):
        answer = text[mark.end() : mark.end() + _MARK_REACH]
        end = _SENTENCE_END_RE.search(answer)
        answer = answer[: end.start()] if end else answer
        yield _braced(answer) if mark[0].endswith("{") else answer


def _braced(text: str) -> str:
    """The text up to and including the brace that closes one opened before it: `"5}, or"` → `"5}"`."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return text[: place + 1]
    return text


def _reference_number(text: str) -> Decimal | None:
    only = only_number(text)
    if only is not None:
        return only
    return next((number for answer in marked_answers(text) if (number := _first_number(answer)) is not None), None)


def final_number(text: str) -> Decimal | None:
    """The number that `number` reads in a response, or None."""
    text = spaced(shown(after_thought(text)))
    if text.count(r"\boxed") > 1 and (boxed := boxed_answer(text)) != last_boxed(text):  # several, side by side
        return _first_number(boxed or "")
    text = _LATEX_COMMA_RE.sub(",", inside_tag(text, "answer") or text)
    for answer in marked_answers(text):
        if any(map(str.isdigit, answer)):
            return _first_number(answer)
    return _last_number(text)


def only_number(text: str) -> Decimal | None:
    """The number that is the whole text, or None."""
    match = _ONLY_NUMBER_RE.fullmatch(spaced(text).strip())
    return None if match is None or _is_list(match[1]) else _decimal(match[1])


def _first_number(answer: str) -> Decimal | None:
    """The number of the last side of a marked answer, or else its first: 5 in "2 + 3 = 5 apples, since x = 2"."""
    answer = _NO_NUMBER_RE.sub(_blank, answer)
    reason = _REASON_RE.search(answer)
    end = reason.start() + 1 if reason else len(answer)
    for start in (answer.rfind("=", 0, end) + 1, 0):
        match = _NUMBER_RE.search(answer, start)
        if match and not is_hedged(answer, *match.span(), _NUMBER_RE):
            value = _whole_number(answer, match)
            if value is not None:
                return value
    return None


def _last_number(text: str) -> Decimal | None:
    text = _NO_NUMBER_RE.sub(_blank, text)
    numbers = (match for match in _NUMBER_RE.finditer(text) if not _EXPONENT_RE.search(_before(text, match)))
    last = next(iter(deque(numbers, maxlen=1)), None)
    if last is None or _is_hedge(text, last):
        return None
    return _whole_number(text, last)


def _is_hedge(text: str, number: re.Match[str]) -> bool:
    """Whether the sentence of a number denies it or has another one instead, or an answer alone bounds it."""
    begin, place = max(0, number.start() - _MARK_REACH), number.start()
    around = text[begin : number.end() + _MARK_REACH]
    ends = [found.span() for found in _SENTENCE_END_RE.finditer(around)]
    first = max((end for _, end in ends if begin + end <= place), default=0)
    last = min((start for start, _ in ends if begin + start >= number.end()), default=len(around))
    sentence, place = around[first:last], place - begin - first
    short = len(text.strip()) <= _SHORT
    bare = short and not _WORD_RE.search(text)
    if bare:
        sentence, place = text, number.start()
    return is_hedged(sentence, place, place + len(number[0]), _NUMBER_RE, bounds=short, commas=bare)


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])


def _before(text: str, match: re.Match[str]) -> str:
    return text[max(0, match.start() - 30) : match.start()]


def _whole_number(text: str, match: re.Match[str]) -> Decimal | None:
    """The number times a magnitude after it ("3 million"); None if it is part of a formula."""
    if _GOES_ON_RE.match(text, match.end()) or _WENT_BEFORE_RE.search(_before(text, match)):
        return None
    magnitude = _MAGNITUDE_RE.match(text, match.end())
    value = _decimal(match[0])
    return _EXACT.multiply(value, Decimal(MAGNITUDES[magnitude[1].lower()])) if magnitude else value


def _is_list(token: str) -> bool:
    return "," in token and not _THOUSANDS_RE.fullmatch(token.translate(_PLAIN))


def _decimal(token: str) -> Decimal:
    """`"-$1,234.50"` → `-1234.50`; `"0,5"` → `0.5`; of a list such as "1,2,3", the last."""
    plain = token.translate(_PLAIN)
    if not _is_list(token):
        return Decimal(plain.replace(",", ""))
    return Decimal(plain.replace(",", ".") if _DECIMAL_COMMA_RE.fullmatch(plain) else plain.rpartition(",")[2])
