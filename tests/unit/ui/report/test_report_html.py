"""A report of runs of all kinds and states: what it says, what it keeps to itself, and how large it gets."""

import json
import re
from pathlib import Path

import pytest
from written_runs import HOSTILE, WrittenRun

from kitae.errors import StoreError
from kitae.observe.machine import note_machine
from kitae.ui.report.page import MOST_BYTES, make_report


def made(run: Path) -> str:
    return make_report(run, run.parent / "report.html").read_text("utf-8")


def heads(page: str) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", page)


def test_a_finished_run_is_told_from_beginning_to_end(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, training={"lr": 3e-5}).evaluate(0.25)
    for reward in (0.0, 1.0, 1.0):
        run.step([[reward, 1.0], [0.0, reward]], entropy=0.5)
    folder = run.evaluate(0.75).finish()
    note_machine(folder)
    page = made(folder)
    assert heads(page) == [
        *("Diagnosis", "Curves", "Evaluations", "Before and after, on the same prompts", "Best answers"),
        *("Worst answers", "Groups", "Where the time went", "Settings", "What happened"),
    ]
    for text in ("toy-001", "finished", "0.250 → 0.750", "3 of 4", "grpo · reverse · tiny", "torch 2"):
        assert text in page, text
    assert "none of" in page and "rules has found a problem" in page
    changed, usual = page.split("<h2>Settings</h2>")[1].split("<details>", 1)
    assert "<td>training.lr</td><td>3e-05</td>" in changed and "<td>engine.kind</td>" in usual
    assert "<td>train</td><td>4.5 s</td><td>75.0%</td>" in page  # phases
    assert "training reward" in page and "entropy (nats per token)" in page


def test_nothing_in_it_can_run_or_be_fetched(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, data={"system": HOSTILE}).step([[0.0, None]], HOSTILE, **{f"reward/{HOSTILE}": 1.0})
    run.step([[1.0, 0.5]], HOSTILE, **{f"reward/{HOSTILE}": 1.0, "reward/<b>": 0.5, "first_error": HOSTILE})
    page = made(run.finish())
    assert page.count("&lt;script&gt;document.title") > 4
    assert "<script" not in page and "<img" not in page and "<link" not in page
    assert not re.search(r"<[^>]*\s(?:src|href|action)=|url\(|@import|https?://", page)
    assert not re.search(r"<[^>]*\son\w+=", page) and not re.search(r"<[^>]*\sstyle=", page)
    assert "default-src 'none'; style-src 'sha256-" in page


def test_a_run_that_is_going_on_or_has_crashed(tmp_path: Path) -> None:
    running = WrittenRun(tmp_path, "going").step([[0.5]])
    assert "running" in made(running.folder)
    page = made(running.close())
    assert "crashed" in page and "The run did not end by itself" in page and "kitae resume" in page


def test_a_run_without_a_step(tmp_path: Path) -> None:
    page = made(WrittenRun(tmp_path).close())
    assert "No step is finished yet." in page and "Best answers" not in page


def test_a_damaged_journal_leaves_the_rest(tmp_path: Path) -> None:
    folder = WrittenRun(tmp_path).step([[1.0]]).finish()
    (folder / "journal.sqlite").write_bytes(b"no database at all, but long enough" * 99)
    page = made(folder)
    assert "Curves" in heads(page) and "Best answers" not in heads(page)


def test_settings_of_another_version(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, "sft")
    (run.folder / "config.json").write_text('{"method": {"kind": "sft"}, "training": {"steps": 9}, "new": {"x": 1}}')
    run.store.metrics.append({"kind": "step", "step": 1, "loss": 2.5, "step_seconds": 1.0})
    page = made(run.evaluate(2.0).finish())
    assert "<td>new.x</td><td>1</td>" in page and "1 of 9" in page


def test_keys_and_addresses_are_not_told(tmp_path: Path) -> None:
    hook = "https://hooks.example/T000/secret-key"
    run = WrittenRun(tmp_path, observe={"on_finish": hook}, eval={"data": "https://me:password@host/data"})
    page = made(run.step([[1.0]]).finish())
    assert "secret-key" not in page and "password" not in page and "(set; not told here)" in page


def test_a_file_is_small_whatever_a_run_holds(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step([[0.0, 1.0]] * 3, "word " * 40_000)
    names = {f"reward/part {i} {'x' * 50}": 0.5 for i in range(40)}
    with (run.folder / "metrics.jsonl").open("a") as file:
        for step in range(2, 3000):
            row = {"kind": "step", "step": step, "reward": 1 / step, "entropy": 0.1, "loss": 1.0, **names}
            file.write(json.dumps(row) + "\n")
            file.write(json.dumps({"kind": "eval", "step": step, "avg": 0.5, "avg_low": 0.4, "avg_high": 0.6}) + "\n")
    with (run.folder / "timeline.jsonl").open("a") as file:
        for i in range(20_000):
            file.write(json.dumps({"part": "generate", "step": 2999, "start": i / 10, "end": i / 10 + 5}) + "\n")
    page = made(run.finish())
    assert len(page.encode()) < MOST_BYTES
    assert "Every 15th step is shown." in page and "more characters" in page


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("none", "there is no such folder"),
        ("empty", "it has no config.json"),
        ("chain", "is a chain; a report is of one run of it: 01-sft-001"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path: Path, place: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "chain" / "01-sft-001").mkdir(parents=True)
    (tmp_path / "chain" / "chain.json").write_text("{}")
    (tmp_path / "chain" / "01-sft-001" / "config.json").write_text("{}")
    with pytest.raises(StoreError, match=says):
        make_report(tmp_path / place, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_folder_to_write_to_must_be_there(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path).finish()
    with pytest.raises(StoreError, match="there is no folder"):
        make_report(run, tmp_path / "none" / "report.html")
