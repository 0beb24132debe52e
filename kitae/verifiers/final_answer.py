r"""Finds the final answer of a response: in a box, in a tag, after ####, after a phrase, or the last expression.

    find_answers("So \boxed{3}. The answer is 4", ("boxed", "phrase")) → "3", "4"

Everything here maps text to text, takes time linear in the length of the response, and never raises. Verifiers
interpret the answer. Not covered: answers that are spread over a sentence ("five apples and, for Tom, three"), and
phrases in languages that `_PHRASES` does not list.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator

from kitae.data.boxes import boxes
from kitae.errors import VerifierError
from kitae.verifiers.hedges import LETTER, is_hedged, joins
from kitae.verifiers.visible_text import shown

_TAIL = 4_000  # characters at the end of a response that are searched for phrases and expressions
_REACH = 400  # characters after a phrase that can belong to its answer
_MARKS = 8  # how many of the last phrases are examined
_FEW_WORDS = 6
_SHORT = 60  # characters of a response that is an answer rather than a solution
_MAX_BOX = 4_000  # characters; longer contents are no answer

_JOINT_RE = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;:!~ ]|\\q?quad|\\(?:text|mbox)\s*\{|\}|and|or|und|oder|et|ou|y|o|и|和|或|、|，)*"
)
_JOINT_WORD_RE = re.compile(r"[,;、，和或и]|and|or|und|oder|\b(?:et|ou|y|o)\b")
_AND_RE = re.compile(r"[,;、，和и&]|\b(?:and|und|et|y)\b")
_OR_RE = re.compile(r"or|oder|\b(?:ou|o)\b|或")
_LABELS_RE = re.compile(
    r"[ \t|]*\n[ \t|]*(?:[-*+•][ \t]+|\(?[0-9A-Za-z]{1,3}[.):][ \t]*|[^|\n]{0,40}\|)[ \t]*"
)  # of lists, tables
_THEN_RE = re.compile(r"\bthen\b", re.IGNORECASE)
_HASH_RE = re.compile(r"(?<!\#)\#{4}(?!\#)[ \t]*([^\n]*)")
_THOUGHT_END = "</think>"

_PHRASES = (
    # English, German, Dutch, Swedish, Danish, Norwegian
    r"answer(?:\s+(?:to\s+[^.:\n]{1,80}?|here))?\W{0,4}?\s*(?:is|are|would\s+be|will\s+be|equals|=|:)",
    r"(?:endg[üu]ltige\s+|finale\s+)?antwort(?:\s+(?:ist|lautet|:)|\s*\W{0,3}?\s*[:：])|(?:ergebnis|lösung)\s*(?:ist|lautet|:)",
    r"antwoord(?:\s+is|\W{0,3}?\s*[:：])",
    r"svar(?:et)?(?:\s+(?:är|er)|\W{0,3}?\s*[:：])",
    # French, Spanish, Portuguese, Italian, Romanian
    r"r[ée]ponse(?:\s+finale)?(?:\s+est|\W{0,3}?\s*[:：])",
    r"respuesta(?:\s+(?:final|correcta))?(?:\s+es|\W{0,3}?\s*[:：])",
    r"resposta(?:\s+(?:final|correta))?(?:\s+[ée]|\W{0,3}?\s*[:：])",
    r"risposta(?:\s+(?:finale|corretta))?(?:\s+[èe]|\W{0,3}?\s*[:：])",
    r"r[ăa]spunsul(?:\s+final)?(?:\s+este|\W{0,3}?\s*[:：])",
    # Russian, Ukrainian, Polish, Czech
    r"ответ(?:\s+(?:равен|это|есть|—|-)|\W{0,3}?\s*[:：])",
    r"відповідь(?:\s*[—-]|\W{0,3}?\s*[:：])",
    r"odpowied[źz](?:\s+(?:to|brzmi)|\W{0,3}?\s*[:：])|odpověď(?:\s+je|\W{0,3}?\s*[:：])",
    # Turkish, Indonesian, Vietnamese, Swahili
    r"(?:cevap|yanıt)(?:\s*:|ı?\s*[:=])|jawaban(?:nya)?(?:\s+(?:akhir(?:nya)?\s+)?adalah|\W{0,3}?\s*[:：])",
    r"(?:đáp\s+án|đáp\s+số|câu\s+trả\s+lời)(?:\s+(?:cuối\s+cùng\s+)?là|\W{0,3}?\s*[:：])",
    r"jibu(?:\s+(?:la\s+mwisho\s+)?ni|\W{0,3}?\s*[:：])",
    # "A: 12" after a question; not where options follow
    r"(?:^|\n)[\s*_#]*+(?-i:A)[*_]{0,4}[:：](?![^\n]*\n[\s*_#]*+(?-i:B)[*_]{0,4}[:：.)])",
    # Chinese, Japanese, Korean
    r"(?:答案|答)\s*(?:应该|應該)?(?:是|为|為|[:：])[:：]?",
    r"(?:答え|答|解答|正解)\s*(?:は|[:：])[、::]?",
    r"(?:정답|답|답변)\s*(?:은|는|[:：])",
    # Arabic, Persian, Hebrew, Hindi, Bengali, Telugu, Thai
    r"(?:الجواب|الإجابة|الاجابة)(?:\s+النهائية|\s+النهائي)?\s*(?:هو|هي|[:：])|پاسخ\s*(?:نهایی\s*)?[:：]",
    r"התשובה(?:\s+הסופית)?\s*(?:היא|הוא|[:：])",
    r"उत्तर\s*(?:है|[:：])",
    r"উত্তর\s*(?:হল|হলো|হচ্ছে|[:：])|సమాధానం\s*[:：]?|คำตอบ\s*(?:คือ|[:：])",
)
_PHRASE_RE = re.compile("(?:" + "|".join(_PHRASES) + r")[\s*_:：]*", re.IGNORECASE)
_SENTENCE_END_RE = re.compile(  # not before what takes the sentence back: "12. Or 13"
    r"\n|[.?!](?=[*_\"')]*(?:\s|$))"
    r"(?![*_\"')\s.?]*(?i:no(?=\s*[,;!])|or|alternatively|otherwise|unless|if (?:that|this|it|not))\b)|[。！？]"
)
_MATH_RE = re.compile(
    r"\$\$(?P<display>.+?)\$\$"
    r"|\\\[(?P<bracket>.+?)\\\]"
    r"|\\\((?P<paren>.+?)\\\)"
    r"|(?<!\\)\$\s*(?P<dollar>(?:\\.|[^$\n\\])+?)\s*(?<!\\)\$(?![0-9])",
    re.DOTALL,
)
_NUMBER = (
    r"(?:(?<![A-Za-z0-9)\]}])[-+\u2212])?+(?:\\?[$€£¥])?+(?<![A-Za-z0-9_^{.])(?<![0-9][,.])"
    r"(?:[0-9]++(?:,[0-9]{3}(?![0-9]))*+(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][-+]?[0-9]{1,4}(?![0-9A-Za-z]))?+(?:\s?\\?%)?+"
)
_PLAIN_EXPRESSION_RE = re.compile(rf"{_NUMBER}(?:\s?[-+*/^×·÷]\s?\(?(?:{_NUMBER}|[0-9.]++)\)?)*+")
_BRACED = r"\{(?:[^{}\n]++|\{(?:[^{}\n]++|\{[^{}\n]*+\})*+\})*+\}"
_SPAN_RE = re.compile(  # a formula without dollars within a sentence: numbers, single letters, signs and commands
    rf"(?:{_NUMBER}|\\[A-Za-z]++(?:\s*+\[[^\[\]\n]*+\])?+(?:\s*+{_BRACED}|[0-9])*+|\\[{{}}%,;! ]"
    r"|(?<![^\W\d_])(?:[A-Za-z](?![^\W\d_]|['’])|(?:sqrt|log|ln|sin|cos|tan|pi|and|or|또는|或|или)(?![^\W\d_]))"
    r"|(?<=[_^(\[{,:√])[0-9]++|[-+*/^=<>≤≥≠≈±×·÷−√π∞°²³!|(){}\[\],:;_ \t])++"
)
_LAYOUT_RE = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|eqnarray|split)\*?\}")
_VALUE_RE = re.compile(r"[0-9π∞]|\\[A-Za-z]")
_LABEL_RE = re.compile(r"(?:step|case|part|problem|question|example|figure|equation|section)\s*$", re.IGNORECASE)
_STRAY_RE = re.compile(r"(?:[A-Za-z]\s+)+(?=[-+$€£\\(0-9])|[-−+]\s+(?=[^\s])|(?:and|or)\s+")
_STRAY_END_RE = re.compile(r"(?<![=+*/<>-])\s+(?:[aAIyou]|and|or)$")
_VALUE_LIKE_RE = re.compile(rf"{_NUMBER}|(?<![A-Za-z\\])[A-J](?![A-Za-z'’])(?!\s+[a-z]{{2}})")
_NOTHING_RE = re.compile(r"(?!)")
_BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
_ATTACHED_RE = re.compile(r"^([$€£]?[0-9][0-9.,]*)([mgshLAWVNJ])$")  # 12m: a unit, or a product
_NAMED_RE = re.compile(r"\s*([A-Za-z](?:_\w)?)\s*=[^=<>]+")
_LEAD_RE = re.compile(
    r"\s*(?:\\(?:text|mbox|textbf|mathrm)\s*\{\s*)?(?:(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s*:|\s+is\b\s*:?)"
    r"|(?:approximately|approx\.|about|exactly)(?![A-Za-z]))\s*(\}?)\s*",
    re.IGNORECASE,
)
_DENIED_RE = re.compile(
    r"(?:\b(?:not|cannot|neither|non|pas|nicht|rather than|instead of)\b|n['’]t\b|不是)[^.,;。，\n]*",
    re.IGNORECASE,
)
_CHOICE_RE = re.compile(
    r"(?<![A-Za-z0-9$\\{^_])(?:\(([A-H])\)|([B-H]|A(?!\s+(?!is\b|or\b|and\b|because\b|since\b|as\b)[a-z])))(?![A-Za-z0-9'’=}$^_])"
)
_PARTS_RE = re.compile(r"(?:[0-9.]+ [a-z]+\.?(?:,? | and |$)){1,3}")  # 3 feet 4 inches
_COMMAND_RE = re.compile(r"\\[A-Za-z]+\*?(?:\s*\{[^{}$\\]*[A-Za-z][^{}$\\]*\})?")
_LETTERS_RE = re.compile(r"[A-Za-z]{2,}")
_FOREIGN_RE = re.compile(r"[^\W\d_a-zA-Zα-ωΑ-Ω]|[α-ωΑ-Ω]{2}")
_FORMULA_WORDS = {
    "and", "or", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
    "ln", "log", "exp", "sqrt", "abs", "pi", "theta", "alpha", "beta", "min", "max", "gcd", "lcm", "inf",
    "infinity", "oo", "union", "cm", "mm", "km", "kg", "mg", "ml", "ft", "in", "lb", "lbs", "oz", "mph", "mod",
    "deg", "degrees", "percent",
}  # fmt: skip
_SMALL_WORDS = {"so", "So", "is", "Is", "it", "It", "we", "We", "to", "of", "the", "The", "are", "has", "get"}
_REASON_RE = re.compile(
    r",?\s(?:because|since|which|as|where|when|so|if|denn|weil|da|car|porque|perché)\s"
    r"|,?(?:\s(?:and|but))?\s(?:not|rather\s+than|instead\s+of)\s+(?=[-$\\(0-9]|[A-H]\b)(?=[^,;]*$)"
)


def find_answers(text: str, order: tuple[str, ...]) -> Iterator[str]:
    """The final answer by each way in `order` that finds one. The first is the answer, the others are alternatives.

    A reasoning model's text before its last `</think>` is ignored if anything follows it.
    """
    text = after_reasoning(text)
    for way in order:
        answer = WAYS[way](text)
        if answer is not None and answer.strip():
            yield without_lead(answer).strip()


def after_reasoning(text: str) -> str:
    """What is shown after the reasoning, with the digits of all scripts as 0 to 9."""
    _, _, after = text.rpartition(_THOUGHT_END)
    text = shown(after if after.strip() else text)
    if text.isascii():
        return text
    return re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.decimal(digit[0])), text)


def without_lead(answer: str) -> str:
    r"""`"\text{Answer: } 7"` → `"7"`: an answer without the words that announce it."""
    lead = _LEAD_RE.match(answer)
    if lead is None:
        return answer
    rest = answer[lead.end() :]
    opened = "{" in lead[0] and not lead[1]
    return (rest.removesuffix("}") if opened else rest) or answer


_TEXT_RE = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm)\s*\{([^{}]*)\}")
_VERB_RE = re.compile(
    r"\b(?:is|are|was|were|equals|has|have|gets|makes|costs|needs|takes)\b(?:\s+equal\s+to\b)?", re.IGNORECASE
)
_OF_THEM_RE = re.compile(r"\s+(?:of\s+(?:them|these|those)|in\s+(?:all|total)|altogether|left|ways)?[.!\s]*\Z")
_SPOKEN_RE = re.compile(r"\s*(yes|no|true|false)\s*[,.;:!]?\s+(.*)", re.IGNORECASE | re.DOTALL)
_DOUBT_RE = re.compile(
    r"[0-9]|n['’]t\b|\b(?:not|no|none|nobody|nothing|never|nor|neither|if|unless|whether|or|either|but|except|opposite|wrong|incorrect"
    r"|false|true|yes|impossible|excluded|invalid|could|might|may|maybe|perhaps|possibly|any|anything|every|everything|all|who|guess)\b",
    re.IGNORECASE,
)


def stated_answer(text: str) -> str | None:
    """What a sentence in the place of an answer states: "Therefore there are 5 of them" → "5 of them"; or None."""
    plain = _TEXT_RE.sub(r" \1 ", text).strip() if "\\" in text else text
    if len(plain) > _REACH or " " not in plain:
        return None
    if spoken := _SPOKEN_RE.fullmatch(plain):
        return None if _DOUBT_RE.search(spoken[2]) or " " not in spoken[2].strip() else spoken[1]
    verbs = list(_VERB_RE.finditer(plain))
    if len(verbs) != 1 or not plain[: verbs[0].start()].strip() or _DOUBT_RE.search(plain[: verbs[0].start()]):
        return None
    return clean(_OF_THEM_RE.sub("", plain[verbs[0].end() :])) or None


def chosen_letter(text: str) -> str | None:
    """The letter that prose decides for, if it is clear: "for sure D, it can't be A or B" → "D"."""
    text = after_reasoning(text)[-_TAIL:]
    sentences = [part for part in _SENTENCE_END_RE.split(text) if part.strip()]
    marks = deque(_PHRASE_RE.finditer(text), maxlen=1)
    places = [_SENTENCE_END_RE.split(text[mark.end() : mark.end() + _REACH].lstrip(), maxsplit=1)[0] for mark in marks]
    for place in [*places, *sentences[-1:], text[:_REACH] if len(text) <= _REACH else ""]:
        sure = _DENIED_RE.sub(lambda denied: " " * len(denied[0]), place)
        letters = {found[1] or found[2]: found for found in _CHOICE_RE.finditer(sure)}
        if letters:
            ((letter, found), *others) = letters.items()
            return None if others or is_hedged(place, *found.span(), LETTER) else letter
    return None


def parse_order(extract: str, *, strict: bool = False) -> tuple[str, ...]:
    """`"boxed, last"` → `("boxed", "last")`; with `strict`, only the ways that a response cannot take by accident."""
    order = tuple(way.strip() for way in extract.split(",") if way.strip())
    unknown = [way for way in order if way not in WAYS]
    if unknown or not order:
        raise VerifierError(f"extract must list some of {', '.join(WAYS)}, got {extract!r}")
    if not strict:
        return order
    kept = tuple(way for way in order if way in STRICT_WAYS)
    if not kept:
        raise VerifierError(f"strict extraction needs one of {', '.join(STRICT_WAYS)} in extract, got {extract!r}")
    return kept


def boxed_answer(text: str) -> str | None:
    r"""The last box. Boxes joined by "and", "or" or a comma are one list: `\boxed{1} and \boxed{2}` → "1, 2"."""
    found = boxes(text)
    if not found:
        return None
    found = [box for box in found if box[2].strip()] or found
    answer = found[-1][2]
    for (_, end, inside), (start, _, _) in zip(reversed(found[:-1]), reversed(found), strict=False):
        joint = _LABELS_RE.sub("; ", text[end:start])
        if not joins(joint) or _THEN_RE.search(joint) or inside.strip() == answer.strip():
            break
        answer = (
            f"{inside}, {answer}" if _AND_RE.search(joint) and not _OR_RE.search(joint) else f"{inside} or {answer}"
        )
    return answer if len(answer) <= _MAX_BOX else None


def tagged_answer(text: str) -> str | None:
    """The contents of the last <answer></answer>, or of the box within it."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return None
    inside = text[start + len("<answer>") : end]
    boxed = boxed_answer(inside)
    return (clean(inside) if boxed is None else boxed)[:_MAX_BOX]


