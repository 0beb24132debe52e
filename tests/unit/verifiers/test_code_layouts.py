"""Tests in the layouts of known data sets, and the comparison of numbers in standard output."""

# ruff: noqa: E501 - programs of one line each
import base64
import json
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from kitae.data.formats import find_reader, read_row
from kitae.verifiers.code.code_verifier import code
from kitae.verifiers.code.references import Calls, Stdio, read_tests
from kitae.verifiers.code.verdicts import OutputRule, same_output

needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


PUBLIC = json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}])
HIDDEN = json.dumps([{"input": "4 5\n", "output": "9\n", "testtype": "stdin"}])
FUNCTIONAL = [{"input": '[1, 2]\n"a"', "output": '["a", 3]', "testtype": "functional"}]
EVALPLUS = {
    "prompt": 'def half(x: float) -> float:\n    """Halve."""\n',
    "entry_point": "half",
    "canonical_solution": "    return x / 2\n",
    "base_input": [[3], [5]],
    "plus_input": [[1e9], [-0.5]],
    "atol": 0,
}
TWO = Stdio((("1 2\n", "3\n"), ("4 5\n", "9\n")))


@pytest.mark.parametrize(
    ("tests", "want"),
    [
        ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, Stdio((("1 2\n", "3\n"),))),
        ({"inputs": [["1 2", "4"]], "outputs": [["3", "4"]]}, Stdio((("1 2\n4", "3\n4"),))),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]})}, Stdio((("1", "2"),))),
        ({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[True]]}, Calls("f", (("1, 'a'", "[True]"),), True)),
        ({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [3]}, Calls("f", (("{1: 2}", "3"),), True)),
        ({"fn_name": "f", "inputs": ['[1]\n"a"'], "outputs": ["b"]}, Calls("f", (("[1], 'a'", "'b'"),), True)),
        ({"public_test_cases": PUBLIC, "private_test_cases": HIDDEN, "metadata": "{}"}, TWO),
        ({"public_test_cases": PUBLIC, "private_test_cases": packed(HIDDEN)}, TWO),
        (
            {"public_test_cases": FUNCTIONAL, "metadata": '{"func_name": "f"}'},
            Calls("f", (("[1, 2], 'a'", "['a', 3]"),)),
        ),
    ],
)
def test_layouts_are_read_as_they_come(tests: Any, want: Any) -> None:
    assert read_tests(tests) == read_tests({"tests": tests}) == read_tests(json.dumps(tests)) == want


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/kitae-layout-bomb"),)


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ({"inputs": ["1"], "outputs": []}, "of one length, got 1 and 0"),
        ({"private_test_cases": packed(Bomb())}, "holds data alone"),
        ({"private_test_cases": packed(HIDDEN)[:-9]}, "as their data set has them"),
        ({"private_test_cases": "???"}, "as their data set has them"),
        ({"public_test_cases": PUBLIC, "private_test_cases": FUNCTIONAL}, "stdin or functional"),
        ({"public_test_cases": FUNCTIONAL}, "function must be the name of a function"),
        ({"public_test_cases": [{"input": "1"}]}, "KeyError"),
        ({"fn_name": "f()", "inputs": [[1]], "outputs": [1]}, "function must be the name"),
        ({**EVALPLUS, "entry_point": "no name"}, "entry_point must be the name"),
        ({"kind": "calls", "function": "f", "cases": [{"arguments": 3, "result": 1}]}, "a list of arguments"),
    ],
)
def test_what_is_wrong_with_them_is_said(tests: Any, says: str) -> None:
    found = read_tests(tests)
    assert isinstance(found, str) and says in found
    assert not Path("/tmp/kitae-layout-bomb").exists()


def test_a_bomb_of_private_tests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitae.verifiers.code.layouts._MAX_TESTS", 1000)
    assert "of private tests" in str(read_tests({"private_test_cases": packed("[" + " " * 10**6 + "]")}))


