"""Tests in the layouts of known data sets, as they come.

    APPS, TACO       {"inputs": [...], "outputs": [...], "fn_name": "f"}; without fn_name, stdin and stdout
    LiveCodeBench    {"public_test_cases", "private_test_cases", "metadata"}; the cases of both, each with a testtype,
                     as JSON, or the private ones as base64 of zlib of a pickled text of JSON
    EvalPlus         {"prompt", "entry_point", "canonical_solution", "base_input", "plus_input", "atol"}

A pickle is read by its text alone: nothing in it is looked up or called.
"""

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

_MAX_TESTS = 2**28  # bytes of private tests when they are unpacked

_EXPECTED = """
def _near(got, want):
    if isinstance(want, float) and isinstance(got, (int, float)):
        return got == want or abs(got - want) <= _ATOL + 1e-07 * abs(want)
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        return len(got) == len(want) and all(_near(got[i], want[i]) for i in range(len(want)))
    return got == want
def check(candidate):
    space = {}
    exec(_REFERENCE, space)
    for case in _CASES:
        want = space[_ENTRY](*_copy.deepcopy(case))
        got = candidate(*case)
        assert got == want or _near(got, want), f"{case!r:.200}"
"""


def from_layout(tests: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """Tests of one of these layouts as tests of a kind; others as they are; or what is wrong with them."""
    try:
        if "input_output" in tests:
            return from_layout(_loaded(tests["input_output"]))
        if "inputs" in tests and "outputs" in tests:
            return _apps(tests)
        if "private_test_cases" in tests or "public_test_cases" in tests:
            return _livecodebench(tests)
        if "base_input" in tests and "canonical_solution" in tests:
            return _evalplus(tests)
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        return f"the tests must be as their data set has them, got {type(error).__name__}: {str(error)[:100]}"
    return tests


def _loaded(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) else text


def _apps(tests: Mapping[str, Any]) -> Mapping[str, Any] | str:
    inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if len(inputs) != len(outputs):
        return f"inputs and outputs must be of one length, got {len(inputs)} and {len(outputs)}"
    if name is None:
        cases = [{"stdin": _joined(i), "stdout": _joined(o)} for i, o in zip(inputs, outputs, strict=True)]
        return {"kind": "stdio", "cases": cases}
    calls = [
        {"arguments": [_with_numbers(value) for value in _arguments(given)], "result": result}
        for given, result in zip(inputs, outputs, strict=True)
    ]
    return {"kind": "calls", "function": name, "cases": calls, "wrapped": True}


def _arguments(given: Any) -> Any:
    """A list of arguments; as text, one to a line."""
    return [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given


def _joined(lines: Any) -> Any:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else lines


def _with_numbers(value: Any) -> Any:
    """A dict of JSON, whose keys are texts, with the numbers that they were."""
    if isinstance(value, dict) and value and all(key.removeprefix("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _livecodebench(tests: Mapping[str, Any]) -> Mapping[str, Any] | str:
    cases = [
        *_loaded(tests.get("public_test_cases") or "[]"),
        *_private(tests.get("private_test_cases") or "[]"),
    ]
    kinds = {case["testtype"] for case in cases}
    if kinds == {"stdin"}:
        return {"kind": "stdio", "cases": [{"stdin": case["input"], "stdout": case["output"]} for case in cases]}
    if kinds != {"functional"}:
        return f"the testtype of all cases must be stdin or functional, got {sorted(kinds)}"
    name = _loaded(tests.get("metadata") or "{}").get("func_name")
    calls = [
        {
            "arguments": _arguments(case["input"]),
            "result": json.loads(case["output"]),
        }
        for case in cases
    ]
    return {"kind": "calls", "function": name, "cases": calls}


def _private(packed: Any) -> Any:
    if not isinstance(packed, str):
        return packed
    if packed.lstrip().startswith("["):
        return json.loads(packed)
    unpacked = zlib.decompressobj()
    text = unpacked.decompress(base64.b64decode(packed), _MAX_TESTS)
    if unpacked.unconsumed_tail:
        raise ValueError(f"more than {_MAX_TESTS >> 20} MiB of private tests")
    return _loaded(_Text(io.BytesIO(text)).load())


class _Text(pickle.Unpickler):
    """Reads a pickle of texts, numbers, lists and dicts, and nothing that has a name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a pickle of tests holds data alone, got {module}.{name}")


def _evalplus(tests: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is expected is what the canonical solution gives, in the process of the tests. Numbers may differ as far as
    EvalPlus lets them: by `atol`, or 1e-6 where that is 0."""
    known = {
        "_ATOL": float(tests.get("atol") or 1e-6),
        "_REFERENCE": f"{tests['prompt']}{tests['canonical_solution']}",
        "_ENTRY": tests["entry_point"],
        "_CASES": [*tests["base_input"], *(tests.get("plus_input") or ())],
    }
    names = "".join(f"{name} = {value!r}\n" for name, value in known.items())
    check = f"import copy as _copy\nfrom math import inf, nan\n{names}{_EXPECTED}"
    return {"kind": "check", "prompt": tests["prompt"], "check": check, "entry_point": tests["entry_point"]}
