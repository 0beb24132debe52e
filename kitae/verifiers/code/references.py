"""The tests of a reference: their four kinds, and what is wrong with any other."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kitae.verifiers.code.analysis import names_bound, refusal
from kitae.verifiers.code.layouts import from_layout
from kitae.verifiers.code.verdicts import brief


@dataclass(frozen=True, slots=True)
class Asserts:
    """`Asserts(("assert f(1) == 2",), setup="import math")`."""

    asserts: tuple[str, ...]
    setup: str


@dataclass(frozen=True, slots=True)
class Stdio:
    """Pairs of stdin and stdout: `Stdio((("1 2\\n", "3\\n"),))`."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CheckFunction:
    """`CheckFunction("def f(x):…", "def check(candidate): …", entry_point="f")`."""

    prompt: str
    check: str
    entry_point: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls and what they give: `Calls("f", (("1, 2", "3"),))`, as texts of Python. The function may be a method of
    `Solution`. wrapped: what is given may stand in a list of its own, as in APPS."""

    function: str
    cases: tuple[tuple[str, str], ...]
    wrapped: bool = False

    def asserts(self, of_class: bool) -> Asserts:
        call = f"Solution().{self.function}" if of_class else self.function
        tests = [f"assert _same({call}({arguments}), {result})" for arguments, result in self.cases]
        return Asserts(tuple(tests), _SAME.replace("WRAPPED", str(self.wrapped)))


# Tuples are lists, and keys are texts, as in the JSON that the expected values come from.
_SAME = """
from math import inf, nan
def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
def _same(got, want):
    got, want = _plain(got), _plain(want)
    return got == want or (WRAPPED and isinstance(want, list) and len(want) == 1 and got == want[0])
"""
Tests = Asserts | Stdio | CheckFunction | Calls


def read_tests(reference: Any) -> Tests | str:
    """The tests of a reference, or what is wrong with it."""
    try:
        while isinstance(reference, str):
            reference = json.loads(reference)
    except (ValueError, RecursionError):
        return f"the reference of 'code' must be a mapping or JSON, got {str(reference)[:100]!r}"
    if isinstance(reference, Mapping) and "tests" in reference and "kind" not in reference:
        return read_tests(reference["tests"])
    if not isinstance(reference, Mapping):
        return f"the tests of 'code' must be a mapping, got {str(reference)[:100]!r}"
    if "kind" not in reference:
        found = from_layout(reference)
        if isinstance(found, str):
            return found
        reference = found
    match reference.get("kind"):
        case "asserts":
            return _read_asserts(reference)
        case "stdio":
            return _read_stdio(reference)
        case "check":
            return _read_check(reference)
        case "calls":
            return _read_calls(reference)
        case kind:
            return f"the kind of tests must be asserts, stdio, check or calls, got {str(kind)[:100]!r}"


def _read_asserts(tests: Mapping[str, Any]) -> Asserts | str:
    asserts, setup = tests.get("asserts"), tests.get("setup") or ""
    if not isinstance(asserts, Sequence) or isinstance(asserts, str) or not asserts:
        return f"asserts must be a list with at least one test, got {str(asserts)[:100]!r}"
    if not all(isinstance(text, str) and text.strip() for text in [*asserts, setup or "#"]):
        return "asserts and setup must be texts of Python"
    problem = _bad_python([setup, *asserts]) or refusal(setup, tuple(asserts), "")
    return problem or Asserts(tuple(asserts), setup)


def _read_stdio(tests: Mapping[str, Any]) -> Stdio | str:
    cases = tests.get("cases")
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        return f"cases must be a list with at least one case, got {str(cases)[:100]!r}"
    pairs = []
    for case in cases:
        if not isinstance(case, Mapping) or "stdout" not in case:
            return f"a case must have stdin and stdout, got {str(case)[:100]!r}"
        pair = (case.get("stdin") or "", case["stdout"])
        if not all(isinstance(text, str) for text in pair):
            return f"stdin and stdout of a case must be texts, got {str(case)[:100]!r}"
        pairs.append(pair)
    return Stdio(tuple(pairs))


def _read_check(tests: Mapping[str, Any]) -> CheckFunction | str:
    prompt, check, entry_point = tests.get("prompt") or "", tests.get("check"), tests.get("entry_point")
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        return f"entry_point must be the name of a function, got {str(entry_point)[:100]!r}"
    if not isinstance(prompt, str) or not isinstance(check, str):
        return "prompt and check must be texts of Python"
    if problem := _bad_python([check]):
        return problem
    if "check" not in names_bound(list(ast.walk(ast.parse(check)))):
        return "check must define a function check(candidate)"
    return refusal(check, (), entry_point) or CheckFunction(prompt, check, entry_point)


def _read_calls(tests: Mapping[str, Any]) -> Calls | str:
    name, cases = tests.get("function"), tests.get("cases")
    if not isinstance(name, str) or not name.isidentifier():
        return f"function must be the name of a function, got {str(name)[:100]!r}"
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        return f"cases must be a list with at least one case, got {str(cases)[:100]!r}"
    pairs = []
    for case in cases:
        if not isinstance(case, Mapping) or "result" not in case or not isinstance(case.get("arguments"), Sequence):
            return f"a case must have a list of arguments and a result, got {str(case)[:100]!r}"
        pairs.append((", ".join(map(repr, case["arguments"])), repr(case["result"])))
    calls = Calls(name, tuple(pairs), bool(tests.get("wrapped")))
    return _bad_python(calls.asserts(False).asserts) or calls


def _bad_python(texts: Sequence[str]) -> str:
    for text in texts:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"the tests must be Python, but {brief(text)!r} is not: {error}"
    return ""
