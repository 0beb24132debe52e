r"""Verifiers of two puzzles: `knights_knaves` reads who is what, `countdown` evaluates an expression.

Both judge the final answer. It comes after `</think>`, and is the inside of the last <answer> tag; without one, that of
the last \boxed{}, or what the last words "answer:" or "conclusion:" introduce, where it says something; or else the
whole response. Nothing of a response is ever executed, and only its last 20,000 characters are read.
"""

import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from kitae.data.boxes import last_boxed
from kitae.types import Score
from kitae.verifiers.hedges import joins
from kitae.verifiers.plain_text import after_thought, inside_tag
from kitae.verifiers.visible_text import shown

_KNIGHTS = "knights? truth-?tellers?"
_KNAVES = "knaves? liars?"
_MARK_RE = re.compile(r"\b(?:conclusion|(?:final\s+)?answer|solution)[\s*_#]*(?:\b(?:is|are)\b|[:：])", re.IGNORECASE)
_NOT_BEFORE_RE = re.compile(
    r"(?:(?:^|[^\w])(?:not|never|neither|nor|no|hardly|scarcely|barely|cannot|far\s+from|former|ex-?|opposite\s+of|anything\s+but|other\s+than|rather\s+than"
    r"|instead\s+of|unlike)|n['’]t|[!¬≠]|(?<!\w)(?:non|anti)-?)(?:\s+(?:a|an|the|be|being|actually|really))*\s*$",
    re.IGNORECASE,
)
_LETTERS = r"A-Za-z\u00c0-\u024f\u0400-\u04ff"
_SUPPOSED = r"\b(?:iff?|in\s+no\s+case|suppose|supposing|assum\w+|would|could|might|either|whether)\b|\?"
_SUPPOSED += r"|\b(?:false|untrue|not\s+true|wrong|not\s+the\s+case|impossible|doubt|deny)\b"
_SUPPOSED_RE = re.compile(_SUPPOSED, re.IGNORECASE)
_UNSURE_RE = re.compile(rf"\b(?:says?|said|claims?|claimed)\b|{_SUPPOSED}", re.IGNORECASE)
_REASON_RE = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)
_CONTRAST_RE = re.compile(r"\b(?:but|yet|however)\b", re.IGNORECASE)
_SENTENCE_RE = re.compile(r"[\n;]|\.(?=\s|$)|!(?=\s|$)")
_GAP_WORD_RE = re.compile(r"\b(?:not|now|later|then|she|he|they|it|is|was|an?)\b|[0-9.]+\s*%|%", re.IGNORECASE)
_LIST_GAP_RE = re.compile(r"[\s,&*_|]*(?:and|respectively)?[\s,&*_|]*(?:an?|the)?\s*", re.IGNORECASE)
_HEADING_RE = re.compile(r"[\s*_]*(?:[:=]|[-–—](?=\s)|\b(?:are|is)\b)")
_OR_RE = re.compile(r"\s*(?:/|\bor\b)\s*(?:an?\s+)?", re.IGNORECASE)
_TAIL = 20_000  # characters at the end of a response that are read
_SHORT = 200  # characters of a response that is an answer rather than a solution
_STRUCK_RE = re.compile(r"~~[^~\n]*~~")
_MARKS = 8  # so many of the last marks are looked at


def knights_knaves(
    response: str,
    reference: Any,
    context: Mapping[str, Any],
    *,
    credit: Literal["all", "share"] = "all",
    knight: str = "",
    knave: str = "",
) -> Score:
    """1 where the response says of everybody, and rightly, whether they are a knight or a knave.

    The reference is a text that says so ("Alice is a knight, Bob is a knave"), or a mapping of names to "knight" or
    "knave", or to true for knights. With `credit` "share" the value is the share of people who are right. The
    reader understands English sentences, lists, tables, JSON, "Knights: Alice, Carol", "Alice and Bob are knaves",
    "not a knight" and "respectively"; `knight` and `knave` add words of your own ("sage", "fool"). Saying both of
    one person is wrong in one clause, in a marked answer and in a short one; otherwise the last statement counts.
    Clauses with "if", "suppose" or "says" are passed over: all of the sentence but what comes before "because" or,
    after "says", behind "but". Components: right and answered, as shares of the people. Not covered: other
    languages, pronouns, "everyone", "the others".
    """
    if credit not in ("all", "share"):
        return Score.error(f"credit must be 'all' or 'share', got {credit!r}")
    people = _people(reference, knight, knave)
    if not people:
        shown = str(reference)[:100]
        return Score.error(f"the reference of 'knights_knaves' must say who is a knight or a knave, got {shown!r}")
    roles: dict[str, bool | None] = {}
    for text, marked in _final_parts(response):
        final = marked or len(text.strip()) <= _SHORT
        for name, role in _statements(_STRUCK_RE.sub(" ", text), tuple(people), knight, knave):
            roles[name] = None if final and roles.get(name, role) is not role else role
        if roles:
            break
    right = [name for name, role in people.items() if roles.get(name) is role]
    components = {"right": len(right) / len(people), "answered": len(roles) / len(people)}
    value = components["right"] if credit == "share" else float(len(right) == len(people))
    wrong = ", ".join(name if name in roles else f"{name} (not named)" for name in people if name not in right)
    return Score(value, components, detail=f"wrong: {wrong}"[:300] if wrong else "")


