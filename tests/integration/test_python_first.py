"""Runs from Python: rows, functions by value, steps one at a time, and the way back from the command line."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kitae
from kitae.errors import ConfigError, DataError, Interrupted, VerifierError
from kitae.observe.observer import Silent
from kitae.store.run_folder import read_config

pytestmark = pytest.mark.usefixtures("warm_posts", "warm_verifiers")

ROWS = [{"prompt": f"Reverse {a}, {b}", "answer": f"{b}, {a}"} for a in range(4) for b in range(4, 8)]
HELD_OUT = [{"prompt": f"Reverse {a}, {b}", "answer": f"{b}, {a}"} for a in (8, 9) for b in range(4)]
SMALL: dict[str, Any] = {"model": "tiny", "prompts_per_step": 2, "group_size": 2, "max_tokens": 4, "quiet": True}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def length_reward(limit: float) -> Callable[[str], float]:
    def by_length(response: str) -> float:
        return len(response) / limit

    return by_length


@kitae.batched
def rank(responses: list[str]) -> list[float]:
    return [float(sorted(responses).index(each)) for each in responses]


async def asked(response: str, context: dict[str, Any]) -> float | None:
    await asyncio.sleep(0)
    return 1.0 if context["level"] == "hard" else None


def steps_of(result: kitae.Result) -> list[dict[str, Any]]:
    return [row for row in result.metrics if row["kind"] == "step"]


@pytest.mark.sentinel(keep=1)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pipeline": {"max_staleness": 1}},
        {"lora_rank": 4},
        {"cluster": {"backend": "local", "verifiers": 1}},
        {"algorithm": {"reference": "frozen", "kl": {"coef": 0.01}}},
    ],
    ids=["plain", "ahead", "lora", "cluster", "reference"],
)
def test_closures_batches_and_waiting_functions_are_rewards(more: dict[str, Any]) -> None:
    rows = [{**row, "level": "hard" if i % 2 else "easy"} for i, row in enumerate(ROWS)]
    seen = []
    run = kitae.start(
        data=iter(rows),
        eval_data=[{**row, "level": "hard"} for row in HELD_OUT],
        reward=[length_reward(10), (rank, 0.5), (asked, 2.0)],
        steps=3,
        **{**SMALL, **more},
    )
    for step in run:
        done = len([row for row in run.metrics if row["kind"] == "step"])
        answers = run.model.generate("hi", n=2, max_tokens=3)
        assert answers == run.model.generate("hi", n=2, max_tokens=3), "no update comes in between"
        if step.number == 2:
            found = run.evaluate()
            assert found is not None and found["prompts"] == 8
        time.sleep(0.2 if step.number < 3 else 1)
        assert len(run.model.generate("hi", max_tokens=3)) == 1, "the run is not over before its last step is taken"
        if "pipeline" not in more:
            assert len([row for row in run.metrics if row["kind"] == "step"]) == done == step.number
        seen.append(step)
    assert [step.number for step in seen] == [1, 2, 3] and run.result.stopped_by is None
    rows_of_steps = steps_of(run.result)
    assert all({"reward/by_length", "reward/rank", "reward/asked"} <= row.keys() for row in rows_of_steps)
    assert all(row["errors"] == 0 and row["reward/asked"] == 1.0 for row in rows_of_steps), "None is left out"
    assert seen[0].reward == rows_of_steps[0]["reward"] and seen[0]["length"] == rows_of_steps[0]["length"]
    assert [row["step"] for row in run.result.metrics if row["kind"] == "eval"] == [0, 2, 3]
    with pytest.raises(ConfigError, match="the run is over"):
        run.evaluate()


def test_leaving_the_loop_is_a_clean_stop_and_functions_given_again_go_on() -> None:
    run = kitae.start(data=ROWS, reward=length_reward(10), steps=50, **SMALL)
    for step in run:
        if step.number == 2:
            break
    assert run.result.stopped_by is not None and run.folder is not None
    done = run.result.step
    assert 2 <= done < 50 and (run.folder / "checkpoints" / f"step-{done:06d}").is_dir()
    more = [f"training.steps={done + 2}"]
    with pytest.raises(VerifierError, match=r"'by_length' was defined in a session of Python.*reward=by_length\)"):
        kitae.resume(run.folder, overrides=more, quiet=True)
    with pytest.raises(ConfigError, match="'by_length' is not what the run began with"):
        kitae.resume(run.folder, reward=length_reward(11), overrides=more, quiet=True)
    assert kitae.resume(run.folder, reward=length_reward(10), overrides=more, quiet=True).step == done + 2


def test_an_error_in_the_body_stops_the_run() -> None:
    run = kitae.start(data=ROWS, reward=length_reward(10), steps=50, **SMALL)
    with pytest.raises(ZeroDivisionError):
        for _ in run:
            1 / 0  # noqa: B018
    assert run.result.step < 5


SCRIPT = """
import sys
import kitae

