"""Whether two models mean the same tokens: what a teacher says of a student's tokens is nonsense if they do not."""

from typing import Any

from kitae.errors import ModelError


def common_rows(student: Any, student_rows: int, teacher: Any, teacher_rows: int, names: tuple[str, str]) -> int:
    """How many rows of logits both models have, `min(151936, 152064)`; refuses a teacher with other tokens.

    student, teacher: their tokenizers. A head may have more rows than its tokenizer has tokens: padding, which stands
    for nothing, so one side may have more of it. Every token of the student must be one of the teacher's, with the same
    number, and have a row on both sides: then what is cut off is padding, or a token that the student lacks.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    what = (
        f"the teacher must have the student's vocabulary, got {len(theirs)} tokens of {names[1]} for {len(ours)} of "
        f"{names[0]}"
    )
    for token, number in ours.items():
        if theirs.get(token) != number:
            found = f"number {theirs[token]}" if token in theirs else "missing"
            raise ModelError(f"{what}: {token!r} is number {number} of the student's and {found} of the teacher's")
    rows = min(student_rows, teacher_rows)
    if (last := max(ours.values(), default=-1)) >= rows:
        raise ModelError(f"{what}: token {last} has no row among the {student_rows} and {teacher_rows} of their heads")
    return rows
