"""`kitae verify` and `kitae verifiers`: a file in, a file out, in the same order, and what goes wrong is named."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitae.cli import main
from kitae.verifiers.verifier_registry import VERIFIERS

Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kitae(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Verify:
    """`kitae("verify", "exact", …)` in an empty folder: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kitae", *map(str, arguments)])
        status = 0
        try:
            main.run()
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def write(rows: list[Any]) -> Path:
    path = Path("in.jsonl")
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def scored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


FILES = ("--input", "in.jsonl", "--output", "out.jsonl")


def test_rows_come_back_in_order_with_what_the_verifier_said(kitae: Verify) -> None:
    write([{"id": f"q{i}", "response": str(i), "reference": str(i - i % 3)} for i in range(40)])
    status, out, _ = kitae("verify", "exact", *FILES, "--workers", 1)
    assert status == 0 and "40 rows" in out and "14 with full score, 0 not judged" in out
    rows = scored()
    assert [r["id"] for r in rows] == [f"q{i}" for i in range(40)]
    assert [r["score"] for r in rows] == [float(i % 3 == 0) for i in range(40)]
    assert rows[0].keys() == {"id", "score", "outcome", "components", "detail"}


def test_options_context_and_a_function_of_ones_own(kitae: Verify) -> None:
    Path("own.py").write_text(
        "def score(response, reference, context, *, bonus=0.0):\n"
        "    if response == 'raise': raise ValueError('no verdict')\n"
        "    return context.get('base', 0) + bonus\n"
    )
    write([{"response": "a", "context": {"base": 1}}, {"response": "raise"}, {"response": "b"}])
    status, out, _ = kitae("verify", "own.py:score", *FILES, "--option", "bonus=0.5", "--workers", 1)
    assert status == 0 and "1 not judged" in out and "no verdict" in out
    rows = scored()
    assert [(r["id"], r["score"], r["outcome"]) for r in rows] == [
        (1, 1.5, "scored"),
        (2, None, "error"),
        (3, 0.5, "scored"),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "in.jsonl:1 is not JSON"),
        ([{"response": "x"}, {"text": "y"}], "in.jsonl:2 must be an object with a text 'response'"),
        ([{"response": 5}], "in.jsonl:1 must be an object with a text 'response'"),
        ([{"response": "x", "context": [1]}], "'context' must be an object, got [1]"),
    ],
)
def test_bad_rows_are_named_before_anything_starts(rows: list[Any], message: str, kitae: Verify) -> None:
    write(rows)
    status, _, err = kitae("verify", "exact", *FILES)
    assert status == 1 and message in err and not Path("out.jsonl").exists()


def test_bad_calls_are_named(kitae: Verify) -> None:
    write([{"response": "x", "reference": "x"}])
    for arguments, message in {
        ("exct", *FILES): "did you mean 'exact'",
        ("exact", *FILES, "--option", "ignore_case"): "key=value",
        ("exact", *FILES, "--option", "x=1"): "it takes ignore_case",
        ("exact", "--input", "nowhere.jsonl", "--output", "out.jsonl"): "cannot read nowhere.jsonl",
        ("exact", "--input", "in.jsonl", "--output", "in.jsonl"): "another file",
    }.items():
        status, _, err = kitae("verify", *arguments)
        assert status == 1 and message in err, (arguments, err)
    assert json.loads(Path("in.jsonl").read_text()) == {"response": "x", "reference": "x"}


def test_the_list_has_every_verifier(kitae: Verify) -> None:
    _, out, _ = kitae("verifiers")
    assert all(any(line.startswith(f"{name} ") for line in out.splitlines()) for name in VERIFIERS)


def test_lines_end_where_json_says(kitae: Verify) -> None:
    Path("in.jsonl").write_text('{"id": 1, "response": "a\u2028b\u0085", "reference": "a\u2028b"}\n', encoding="utf-8")
    assert kitae("verify", "exact", *FILES)[0] == 0 and [r["score"] for r in scored()] == [1.0]


@pytest.mark.thorough
def test_validate_lists_gold_answers_that_fail(kitae: Verify) -> None:
    Path("r.toml").write_text('[data]\npath = "in.jsonl"\n[verifier]\nname = "number"\n')
    write([{"question": "?", "answer": answer} for answer in ("4", "four", "5", "{}")])
    status, out, _ = kitae("validate", "r.toml")
    assert status == 1 and "4 prompts, 4 with a gold answer; 2 fail under verifier 'number'" in out
    assert "in.jsonl:2" in out and "in.jsonl:4" in out and "in.jsonl:1:" not in out
    assert kitae("validate", "r.toml", "data.shuffle=false", "--limit", 1)[0] == 0
    assert "256 prompts" in kitae("validate", "quickstart")[1]


def test_validate_says_how_far_a_verifier_agrees_with_labels(kitae: Verify) -> None:
    """Four right and four wrong by label; one of each is scored otherwise: 6 of 8, where chance is a half."""
    Path("r.toml").write_text('[data]\npath = "in.jsonl"\n[verifier]\nname = "number"\n')
    write([{"question": "?", "answer": "4"}])
    said = [("4", 1)] * 3 + [("5", 1)] + [("5", 0)] * 3 + [("4", 0)]
    rows = [{"response": text, "reference": "4", "label": label} for text, label in said]
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, _ = kitae("validate", "r.toml", "--labels", "labels.jsonl")
    assert status == 0 and "8 labelled answers, 0 not judged; agreement 0.750, kappa 0.50" in out
    assert "right but scored wrong 1, wrong but scored right 1" in out
