"""The verdicts in a sandbox's reports, and the score of all of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kitae.errors import VerifierError
from kitae.sandbox.inside.checker import UNUSED
from kitae.sandbox.session import Report
from kitae.types import Score

_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class OutputRule:
    """How outputs are compared: word by word; with `numbers`, words that are numbers by their value (`2.50` is `2.5`),
    which may differ by `tolerance`, absolutely or relatively to the expected one."""

    numbers: bool = False
    tolerance: float = 0.0


def same_output(got: str, want: str, how: OutputRule | None = None) -> bool:
    """Whether two outputs have the same words on the same lines; blank lines and the width of gaps do not matter."""
    ours, theirs = _words(got), _words(want)
    if ours == theirs or how is None or not how.numbers or [*map(len, ours)] != [*map(len, theirs)]:
        return ours == theirs
    pairs = [pair for line, other in zip(ours, theirs, strict=True) for pair in zip(line, other, strict=True)]
    return all(word == other or _same_number(word, other, how.tolerance) for word, other in pairs)


_NUMBER_RE = re.compile(r"[-+]?(?:[0-9]{1,4000}(?:\.[0-9]{0,4000})?|\.[0-9]{1,4000})(?:[eE][-+]?[0-9]{1,4})?")


def _same_number(word: str, other: str, tolerance: float) -> bool:
    if not _NUMBER_RE.fullmatch(word) or not _NUMBER_RE.fullmatch(other):
        return False
    got, want = Decimal(word), Decimal(other)
    if got == want or not tolerance:
        return got == want
    return abs(got - want) <= Decimal(tolerance) * max(Decimal(1), abs(want))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one test: `Verdict(False, "assert f(1) == 2: AssertionError")`.

    unused: whether the test ended before the tests had reached the candidate.
    """

    passed: bool
    detail: str = ""
    unused: bool = False


def take_verdicts(reports: Iterator[Report], tests: Sequence[str], alone: bool = False) -> list[Verdict]:
    """The verdicts in a checker's reports, on the first tests or all of them. alone: no candidate was there, so that
    tests which fail before they reach it are at fault."""
    loaded = next(reports)
    if loaded.status != "loaded":
        return all_failed(tests, complaint(loaded))
    verdicts: list[Verdict] = []
    for number, test in enumerate(tests):
        report = next(reports)
        if report.status == "error" or (report.status == "unsure" and alone):
            raise VerifierError(report.detail)
        if report.status == "broken":
            return verdicts + all_failed(tests[number:], report.detail)
        unused = report.status == "unsure" or (report.status == "passed" and report.detail == UNUSED)
        verdicts.append(Verdict(report.status == "passed", f"{brief(test)}: {complaint(report)}", unused))
        if report.status not in ("passed", "failed"):
            break
    return verdicts


def is_doubted(verdicts: Sequence[Verdict]) -> bool:
    """Whether tests failed before they reached the candidate."""
    return bool(verdicts) and verdicts[-1].unused and not verdicts[-1].passed


def used(verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts of tests that have reached the candidate; functions of tests that nobody calls never do."""
    if all(verdict.passed and verdict.unused for verdict in verdicts):
        raise VerifierError("the tests must reach the response, but pass without it")
    return verdicts


def judge_case(report: Report, stdout: str, name: str, how: OutputRule) -> Verdict:
    """The verdict on a run: it must end normally and print the expected output."""
    output = report.output.decode(errors="replace")
    if report.status == "ended" and not same_output(output, stdout, how):
        return Verdict(False, f"{name}: wrong output {brief(output[:1000].strip())!r}")
    return Verdict(report.status == "ended", f"{name}: {complaint(report)}")


def all_failed(tests: Sequence[Any], reason: str) -> list[Verdict]:
    return [Verdict(False, reason) for _ in tests]


def total_score(verdicts: Sequence[Verdict], reward: str) -> Score:
    rate = sum(verdict.passed for verdict in verdicts) / len(verdicts)
    detail = next((verdict.detail for verdict in verdicts if not verdict.passed), "")
    return Score(rate if reward == "rate" else float(rate == 1), {"pass_rate": rate}, detail=_printable(detail))


def wrong(reason: str) -> Score:
    return Score(0.0, {"pass_rate": 0.0}, detail=reason)


def complaint(report: Report) -> str:
    match report.status:
        case "timeout":
            return f"out of time ({report.detail})"
        case "output":
            return "too much output"
        case _:
            return report.detail or report.status


def _words(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_DETAIL else line[:_MAX_DETAIL] + "…"


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()
