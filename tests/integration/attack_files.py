"""Reads the attacks and honest answers of `tests/data/attacks`.

`*.jsonl`: a line with a `kind`, its `verifier`, `options`, `reference`, `context` and `want`, the bounds of the score:
[0, 0] where a response must not pay, [1, 1] where it must; and after it a line for each `response`, with a `name` where
its beginning is none. A response may be a list of texts and how often each comes, with {i} for the number of the time.
`refusable`: it may be an error too. `open`: why it is not held yet. A judge's option `says` is what a stand-in answers;
`{mark}` in it is the mark of the request, and `{seen}` is 10 where the name of the case is in the request and else 0.

`programs_*.toml`, for `code`: groups of a `kind`, in which tests are tried with programs, those that are `right` and
those that are `wrong`. Tests are `tests` (a text with assertions each), `cases` (a list of such texts each), `stdio`
(pairs of input and output each) or `checks` (prompt, check and entry point each). `setup` precedes the assertions,
`options` are the verifier's. `most` is what a wrong program may get, by its name or for all ("*"). `refused` names
tests that may be an error, but then for all programs, as what they ask cannot be done safely. `open` names tests,
programs or "test / program", with the reason why they are not held yet. `apart` lists tests ("*": all) and programs
that are not tried together. `slow`: they take long.
"""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "attacks"
LIMITS = {"time_limit": 2.0, "total_limit": 8.0}


@dataclass(frozen=True)
class Case:
    """One response and the bounds of its score. `core`: it is fast, and one of those with which each test and each
    program of its group is tried at least once."""

    kind: str
    name: str
    verifier: str
    response: str
    reference: Any
    want: tuple[float, float]
    options: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    refusable: bool = False
    open: str = ""
    core: bool = True

    @property
    def honest(self) -> bool:
        return self.want[0] > 0

    @property
    def test(self) -> str:
        """Of a program, the name of its test."""
        return self.name.partition(" / ")[0]


def all_cases() -> list[Case]:
    return [*texts(), *programs()]


def texts() -> Iterator[Case]:
    shared: dict[str, Any] = {}
    for file in sorted(FOLDER.glob("*.jsonl")):
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if "kind" in row:
                shared = row | {"want": tuple(row["want"])}
            else:
                response = _written_out(row.pop("response"))
                yield Case(**{"name": " ".join(response.split())[:60] or "blank", **shared, **row}, response=response)


def _written_out(response: str | list[Any]) -> str:
    if isinstance(response, str):
        return response
    return "".join(text.replace("{i}", str(i)) for text, times in response for i in range(times))


def programs(pattern: str = "programs_*.toml") -> list[Case]:
    files = sorted(FOLDER.glob(pattern))
    groups = [group for file in files for group in tomllib.loads(file.read_text(encoding="utf-8"))["group"]]
    return [case for group in groups for case in _group(**group)]


def _group(
    kind: str,
    right: dict[str, str],
    wrong: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
    most: dict[str, float] | None = None,
    refused: list[str] | None = None,
    apart: list[list[str]] | None = None,
    open: dict[str, str] | None = None,
    slow: bool = False,
    **tests: Any,
) -> Iterator[Case]:
    options, most, refused, open, wrong = options or {}, most or {}, refused or [], open or {}, wrong or {}
    language = options.get("language", "python")
    references = dict(_references(**tests))
    core = {*_covering([*references], [*right]), *_covering([*references], [*wrong])}
    for test, reference in references.items():
        for program, source in {**right, **wrong}.items():
            if [test, program] in (apart or []) or ["*", program] in (apart or []):
                continue
            name = f"{test} / {program}"
            yield Case(
                kind,
                name,
                "code",
                f"```{language}\n{source}\n```",
                reference,
                (1.0, 1.0) if program in right else (0.0, most.get(program, most.get("*", 0.0))),
                options=LIMITS | options,
                refusable=not {test, "*"}.isdisjoint(refused),
                open=next((open[key] for key in (name, test, program) if key in open), ""),
                core=not slow and (test, program) in core,
            )


def _references(
    setup: str = "",
    tests: dict[str, str] | None = None,
    cases: dict[str, list[str]] | None = None,
    stdio: dict[str, list[list[str]]] | None = None,
    checks: dict[str, dict[str, str]] | None = None,
) -> Iterator[tuple[str, Any]]:
    for name, text in (tests or {}).items():
        yield name, {"kind": "asserts", "asserts": [text], "setup": setup}
    for name, listed in (cases or {}).items():
        yield name, {"kind": "asserts", "asserts": listed, "setup": setup}
    for name, pairs in (stdio or {}).items():
        yield name, {"kind": "stdio", "cases": [{"stdin": stdin, "stdout": stdout} for stdin, stdout in pairs]}
    for name, check in (checks or {}).items():
        yield name, {"kind": "check", **check}


def _covering(tests: list[str], programs: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs in which each test and each program appears."""
    for number in range(max(len(tests), len(programs)) if programs else 0):
        yield tests[number % len(tests)], programs[number % len(programs)]
