"""Training on episodes of several turns: failures cost one sample, and a run that was killed goes on where it was."""

import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from dialogue import TURNS, fate_of
from harness import HERE, RECIPE, VERIFIER, assert_same_metrics, finish, kitae, rows

from kitae.models.tiny import make_tokenizer
from kitae.store.journal import Journal
from kitae.types import Rollout

STOPS = "sampling.stop=" + str(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")).replace("'", '"')
SETTINGS = (
    "training.steps=4",
    "training.prompts_per_step=3",
    "checkpoint.every=2",
    "eval.prompts=4",
    "sampling.max_tokens=40",
    "verifier.max_error_share=1",
    STOPS,
    f"env.name={HERE / 'dialogue.py'}:Dialogue",
    "env.seconds=3",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(kitae("train", str(RECIPE), VERIFIER, f"run.dir={folder}", *SETTINGS))
    return folder / "toy-001"


def rollouts_of(run: Path) -> list[Rollout]:
    journal = Journal(run / "journal.sqlite", read_only=True)
    found = [r for group, *_ in journal.groups() for r in journal.rollouts(group)]
    journal.close()
    return found


def told(r: Rollout) -> Any:
    assert r.score is not None
    value = r.score.value if r.score.valid else None
    tokens = [(s.source, s.tokens, s.versions) for s in r.segments]
    return r.id, tokens, r.finish, r.text, r.status, value, r.score.detail, r.transcript


@pytest.mark.sentinel
def test_failures_cost_one_sample_and_turns_are_trained_on(whole: Path) -> None:
    rollouts = rollouts_of(whole)
    assert len(rollouts) == 4 * 3 * 8
    failed = [r for r in rollouts if r.status == "failed"]
    for r in rollouts:
        assert r.score is not None
        last = [s for s in r.segments if s.source == "model"][-1]
        assert (r.status == "failed") == (r.finish == "stop" and fate_of(_said(last.tokens)) != "")
        assert r.score.valid == (r.status == "complete")
        if r.status == "complete" and r.finish == "stop":
            assert [s.source for s in r.segments] == (["model", "environment"] * TURNS)[:-1]
        assert {v for s in r.segments for v in s.versions if s.source == "model"} <= {r.group // 3}, "on-policy"
    reasons = {r.score.detail for r in failed if r.score}
    assert any("step raised ValueError: turn" in reason for reason in reasons), reasons
    assert any("step took longer than 3 s" in reason for reason in reasons), reasons
    assert any("an observation of 6" in reason for reason in reasons), reasons
    assert "environment: out of order" in reasons
    steps = [r for r in rows(whole) if r["kind"] == "step"]
    assert sum(r["errors"] for r in steps) == len(failed) > 4
    assert all(r["updates"] for r in steps) and all(r["error_share"] < 1 for r in steps)
    assert {len(r.segments) for r in rollouts} >= {1, 3, 5}


def _said(tokens: tuple[int, ...]) -> str:
    text: str = make_tokenizer().decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    cuts = [i for i, c in enumerate(text) if c.isascii() and c.isalpha()]
    return text[: cuts[0]] if cuts else text


def count(run: Path, table: str) -> int:
    try:
        connection = sqlite3.connect(f"file:{run / 'journal.sqlite'}?mode=ro", uri=True)
        try:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error:
        return -1


@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGKILL, 53), pytest.param(signal.SIGINT, 30, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_resumes_to_the_same_numbers(
    number: signal.Signals, moment: int, whole: Path, tmp_path: Path
) -> None:
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path}", *SETTINGS)
    run, deadline = tmp_path / "toy-001", time.time() + 100
    while count(run, "rollouts") < moment:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    process.ended(timeout=100)
    before = [told(r) for r in rollouts_of(run)]
    assert count(run, "suspended") > 0 or number == signal.SIGKILL, "what is being said is kept"
    finish(kitae("resume", str(run)))
    assert [told(r) for r in rollouts_of(run)] == [told(r) for r in rollouts_of(whole)]
    assert_same_metrics(run, whole)
    assert before == [told(r) for r in rollouts_of(run)][: len(before)]
    assert count(run, "suspended") == 0
