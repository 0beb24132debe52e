"""Which teachers speak the student's language."""

from typing import Any

import pytest

from kitae.errors import ModelError
from kitae.models.vocabulary import common_rows

NAMES = ("small", "large")


class Tokens:
    def __init__(self, **numbers: int) -> None:
        self._numbers = numbers

    def get_vocab(self) -> dict[str, int]:
        return self._numbers


ABC = Tokens(a=0, b=1, c=2)


@pytest.mark.parametrize(("student", "teacher", "rows"), [(3, 3, 3), (8, 4, 4), (4, 8, 4), (3, 16, 3)])
def test_one_tokenizer_may_have_heads_of_different_sizes(student: int, teacher: int, rows: int) -> None:
    assert common_rows(ABC, student, ABC, teacher, NAMES) == rows


def test_a_teacher_may_know_more_tokens() -> None:
    assert common_rows(ABC, 4, Tokens(a=0, b=1, c=2, d=3), 4, NAMES) == 4


@pytest.mark.parametrize(
    ("teacher", "rows", "why"),
    [
        (Tokens(a=0, b=1), 3, "'c' is number 2 of the student's and missing of the teacher's"),
        (Tokens(a=0, b=2, c=1), 3, "'b' is number 1 of the student's and number 2 of the teacher's"),
        (ABC, 2, "token 2 has no row among the 3 and 2 of their heads"),
    ],
)
def test_a_teacher_with_other_tokens_is_refused_with_both_sizes(teacher: Any, rows: int, why: str) -> None:
    with pytest.raises(ModelError) as caught:
        common_rows(ABC, 3, teacher, rows, NAMES)
    size = len(teacher.get_vocab())
    message = f"the teacher must have the student's vocabulary, got {size} tokens of large for 3 of small: {why}"
    assert str(caught.value) == message
