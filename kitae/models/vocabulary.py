"""Checks that two models use the same tokens, without which a teacher's scores of a student's tokens are
meaningless.
"""

from typing import Any

from kitae.errors import ModelError


def common_rows(student: Any, student_rows: int, teacher: Any, teacher_rows: int, names: tuple[str, str]) -> int:
    """How many rows of logits both models have, `min(151936, 152064)`. Raises if the teacher has other tokens.

    student, teacher: their tokenizers. A head may have more rows than its tokenizer has tokens; these are padding, so
    the two sides may differ in it. Every token of the student must be one of the teacher's, with the same number, and
    have a row on both sides: then only padding, or tokens that the student lacks, are cut off.
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
