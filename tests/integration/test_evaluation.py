"""Evaluations beside a run and on their own: other suites, interruptions, what goes on where it was."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from harness import RECIPE, finish, kitae, rows, run_toy, toy_config

from kitae.cli.eval import evaluate as evaluate_command
from kitae.cli.runs import compare
from kitae.evaluation.held_out import answers_at, pair
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import go_on, train
from kitae.store.journal import Journal
from kitae.store.run_folder import RunStore
from kitae.store.run_summary import look

FEW = ("training.steps=2", "eval.prompts=4", "verifier.check_gold=false")


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    """A verifier that waits at its third verdict until the file `go` is there, and fails while `broken` is."""
    path = tmp_path / "judge.py"
    path.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "HERE = Path(__file__).parent\n"
        "def score(response, reference, context):\n"
        "    if (HERE / 'broken').exists():\n"
        "        raise OSError('out of order')\n"
        "    with (HERE / 'calls').open('a') as calls:\n"
        "        calls.write('x')\n"
        "    while (HERE / 'calls').stat().st_size > 2 and not (HERE / 'go').exists():\n"
        "        time.sleep(0.02)\n"
        "    return float(len(response) % 2)\n"
    )
    return path


@pytest.mark.sentinel
def test_other_suites_beside_the_run_s_own_task(tmp_path: Path) -> None:
    settings = (*FEW, "eval.every=1", 'eval.suites=["reverse", "count"]')
    result = run_toy(tmp_path, *settings)
    found = [(r["step"], r.get("suite"), r["prompts"]) for r in rows(result.folder) if r["kind"] == "eval"]
    assert found == [(step, suite, 4) for step in range(3) for suite in (None, "reverse", "count")]
    seen = look(result.folder)
    assert [r["step"] for r in seen.evaluations] == [0, 1, 2]
    assert {name: len(each) for name, each in seen.suites.items()} == {"reverse": 3, "count": 3}
    assert result.before == seen.evaluations[0] and result.after == seen.evaluations[-1]
    alone = run_toy(tmp_path, *FEW, "eval.every=1")
    own = [r for r in rows(result.folder) if r["kind"] == "eval" and "suite" not in r]
    assert own == [r for r in rows(alone.folder) if r["kind"] == "eval"], "suites change nothing of it"


def test_two_runs_are_compared_prompt_by_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what they kept of their last evaluations; the means are those of the metrics."""
    one = run_toy(tmp_path, *FEW)
    two = run_toy(tmp_path, *FEW, "training.lr=3e-2")
    kept = [answers_at(one.folder, step) for step in (0, 2)]
    assert [len(each) for each in kept] == [4, 4] and kept[0].keys() == kept[1].keys()
    for step, each in zip((0, 2), kept, strict=True):
        (row,) = [r for r in rows(one.folder) if r["kind"] == "eval" and r["step"] == step]
        assert fmean(a.value or 0.0 for a in each.values()) == pytest.approx(row["avg"])
        assert {v for a in each.values() for r in a.rollouts for s in r.segments for v in s.versions} == {step}
    found = pair(one.folder, two.folder)
    assert one.after is not None and two.after is not None and found.difference is not None
    assert found.difference.interval.mean == pytest.approx(two.after["avg"] - one.after["avg"], abs=1e-6)
    capsys.readouterr()
    compare([one.folder, two.folder])
    lines = {line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert f"{found.difference.interval.mean:+.3f} [" in lines["paired with toy-001"]
    other = run_toy(tmp_path, *FEW, "run.seed=5")
    compare([one.folder, other.folder])
    said = capsys.readouterr().out
    assert "not paired with toy-001: they have no held-out prompt in common: 4 of toy-001, 4 of toy-003" in said


def test_a_bad_suite_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no data for suite 'gsm8k'"):
        run_toy(tmp_path, 'eval.suites=["gsm8k"]', f"eval.data={tmp_path}")
    assert not list(tmp_path.glob("toy-*"))


def test_a_first_evaluation_that_nobody_judged_is_made_again(judge: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "broken").touch()
    config = toy_config(tmp_path, *FEW, f"verifier.name={judge}:score", "verifier.max_error_share=0.5")
    with pytest.raises(Exception, match="could not be judged"):
        train(config, Bystander(Silent()))
    run = tmp_path / "toy-001"
    assert [(r["step"], r["avg"], r["errors"]) for r in rows(run)] == [(0, None, 4)]
    (tmp_path / "broken").unlink()
    store = RunStore.open(run)
    result = go_on(store, Bystander(Silent()))
    first, *_ = look(run).evaluations
    assert (first["step"], first["errors"]) == (0, 0)
    assert result.before == first and result.after is not None


def interrupted(arguments: list[str], moment: Callable[[], bool], number: signal.Signals) -> tuple[int, str]:
    process = kitae(*arguments)
    until(moment)
    process.send_signal(number)
    output = process.ended(timeout=60)
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_during_the_first_evaluation(number: signal.Signals, judge: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    arguments = ["train", str(RECIPE), f"run.dir={tmp_path}", f"verifier.name={judge}:score", *FEW]
    status, output = interrupted(arguments, lambda: calls.exists() and calls.stat().st_size > 2, number)
    assert status == 128 + number, output
    run = tmp_path / "toy-001"
    assert look(run).status == "stopped"
    (answers,) = run.glob("evaluations/step-000000/own/*/answers.sqlite")
    before = _texts(answers)
    assert before, "answers are kept before they are judged"
    (tmp_path / "go").touch()
    finish(kitae("resume", str(run)))
    assert look(run).status == "finished" and _texts(answers).items() >= before.items()
    assert [r["step"] for r in look(run).evaluations] == [0, 2]


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(judge: Path, tmp_path: Path) -> None:
    """What was answered is not asked again, and the numbers are those of one that was not killed."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE.read_text())

    def command(output: str) -> list[str]:
        settings = [f"verifier.name={judge}:score", "eval.prompts=8", "eval.samples=2", "eval.temperature=1"]
        return ["eval", str(recipe), *settings, "--output", str(tmp_path / output), "--json"]

    calls = tmp_path / "calls"
    status, _ = interrupted(command("out"), lambda: calls.exists() and calls.stat().st_size > 2, signal.SIGKILL)
    assert status == -signal.SIGKILL
    (answers,) = (tmp_path / "out").glob("tiny/mine-*/answers.sqlite")
    before = _texts(answers)
    assert before, "answers are kept before they are judged"
    (tmp_path / "go").touch()
    found = _last_json(finish(kitae(*command("out"))))
    assert _texts(answers).items() >= before.items() and len(_texts(answers)) == 16
    assert found == _last_json(finish(kitae(*command("whole"))))
    (result,) = found["results"]
    assert (result["model"], result["suite"], result["prompts"], result["errors"]) == ("tiny", "mine", 8, 0)


@pytest.mark.slow
def test_ctrl_c_during_an_evaluation_says_how_to_go_on(judge: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    arguments = ["eval", str(RECIPE), f"verifier.name={judge}:score", "--output", str(tmp_path / "out")]
    status, output = interrupted(arguments, lambda: calls.exists() and calls.stat().st_size > 2, signal.SIGINT)
    assert status == 130
    assert "interrupted; the same command goes on from here" in output and "Traceback" not in output


def test_two_models_are_compared_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_toy(tmp_path, *FEW, "training.steps=4").folder
    arguments = ["tiny", str(run), "eval.prompts=6", "model.dtype=float32"]
    output, markdown, answers = (tmp_path / "out", tmp_path / "t.md", tmp_path / "a.jsonl")
    capsys.readouterr()
    evaluate_command(arguments, "own,reverse", output=output, markdown=markdown, answers=answers)
    said = capsys.readouterr().out
    titles, *lines = [line.split() for line in said.splitlines() if line.startswith(("suite", "toy", "reverse"))]
    assert titles[:3] == ["suite", "score", "model"] and "difference" in titles
    assert [line[:4] for line in lines] == [
        ["toy", "score", "tiny", "6"],
        ["toy", "score", "toy-001", "6"],
        ["reverse", "score", "tiny", "6"],
        ["reverse", "score", "toy-001", "6"],
    ]
    assert (tmp_path / "t.md").read_text().startswith("| suite | score | model |")
    written = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(written) == 24 and {"question", "answer", "score", "finish", "tokens"} <= written[0].keys()


def _texts(path: Path) -> dict[str, str]:
    journal = Journal(path, read_only=True)
    try:
        return {r.id: r.text for group in range(8) for r in journal.rollouts(group)}
    finally:
        journal.close()


def _last_json(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found
