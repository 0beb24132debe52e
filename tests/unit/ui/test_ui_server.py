"""The API as the page asks it: runs of all states and kinds, bad questions, and no way out of the folders."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from written_runs import HOSTILE, WrittenRun

from kitae.errors import StoreError
from kitae.evaluation.held_out import keep_examples
from kitae.observe.diagnosis import RULES, diagnose
from kitae.ui.guard import Door
from kitae.ui.library import Library
from kitae.ui.ui_server import STATIC, make_app


def client(*places: Path) -> TestClient:
    return TestClient(make_app(Library(places), Door("127.0.0.1")), base_url="http://127.0.0.1")


def test_finished_running_and_crashed_runs_are_told_apart(tmp_path: Path) -> None:
    WrittenRun(tmp_path, "done").evaluate(0.25).step([[1.0]]).evaluate(0.75).finish()
    WrittenRun(tmp_path, "died").step([[0.0]]).close()
    running = WrittenRun(tmp_path, "runs").step([[0.5]])
    found = {run["name"]: run for run in client(tmp_path).get("/api/runs").json()}
    assert {name: run["status"] for name, run in found.items()} == {
        "done-001": "finished",
        "died-001": "crashed",
        "runs-001": "running",
    }
    done, now = found["done-001"], found["runs-001"]
    assert (done["before"]["mean"], done["after"]["mean"], done["value"], done["eta"]) == (0.25, 0.75, 1.0, None)
    assert (now["step"], now["steps"], now["eta"], now["step_seconds"]) == (1, 4, 6.0, 2.0)
    running.close()


def test_a_run_says_what_can_be_chosen(tmp_path: Path) -> None:
    WrittenRun(tmp_path, training={"lr": 3e-5}).step([[0.0, 1.0]], entropy=0.5).evaluate(0.5).finish()
    found = client(tmp_path).get("/api/runs/toy-001").json()
    assert {"reward", "entropy"} <= set(found["metrics"]) and found["evaluations"] == ["avg", "avg_low", "avg_high"]
    assert found["phases"] == ["wait_seconds", "train_seconds"] and found["rollouts"] == 2
    assert [event["kind"] for event in found["events"]] == ["start", "finished"]
    changed = [row["key"] for row in found["settings"] if row["changed"]]
    assert "training.lr" in changed and changed == [row["key"] for row in found["settings"]][: len(changed)]


def test_a_run_of_another_kind_and_version_is_shown(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path, "sft")
    (made.folder / "config.json").write_text('{"method": {"kind": "sft"}, "training": {"steps": 9}, "new": {"x": 1}}')
    made.store.metrics.append({"kind": "step", "step": 1, "loss": 2.5, "step_seconds": 1.0, "strange/metric": 7})
    made.finish()
    with client(tmp_path) as asked:
        (run,) = asked.get("/api/runs").json()
        assert (run["metric"], run["value"], run["title"], run["steps"]) == ("loss", 2.5, "sft", 9)
        found = asked.get("/api/runs/sft-001").json()
        assert "strange/metric" in found["metrics"] and found["rollouts"] == 0
        assert {"key": "new.x", "value": 1, "changed": False} in found["settings"]
        for page in ("rollouts", "prompts", "errors", "timeline", "console", "diagnosis", "series?names=loss"):
            assert asked.get(f"/api/runs/sft-001/{page}").status_code == 200, page


def test_a_damaged_run_is_listed_and_takes_no_other_with_it(tmp_path: Path) -> None:
    WrittenRun(tmp_path, "good").step([[1.0]]).finish()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    (tmp_path / "bad" / "journal.sqlite").write_text("no database")
    with client(tmp_path) as asked:
        found = {run["name"]: run for run in asked.get("/api/runs").json()}
        assert found["good-001"]["status"] == "finished" and found["bad"]["status"] == "unreadable"
        assert asked.get("/api/runs/bad").json()["summary"]["problem"]
        answer = asked.get("/api/runs/bad/rollouts")
        assert answer.status_code == 404 and "not a database" in answer.json()["error"]


def test_hostile_text_goes_out_as_json(tmp_path: Path) -> None:
    WrittenRun(tmp_path).step([[0.0]], text=HOSTILE).finish()
    answer = client(tmp_path).get("/api/runs/toy-001/groups/0")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["samples"][0]["text"] == HOSTILE


@pytest.mark.parametrize(
    "key", ["..", "../secret", "%2e%2e%2fsecret", "..%2Fsecret", "/etc", "%2Fetc%2Fpasswd", "secret", "toy-001/.."]
)
def test_there_is_no_way_out_of_the_folder(tmp_path: Path, key: str) -> None:
    WrittenRun(tmp_path / "runs").step([[1.0]]).finish()
    WrittenRun(tmp_path, "secret").finish()
    os.symlink(tmp_path / "secret-001", tmp_path / "runs" / "secret")
    with client(tmp_path / "runs") as asked:
        assert [run["key"] for run in asked.get("/api/runs").json()] == ["toy-001"]
        assert asked.get(f"/api/runs/{key}/console").status_code == 404


@pytest.mark.parametrize("path", ["..%2Findex.html", "%2e%2e%2f%2e%2e%2fserver.py", "%2Fetc%2Fpasswd", "none"])
def test_assets_are_those_of_the_page(tmp_path: Path, path: str) -> None:
    assert client(tmp_path).get(f"/assets/{path}").status_code == 404


def test_a_file_that_is_a_link_to_elsewhere_is_not_read(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "runs").finish()
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", run / "console.log")
    assert client(tmp_path / "runs").get("/api/runs/toy-001/console").json() == {"text": "", "complete": True}


def test_two_runs_of_one_name_have_two_keys(tmp_path: Path) -> None:
    a, b = (WrittenRun(tmp_path / name).finish() for name in "ab")
    library = Library([a, b, tmp_path / "a"])
    assert library.runs() == {"toy-001": a.resolve(), "toy-001~2": b.resolve()}
    with pytest.raises(StoreError, match="no such folder"):
        Library([tmp_path / "none"])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/runs/none", "no run 'none' in"),
        ("/api/runs/toy-001/rollouts?step=x", "a number is needed, got 'x'"),
        ("/api/runs/toy-001/rollouts?after=x", "got 'x'"),
        ("/api/runs/toy-001/rollouts?order=x", "order must be one of"),
        ("/api/runs/toy-001/prompts?kind=x", "kind must be one of"),
        ("/api/runs/toy-001/groups/99", "has no group 99"),
        ("/api/runs/toy-001/groups/0/tokens/x", "a number is needed"),
        ("/api/compare?runs=toy-001", "compare takes 2 to 6 runs, got 1"),
    ],
)
def test_bad_questions_get_a_reason(tmp_path: Path, path: str, says: str) -> None:
    WrittenRun(tmp_path).step([[1.0]]).finish()
    answer = client(tmp_path).get(path)
    assert answer.status_code == 404 and says in answer.json()["error"]


def test_comparison_pairs_prompts_and_names_differences(tmp_path: Path) -> None:
    WrittenRun(tmp_path, "a").step([[0.0, 0.0], [0.0, 1.0], [0.5]]).finish()
    WrittenRun(tmp_path, "b", training={"lr": 1e-4}).step([[1.0, 0.0], [1.0, 1.0], [1.0]]).finish()
    found = client(tmp_path).get("/api/compare?runs=a-001,b-001").json()
    assert [row["key"] for row in found["settings"]] == ["training.lr"]
    (pair,) = found["pairings"]
    assert (pair["prompts"], pair["difference"]) == (3, 0.5)
    assert pair["first"] == pytest.approx(1 / 3) and pair["low"] == pair["high"] == 0.5
    assert [row["reason"] for row in found["held_out"]] == ["a-001 has no evaluation yet"]


def test_comparison_pairs_held_out_results(tmp_path: Path) -> None:
    runs = [WrittenRun(tmp_path, name).step([[0.0]]).evaluate(0.5).finish() for name in "abc"]
    for run, values in zip(runs, ([0.0] * 8, [1.0] * 8), strict=False):
        keep_examples(run, 1, {f"example {i}": value for i, value in enumerate(values)})
    found = client(tmp_path).get("/api/compare?runs=a-001,b-001,c-001").json()["held_out"]
    assert [(row["key"], row["prompts"], row["difference"]) for row in found] == [("b-001", 8, 1.0), ("c-001", 0, None)]
    assert found[0]["low"] > 0.3 and found[0]["p"] == pytest.approx(2 / 2**8)
    assert found[1]["reason"] == "c-001 kept no results of single prompts"


def test_rollouts_of_one_prompt(tmp_path: Path) -> None:
    WrittenRun(tmp_path).step([[0.0], [1.0], [0.5], [0.25]]).finish()
    with client(tmp_path) as asked:
        rows = asked.get("/api/runs/toy-001/rollouts?prompt=reverse/0").json()["rows"]
        assert [row["group"] for row in rows] == [3, 0]
        assert "fate must be one of" in asked.get("/api/runs/toy-001/rollouts?fate=x").json()["error"]


def test_prompts_have_their_visits(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path)
    for rewards in ([[0.0], [1.0], [0.0]], [[1.0], [0.0], [0.0]], [[1.0], [1.0], [0.0]]):
        made.step(rewards)
    made.finish()
    with client(tmp_path) as asked:
        found = asked.get("/api/runs/toy-001/prompts").json()
        assert {row["prompt_id"]: row["kind"] for row in found["rows"]} == {
            "reverse/0": "mastered",
            "reverse/1": "flipping",
            "reverse/2": "dead",
        }
        assert [visit["rate"] for visit in found["rows"][1]["visits"]] == [1.0, 0.0, 1.0]
        assert found["counts"] == {"flipping": 1, "dead": 1, "learning": 0, "mastered": 1}
        assert asked.get("/api/runs/toy-001/prompts?kind=dead").json()["total"] == 1


def test_the_timeline_has_who_worked_in_some_steps(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path)
    for _ in range(4):
        made.step([[1.0]])
    with (made.folder / "timeline.jsonl").open("a") as file:
        file.write('{"part": "train", "st')
    made.finish()
    with client(tmp_path) as asked:
        found = asked.get("/api/runs/toy-001/timeline?steps=2&last=3").json()
        assert (found["first"], found["last"], found["of"]) == (2, 3, 4)
        assert (found["start"], found["end"]) == (4.5, 8.0)
        assert found["busy"]["train"] == pytest.approx(3 / 3.5)
        assert [(s["part"], s["step"]) for s in found["spans"]] == [("train", 2), ("generate", 3), ("train", 3)]


def test_a_diagnosis_is_what_the_rules_say(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path)
    for _ in range(5):
        made.step([[0.0, 0.0]], rollouts=2)
    run = made.finish()
    found = client(tmp_path).get("/api/runs/toy-001/diagnosis").json()
    assert found["rules"] == len(RULES)
    assert found["findings"] == [asdict(finding) for finding in diagnose(run.resolve())]
    (finding,) = found["findings"]
    assert finding["rule"] == "all-wrong" and "10 answers of 5 steps" in finding["evidence"]
    assert str(run) in finding["advice"]


def test_reading_leaves_no_traces(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path).step([[0.0, 1.0]]).finish()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with client(tmp_path) as asked:
        for page in (
            "",
            "/rollouts?length_min=1&reward_min=0",
            "/groups/0",
            "/groups/0/tokens/0",
            "/prompts",
            "/errors",
        ):
            asked.get(f"/api/runs/toy-001{page}").raise_for_status()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_page_is_small_and_names_nothing_outside(tmp_path: Path) -> None:
    WrittenRun(tmp_path).finish()
    page = client(tmp_path).get("/").text
    assert "http://" not in page and "https://" not in page and "<style" not in page
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) <= 200_000
    assets = [path for path in STATIC.rglob("*") if path.suffix == ".js"]
    (script,) = assets
    answer = client(tmp_path).get(f"/assets/{script.name}")
    assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"]


def test_no_number_is_lost_for_not_being_one(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path)
    with (made.folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 1, "loss": NaN, "reward": Infinity}\n')
    made.finish()
    answer = client(tmp_path).get("/api/runs/toy-001/series?names=loss,reward")
    assert json.loads(answer.text)["columns"] == {"loss": [None], "reward": [None]}


def test_the_first_page_waits_for_nothing_heavy(tmp_path: Path) -> None:
    """Neither torch nor what makes settings of files, which takes longer to import than all the rest."""
    WrittenRun(tmp_path).step([[1.0]]).finish()
    code = f"""
import sys
from pathlib import Path
from starlette.testclient import TestClient
known = {{*sys.modules}}
from kitae.ui.guard import Door
from kitae.ui.library import Library
from kitae.ui.ui_server import make_app
asked = TestClient(make_app(Library([Path({str(tmp_path)!r})]), Door("127.0.0.1")), base_url="http://127.0.0.1")
assert asked.get("/").status_code == 200 and len(asked.get("/api/runs").json()) == 1
heavy = ("torch", "transformers", "pydantic", "sympy", "matplotlib", "kitae.config.root", "kitae.observe.diagnosis")
print("HEAVY", [name for name in heavy if name in sys.modules and name not in known])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "HEAVY []"