def countdown(
    response: str, reference: Any, context: Mapping[str, Any], *, use_all: bool = False, partial: float = 0.0
) -> Score:
    r"""1 where the response's expression has the target as its exact value and uses each number at most once.

    The reference is {"numbers": [3, 7, 25], "target": 46} ("nums" will do), or the target alone, with the numbers in
    the context, or a solution as text, "25 + 3 * 7 = 46", whose numbers are the ones to use. `use_all` asks for every
    number; `partial` is the value of an expression that keeps the rules but misses the target. Allowed are + - * / and
    their kin (× x · ÷ − \times \frac{}{}, "2(3 + 4)"), brackets and unary minus, in exact fractions; words in brackets
    are passed over. An equation may go on with "= 46" or with steps, each of which must equal the target. Components:
    valid (an expression that keeps the rules) and hit. Not covered: solutions spread over several lines, powers,
    joining digits.
    """
    task = _countdown_task(reference, context)
    if task is None:
        return Score.error(f"the reference of 'countdown' must give numbers and a target, got {str(reference)[:100]!r}")
    numbers, target = task
    problem = "no expression in the response"
    for candidate, alone in _expressions(response):
        try:
            value, used = _solution(candidate)
        except _NotAnExpression as error:
            problem = str(error)
            continue
        extra, unused = used - numbers, numbers - used
        if extra and _BARE_RE.fullmatch(candidate) and value == target:
            problem = "the target, but no expression for it"
            continue
        if not alone:
            return _missed("more than one expression")
        if extra:
            return _missed(f"uses {_listed(extra)}, which is not left")
        if use_all and unused:
            return _missed(f"does not use {_listed(unused)}")
        if value != target:
            shown = "different values" if value is None else str(value)[:50]
            return Score(partial, {"valid": 1.0, "hit": 0.0}, detail=f"has {shown}, not {target}")
        return Score(1.0, {"valid": 1.0, "hit": 1.0})
    return _missed(problem)


def _missed(reason: str) -> Score:
    return Score(0.0, {"valid": 0.0, "hit": 0.0}, detail=reason[:300])


def _final_parts(response: str) -> Iterator[tuple[str, bool]]:
    """The parts that may hold the final answer, the likeliest first, and whether a mark says so."""
    text = shown(after_thought(response)[-_TAIL:])
    tagged = inside_tag(text, "answer")
    if tagged:
        yield tagged, True
        return
    boxed = last_boxed(text)
    if boxed:
        yield re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", boxed), True
    for mark in reversed(deque(_MARK_RE.finditer(text), maxlen=_MARKS)):
        yield text[mark.end() :], True
    yield text, False


# Knights and knaves


class _Word(NamedTuple):
    """A name or a role in a sentence: `_Word(0, 5, name="Alice", role=None)`."""

    start: int
    end: int
    name: str | None
    role: bool | None


def _people(reference: Any, knight: str, knave: str) -> dict[str, bool]:
    """Who is a knight, in the order of the reference; empty where it does not say so of somebody."""
    if isinstance(reference, str) and reference.lstrip().startswith("{"):
        try:
            reference = json.loads(reference)
        except (ValueError, RecursionError):
            return {}
    if isinstance(reference, Mapping):
        roles = {str(name): _role(value, knight, knave) for name, value in reference.items()}
        return {} if None in roles.values() else {name: bool(role) for name, role in roles.items()}
    if not isinstance(reference, str):
        return {}
    return _people_of_text(reference, knight, knave)


