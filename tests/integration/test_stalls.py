"""Each loop is made to hang in turn: the run ends by itself, says who waited for what, and can be resumed."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import finish, kitae, run_toy, toy_config
from test_async import check_ledger

from kitae.engines.native.engine import NativeEngine
from kitae.errors import StalledError
from kitae.store.journal import Journal
from kitae.trainer.base import Column
from kitae.trainer.training_worker import Worker
from kitae.verifiers.pool import VerifierPool

SETTINGS = ("training.steps=3", "checkpoint.every=1", "eval.prompts=0", "pipeline.max_staleness=1")
LATER = 20  # calls that go well before one hangs


async def _never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.sentinel
@pytest.mark.parametrize(
    ("owner", "method", "after", "message"),
    [
        (Journal, "add_prompt", 6, "feed waits [0-9]+ s for the journal"),
        (NativeEngine, "generate", LATER, r"a rollout \(\d+ of them\) waits \d+ s for the engine: train/"),
        pytest.param(
            VerifierPool,
            "score",
            LATER,
            r"a rollout \(\d+ of them\) waits \d+ s for the verifier: \d+/\d",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Journal,
            "add_rollout",
            LATER,
            r"a rollout \(\d+ of them\) waits \d+ s for the journal: \d+/\d",
            marks=pytest.mark.slow,
        ),
        (Worker, "forward_backward", 1, "train waits [0-9]+ s for the trainer to learn step 2"),
        pytest.param(Journal, "add_fates", 1, "train waits [0-9]+ s for the journal", marks=pytest.mark.slow),
        (NativeEngine, "update_weights", 1, "settle waits [0-9]+ s for the engine to serve version 2"),
    ],
)
def test_a_loop_that_hangs(
    owner: Any, method: str, after: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    original = getattr(owner, method)
    let_go = threading.Event()

    def hang(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= after:
            return original(*arguments, **settings)
        return let_go.wait(60) if owner is Worker else _never()

    monkeypatch.setattr(owner, method, hang)
    with pytest.raises(StalledError, match=message):
        run_toy(tmp_path, *SETTINGS, "pipeline.stall_limit=4")
    let_go.set()
    monkeypatch.undo()
    stacks = (tmp_path / "toy-001" / "stalled.txt").read_text()
    assert "Thread MainThread" in stacks and "Task train" in stacks


def test_a_long_step_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer works on one batch for longer than the limit: it moves, though no loop does."""
    forward_backward = Worker.forward_backward

    def slowly(self: Worker, rows: Any, *rest: Any) -> Any:
        ends = time.monotonic() + 6
        while time.monotonic() < ends:
            self.annotate(rows, [Column.OLD])
        return forward_backward(self, rows, *rest)

    monkeypatch.setattr(Worker, "forward_backward", slowly)
    run_toy(tmp_path, "training.steps=1", "eval.prompts=0", "pipeline.stall_limit=4")


def test_a_stalled_run_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, judged = VerifierPool.scores, 0

    async def hang(self: VerifierPool, responses: Any, *arguments: Any) -> Any:
        nonlocal judged
        judged += len(responses)
        return await (original(self, responses, *arguments) if judged < 60 else _never())

    monkeypatch.setattr(VerifierPool, "scores", hang)
    with pytest.raises(StalledError, match=r"train waits [0-9]+ s for a batch: [0-9] groups are ready, 4 are needed"):
        run_toy(tmp_path, *SETTINGS, "pipeline.stall_limit=4")
    finish(kitae("resume", str(tmp_path / "toy-001")))
    check_ledger(tmp_path / "toy-001", toy_config(tmp_path, *SETTINGS))