def hash_answer(text: str) -> str | None:
    """The text after the last #### on its line, but not a Markdown heading such as "#### 2. Add up"."""
    for mark in reversed(deque(_HASH_RE.finditer(text), maxlen=_MARKS)):
        answer = clean(mark[1].rpartition("####")[2])
        if answer and not re.match(r"(?:step|part|case)\b|[0-9]+[.)]\s+\D", answer, re.IGNORECASE):
            return answer[:_MAX_BOX]
    return None


def phrase_answer(text: str) -> str | None:
    """The text after the last phrase like "the answer is", up to the end of its sentence."""
    for answer in phrase_answers(text[-_TAIL:]):
        if answer:
            return answer
    return None


def phrase_answers(text: str) -> Iterator[str]:
    """The text after each of the last phrases, last one first: "The answer is 12. Bye" → "12"."""
    for mark in reversed(deque(_PHRASE_RE.finditer(text), maxlen=_MARKS)):
        after = text[mark.end() : mark.end() + _REACH]
        formula = _leading_formula(after)
        yield clean(_from_sentence(after) if formula is None else formula)


def _from_sentence(text: str) -> str:
    """The answer in a sentence: the whole sentence, or its last formula or number if it has other words."""
    end = _SENTENCE_END_RE.search(text)
    whole = text[: end.start()] if end else text
    sentence = _without_reason(whole)
    if not _is_prose(sentence):
        return whole if whole != sentence and _is_hedge(whole, sentence, start=0) else sentence
    leading = _PLAIN_EXPRESSION_RE.match(sentence)
    if leading and not _MATH_RE.search(sentence):
        alone = len(_PLAIN_EXPRESSION_RE.findall(sentence)) == 1
        return sentence if alone or _is_hedge(sentence, leading[0]) else leading[0]
    formula = _last_formula(sentence)
    return sentence if formula is None or _is_hedge(sentence, formula) else formula