@lru_cache(maxsize=256)
def _people_of_text(text: str, knight: str, knave: str) -> dict[str, bool]:
    """A name is the first word of the clause that ends with a role."""
    role = _role_pattern(knight, knave)
    people: dict[str, bool] = {}
    for clause in re.split(r"[\n,;|]|\.(?=\s|$)|\band\b", text):
        found = role.search(clause)
        if found is None:
            continue
        name = re.match(r"[\s\d().*_\-\"'{]*([^\W\d_][\w'’-]*)", clause[: found.start()])
        if name is None or name[1].casefold() in ("a", "an", "the"):
            return {}
        people[name[1]] = (found.lastgroup == "knight") is not _negated(clause, found.start())
    return people


def _role(value: Any, knight: str, knave: str) -> bool | None:
    if isinstance(value, bool):
        return value
    found = _role_pattern(knight, knave).fullmatch(str(value).strip())
    return None if found is None else found.lastgroup == "knight"


@lru_cache(maxsize=16)
def _role_pattern(knight: str, knave: str) -> re.Pattern[str]:
    def words(known: str, own: str) -> str:
        return "|".join([*known.split(), *(f"{re.escape(word)}s?" for word in own.split())])

    roles = rf"(?P<knight>{words(_KNIGHTS, knight)})|(?P<knave>{words(_KNAVES, knave)})"
    return re.compile(rf"(?<![{_LETTERS}])(?:{roles})(?![{_LETTERS}]|['’]s\b)", re.IGNORECASE)


def _statements(text: str, people: tuple[str, ...], knight: str, knave: str) -> Iterator[tuple[str, bool | None]]:
    """Every (name, is a knight) that a text states, in its order; None where it states both."""
    heading: bool | None = None  # the role of the list of names that we are in
    for sentence in _SENTENCE_RE.split(text):
        clauses = [sentence] if not _UNSURE_RE.search(sentence) else list(_sure_clauses(sentence))
        if not clauses:
            heading = None
        for clause in clauses:
            words = _words(clause, people, knight, knave)
            if not words:
                heading = None if clause.strip() else heading
                continue
            if words[0].name is None or any(word.role is not None for word in words):
                heading = None
            for names, roles in _runs(words):
                if heading is not None:
                    yield from ((name.name, heading) for name in names if name.name is not None)
                elif roles:
                    yield from _assigned(clause, names, roles)
                opens = bool(roles) and (heading is not None or not names) and _HEADING_RE.match(clause, roles[-1].end)
                heading = roles[-1].role if opens else heading if not roles else None


def _sure_clauses(sentence: str) -> Iterator[str]:
    """What a sentence states for sure: "A is a knight, because if B were, …" → "A is a knight, "."""
    for clause in _REASON_RE.split(sentence):
        if _UNSURE_RE.search(clause):
            if not _SUPPOSED_RE.search(clause):
                yield from (part for part in _CONTRAST_RE.split(clause) if not _UNSURE_RE.search(part))
            return  # the reasons that follow are those of the supposition
        yield clause


def _words(sentence: str, people: tuple[str, ...], knight: str, knave: str) -> list[_Word]:
    found = [_Word(*m.span(), _name_of(m[0], people), None) for m in _name_pattern(people).finditer(sentence)]
    for m in _role_pattern(knight, knave).finditer(sentence):
        found.append(_Word(*m.span(), None, (m.lastgroup == "knight") is not _negated(sentence, m.start())))
    return sorted(found)


@lru_cache(maxsize=256)
def _name_pattern(people: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in sorted(people, key=len, reverse=True))
    return re.compile(rf"(?<![{_LETTERS}0-9_])(?:{names})(?![{_LETTERS}0-9_])", re.IGNORECASE)


def _name_of(found: str, people: tuple[str, ...]) -> str:
    return next((name for name in people if name.casefold() == found.casefold()), found)


def _negated(sentence: str, start: int) -> bool:
    return bool(_NOT_BEFORE_RE.search(sentence[max(0, start - 30) : start]))


def _runs(words: Sequence[_Word]) -> Iterator[tuple[list[_Word], list[_Word]]]:
    """Names followed by roles, again and again: `A B knight, C knave` → `([A, B], [knight]), ([C], [knave])`."""
    names: list[_Word] = []
    roles: list[_Word] = []
    for word in words:
        if word.name is not None and roles:
            yield names, roles
            names, roles = [], []
        (roles if word.name is None else names).append(word)
    yield names, roles


