r"""The `math` verifier: `math(r"So it is $\boxed{0.5}$.", "1/2", {})` → `Score(1.0)`."""

import re
from collections.abc import Mapping
from typing import Any

from kitae.data.boxes import boxes
from kitae.types import Score
from kitae.verifiers.final_answer import (
    DEFAULT_ORDER,
    MARKED_WAYS,
    after_reasoning,
    boxed_answer,
    chosen_letter,
    find_answers,
    hash_answer,
    parse_order,
    phrase_answer,
    stated_answer,
    without_lead,
)
from kitae.verifiers.math.cleanup import are_texts, choice_letter, plain_words, text_key, tidy
from kitae.verifiers.math.comparison import same, with_constants_of
from kitae.verifiers.math.equality import any_true, same_constant
from kitae.verifiers.math.fallback import math_verify_agrees
from kitae.verifiers.math.lexer import is_spelled_out
from kitae.verifiers.math.reading import comma_number, plain_number, read
from kitae.verifiers.math.tree import TooBig
from kitae.verifiers.math.written_forms import same_form

_MAX_ANSWER = 2_000  # characters; a longer text is no answer
_INDEX_RE = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?\s*Z|∈\s*ℤ)")
_MAX_WRAPPING = 8  # characters around an answer that is the whole response
_MAX_BOXES = 8
_CONSTANT_RE = re.compile(r"(?<![A-Za-z\\])[CcK](?![A-Za-z(])")
_PARTS_RE = re.compile(r"[,;]|\\pm|\b(?:and|or)\b|\\quad")  # in a reference with several parts


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

    A reference that is a list holds several right answers. Where it is one answer of several parts ("3, 4"), these may
    stand in a box each.
    `extract` lists the ways to find the answer, in order: boxed, tag (<answer>), hash (####), phrase ("the answer is",
    in some thirty languages), last (the last formula or number). The first that finds something decides. With
    `strict`, only boxed and hash count. `tolerance` is relative to a reference that is a number.
    """
    order = parse_order(extract, strict=strict)
    golds = [_reference_answer(str(one)) for one in (reference if isinstance(reference, list | tuple) else [reference])]
    if not golds or any(not gold or len(gold) > _MAX_ANSWER for gold in golds):
        return Score.error(f"the reference of 'math' must be an expression, got {str(reference)[:100]!r}")
    answer = next(find_answers(response, order), None)
    if answer is None:
        return Score(0.0, detail="no answer in the response")
    if len(answer) > _MAX_ANSWER:
        return Score(0.0, detail=f"the answer must have at most {_MAX_ANSWER} characters, got {len(answer)}")
    for gold in golds:
        if same_answer(gold, answer, tolerance) or _is_whole(response, gold, order) or _chooses(response, gold, order):
            return Score(1.0)
        if "boxed" in order and _is_in_boxes(response, gold, tolerance):
            return Score(1.0)
        if (said := stated_answer(answer)) is not None and same_answer(gold, said, tolerance):
            return Score(1.0)
    return Score(0.0, detail=f"got {answer[:100]!r}, want {' or '.join(golds)[:100]!r}")


def _is_in_boxes(response: str, gold: str, tolerance: float) -> bool:
    """Whether all boxes of the response together are the parts of the reference."""
    if not _PARTS_RE.search(gold):
        return False
    parts = [inside for _, _, inside in boxes(after_reasoning(response)) if inside.strip()]
    return 1 < len(parts) <= _MAX_BOXES and same_answer(gold, ", ".join(parts), tolerance)


def _is_whole(response: str, gold: str, order: tuple[str, ...]) -> bool:
    """Whether the response is nothing but the reference."""
    return "last" in order and len(response) <= len(gold) + _MAX_WRAPPING and text_key(response) == text_key(gold)


def _chooses(response: str, gold: str, order: tuple[str, ...]) -> bool:
    """Whether prose without a marked answer, such as "I think it's (D).", chooses the option that is the reference."""
    letter = choice_letter(gold, start=False)
    if letter is None or not set(order) & {"phrase", "last"} or chosen_letter(response) != letter:
        return False
    return next(find_answers(response, tuple(way for way in order if way in MARKED_WAYS)), None) is None


def same_answer(gold: str, answer: str, tolerance: float = 0.0) -> bool:
    """Whether two bare answers are equivalent: `same_answer("1/2", "0.5")` → True. Never raises."""
    if gold == answer or text_key(gold) == text_key(answer):
        return True
    if max(len(gold), len(answer)) > _MAX_ANSWER:
        return False
    try:
        verdict = _compare_texts(gold, answer, tolerance)
        return math_verify_agrees(gold, answer) if verdict is None else verdict
    except (TooBig, RecursionError):
        return False


def _compare_texts(gold: str, answer: str, tolerance: float) -> bool | None:
    """Whether the two texts are equivalent; None: one of them cannot be parsed."""
    want, have = plain_number(gold), plain_number(answer)
    if want is not None and have is not None:
        return same_constant(want, have, tolerance)
    if want is not None or have is not None:
        want, have = want or comma_number(gold), have or comma_number(answer)
        if want is not None and have is not None and same_constant(want, have, tolerance):
            return True
    if not (gold.isalpha() and len(gold) == 1) and (verdict := same_form(gold, answer)) is not None:
        return verdict
    letter = choice_letter(gold, start=False)
    if letter is not None and letter in "ABCD" and answer.strip() == letter.lower():
        return True
    if letter is not None and (got_letter := choice_letter(answer, start=True)) is not None:
        return letter == got_letter
    if letter is None and len(answer) < 20 and (letter := choice_letter(gold, start=True)) is not None:
        got_letter = choice_letter(answer, start=False)
        if got_letter is not None:
            return letter == got_letter
    if is_spelled_out(gold) and is_spelled_out(answer):
        return tidy(gold) == tidy(answer)
    words = plain_words(gold)
    if words and words == plain_words(answer) and are_texts(gold, answer):
        return True
    golds, answers = read(gold), read(_with_index_of(gold, answer))
    if not golds or not answers:
        return None
    verdict = any_true(same(left, right, tolerance) for left in golds for right in answers)
    if verdict or not _CONSTANT_RE.search(gold):
        return verdict
    return any_true(
        same(left, other) for left in golds for right in answers for other in with_constants_of(left, right)
    )


def _with_index_of(gold: str, answer: str) -> str:
    r"""The answer `k\pi, k \in \mathbb{Z}` with the reference's letter for the integer."""
    if r"\in" not in answer and "∈" not in answer:
        return answer
    left, right = _INDEX_RE.findall(gold), _INDEX_RE.findall(answer)
    if len(left) != 1 or len(right) != 1 or left == right:
        return answer
    return re.sub(rf"(?<![A-Za-z\\]){right[0]}(?![A-Za-z])", left[0], answer)


def _reference_answer(text: str) -> str:
    text = without_lead(text.strip()).strip()
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed.strip()
    marked = hash_answer(text) if "####" in text else None
    if marked is None and len(text.split()) > 3:
        marked = phrase_answer(text)
    return text if marked is None else marked