def _is_hedge(sentence: str, answer: str, *, bounds: bool = True, start: int | None = None) -> bool:
    """Whether the sentence offers other values besides the answer, which it has, or denies it."""
    start = sentence.rfind(answer) if start is None else start
    bare = not _LETTERS_RE.search(sentence)
    plain = _VALUE_LIKE_RE.fullmatch(answer.strip(" ,;:."))
    others = _VALUE_LIKE_RE if plain else _NOTHING_RE  # a formula has values in it
    return start >= 0 and is_hedged(sentence, start, start + len(answer), others, bounds=bounds, commas=bare)


def _without_reason(sentence: str) -> str:
    """ "12, since …" → "12". After more than a few words, "so" and "which" introduce the answer instead of a reason."""
    for reason in _REASON_RE.finditer(sentence, 1):
        head = sentence[: reason.start()]
        if not (reason[0].strip(", ") in ("so", "which") and len(head.split()) > _FEW_WORDS):
            return head
    return sentence


def last_expression(text: str) -> str | None:
    """The whole text if it is nothing but an answer, or else its last formula or number, whichever comes last."""
    tail = text[-_TAIL:].strip()
    if _is_bare(tail):
        return clean(tail)
    formula = _last_formula(tail)
    if formula:
        sentence = _sentence_around(tail, formula)
        return clean(sentence if _is_hedge(sentence, formula, bounds=len(tail) <= _SHORT) else formula)
    return clean(tail) if tail and len(tail) <= _REACH else None