WORDS = ["a", "e"]

def vowels(response, reference):
    return sum(response.count(word) for word in WORDS)

rows = [{"prompt": f"Say {n}", "solution": str(n)} for n in range(12)]

if __name__ == "__main__":
    run = kitae.start(model="tiny", data=rows, reward=vowels, steps=50, prompts_per_step=2, group_size=2,
                      max_tokens=4, quiet=True)
    for step in run:
        if step.number == 2:
            break
    print(run.result.step)
"""


@pytest.mark.thorough
def test_a_run_of_a_script_is_resumed_from_the_command_line(folder: Path) -> None:
    script = folder / "mine" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)

    def call(*command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=300)

    begun = call(str(script))
    assert begun.returncode == 0, begun.stderr
    steps = int(begun.stdout)
    written = (folder / "runs/run-001/given/train.jsonl").read_text()
    assert [json.loads(line) for line in written.splitlines()][3] == {"prompt": "Say 3", "solution": "3"}
    script.write_text(SCRIPT.replace("WORDS = [", "# of one letter\nWORDS = ["))
    resumed = "import sys; from kitae.cli.main import run; sys.argv[0] = 'kitae'; run()"
    gone_on = call("-c", resumed, "resume", "runs/run-001", f"training.steps={steps + 1}")
    assert gone_on.returncode == 0, gone_on.stderr
    assert f"step {steps + 1}/{steps + 1}" in gone_on.stdout
    script.write_text(SCRIPT.replace('"e"]', '"i"]'))
    changed = call("-c", resumed, "resume", "runs/run-001", f"training.steps={steps + 2}")
    assert changed.returncode == 1 and "'vowels' of" in changed.stderr and "is not what the run began" in changed.stderr
    unguarded = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    script.write_text(unguarded)
    endless = call("-c", resumed, "resume", "runs/run-001", f"training.steps={steps + 2}")
    assert endless.returncode == 1 and 'put the call under if __name__ == "__main__"' in endless.stderr
    with (folder / "runs/run-001/given/train.jsonl").open("a") as file:
        file.write('{"prompt": "Say more", "solution": "1"}\n')
    script.write_text(SCRIPT)
    other = call("-c", resumed, "resume", "runs/run-001", f"training.steps={steps + 2}")
    assert other.returncode == 1 and "the prompts must be those that the run began with" in other.stderr


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("method", "row"),
    [
        ("sft", {"prompt": "2 + 2", "completion": "4"}),
        ("dpo", {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}),
        ("kto", {"prompt": "2 + 2", "completion": "4", "label": True}),
        ("reward", {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}),
        ({"kind": "distil-file", "teacher": "tiny"}, {"prompt": "2 + 2", "completion": "4"}),
    ],
    ids=["sft", "dpo", "kto", "reward", "distil"],
)
def test_rows_of_examples_train_in_every_way(method: Any, row: dict[str, Any]) -> None:
    rows = [{**row, "prompt": f"{n} + 2"} for n in range(8)]
    run = kitae.start(model="tiny", data=rows, eval_data=rows[:2], method=method, batch=4, steps=3, quiet=True)
    numbers = []
    for step in run:
        numbers.append(step.loss)
        with pytest.raises(ConfigError, match="samples nothing while it trains"):
            run.model.generate("hi")
    assert len(numbers) == 3 and None not in numbers and run.result.after is not None
    with pytest.raises(ConfigError, match="reward is for reinforcement learning"):
        kitae.train(model="tiny", data=rows, method=method, reward=rank, quiet=True)


def test_a_reward_function_of_trl_runs_as_it_is() -> None:
    def first_letter(completions: list[str], answer: list[str], level: list[str], **kwargs: Any) -> list[float]:
        assert len(set(answer)) == len(set(level)) == 1, "the answers to one prompt"
        return [float(c[:1] == a[:1]) for c, a in zip(completions, answer, strict=True)]

    rows = [{**row, "level": "easy"} for row in ROWS]
    result = kitae.train(data=rows, reward=[first_letter, (length_reward(10), 0.5)], steps=2, **SMALL)
    assert all(row["errors"] == 0 and "reward/by_length" in row for row in steps_of(result))


def test_evaluate_and_sample_take_rows_and_functions(folder: Path) -> None:
    found = kitae.evaluate("tiny", data=HELD_OUT, reward=length_reward(10), max_tokens=4)
    assert found.prompts == len(HELD_OUT) and found.errors == 0
    groups = kitae.sample("tiny", 2, 3, data=ROWS, reward=[length_reward(10), rank], max_tokens=4)
    assert [len(group.rewards_G) for group in groups] == [3, 3]
    assert sorted(groups[0].rollouts[i].score.components["rank"] for i in range(3)) == [0.0, 1.0, 2.0]  # type: ignore[union-attr]
    assert not list(folder.iterdir()), "nothing is left"


def test_the_same_without_a_reference_column() -> None:
    result = kitae.train([{"prompt": "a"}, {"prompt": "b"}], reward=length_reward(10), steps=1, **SMALL)
    config = read_config(result.folder)
    assert config.flat()["data.columns.answer"] == "" and config.flat()["eval.prompts"] == 0


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({}, ConfigError, "reward must be given with data"),
        ({"reward": "mathh"}, VerifierError, "a verifier is one of .* did you mean 'math'"),
        ({"reward": rank, "num_generations": 4}, ConfigError, "Kitae calls it training.group_size"),
        ({"reward": rank, "data": [{"x": 1}]}, DataError, "rows must have a column for the prompt"),
        ({"reward": "exact", "data": [{"prompt": "a", "answer": None}]}, DataError, "the reference answer is null"),
    ],
)
def test_what_is_wrong_leaves_no_folder(more: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kitae.train(**{"data": ROWS, **SMALL, **more})
    assert not list(Path("runs").glob("*")) if Path("runs").exists() else True


def test_a_function_that_fails_for_all_answers_is_found_before_training(folder: Path) -> None:
    def broken(response: str) -> float:
        raise KeyError("no such thing")

    with pytest.raises(VerifierError, match="KeyError: 'no such thing'"):
        kitae.train(data=ROWS, reward=broken, **SMALL)
    assert not list(Path("runs").glob("*"))


def test_progress_is_shown_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    result = kitae.train(data=ROWS, reward=rank, steps=2, **{**SMALL, "quiet": False})
    shown = capsys.readouterr().out
    assert "step 2/2" in shown and str(result.folder) in shown
    assert "step 2/2" in (result.folder / "console.log").read_text()
    kitae.train(data=ROWS, reward=rank, steps=1, **SMALL)
    assert capsys.readouterr().out == ""


def test_a_run_in_an_event_loop_is_interrupted_and_says_how_to_go_on() -> None:
    class Impatient(Silent):
        def step(self, report: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        kitae.train(data=ROWS, reward=rank, steps=50, observer=Impatient(), **{**SMALL, "quiet": False})

    with pytest.raises(Interrupted, match="kitae resume runs/run-001"):
        asyncio.run(cell())


def test_a_moved_folder_of_rows_is_named(folder: Path) -> None:
    result = kitae.train(data=ROWS, reward=rank, steps=1, **SMALL)
    shutil.move(result.folder / "given", folder / "elsewhere")
    with pytest.raises(DataError, match=r"data.path must name a file, got .*run-001/given/train.jsonl"):
        kitae.resume(result.folder, overrides=["training.steps=2"], quiet=True)
