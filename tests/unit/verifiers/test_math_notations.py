"""Answers in many notations, written down before anybody looked at what the verifier makes of them.

tests/data/math_notations.txt says how it is read. To change a label in order to please the verifier would make it
worthless.
"""

from collections.abc import Iterator
from pathlib import Path

from kitae.verifiers.math import math

FLOOR = 0.99


def rows() -> Iterator[tuple[str, str, bool]]:
    reference = ""
    for line in (Path(__file__).parents[2] / "data/math_notations.txt").read_text("utf-8").split("\n"):
        mark, _, rest = line.partition(" ")
        match mark:
            case "=":
                reference = rest
            case "+" | "-":
                yield reference, rf"The answer is $\boxed{{{rest}}}$.", mark == "+"
            case "+:" | "-:":
                yield reference, rest.replace("\\n", "\n"), mark == "+:"


def test_right_answers_are_accepted_and_no_wrong_one_is() -> None:
    missed = [row for row in rows() if math(row[1], row[0], {}).value != row[2]]
    shown = "\n".join(map(str, missed))
    assert not [row for row in missed if not row[2]], f"accepted, though wrong:\n{shown}"
    assert len(missed) <= (1 - FLOOR) * len(list(rows())), f"refused, though right:\n{shown}"