def _sentence_around(text: str, formula: str) -> str:
    """The sentence that a formula is in; of several lines without words, all."""
    place = max(text.rfind(formula), 0)
    if not _LETTERS_RE.search(text):
        return text
    ends = [found.span() for found in _SENTENCE_END_RE.finditer(text, max(0, place - _REACH))]
    start = max((end for _, end in ends if end <= place), default=0)
    return text[start : min((low for low, _ in ends if low >= place + len(formula)), default=len(text))]


def _last_formula(text: str) -> str | None:
    """The last formula of a text, in dollars or bare: "Since $n$ is odd, the pair is (2, 3)." → "(2, 3)"."""
    text = _LAYOUT_RE.sub(" ", text)
    formulas = list(_formulas(text))
    start = formulas[-1].end() if formulas else 0
    spans = (span for span in _SPAN_RE.finditer(text, start) if _VALUE_RE.search(span[0]))
    for span in reversed(deque(spans, maxlen=_MARKS)):
        bare = _bare_formula(span[0])
        labelled = span[0].lstrip()[:1].isdigit() and _LABEL_RE.search(text[max(span.start() - 20, 0) : span.start()])
        if _VALUE_RE.search(bare) and not labelled:
            return bare
    return _listed(text, formulas) if formulas else None


def _listed(text: str, formulas: list[re.Match[str]]) -> str:
    """The last formula, and those before it separated only by "and", "or" or a comma: "$1$ and $2$" → "1, 2"."""
    answer = _inside(formulas[-1])
    for before, after in zip(reversed(formulas[:-1]), reversed(formulas), strict=False):
        if not _is_joint(text[before.end() : after.start()], 12) or not _VALUE_RE.search(_inside(before)):
            break
        answer = f"{_inside(before)}, {answer}"
    return answer


