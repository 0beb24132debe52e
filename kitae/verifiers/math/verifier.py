r"""The verifier: `math(r"So it is $\boxed{0.5}$.", "1/2", {})` → `Score(1.0)`."""

from collections.abc import Mapping
from typing import Any

from kitae.types import Score
from kitae.verifiers.answers import DEFAULT_ORDER, boxed_answer, find_answers, hash_answer, parse_order, phrase_answer
from kitae.verifiers.math.cleanup import are_texts, choice_letter, plain_words, text_key
from kitae.verifiers.math.comparison import same
from kitae.verifiers.math.equality import any_true, same_constant
from kitae.verifiers.math.fallback import math_verify_agrees
from kitae.verifiers.math.reading import plain_number, read
from kitae.verifiers.math.tree import TooBig

_MAX_ANSWER = 2_000  # characters; what is longer is no answer


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
    if text_key(gold) == text_key(answer):
        return True
    if max(len(gold), len(answer)) > _MAX_ANSWER:
        return False
    try:
        verdict = _compare_texts(gold, answer, tolerance)
        return math_verify_agrees(gold, answer) if verdict is None else verdict
    except (TooBig, RecursionError):
        return False


def _compare_texts(gold: str, answer: str, tolerance: float) -> bool | None:
    """Are they the same? None: we cannot read one of them."""
    want, have = plain_number(gold), plain_number(answer)
    if want is not None and have is not None:
        return same_constant(want, have, tolerance)
    letter = choice_letter(gold, start=False)
    if letter is not None and (got_letter := choice_letter(answer, start=True)) is not None:
        return letter == got_letter
    words = plain_words(gold)
    if words and words == plain_words(answer) and are_texts(gold, answer):
        return True
    golds, answers = read(gold), read(answer)
    if not golds or not answers:
        return None
    verdicts = (same(left, right, tolerance) for left in golds for right in answers)
    return any_true(verdicts)


def _reference_answer(text: str) -> str:
    text = text.strip()
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed.strip()
    marked = hash_answer(text) if "####" in text else None
    if marked is None and len(text.split()) > 3:
        marked = phrase_answer(text)
    return text if marked is None else marked
