"""What to run for a response and its reference: the order for the warden, and the job for the checker."""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from kitae.errors import VerifierError
from kitae.sandbox.backends import find_program
from kitae.sandbox.sandbox_jobs import Job, Limits, Order
from kitae.types import Score
from kitae.verifiers.code.analysis import as_assert, names_of, visible_setup
from kitae.verifiers.code.extraction import Source, completions, defines, extract_code, typing_names, variants
from kitae.verifiers.code.languages import LANGUAGES
from kitae.verifiers.code.references import Asserts, Calls, CheckFunction, Stdio, Tests, read_tests
from kitae.verifiers.code.verdicts import OutputRule, wrong
from kitae.verifiers.code.weaving import settled

COMPILE_LIMIT = 30.0
_MAX_CODE = 2**20  # characters
_JAVA_CLASS_RE = re.compile(r"\bpublic\s+(?:final\s+|abstract\s+)*class\s+(\w+)")


def prepare(
    response: str, reference: Any, language: str, reward: str, how: OutputRule
) -> tuple[Source, Asserts | Stdio | CheckFunction] | Score:
    """The code and its tests; or the score, if something in options, reference or response already decides it."""
    if problem := _check_options(language, reward, how):
        return Score.error(problem)
    tests = read_tests(reference)
    if isinstance(tests, str):
        return Score.error(tests)
    if not isinstance(tests, Stdio) and language != "python":
        return Score.error(f"tests of kind asserts, check or calls must be for language 'python', got {language!r}")
    source = extract_code(response, LANGUAGES[language].tags, _wanted_names(tests))
    if not source.text.strip():
        return wrong("no code in the response")
    if len(source.text) > _MAX_CODE:
        return wrong(f"more than {_MAX_CODE} characters of code")
    if isinstance(tests, Calls):
        tests = tests.asserts(
            of_class=defines(source.text, ["Solution"]) and not defines(source.text, [tests.function])
        )
    return source, tests


def plan(source: Source, tests: Asserts | CheckFunction, time_limit: float) -> tuple[Order, Job, Sequence[str]]:
    """The order that loads the candidate; the job of the checker, which the candidate must not see; and its tests as
    they are shown."""
    if isinstance(tests, Asserts):
        return (
            {
                "mode": "check",
                "variants": variants(source),
                "loose": not source.fenced,
                "typing": typing_names(source.text, tests.setup),
                "setup": visible_setup(tests.setup),
            },
            {
                **names_of(tests.setup, tests.asserts, ""),
                "prompt": "",
                "setup": settled(tests.setup),
                "entry_point": "",
                "tests": [settled(as_assert(test)) for test in tests.asserts],
                "time_limit": time_limit,
            },
            tests.asserts,
        )
    names = names_of(tests.check, (), tests.entry_point)
    whole = defines(source.text, [tests.entry_point])
    return (
        {
            "mode": "check",
            "variants": variants(source) if whole else completions(tests.prompt, source.text),
            "loose": not source.fenced,
            "typing": typing_names(source.text, tests.prompt),
            "setup": [tests.prompt] if whole else [],
        },
        {
            **names,
            "prompt": tests.prompt if names["names"] or names["library"] else "",
            "setup": settled(tests.check),
            "entry_point": tests.entry_point,
            "tests": ["check(__candidate__)"],
            "time_limit": time_limit,
        },
        ["check(candidate)"],
    )


def without_code(order: Order) -> Order:
    """An order for tests without the code under test, which shows what fails for everybody."""
    return {**order, "variants": [""]}


def program(language: str, source: Source, limits: Limits) -> Order:
    """The order that runs a program. Raises `VerifierError` with the name of a program that is not installed."""
    if language == "python":
        return {
            "mode": "run",
            "variants": variants(source),
            "loose": not source.fenced,
            "typing": typing_names(source.text),
            "files": {},
            "compile": None,
            "command": None,
        }
    entry = LANGUAGES[language]
    found = _JAVA_CLASS_RE.search(source.text)
    fill = {"{class}": found[1] if found else "Main", "{heap}": str(limits.memory_mb * 3 // 4)}

    def words(template: tuple[str, ...]) -> list[str] | None:
        if not template:
            return None
        filled = [functools.reduce(lambda word, key: word.replace(key, fill[key]), fill, word) for word in template]
        program = filled[0] if filled[0].startswith("./") else find_program(filled[0])
        if program is None:
            raise VerifierError(f"language {language!r} needs {filled[0]!r} in /usr/local/bin, /usr/bin or /bin")
        return [program, *filled[1:]]

    file = entry.file.replace("{class}", fill["{class}"])
    return {
        "mode": "run",
        "variants": [],
        "files": {file: source.text},
        "compile": words(entry.compile),
        "compile_limit": COMPILE_LIMIT,
        "command": words(entry.run),
    }


def _wanted_names(tests: Tests) -> list[str]:
    match tests:
        case CheckFunction():
            return [tests.entry_point]
        case Asserts():
            found = names_of(tests.setup, tests.asserts, "")
            return [name for name in found["names"] if name not in found["library"]]
        case Calls():
            return [tests.function, "Solution"]
        case Stdio():
            return []


def _check_options(language: str, reward: str, how: OutputRule) -> str:
    if language not in LANGUAGES:
        return f"language must be one of {', '.join(LANGUAGES)}, got {language!r}"
    if reward not in ("all", "rate"):
        return f"reward must be 'all' or 'rate', got {reward!r}"
    if not 0 <= how.tolerance < math.inf or (how.tolerance and not how.numbers):
        return f"tolerance must be a number of at least 0, and goes with numbers = true, got {how.tolerance!r}"
    return ""