def _is_joint(text: str, longest: int) -> bool:
    return len(text) <= longest and bool(_JOINT_RE.fullmatch(text)) and bool(_JOINT_WORD_RE.search(text))


def _formulas(text: str) -> Iterator[re.Match[str]]:
    """The formulas in dollars or LaTeX brackets. If dollars enclose words, the first one is a currency sign."""
    position = 0
    while match := _MATH_RE.search(text, position):
        prose = _is_prose(_inside(match))
        if not prose:
            yield match
        position = match.start() + 1 if prose else match.end()


def _without_formulas(text: str) -> str:
    rest, position = "", 0
    for formula in _formulas(text):
        rest += text[position : formula.start()] + " "
        position = formula.end()
    return rest + text[position:]


def _bare_formula(span: str) -> str:
    """A formula without the punctuation of the sentence around it; of "6 * 7 = 42", the 42."""
    previous = None
    while span != previous:
        previous = span
        span = _STRAY_END_RE.sub("", span.strip(" \t,:;=*_!").rstrip("-−+/"))
        for opening, closing in _BRACKETS:
            if span.endswith(closing) and span.count(closing) > span.count(opening):
                span = span[:-1]
            if span.startswith(opening) and span.count(opening) > span.count(closing):
                span = span[1:]
        if stray := _STRAY_RE.match(span):
            span = span[stray.end() :]
    parts = re.split(r",|;|\b(?:and|or)\b", span)
    names = [named[1] for part in parts if (named := _NAMED_RE.fullmatch(part))]
    if "=" in span and not len(names) == len(parts) > 1:
        last = parts[-1] if "=" in parts[-1] else span
        if not re.search(r"[<>≤≥]|\\[lg]eq?", last):
            value = next((side for side in reversed(last.split("=")) if _VALUE_RE.search(side)), "")
            return _bare_formula(re.sub(r"^\s*[-−]\s+", "-", value))
    return _ATTACHED_RE.sub(r"\1 \2", span)


