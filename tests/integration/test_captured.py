"""Training on what agent programs ask: chains of one rollout, failures of one sample, and a killed run that goes on."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, RECIPE, VERIFIER, assert_same_metrics, finish, kitae, rows
from test_conversation_runs import count, rollouts_of, told
from test_resume import kill_when

SETTINGS = (
    "training.steps=3",
    "training.prompts_per_step=2",
    "training.group_size=4",
    "checkpoint.every=1",
    "eval.prompts=2",
    "sampling.max_tokens=40",
    "verifier.max_error_share=1",
    f"env.command={sys.executable} {HERE / 'captured_agent.py'}",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(kitae("train", str(RECIPE), VERIFIER, f"run.dir={folder}", *SETTINGS))
    return folder / "toy-001"


@pytest.mark.sentinel
def test_chains_are_trained_on_and_failures_cost_one_sample(whole: Path) -> None:
    rollouts = rollouts_of(whole)
    assert len(rollouts) == 3 * 2 * 4
    failed = [r for r in rollouts if r.status == "failed"]
    assert failed and all("I do not like" in r.score.detail for r in failed if r.score)
    for r in rollouts:
        if r.status == "complete" and r.finish == "stop":
            assert [len(c.segments) for c in r.chains] == [3, 1]
    steps = [r for r in rows(whole) if r["kind"] == "step"]
    assert sum(r["errors"] for r in steps) == len(failed)
    assert all(r["updates"] for r in steps)


@pytest.mark.parametrize(
    ("moment", "spoken"),
    [
        (9, "chats"),
        pytest.param(17, "chats", marks=pytest.mark.slow),
        pytest.param(9, "messages", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_resumes_to_the_same_numbers(moment: int, spoken: str, whole: Path, tmp_path: Path) -> None:
    """Also where its program speaks Anthropic's dialect: the numbers are those of the whole run, which does not."""
    settings = (*SETTINGS[:-1], f"{SETTINGS[-1]} {spoken}")
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path}", *settings)
    run = tmp_path / "toy-001"
    kill_when(process, lambda: count(run, "rollouts") >= moment and count(run, "suspended"))
    before = [told(r) for r in rollouts_of(run)]
    finish(kitae("resume", str(run)))
    assert [told(r) for r in rollouts_of(run)] == [told(r) for r in rollouts_of(whole)]
    assert before == [told(r) for r in rollouts_of(run)][: len(before)]
    assert_same_metrics(run, whole)
    assert count(run, "suspended") == 0
    assert not _agents(), "no program is left"


def _agents() -> list[Any]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(HERE / "captured_agent.py").encode() in words.split(b"\0"):
            found.append(pid)
    return found
