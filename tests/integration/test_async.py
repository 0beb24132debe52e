"""Generation runs ahead of training: the bound holds, learning goes on, and nothing is lost or trained twice."""

import json
import re
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RECIPE, VERIFIER, finish, kitae, rows, run_toy, toy_config
from test_resume import kill_when, rollouts_written

from kitae.config.root import RLConfig
from kitae.engines.native.cpu_runner import CpuRunner
from kitae.engines.native.engine import NativeEngine
from kitae.errors import StoreError
from kitae.kernels.cpu import packed
from kitae.models.tiny import make_tiny
from kitae.observe import timeline
from kitae.run.recompute_step import replay
from kitae.store.journal import Journal
from kitae.trainer.training_worker import Worker

pytestmark = pytest.mark.usefixtures("warm_posts")

SLOW = """
import time, zlib

def digits(response, reference, context):
    time.sleep(0.15 * (zlib.crc32(response.encode()) % 16 == 0))  # now and then one takes long
    if response == str(reference):
        return 1.0
    return sum(c.isdigit() for c in response) / len(response) if response else 0.0
"""


def slow_verifier(folder: Path) -> str:
    (folder / "slow.py").write_text(SLOW)
    return f"verifier.name={folder / 'slow.py'}:digits"


def check_ledger(run: Path, config: RLConfig) -> Counter[str]:
    """Each prompt issued was trained on once or dropped once; each trained group is whole, none too old."""
    journal = Journal(run / "journal.sqlite", read_only=True)
    try:
        fates = journal.groups()
        ids = [group for group, *_ in fates]
        assert ids == list(range(len(ids))), "skipped or closed twice"
        assert journal.pending() == [] and journal.counts()["prompts"] == len(ids)
        assert journal.counts()["suspended"] == 0
        for group, step, fate, _ in fates:
            rollouts = [r for r in journal.rollouts(group) if r.index >= 0]  # the greedy one comes on top
            if fate == "skipped":
                continue
            assert len(rollouts) == config.training.group_size
            sampled = (s for r in rollouts for s in r.segments if s.source == "model")
            oldest = min((v for s in sampled for v in s.versions), default=step - 1)
            if fate == "trained":
                assert step - 1 - oldest <= config.pipeline.max_staleness
        per_step = Counter(step for _, step, fate, _ in fates if fate == "trained")
        if not config.pipeline.refill:
            closed = Counter(step for _, step, fate, _ in fates if fate != "skipped")
            assert set(closed.values()) == {config.training.prompts_per_step}
        assert sum(per_step.values()) <= config.training.steps * config.training.prompts_per_step
        return Counter(fate for _, _, fate, _ in fates)
    finally:
        journal.close()