def _is_bare(text: str) -> bool:
    """Whether the text is an answer only: a formula, a few words without a number, or a number with its unit."""
    if not text or len(text) > _REACH or _LAYOUT_RE.search(text):
        return False
    if "\n" in text and "\\begin" not in text and "$" not in text:
        return False
    outside = _without_formulas(text)
    if not _is_prose(text if outside.isspace() else outside):
        return True
    words = len(outside.split())
    if not re.search(r"[0-9]|\\[A-Za-z]", text):
        return words <= 6 and outside == text
    if _PARTS_RE.fullmatch(text):
        return True
    return words <= 4 and _PLAIN_EXPRESSION_RE.match(text) is not None and len(_PLAIN_EXPRESSION_RE.findall(text)) == 1


def _is_prose(text: str) -> bool:
    r"""Whether the text has words, apart from function names, commands and the contents of \text{}."""
    plain = _COMMAND_RE.sub(" ", text)
    if not plain.isascii() and _FOREIGN_RE.search(re.sub("또는|或者?|или", " ", plain)):
        return True
    words = [word for word in _LETTERS_RE.findall(plain) if word.lower() not in _FORMULA_WORDS]
    return len(words) > 1 or any((len(word) > 3 and not word.isupper()) or word in _SMALL_WORDS for word in words)