def _assigned(sentence: str, names: list[_Word], roles: list[_Word]) -> Iterator[tuple[str, bool | None]]:
    gaps = [sentence[left.end : right.start] for left, right in pairwise(roles)]
    if any(_OR_RE.fullmatch(gap) for gap in gaps):
        return
    if len(roles) == len(names) > 1 and all(_LIST_GAP_RE.fullmatch(gap) for gap in gaps):
        pairs = zip(names, roles, strict=True)
    else:
        both = any(a.role is not b.role and _opposes(gap) for (a, b), gap in zip(pairwise(roles), gaps, strict=True))
        yield from ((name.name, None if both else roles[0].role) for name in names if name.name is not None)
        return
    yield from ((name.name, role.role) for name, role in pairs if name.name is not None)


def _opposes(gap: str) -> bool:
    """Whether the text between two roles gives both to one person: "and a", "(50%), ", "unless she is a", ", now a"."""
    return joins(_GAP_WORD_RE.sub(" ", gap))


# Countdown


class _NotAnExpression(Exception):
    """The text is no arithmetic; the message says why."""


_FRACTION_RE = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_ALSO_RE = re.compile(r"\W*(?:or|also|alternatively)\b", re.IGNORECASE)
_REMARK_RE = re.compile(r"\(([^()\n]*+)\)")  # "(which is 98)"
_WORD_RE = re.compile(r"[^\W\d_]{2}")
_NESTING = 8  # of fractions in fractions
_LATEX = (
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:left|right|[,;!: ]|quad)(?![A-Za-z])|\\[()\[\]]"), " "),
    (re.compile(r"(?<=[0-9)])[ \t]*+[xX][ \t]*+(?=[0-9(])"), "*"),
)
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("×·⋅∗✕✖", "*"),
        **dict.fromkeys("÷∕⁄：", "/"),
        **dict.fromkeys("−–—﹣－", "-"),
        "＋": "+",
        "＝": "=",
        "（": "(",
        "）": ")",
        "[": "(",
        "]": ")",
    }
)
_TOKEN_RE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|[-+*/()])")
_ARITHMETIC_RE = re.compile(r"[-+*/()=.\s0-9]+")
_OPERATOR_RE = re.compile(r"[-+*/=]")
_FOREIGN_OPERATOR_RE = re.compile(r"[0-9)]\s*[%^!√]\s*[0-9(]")
_DENIED_RE = re.compile(
    r"\W*(?:not|never|anything\s+but)\b|.{0,500}?[0-9)]\W+(?:is|was)\s+(?:wrong|incorrect|false|not\s+(?:right|correct|it))\b",
    re.IGNORECASE,
)
_DIGIT_RE = re.compile(r"[0-9]")
_BARE_RE = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_DECORATION = " \t\r*_`$.,;:!\"'"
_PRIORITY = {"+": 1, "-": 1, "*": 2, "/": 2, "~": 3}
_MAX_EXPRESSION = 500  # characters
_MAX_DIGITS = 30  # of one number
_LINES = 20  # at the end of a response that are tried


def _countdown_task(reference: Any, context: Mapping[str, Any]) -> tuple[Counter[Fraction], Fraction] | None:
    numbers, target = context.get("numbers", context.get("nums")), reference
    if isinstance(reference, str) and reference.lstrip().startswith("{"):
        try:
            reference = json.loads(reference)
        except (ValueError, RecursionError):
            return None
    if isinstance(reference, Mapping):
        numbers, target = reference.get("numbers", reference.get("nums")), reference.get("target")
    elif numbers is None and isinstance(reference, str) and "=" in reference:
        try:
            value, used = _solution(_plain(reference))
        except _NotAnExpression:
            return None
        return None if value is None else (used, value)
    if not isinstance(numbers, list | tuple) or not numbers:
        return None
    try:
        return Counter(Fraction(str(number)) for number in numbers), Fraction(str(target))
    except (ValueError, ZeroDivisionError):
        return None


def _expressions(response: str) -> Iterator[tuple[str, bool]]:
    """Texts that may be the final expression, the likeliest first: of a marked part the first line, else the last. And
    whether it is the only one on its line."""
    for text, marked in _final_parts(response):
        lines = [line for line in _plain(text).splitlines() if line.strip()]
        for line in lines[:_LINES] if marked else reversed(lines[-_LINES:]):
            yield from _arithmetic(line.strip(_DECORATION))


def _plain(text: str) -> str:
    """`r"\\frac{6}{2} × 3"` → `"((6)/(2)) * 3"`."""
    for _ in range(_NESTING):  # the innermost first
        text, found = _FRACTION_RE.subn(r"((\1)/(\2))", text)
        if not found:
            break
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    text = _REMARK_RE.sub(
        lambda brackets: " " if _WORD_RE.search(brackets[1]) and not _ALSO_RE.match(brackets[1]) else brackets[0], text
    )
    return text.translate(_PLAIN)