@pytest.mark.skipif(not packed.available(torch.float32), reason="no C++ compiler")
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("lora", [0, 4])
def test_the_trainer_has_the_memory_of_packed_weights_while_nobody_samples(
    staleness: int, lora: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While gradients are computed. An engine that runs ahead is not stopped for them, and keeps its copies."""
    engines: list[NativeEngine] = []
    held: list[bool] = []
    start, learn = NativeEngine.__init__, Worker.forward_backward

    def started(self: NativeEngine, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        engines.append(self)

    def learning(self: Worker, *args: Any, **kwargs: Any) -> Any:
        (engine,) = engines
        assert isinstance(engine.runner, CpuRunner) and engine.runner.decoder is not None
        assert engine._paused == (staleness == 0)
        held.append(engine.runner.decoder._packed_head.data.untyped_storage().nbytes() > 0)
        return learn(self, *args, **kwargs)

    monkeypatch.setattr(NativeEngine, "__init__", started)
    monkeypatch.setattr(Worker, "forward_backward", learning)
    settings = ("training.steps=4", f"pipeline.max_staleness={staleness}", f"model.lora_rank={lora}", "eval.prompts=0")
    result = run_toy(tmp_path, slow_verifier(tmp_path), *settings)
    assert len(held) == 4 and held[0] == (staleness == 1) and any(held) == (staleness == 1)
    steps: list[dict[str, Any]] = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert all(r["logp_gap"] < 1e-4 for r in steps if r["staleness"] == 0), "what was sampled is what is trained"


@pytest.mark.sentinel
@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_it_learns_from_stale_samples(staleness: int, tmp_path: Path) -> None:
    settings = (
        slow_verifier(tmp_path),
        f"pipeline.max_staleness={staleness}",
        "training.steps=30",
        "verifier.workers=2",
    )
    result = run_toy(tmp_path, *settings)
    steps: list[dict[str, Any]] = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert max(r["staleness_max"] for r in steps) == staleness
    assert sum(r["reward"] for r in steps[-3:]) / 3 > 0.75 > steps[0]["reward"] + 0.2
    assert steps[0]["staleness"] == 0 and sum(r["staleness"] for r in steps) / len(steps) > 0.2
    assert any(r[f"staleness/{staleness}"] > 0 for r in steps)
    check_ledger(result.folder, toy_config(tmp_path, *settings))


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_sequences_live_through_weight_updates(mode: str, tmp_path: Path) -> None:
    """Long responses are sampled by several versions, and every token says by which."""
    settings = (
        "pipeline.max_staleness=3",
        f"pipeline.in_flight={mode}",
        "sampling.max_tokens=120",
        "training.steps=8",
        "training.prompts_per_step=1",
        "eval.prompts=0",
    )
    result = run_toy(tmp_path, *settings)
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    versions = [tuple(s.versions) for g in range(8) for r in journal.rollouts(g) for s in r.segments]
    journal.close()
    assert any(len(set(v)) > 1 for v in versions), "no response saw a weight update"
    assert all(list(v) == sorted(v) for v in versions)
    check_ledger(result.folder, toy_config(tmp_path, *settings))


def test_refills_keep_the_batch_full(tmp_path: Path) -> None:
    settings = (
        slow_verifier(tmp_path),
        "pipeline.max_staleness=2",
        "pipeline.refill=3",
        "algorithm.filter=zero-variance",
        "pipeline.refill.most=20",
        "sampling.max_tokens=3",
        "training.group_size=3",
        "training.lr=1e-6",
        "training.steps=6",
        "eval.prompts=0",
    )
    result = run_toy(tmp_path, *settings)
    fates = check_ledger(result.folder, toy_config(tmp_path, *settings))
    assert fates["dropped"] > 0 and fates["trained"] == 24


def test_overdue_groups_can_be_dropped(tmp_path: Path) -> None:
    """One prompt in four takes long to judge: the batches go on without it, and others take its place."""
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef digits(response, reference, context):\n"
        "    time.sleep(0.4 if str(reference).startswith('1') else 0.0)\n"
        "    return 1.0 if response == str(reference) else sum(c.isdigit() for c in response) / max(1, len(response))\n"
    )
    settings = (
        f"verifier.name={tmp_path / 'slow.py'}:digits",
        "verifier.workers=6",
        "pipeline.max_staleness=1",
        "pipeline.overdue=drop",
        "pipeline.stall_limit=10",
        "training.steps=8",
        "training.group_size=4",
        "eval.prompts=0",
    )
    result = run_toy(tmp_path, *settings)
    fates = check_ledger(result.folder, toy_config(tmp_path, *settings))
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert fates["trained"] == 32 and fates["skipped"] == sum(r["overdue"] for r in steps) > 0
    assert all(r["groups"] == 4 for r in steps)


def test_mastered_prompts_are_asked_less(tmp_path: Path) -> None:
    """Four prompts, two of which are always right: they are skipped at three of four later visits."""
    data = tmp_path / "four.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"p{i}", "answer": "easy" if i < 2 else "hard"}) + "\n" for i in range(4))
    )
    (tmp_path / "fixed.py").write_text(
        "def score(response, reference, context):\n    return 1.0 if reference == 'easy' else (len(response) % 2) / 2\n"
    )
    settings = (
        f"data.path={data}",
        f"verifier.name={tmp_path / 'fixed.py'}:score",
        "verifier.check_gold=false",
        "pipeline.mastered_visits=0.25",
        "training.steps=15",
        "training.group_size=2",
        "eval.prompts=0",
    )
    result = run_toy(tmp_path, *settings)
    fates = check_ledger(result.folder, toy_config(tmp_path, *settings))
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    asked, skipped = Counter[str](), Counter[str]()
    for group, _, fate, reason in journal.groups():
        prompt = journal.prompt(group)
        assert prompt is not None and reason in ("", "mastered")
        (skipped if fate == "skipped" else asked)[prompt.reference] += 1
    journal.close()
    assert fates["trained"] == 60 and skipped["hard"] == 0
    assert 0.1 < asked["easy"] / (asked["easy"] + skipped["easy"]) < 0.5


STALE = ("pipeline.max_staleness=2", "training.steps=8", "checkpoint.every=3", "eval.prompts=0")


@pytest.mark.sentinel
@pytest.mark.parametrize("moment", [50, *(pytest.param(other, marks=pytest.mark.slow) for other in (5, 140))])
def test_killed_runs_resume_without_loss(moment: int, tmp_path: Path) -> None:
    settings = (slow_verifier(tmp_path), *STALE)
    process = kitae("train", str(RECIPE), f"run.dir={tmp_path}", *settings)
    run = tmp_path / "toy-001"
    kill_when(process, lambda: rollouts_written(run) >= moment)
    finish(kitae("resume", str(run)))
    check_ledger(run, toy_config(tmp_path, *settings))
    assert [r["step"] for r in rows(run) if r["kind"] == "step"] == list(range(1, 9))


def test_a_killed_run_keeps_what_was_sampled_of_long_responses(tmp_path: Path) -> None:
    settings = (
        VERIFIER,
        "sampling.max_tokens=400",
        "training.steps=4",
        "eval.prompts=0",
    )
    process = kitae("train", str(RECIPE), f"run.dir={tmp_path}", *settings)
    run = tmp_path / "toy-001"
    kill_when(process, lambda: suspended_tokens(run) > 0)
    journal = Journal(run / "journal.sqlite", read_only=True)
    suspended = [r for g in range(24) for r in journal.suspended(g)]
    journal.close()
    assert suspended
    finish(kitae("resume", str(run)))
    check_ledger(run, toy_config(tmp_path, *settings))
    journal = Journal(run / "journal.sqlite", read_only=True)
    for part in suspended:
        (whole,) = [r for r in journal.rollouts(part.group) if r.index == part.index]
        length = part.response_length
        assert length >= 32 and whole.segments[0].tokens[:length] == part.segments[0].tokens
        assert whole.segments[0].logprobs[:length] == part.segments[0].logprobs
    journal.close()


def suspended_tokens(run: Path) -> int:
    if not (run / "journal.sqlite").exists():
        return 0
    try:
        journal = Journal(run / "journal.sqlite", read_only=True)
        try:
            return sum(r.response_length for g in range(24) for r in journal.suspended(g))
        finally:
            journal.close()
    except (StoreError, sqlite3.Error):  # it is being made
        return 0


def test_what_is_being_sampled_is_suspended_on_ctrl_c(tmp_path: Path) -> None:
    """Half a response is worth keeping: it is continued, its log-probs are those it was sampled with."""
    settings = (VERIFIER, *STALE, "training.steps=3", "sampling.max_tokens=300", "engine.max_batch=16")
    process = kitae("train", str(RECIPE), f"run.dir={tmp_path}", *settings)
    run = tmp_path / "toy-001"
    while rollouts_written(run) < 20:
        assert process.poll() is None, process.printed()
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output = finish(process, status=130)
    assert re.search(r"stopped after step \d+; everything is saved", output), output
    journal = Journal(run / "journal.sqlite", read_only=True)
    suspended = {(r.group, r.index): r for g in range(24) for r in journal.suspended(g)}
    done = journal.counts()["rollouts"]
    journal.close()
    assert suspended and all(0 < r.response_length < 300 for r in suspended.values())
    finish(kitae("resume", str(run)))
    check_ledger(run, toy_config(tmp_path, *settings))
    journal = Journal(run / "journal.sqlite", read_only=True)
    for (group, index), part in suspended.items():
        (whole,) = [r for r in journal.rollouts(group) if r.index == index]
        length = part.response_length
        assert whole.segments[0].tokens[:length] == part.segments[0].tokens
        assert whole.segments[0].logprobs[:length] == part.segments[0].logprobs
    assert journal.counts()["rollouts"] > done
    journal.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_past_step_can_be_computed_again(staleness: int, tmp_path: Path) -> None:
    result = run_toy(
        tmp_path,
        f"pipeline.max_staleness={staleness}",
        "algorithm.filter=zero-variance",
        "training.steps=6",
        "training.minibatches=2",
        "checkpoint.every=3",
        "checkpoint.keep=3",
        "eval.prompts=0",
    )
    for step, checkpoint in ((3, 0), (4, 3), (6, 3)):
        found = replay(result.folder, step, lambda text: None)
        assert found.checkpoint == checkpoint and set(found.numbers) >= {"loss", "grad_norm", "samples_trained"}
        assert found.difference == 0, found
    with pytest.raises(StoreError, match="1 to 6, got 7"):
        replay(result.folder, 7, lambda text: None)


@pytest.mark.parametrize(
    ("threads", "settings"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.slow),
        pytest.param(1, ("model.lora_rank=4",), marks=pytest.mark.slow),
        pytest.param(1, ("model.exact=true",), marks=pytest.mark.slow),
        (1, ("algorithm.kl.coef=0.01", "algorithm.reference=ema", "algorithm.reference.every=1", "algorithm.kl=k3")),
        (1, ("engine.kind=process",)),
    ],
    ids=str,
)
def test_in_bf16_a_past_step_is_the_same_to_the_last_bit(
    threads: int, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Wide enough for libraries to add up in an order that depends on the shape of a product."""
    make_tiny(tmp_path / "wide", hidden=512)
    torch.set_num_threads(threads)
    try:
        result = run_toy(
            tmp_path,
            f"model.path={tmp_path / 'wide'}",
            "model.dtype=bfloat16",
            "training.steps=2",
            "training.prompts_per_step=2",
            "training.lr=1e-4",
            "checkpoint.every=1",
            "checkpoint.keep=4",
            "eval.prompts=0",
            *settings,
        )
    finally:
        torch.set_num_threads(1)
    for step in (1, 2):
        found = replay(result.folder, step, lambda text: None)
        assert found.numbers.keys() >= {"loss", "grad_norm"} and found.difference == 0, found


def test_the_timeline_shows_who_worked_when(tmp_path: Path) -> None:
    result = run_toy(tmp_path, "pipeline.max_staleness=2", "training.steps=6", "checkpoint.every=2", "eval.every=3")
    spans = timeline.read(result.folder)
    assert {row["part"] for row in spans} == set(timeline.PARTS)
    training = [(row["start"], row["end"]) for row in spans if row["part"] == "train"]
    assert len(training) == 6 and training == sorted(training)
    groups = [row for row in spans if row["part"] == "generate"]
    assert len(groups) == 6 * 4 and all(row["start"] < row["end"] for row in groups)
    assert any(a < g["end"] and g["start"] < b for g in groups for a, b in training), "they did not overlap"
    shares = timeline.busy_shares(spans)
    assert all(0 < share <= 1 for share in shares.values())
    assert timeline.draw(result.folder).read_bytes().startswith(b"\x89PNG")


@pytest.mark.sentinel
@pytest.mark.parametrize(("staleness", "sync", "engines"), [(0, "full", 1), (2, "delta", 2)])
def test_the_engine_may_have_a_process_of_its_own(staleness: int, sync: str, engines: int, tmp_path: Path) -> None:
    settings = (
        "engine.kind=process",
        f"engine.count={engines}",
        f"engine.sync={sync}",
        f"pipeline.max_staleness={staleness}",
        "training.steps=4",
        "eval.prompts=0",
    )
    result = run_toy(tmp_path / "own", *settings)
    check_ledger(result.folder, toy_config(tmp_path / "own", *settings))
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert all(r["sync_bytes"] > 0 and r["probe_gap"] < 1e-4 for r in steps)
    if staleness == 0:
        assert max(r["logp_gap_max"] for r in steps) < 1e-3, "it samples from other weights"
        shared = run_toy(tmp_path / "shared", "training.steps=4", "eval.prompts=0")
        expected = [r["reward"] for r in rows(shared.folder) if r["kind"] == "step"]
        assert [r["reward"] for r in steps] == pytest.approx(expected, abs=0.02)
