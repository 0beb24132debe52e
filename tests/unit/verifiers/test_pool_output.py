"""What a score function prints reaches the user."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kitae.verifiers.pool import VerifierPool

PRINTS = r"""
import os, subprocess, sys
print("loaded")
def score(response, reference, context):
    match response:
        case "out": print("to stdout", reference)
        case "err": print("to stderr", reference, file=sys.stderr)
        case "open": print("no newline", end="")
        case "raw": os.write(1, b"raw \xff bytes\n")
        case "child": subprocess.run(["echo", "from a child"])
        case "many":
            for i in range(reference): print("line", i)
        case "wide": print("w" * 1_000_000)
        case "surrogate": print("\ud800 lone")
        case "exit":
            print("goodbye", flush=True)
            os._exit(3)
        case "close":
            sys.stdout.close()
            sys.stderr.close()
        case "closed descriptors":
            os.close(1)
            os.close(2)
    return 1.0
"""


def heard(tmp_path: Path, *cases: tuple[str, Any]) -> tuple[list[float], list[str]]:
    (tmp_path / "prints.py").write_text(PRINTS)
    notes: list[str] = []

    async def body() -> list[float]:
        async with VerifierPool(f"{tmp_path / 'prints.py'}:score", workers=1, note=notes.append) as pool:
            return [(await pool.score(*case)).value for case in cases]

    return asyncio.run(body()), notes


def test_lines_are_noted_with_the_name_of_the_verifier(tmp_path: Path) -> None:
    kinds = ("out", "err", "open", "raw", "child", "surrogate", "quiet")
    values, notes = heard(tmp_path, *((kind, 7) for kind in kinds))
    assert values == [1.0] * len(kinds)
    assert all(note.startswith("prints.py:score: ") for note in notes)
    said = [note.removeprefix("prints.py:score: ") for note in notes]
    expected = ["loaded", "to stdout 7", "to stderr 7", "no newline", "raw \ufffd bytes", "from a child"]
    assert said == [*expected, "\\ud800 lone"]


def test_the_first_lines_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    _, notes = heard(tmp_path, ("many", 5_000), ("wide", None))
    assert "prints.py:score: line 0" in notes and len(notes) < 30
    assert all(len(note) < 1_000 for note in notes)
    assert notes[-1] == f"prints.py:score: {5_002 - (len(notes) - 1):,} more lines were printed"


def test_last_words(tmp_path: Path) -> None:
    _, notes = heard(tmp_path, ("exit", None), ("out", 1))
    assert "prints.py:score: goodbye" in notes and "prints.py:score: to stdout 1" in notes


def test_a_check_that_closes_its_streams_harms_no_other(tmp_path: Path) -> None:
    values, notes = heard(tmp_path, ("close", None), ("out", 1), ("closed descriptors", None), ("out", 2), ("err", 3))
    assert values == [1.0] * 5
    assert {"prints.py:score: to stdout 1", "prints.py:score: to stdout 2"} <= set(notes)


def test_without_a_listener_it_goes_to_stderr(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)

    async def body() -> None:
        async with VerifierPool(f"{tmp_path / 'prints.py'}:score", workers=1) as pool:
            await pool.score("out", 1)

    asyncio.run(body())
    assert "prints.py:score: to stdout 1\n" in capfd.readouterr().err


@pytest.mark.thorough
def test_libraries_of_a_built_in_verifier_are_not_heard(capfd: Any) -> None:
    async def body() -> None:
        async with VerifierPool("math", workers=1) as pool:
            await pool.score(r"\boxed{\int_0^1 x^2 y dx}", "1/3")

    asyncio.run(body())
    assert capfd.readouterr().err == ""


def test_a_terminal_that_is_gone_ends_no_check(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)

    def broken(_: str) -> None:
        raise BrokenPipeError

    async def body() -> list[float]:
        async with VerifierPool(f"{tmp_path / 'prints.py'}:score", workers=1, note=broken) as pool:
            return [(await pool.score("many", 20_000)).value for _ in range(3)]

    assert asyncio.run(body()) == [1.0] * 3


def test_parts_of_a_composition_are_heard(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    notes: list[str] = []
    params = {"parts": [{"name": f"{tmp_path / 'prints.py'}:score"}, {"name": "exact"}]}

    async def body() -> None:
        async with VerifierPool("compose", params, workers=1, note=notes.append) as pool:
            await pool.score("out", "x")

    asyncio.run(body())
    assert "compose: to stdout x" in notes
