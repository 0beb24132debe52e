"""The answer of a response in a canonical form, equal for equivalent answers, so that samples can vote.

It exists for verifiers that look for one final answer. Numbers are compared as numbers ("18", "$18.00"), formulas as
text, so 1/2 and 0.5 are different answers: a vote needs no proof of equality, and may lose a little by that.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from kitae.verifiers.final_answer import DEFAULT_ORDER, find_answers, parse_order
from kitae.verifiers.math.cleanup import text_key
from kitae.verifiers.plain_text import after_thought, final_number, only_number

_LONGEST = 300  # characters; longer answers are never shared by two samples
_DIGITS = 300

Vote = Callable[[str], str | None]
"""Returns the answer of a response: `vote("So it is \\boxed{1,200}.")` → `"1200"`; None: it has none."""


def find_vote(verifier: str, params: Mapping[str, Any]) -> Vote | None:
    """How samples vote under a verifier; None if they cannot, as for programs, letters and instructions."""
    if verifier == "math":
        order = parse_order(params.get("extract", DEFAULT_ORDER), strict=bool(params.get("strict", False)))
        return partial(_of_math, order)
    if verifier == "number":
        return partial(_of_number, bool(params.get("strict", False)))
    return _of_text if verifier == "exact" else None


def _of_math(order: tuple[str, ...], response: str) -> str | None:
    answer = next(find_answers(response, order), None)
    if answer is None or len(answer) > _LONGEST:
        return None
    key = text_key(answer)
    try:
        return _plain(Decimal(key.replace("\\$", "").replace("$", "").replace(",", "")))
    except InvalidOperation:
        return key


def _of_number(strict: bool, response: str) -> str | None:
    found = only_number(response) if strict else final_number(response)
    return None if found is None else _plain(found)


def _of_text(response: str) -> str | None:
    return after_thought(response).strip()[:_LONGEST] or None


def _plain(number: Decimal) -> str:
    """`"1200"`, without superfluous zeros. Numbers that are far too large or small are left as they are."""
    if not number.is_finite() or abs(number.adjusted()) > _DIGITS:
        return str(number)
    return f"{number.normalize() + 0:f}"  # + 0: no -0
