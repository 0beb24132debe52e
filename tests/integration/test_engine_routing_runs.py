"""Runs whose trainer repeats the experts of the engine: what is recorded, beside everything else, and over a crash."""

import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import HERE, RECIPE, VERIFIER, assert_same_metrics, finish, kitae, rows, run_toy
from test_conversation_runs import SETTINGS as TALKS
from test_conversation_runs import count, rollouts_of, told

from kitae.algorithms.group_stages import experts_of
from kitae.data.packing import NO_RECORD
from kitae.errors import KitaeError
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import go_on
from kitae.store.run_folder import RunStore
from kitae.types import GREEDY, Chain

pytestmark = pytest.mark.usefixtures("warm_posts")

TinyFolder = Callable[[str], Path]
RIGHT_OR_WRONG = f"verifier.name={HERE / 'toy.py'}:any_digit"
SHORT = (RIGHT_OR_WRONG, "training.steps=4", "checkpoint.every=2", "eval.prompts=4", "eval.every=2")


def mixture(tiny_folder: TinyFolder) -> tuple[str, str]:
    return f"model.path={tiny_folder('qwen3_moe')}", "algorithm.experts.routing=engine"


def assert_routed(chain: Chain) -> None:
    """All that the model said has experts; what nobody computed has none."""
    found = experts_of(chain)
    assert found is not None and len(found) == chain.length - 1
    heard = len(chain.segments[-1].tokens) if chain.segments[-1].source == "environment" else 0
    known_T = (found != NO_RECORD).all((1, 2))
    assert known_T[: len(found) - heard].all() and not known_T[len(found) - heard :].any()
    assert found.max() < 4 and (found[..., 0] != found[..., 1])[: len(found) - heard].all()


CROSSED = {
    "alone": (),
    "updates": ("training.minibatches=2", "algorithm.kl.coef=0.01", "algorithm.reference=frozen"),
    "greedy": ("algorithm.preset=remax",),
    "critic": ("algorithm.preset=ppo", "training.minibatches=2"),
    "ahead-lora": ("pipeline.max_staleness=1", "model.lora_rank=4", "training.minibatches=2"),
    "refill": ("pipeline.refill=3", "algorithm.filter=zero-variance", "pipeline.max_staleness=1"),
    "recompute": ("pipeline.max_staleness=2", "pipeline.in_flight=recompute"),
    "process": ("engine.kind=process", "pipeline.max_staleness=1"),
    "fleet": ("engine.kind=process", "engine.count=2"),
    "cluster": ("cluster.backend=local",),
}


SLOW = ("updates", "greedy", "recompute", "fleet", "cluster")


@pytest.mark.sentinel
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CROSSED])
def test_a_run_repeats_what_its_engine_chose(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = run_toy(tmp_path, *SHORT, *mixture(tiny_folder), *CROSSED[name]).folder
    steps = [row for row in rows(folder) if row["kind"] == "step"]
    assert len(steps) == 4 and all(row["updates"] and not row["skipped_updates"] for row in steps)
    flips = [row["routing_flips"] for row in steps]
    assert all(0 <= share <= 1 for share in flips)
    if name in ("alone", "greedy", "fleet", "cluster"):
        assert max(flips) < 0.001 and max(row["logp_gap_max"] for row in steps) < 1e-3, "on-policy, in fp32"
    for r in rollouts_of(folder):
        for chain in r.chains if r.index != GREEDY else ():
            assert_routed(chain)
        assert r.index != GREEDY or all(s.experts is None for s in r.segments)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [(), ("pipeline.max_staleness=1", *CROSSED["fleet"])], ids=["on-policy", "ahead"])
def test_one_mixture_teaches_another(ahead: tuple[str, ...], tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The teacher chooses its own experts; the student repeats those of its engine."""
    teacher = ("method.kind=distil", f"method.teacher={tiny_folder('mixtral')}")
    folder = run_toy(tmp_path, *SHORT, *mixture(tiny_folder), *teacher, *ahead).folder
    steps = [row for row in rows(folder) if row["kind"] == "step"]
    assert len(steps) == 4 and all(row["updates"] and not row["skipped_updates"] for row in steps)
    assert all(row["teacher_kl"] > 0 for row in steps)
    assert ahead or max(row["routing_flips"] for row in steps) < 0.001
    for r in rollouts_of(folder):
        for chain in r.chains:
            assert_routed(chain)


def test_who_does_not_ask_stores_nothing(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = run_toy(tmp_path, *SHORT, mixture(tiny_folder)[0]).folder
    assert all(s.experts is None for r in rollouts_of(folder) for s in r.segments)
    assert not any("routing_flips" in row for row in rows(folder))
    connection = sqlite3.connect(folder / "journal.sqlite")
    assert connection.execute("SELECT sum(length(experts)) FROM rollouts").fetchone() == (0,)
    connection.close()


def test_a_model_without_experts_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    with pytest.raises(KitaeError, match="needs a mixture of experts, got 'tiny'"):
        run_toy(tmp_path, *SHORT, "algorithm.experts.routing=engine")


def test_resumed_equals_uninterrupted(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Steps that are trained again get their experts from the journal."""
    settings = (*SHORT, *mixture(tiny_folder), "training.minibatches=2")
    whole = run_toy(tmp_path / "whole", *settings).folder
    copy = shutil.copytree(whole, tmp_path / "copy")
    store = RunStore.open(copy)
    go_on(store, Bystander(Silent()), "step-000002")
    assert_same_metrics(copy, whole)
    flips = [[row["routing_flips"] for row in rows(f) if row["kind"] == "step"] for f in (copy, whole)]
    assert flips[0] == pytest.approx(flips[1], abs=1e-9)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=["killed", "suspended"],
)
def test_a_killed_run_of_several_turns_goes_on_with_all_experts(
    number: signal.Signals, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    settings = (*TALKS, "env.seconds=1.5", *mixture(tiny_folder))  # what hangs is not what is tested
    finish(kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path / 'whole'}", *settings))
    process = kitae("train", str(RECIPE), VERIFIER, f"run.dir={tmp_path}", *settings)
    whole, run, deadline = tmp_path / "whole" / "toy-001", tmp_path / "toy-001", time.time() + 100
    while count(run, "rollouts") < 40 or not count(run, "suspended"):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    process.ended(timeout=100)
    finish(kitae("resume", str(run)))
    assert_same_metrics(run, whole)
    found, expected = rollouts_of(run), rollouts_of(whole)
    assert [told(r) for r in found] == [told(r) for r in expected]
    assert any(len(r.segments) > 1 for r in found)
    for ours, theirs in zip(found, expected, strict=True):
        for chain, same in zip(ours.chains, theirs.chains, strict=True):
            assert_routed(chain)
            np.testing.assert_array_equal(experts_of(chain), experts_of(same))