def _arithmetic(line: str) -> Iterator[tuple[str, bool]]:
    """The whole line where it is arithmetic, or else the parts of it that are and have an operator, longest first."""
    found = [piece for piece in _ARITHMETIC_RE.finditer(line) if _DIGIT_RE.search(piece[0])]
    pieces = [piece[0].strip(_DECORATION) for piece in found]
    alone = len({piece for piece in pieces if _OPERATOR_RE.search(piece) and not _is_step(piece)}) <= 1
    alone = alone and not any(joins(line[left.end() : right.start()]) for left, right in pairwise(found))
    alone = alone and not _FOREIGN_OPERATOR_RE.search(line) and not _DENIED_RE.match(line)
    if pieces != [line]:
        pieces = sorted((p for p in pieces if _OPERATOR_RE.search(p)), key=len, reverse=True)
    yield from ((p, alone) for p in pieces if len(p) <= _MAX_EXPRESSION)


def _is_step(piece: str) -> bool:
    """Whether it is a true equation, such as 3 * 7 = 21, which may stand beside the solution."""
    try:
        return "=" in piece and len(piece) <= _MAX_EXPRESSION and _solution(piece)[0] is not None
    except _NotAnExpression:
        return False


def _solution(text: str) -> tuple[Fraction | None, Counter[Fraction]]:
    """The value of an equation's sides, None where they differ, and the numbers of its first side that is no number."""
    sides = [side.strip(_DECORATION) for side in text.split("=")]
    sides = [side for side in sides if side]
    if not sides:
        raise _NotAnExpression("no expression in the response")
    if any(_BARE_RE.fullmatch(side) for side in sides[1:-1]):
        raise _NotAnExpression("an equation that goes on behind its value")
    values = {_evaluate(_lex(side)) for side in sides}
    solution = next((side for side in sides if not _BARE_RE.fullmatch(side)), sides[0])
    used = Counter(Fraction(token) for token in _lex(solution) if token[0].isdigit())
    return values.pop() if len(values) == 1 else None, used


def _lex(text: str) -> list[str]:
    found, position = [], 0
    while position < len(text):
        token = _TOKEN_RE.match(text, position)
        if token is None:
            raise _NotAnExpression(f"not arithmetic: {text[position : position + 20]!r}")
        if len(token[1]) > _MAX_DIGITS:
            raise _NotAnExpression(f"a number of {len(token[1])} digits")
        found.append(token[1])
        position = token.end()
    return found


def _with_products(tokens: list[str]) -> Iterator[str]:
    """A bracket next to a number or a bracket is multiplied: `2 (` → `2 * (`."""
    for before, token in pairwise(["", *tokens]):
        if (token == "(" and (before == ")" or before[:1].isdigit())) or (before == ")" and token[0].isdigit()):
            yield "*"
        yield token


def _evaluate(tokens: list[str]) -> Fraction:
    """The value of infix arithmetic, with two stacks and no recursion; `~` is unary minus."""
    values: list[Fraction] = []
    operators: list[str] = []
    expects_value = True
    for token in _with_products(tokens):
        if expects_value and token[0].isdigit():
            values.append(Fraction(token))
            expects_value = False
        elif expects_value and token == "(":
            operators.append(token)
        elif expects_value and token in "+-":
            if token == "-":
                operators.append("~")
        elif not expects_value and token == ")":
            while operators and operators[-1] != "(":
                _apply(operators.pop(), values)
            if not operators:
                raise _NotAnExpression("a bracket is closed that was not opened")
            operators.pop()
        elif not expects_value and token in "+-*/":
            while operators and operators[-1] != "(" and _PRIORITY[operators[-1]] >= _PRIORITY[token]:
                _apply(operators.pop(), values)
            operators.append(token)
            expects_value = True
        else:
            raise _NotAnExpression(f"unexpected {token!r}")
    if expects_value or "(" in operators:
        raise _NotAnExpression("the expression is not complete")
    while operators:
        _apply(operators.pop(), values)
    return values[0]


def _apply(operator: str, values: list[Fraction]) -> None:
    right = values.pop()
    match operator:
        case "~":
            values.append(-right)
        case "+":
            values.append(values.pop() + right)
        case "-":
            values.append(values.pop() - right)
        case "*":
            values.append(values.pop() * right)
        case _:
            if right == 0:
                raise _NotAnExpression("division by zero")
            values.append(values.pop() / right)


def _listed(numbers: Counter[Fraction]) -> str:
    return ", ".join(str(number)[:_MAX_DIGITS] for number in list(numbers.elements())[:8])
