"""Metrics as columns: what was added is read, what was replaced is forgotten, and odd lines break nothing."""

import json
import os
from pathlib import Path

import pytest
from written_runs import WrittenRun

from kitae.ui import tables
from kitae.ui.records import HeldOut
from kitae.ui.tables import LineReader, Tables


def test_columns_equal_the_file(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path).evaluate(0.25)
    for entropy in (0.5, 0.25, 0.125):
        made.step([[0.0, 1.0]], entropy=entropy)
    run = made.evaluate(0.75).finish()
    found = Tables().series(run, ["reward", "entropy", "unknown"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert found.steps == [1, 2, 3]
    assert found.columns == {name: [row[name] for row in steps] for name in ("reward", "entropy")}
    assert (found.evaluation_steps, found.evaluations["avg"]) == ([0, 3], [0.25, 0.75])


def test_a_growing_file_is_read_on_and_a_replaced_one_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 3}\n{"kind": "step", "ste')
    found = Tables()
    assert found.series(tmp_path, ["loss"]).columns == {"loss": [3]}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('p": 2, "loss": 2, "new": 7}\n')
    assert found.series(tmp_path, ["loss", "new"]).columns == {"loss": [3, 2], "new": [None, 7]}
    (tmp_path / "other").write_text('{"kind": "step", "step": 1, "loss": 5}\n')
    os.replace(tmp_path / "other", tmp_path / "metrics.jsonl")
    assert found.series(tmp_path, ["loss"]).columns == {"loss": [5]}
    (tmp_path / "metrics.jsonl").unlink()
    assert found.series(tmp_path, ["loss"]).steps == []


def test_unknown_kinds_texts_and_cut_lines_are_coped_with(tmp_path: Path) -> None:
    lines = (
        '{"kind": "train", "step": 1, "loss": 1.5, "first_error": "boom", "done": true}',
        '{"kind": "step", "st',
        '{"step": 1, "margin": 0.5, "nothing": null}',
        "[1, 2]",
        '{"kind": "step", "loss": 9}',
        '{"kind": "eval", "step": 1, "accuracy": 0.5}',
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = Tables()
    assert found.names(tmp_path) == (["loss", "margin"], ["accuracy"])
    assert found.series(tmp_path, ["loss", "margin"]).columns == {"loss": [1.5], "margin": [0.5]}
    assert found.glance(tmp_path).metric == "loss" and found.glance(tmp_path).points == []


def test_the_small_curve_ends_with_the_last_value(tmp_path: Path) -> None:
    rows = (json.dumps({"kind": "step", "step": i, "reward": i}) for i in range(1, 1002))
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    glance = Tables().glance(tmp_path)
    assert glance.recent[-1] == 1001 and len(glance.recent) <= tables._RECENT and glance.step == 1001


def test_only_the_last_tables_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_TABLES", 2)
    found = Tables()
    for name in "abc":
        (tmp_path / name).mkdir()
        found.series(tmp_path / name, [])
    assert list(found._tables) == [tmp_path / "b", tmp_path / "c"]


def test_a_reader_gives_each_line_once(tmp_path: Path) -> None:
    path, reader = tmp_path / "lines", LineReader()
    path.write_text("1\n2\n")
    assert reader.read(path) == (True, [1, 2])
    assert reader.read(path) == (False, [])


def test_other_suites_leave_the_own_results_as_they_are(tmp_path: Path) -> None:
    """Both are evaluated after the same step."""
    own = {"kind": "eval", "step": 3, "avg": 0.5, "avg_low": 0.4, "avg_high": 0.6}
    rows = [own, {**own, "suite": "gsm8k", "avg": 0.9}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Tables()
    assert found.glance(tmp_path).points == [HeldOut(3, 0.5, 0.4, 0.6)]
    assert found.series(tmp_path, []).evaluations["gsm8k/avg"] == [0.9]
