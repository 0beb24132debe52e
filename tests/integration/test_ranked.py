"""A run whose trainer is spread over ranks is the run of one process; a lost rank costs time and nothing else."""

import asyncio
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from harness import CLOSE, EXACT, RECIPE, VERIFIER, assert_ledger_balances, finish, kitae, rows, run_toy, toy_config

from kitae.api import resume
from kitae.store.journal import Journal

pytestmark = pytest.mark.usefixtures("warm_posts")

SETTINGS = ("training.steps=4", "checkpoint.every=2", "eval.every=0", "training.prompts_per_step=3")
RANKS = ("cluster.backend=local", "cluster.ranks=2", "engine.count=1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_toy(tmp_path_factory.mktemp("alone"), *SETTINGS).folder


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_toy(tmp_path_factory.mktemp("ranked"), *SETTINGS, *RANKS).folder


def assert_same_learning(left: Path, right: Path, first: int = 1) -> None:
    a, b = ([row for row in rows(run) if row["kind"] == "step" and row["step"] >= first] for run in (left, right))
    assert [row["step"] for row in a] == [row["step"] for row in b] and a
    for x, y in zip(a, b, strict=True):
        for key in EXACT:
            assert x[key] == y[key], (x["step"], key)
        for key in x.keys() & y.keys() & set(CLOSE):
            assert abs(x[key] - y[key]) <= 1e-4 * max(1.0, abs(y[key])), (x["step"], key, x[key], y[key])


def children(pid: int) -> list[int]:
    """Of the ranks below a run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(re.search(r"PPid:\t(\d+)", (entry / "status").read_text()).group(1))  # type: ignore[union-attr]
                command = (entry / "cmdline").read_bytes()  # what is forked with its imports done has their names in it
                if parent == pid and b"kitae.trainer.parallel.rank_process" in command and b"forkserver" not in command:
                    found.append(int(entry.name))
            except (OSError, AttributeError):
                continue
    return found


@pytest.mark.sentinel
def test_two_ranks_learn_what_one_process_does(alone: Path, ranked: Path) -> None:
    assert_same_learning(ranked, alone)
    assert (ranked / "model" / "config.json").is_file()


ONE = ("cluster.backend=none", "cluster.ranks=1", "engine.kind=native", "engine.count=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "settings"),
    [("ranked", ONE), ("ranked", ("cluster.ranks=3",)), ("alone", (*RANKS, "engine.kind=process"))],
)
def test_others_go_on_from_what_was_saved(
    saved_by: str, settings: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(request.getfixturevalue(saved_by), tmp_path / "went-on")
    result = resume(tmp_path / "went-on", overrides=[*settings, "training.steps=6"])
    whole = run_toy(tmp_path / "whole", *SETTINGS, "training.steps=6").folder
    assert result.step == 6
    assert_same_learning(result.folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_time_alone(rank: int, alone: Path, tmp_path: Path) -> None:
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path}", *SETTINGS, *RANKS)
    run = tmp_path / "toy-001"
    asyncio.run(_kill_after_step(process, run, 3, rank))
    finish(process)
    assert_same_learning(run, alone)
    assert_ledger_balances(run, toy_config(tmp_path, *SETTINGS))
    journal = Journal(run / "journal.sqlite", read_only=True)
    assert [kind for _, kind, _ in journal.events()].count("trainer lost") == 1
    assert not children(process.pid)


async def _kill_after_step(process: object, run: Path, step: int, rank: int) -> None:
    for _ in range(600):
        if run.joinpath("metrics.jsonl").exists() and any(r["step"] >= step for r in rows(run) if r["kind"] == "step"):
            break
        await asyncio.sleep(0.2)
    ranks = sorted(children(process.pid))  # type: ignore[attr-defined]
    os.kill(ranks[rank], signal.SIGKILL)
