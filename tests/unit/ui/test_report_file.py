"""A report of runs of all kinds and states: what it says, what it keeps to itself, and how large it gets."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from written_runs import HOSTILE, WrittenRun

from kitae.errors import StoreError
from kitae.observe.machine import note_machine
from kitae.ui.report_file import MOST_BYTES, make_report


def made(run: Path) -> str:
    return make_report(run, run.parent / "report.html").read_text("utf-8")


def data_of(page: str) -> str:
    (found,) = re.findall(r'<script type="application/json" id="kitae-answers">([^<]*)</script>', page)
    return str(found)


def answers(run: Path) -> dict[str, Any]:
    """The answers that the file of a run holds, by the end of their address; the run itself is under "run"."""
    found = json.loads(data_of(made(run)))
    return {address.rpartition("/")[2]: body for address, body in found.items()}


def test_a_finished_run_is_told_from_beginning_to_end(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, training={"lr": 3e-5}).evaluate(0.25)
    for reward in (0.0, 1.0, 1.0):
        run.step([[reward, 1.0], [0.0, reward]], entropy=0.5)
    folder = run.evaluate(0.75).finish()
    note_machine(folder)
    found = answers(folder)
    assert found.keys() == {"run", "series", "timeline", "diagnosis", "report"}
    summary, report = found["run"]["summary"], found["report"]
    assert (summary["name"], summary["status"], summary["step"], summary["steps"]) == ("toy-001", "finished", 3, 4)
    assert (summary["title"], report["measure"]) == ("grpo · reverse · tiny", "accuracy")
    assert (summary["before"]["mean"], summary["after"]["mean"]) == (0.25, 0.75)
    assert any("torch 2" in line for line in report["machine"])
    assert found["diagnosis"]["findings"] == [] and found["diagnosis"]["rules"] > 20
    assert found["series"]["columns"]["entropy"] == [0.5, 0.5, 0.5] and found["series"]["evaluation_steps"] == [0, 3]
    assert (report["first"], report["last"], report["evaluations"], report["every"]) == (0.25, 0.75, 2, 1)
    assert report["phases"] == {"wait_seconds": 1.5, "train_seconds": 4.5}
    assert report["best"] and report["worst"] and report["groups"] and report["before_after"]
    settings = {setting["key"]: setting for setting in found["run"]["settings"]}
    assert settings["training.lr"] == {"key": "training.lr", "value": 3e-5, "changed": True}
    assert not settings["engine.kind"]["changed"]


def test_nothing_in_it_can_run_or_be_fetched(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, data={"system": HOSTILE}).step([[0.0, None]], HOSTILE, **{f"reward/{HOSTILE}": 1.0})
    run.step([[1.0, 0.5]], HOSTILE, **{f"reward/{HOSTILE}": 1.0, "reward/<b>": 0.5, "first_error": HOSTILE})
    page = made(run.finish())
    assert data_of(page).count("\\u003cscript>document.title") > 4
    outside = page.replace(data_of(page), "")
    assert HOSTILE not in outside and outside.count("<script") == 2 and "<link" not in page
    assert not re.search(r"<[a-z]+\s[^<>]*\b(?:src|href|action|on\w+)=", outside.split('<script type="module">')[0])
    for rule in ("default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "connect-src 'none'"):
        assert rule in page


def test_the_policy_has_the_hash_of_the_script_and_the_style(tmp_path: Path) -> None:
    page = made(WrittenRun(tmp_path).step([[1.0]]).finish())
    for kind, inside in (("script", r'<script type="module">(.*?)</script>'), ("style", r"<style>(.*?)</style>")):
        (text,) = re.findall(inside, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page


def test_a_run_that_is_going_on_or_has_crashed(tmp_path: Path) -> None:
    running = WrittenRun(tmp_path, "going").step([[0.5]])
    assert answers(running.folder)["run"]["summary"]["status"] == "running"
    found = answers(running.close())
    assert found["run"]["summary"]["status"] == "crashed"
    (finding,) = [each for each in found["diagnosis"]["findings"] if "did not end by itself" in each["title"]]
    assert "kitae resume" in finding["advice"]


def test_a_run_without_a_step(tmp_path: Path) -> None:
    found = answers(WrittenRun(tmp_path).close())
    assert found["run"]["metrics"] == [] and found["report"]["best"] == [] and found["report"]["first"] is None


def test_a_damaged_journal_leaves_the_rest(tmp_path: Path) -> None:
    folder = WrittenRun(tmp_path).step([[1.0]]).finish()
    (folder / "journal.sqlite").write_bytes(b"no database at all, but long enough" * 99)
    found = answers(folder)
    assert found["series"]["columns"]["reward"] == [1.0] and found["report"]["best"] == []


def test_settings_of_another_version(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, "sft")
    (run.folder / "config.json").write_text('{"method": {"kind": "sft"}, "training": {"steps": 9}, "new": {"x": 1}}')
    run.store.metrics.append({"kind": "step", "step": 1, "loss": 2.5, "step_seconds": 1.0})
    found = answers(run.evaluate(2.0).finish())
    assert {"key": "new.x", "value": 1, "changed": False} in found["run"]["settings"]
    assert (found["run"]["summary"]["step"], found["run"]["summary"]["steps"]) == (1, 9)


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
    folder = run.finish()
    assert len(made(folder).encode()) < MOST_BYTES
    found = answers(folder)
    assert found["report"]["every"] == 15 and len(found["series"]["steps"]) == 200
    assert found["series"]["steps"][-1] == 2999 and len(found["series"]["evaluation_steps"]) == 100
    assert (
        found["report"]["evaluations"] == 2998 and "more characters" in found["report"]["best"][0]["samples"][0]["text"]
    )


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
