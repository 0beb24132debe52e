"""No response is so long or so odd that a verifier of text takes more than a moment for it."""

import time

import pytest

from kitae.verifiers.verifier_registry import VERIFIERS

LENGTH = 50_000
SECONDS = 2.0  # of processor time; what is linear takes a twentieth of it
REFERENCES = {"number": "12345", "choice": "B", "math": "12345", "json_schema": {"type": "object"}}
NAMES = (
    "exact", "normalised", "f1", "number", "choice", "math", "tags", "json_schema", "length", "repetition", "language",
)  # fmt: skip
UNITS = (
    " ", "\n", "\t", "1", "A", "{", "}", "\\", "$", "(", "[", "<think>", "</think>", "<answer>", "answer is ",
    "answer: \n", "option: the ", "so the ", "it is ", "not ", "or ", "A or ", "A: \n", "```\n", "    ```\n", "####",
    r"\boxed{", r"\boxed ", r"\frac{1}{", r"\(", r"\[", "$1 ", "1,", "1/", "1^", "**", '{"a":', "答案", ". ", " \n",
    "mod ",
)  # fmt: skip


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frame", ["{}", "answer is {}", "\\boxed{{{}}}", "B {} B"])
def test_time_is_bounded(name: str, frame: str) -> None:
    slow = {}
    for unit in UNITS:
        response = frame.format(unit * (LENGTH // len(unit)))
        start = time.process_time()
        VERIFIERS[name].score(response, REFERENCES.get(name, "some text"), {})
        taken = time.process_time() - start
        if taken > SECONDS:
            slow[unit] = taken
    assert not slow
