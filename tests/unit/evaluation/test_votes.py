"""Answers that mean the same have the same vote, as far as text and numbers go."""

from typing import Any

import pytest

from kitae.evaluation.measure import find_vote


@pytest.mark.parametrize(
    ("verifier", "params", "response", "vote"),
    [
        ("math", {}, r"So it is $\boxed{1,200}$.", "1200"),
        ("math", {}, "The answer is $1200.00", "1200"),
        ("math", {}, "#### 18", "18"),
        ("math", {}, "It is 18.0 dollars", "18"),
        ("math", {"strict": True}, "It is 18", None),
        ("math", {"strict": True}, "#### 18", "18"),
        ("math", {}, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("math", {}, r"\boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        ("math", {}, "", None),
        ("math", {}, r"\boxed{-0}", "0"),
        ("math", {}, r"\boxed{" + "x" * 400 + "}", None),
        ("math", {}, r"\boxed{1e99999999}", "1E+99999999"),
        ("number", {}, "It is 12.50", "12.5"),
        ("number", {}, "none", None),
        ("number", {"strict": True}, "It is 12", None),
        ("exact", {}, " 3, 2, 1\n", "3, 2, 1"),
        ("exact", {}, "<think>1?</think>3, 2, 1", "3, 2, 1"),
        ("exact", {}, "  ", None),
    ],
)
def test_the_vote_of_an_answer(verifier: str, params: dict[str, Any], response: str, vote: str | None) -> None:
    find = find_vote(verifier, params)
    assert find is not None
    assert find(response) == vote


@pytest.mark.parametrize("verifier", ["code", "instructions", "compose", "mine.py:score", ""])
def test_who_has_no_vote(verifier: str) -> None:
    assert find_vote(verifier, {}) is None
