"""An answer that names more than was asked is wrong, in every wording, place and verifier."""

import re
from typing import Any

import pytest

from kitae.verifiers.verifier_registry import VERIFIERS

HEDGES = (
    "either A or B", "A, though maybe B", "A or B", "B or A", "not B", "B is wrong", "anything but B",
    "everything except B",
    "A (or B)", "B (or A)", "A/B", "B, A", "A and B", "between A and B", "from A to B", "A to B", "A–B",
    "A through B",
    "one of A and B", "A | B", "A; B", "if not A then B", "B unless it is A", "maybe A, maybe B", "B isn't it",
    "B is incorrect", "it is not B", "can't be B", "B or something", "neither A nor B", "both A and B",
    "(A)(B)", "A vs B",
    "A xor B", "B (A)", "B [A]", "B, alternatively A", "B, otherwise A", "B. Or A.",
    "B; if that is wrong, A", "A → B",
    "≠B", "¬B", "B and/or A", "A as well as B", "B along with A", "A ou B", "A oder B", "never B",
    "B is not the answer",
)  # fmt: skip
PLACES = (r"\boxed{X}", r"\boxed{\text{X}}", "The answer is X.", "#### X", "<answer>X</answer>", "X", "Final answer: X")
VALUES = (("math", "41", "52"), ("number", "41", "52"), ("choice", "A", "B"), ("math", "A", "B"))
HONEST = (
    ("math", "5", "There are 3 red and 2 blue ones, so the answer is 5."), ("number", "7", "First 3, then 4, so 7"),
    ("number", "5.5", "the answer is $5.50, with 3 left"), ("number", "60", "It is 0.6 or 60%"),
    ("math", "1/2", r"\boxed{\frac{1}{2} \text{ or } 0.5}"),
    ("math", "7", r"\boxed{5}? No, I forgot the 2. So it is \boxed{7}."),
    ("choice", "B", "The answer is B and not C."), ("choice", "B", "**B.** A whale is no fish."),
    ("math", "3, 4", r"\boxed{3} and \boxed{4}"), ("choice", "B", "<b>Ⓑ</b>"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "other", "right"), VALUES)
def test_a_hedge_is_wrong(name: str, other: str, right: str) -> None:
    paid = []
    for hedge in HEDGES:
        said = re.sub(r"(?<![A-Za-z])[AB](?![A-Za-z])", lambda m: {"A": other, "B": right}[m[0]], hedge)
        for place in PLACES:
            score: Any = VERIFIERS[name].score(place.replace("X", said), right, {})
            if score.value > 0:
                paid.append(place.replace("X", said))
    assert paid == []


@pytest.mark.parametrize(("name", "reference", "response"), HONEST)
def test_what_is_no_hedge_is_right(name: str, reference: str, response: str) -> None:
    score: Any = VERIFIERS[name].score(response, reference, {})
    assert score.value == 1