def clean(answer: str) -> str:
    """The answer without surrounding Markdown, quotes and full stop: `"**12**."` → `"12"`."""
    previous = None
    answer = answer.strip()
    while answer != previous:
        previous = answer
        answer = answer.strip('*_`"“”「」 \t\r\n')
        answer = answer.rstrip("。．！")
        if re.search(r"[a-z]{2}!$", answer):  # after a word; 5! is a factorial
            answer = answer[:-1]
        if answer.endswith(".") and not answer.endswith((r"\.", "..")) and not re.search(r"\b[a-z]\.[a-z]\.$", answer):
            answer = answer[:-1]
    return answer


def _leading_formula(text: str) -> str | None:
    """The formula that a text starts with, and those that follow it after "and", "or" or a comma."""
    match = _MATH_RE.match(text.lstrip())
    if match is None:
        return None
    text = text.lstrip()
    parts, end = [_inside(match)], match.end()
    while following := _MATH_RE.search(text, end):
        if not _is_joint(text[end : following.start()], 12):
            break
        parts.append(_inside(following))
        end = following.end()
    if len(parts) > 1:
        return ", ".join(parts)
    rest = _SENTENCE_END_RE.split(text[end:], maxsplit=1)[0].strip("* ")
    unit = re.match(r"(?:\\?%|°|percent\b|[A-Za-z]{1,12}\b$)", rest)
    return parts[0] + (f" {unit[0]}" if unit else "")


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


WAYS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed_answer,
    "tag": tagged_answer,
    "hash": hash_answer,
    "phrase": phrase_answer,
    "last": last_expression,
}
STRICT_WAYS = ("boxed", "hash")
MARKED_WAYS = ("boxed", "tag", "hash")
DEFAULT_ORDER = "boxed,tag,hash,phrase,last"