@needs_sandbox
@pytest.mark.parametrize(
    ("response", "tests", "value"),
    [
        ("def f(a, b): return (b, sum(a))", {"public_test_cases": FUNCTIONAL, "metadata": '{"func_name": "f"}'}, 1),
        ("class Solution:\n    def f(self, a, b): return [b, sum(a)]", {"public_test_cases": FUNCTIONAL, "metadata": {"func_name": "f"}}, 1),
        ("def f(a, b): return [b, 4]", {"public_test_cases": FUNCTIONAL, "metadata": {"func_name": "f"}}, 0),
        ("class Yes:\n    def __eq__(self, o): return True\ndef f(a, b): return Yes()", {"public_test_cases": FUNCTIONAL, "metadata": {"func_name": "f"}}, 0),
        ("def f(x): return x + 1", {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], 3]}, 1),
        ("def f(x): return {x: (x,)}", {"fn_name": "f", "inputs": [[1]], "outputs": [{"1": [1]}]}, 1),
        ("def f(x): return []", {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, 0),
        ("print(sum(map(int, input().split())))", {"public_test_cases": PUBLIC, "private_test_cases": packed(HIDDEN)}, 1),
        ("print(3)", {"public_test_cases": PUBLIC, "private_test_cases": packed(HIDDEN)}, 0),
        ("def half(x): return x * 0.5000000001", EVALPLUS, 1),
        ("    return x / 2", EVALPLUS, 1),
        ("def half(x): return x // 2", EVALPLUS, 0),
        ("def half(x): return x / 2 if abs(x) < 10 else 0", EVALPLUS, 0),
        ("def half(x): return half_of(x)\ndef half_of(x): return space[_ENTRY](x)", EVALPLUS, 0),
    ],
)  # fmt: skip
def test_programs_are_judged_by_them(response: str, tests: Any, value: float) -> None:
    score = code(f"```python\n{response}\n```", {"tests": tests}, {})
    assert (score.outcome, score.value) == ("scored", value), score.detail


@pytest.mark.parametrize(
    ("got", "want", "numbers", "tolerance", "same"),
    [
        ("2.50", "2.5", False, 0, False),
        ("2.50", "2.5", True, 0, True),
        ("  2.50   -0.0\n\n+7", "2.5 0\n7.\n", True, 0, True),
        ("1e3", "1000", True, 0, True),
        ("0.1", "0.10000000000000001", True, 0, False),
        ("0.1", "0.10000000000000001", True, 1e-9, True),
        ("1000001", "1000000", True, 1e-5, True),
        ("1000001", "1000000", True, 1e-7, False),
        ("1.0 2.0", "1 2 3", True, 0, False),
        ("1.0\n2.0", "1 2", True, 0, False),
        ("Yes 1.0", "Yes 1", True, 0, True),
        ("yes", "Yes", True, 1, False),
        ("nan", "nan", True, 1, True),
        ("nan", "1", True, 1, False),
        ("inf", "1e400", True, 1, False),
        ("1_0", "10", True, 0, False),
        ("٣", "3", True, 0, False),
        ("1e9999", "1e9998", True, 0.5, False),
        ("0x10", "16", True, 0, False),
        ("9" * 5000, "9" * 5000, True, 0, True),
        ("", "0", True, 1, False),
    ],
)
def test_numbers_are_compared_by_value(got: str, want: str, numbers: bool, tolerance: float, same: bool) -> None:
    assert same_output(got, want, OutputRule(numbers, tolerance)) is same


@needs_sandbox
def test_the_option_numbers() -> None:
    tests = {"kind": "stdio", "cases": [{"stdin": "3", "stdout": "1.5\n"}]}
    assert code("print(int(input()) / 2 + 1e-9)", tests, {}).value == 0
    assert code("print('1.50')", tests, {}, numbers=True).value == 1
    assert code("print(int(input()) / 2 + 1e-9)", tests, {}, numbers=True, tolerance=1e-6).value == 1
    for tolerance, numbers in ((1e-6, False), (-1.0, True), (float("nan"), True)):
        score = code("print(1)", tests, {}, numbers=numbers, tolerance=tolerance)
        assert score.outcome == "error" and "tolerance must be" in score.detail


@needs_sandbox
@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("apps", {"question": "Add.", "input_output": '{"inputs": ["1 2"], "outputs": ["3"]}', "solutions": '["print(sum(map(int, input().split())))"]'}),
        ("taco", {"question": "Add.", "starter_code": "def f(a):", "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, "solutions": ["def f(a): return a + 1"]}),
        ("evalplus", EVALPLUS),
    ],
)  # fmt: skip
def test_gold_answers_of_the_formats_score_one(name: str, row: Any) -> None:
    made = read_row(find_reader(name), row)
    assert made.gold is not None
    assert code(made.gold, made.reference, {}).value == 1


def test_the_format_of_livecodebench() -> None:
    row = {"question_content": "Add.", "starter_code": "", "public_test_cases": PUBLIC, "private_test_cases": packed(HIDDEN), "metadata": "{}"}  # fmt: skip
    made = read_row(find_reader("livecodebench"), row)
    assert "standard input" in made.question and read_tests(made.reference) == TWO
