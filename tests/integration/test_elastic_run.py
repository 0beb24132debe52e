"""Engines of a real run join, leave, are killed and lose their node: nothing is lost, nothing is trained twice."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import RECIPE, VERIFIER, assert_ledger_balances, finish, kitae, rows

from kitae.store.run_folder import read_config

pytestmark = pytest.mark.slow

LONG = ("training.steps=2000", "checkpoint.every=10", "eval.prompts=0", "training.prompts_per_step=2")
LIMIT = 240.0  # seconds, on a busy machine


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen within {LIMIT:g} s")


def steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run) if row["kind"] == "step"] if (run / "metrics.jsonl").exists() else []


def serving(run: Path) -> int:
    """Engines, at the last step."""
    return steps(run)[-1].get("engines", 1) if steps(run) else 0


def processes(module: str) -> list[int]:
    """All that run it, wherever their parents are."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and module.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def finish_and_check(command: Any, run: Path) -> str:
    """Stop it, let it end a few steps later, and see that every prompt has one fate."""
    command.send_signal(signal.SIGINT)
    output = finish(command, 130)
    more = steps(run)[-1]["step"] + 2
    output += finish(kitae("resume", str(run), f"training.steps={more}", "cluster.patience=60"))
    assert [row["step"] for row in steps(run)] == list(range(1, more + 1))
    assert_ledger_balances(run, read_config(run))  # type: ignore[arg-type]
    until(lambda: not processes("kitae.engines.process.engine_main"), "the end of all engines")
    return output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "toy-001"


@pytest.mark.sentinel
def test_from_one_to_three_to_one_and_a_loss(run: Path) -> None:
    settings = ("cluster.backend=local", "engine.count=1", "cluster.patience=60")
    command = kitae("train", str(RECIPE), VERIFIER, f"run.dir={run.parent}", *LONG, *settings)
    try:
        until(lambda: len(steps(run)) > 2, "a step")
        assert "shall have 3 engines, now" in finish(kitae("scale", str(run), "3"))
        until(lambda: serving(run) == 3, "serving with 3")
        os.kill(processes("kitae.engines.process.engine_main")[0], signal.SIGKILL)
        until(lambda: sum(row["engine_restarts"] for row in steps(run)) == 1, "the loss")
        until(lambda: serving(run) == 3, "serving with 3 again")
        finish(kitae("scale", str(run), "1"))
        until(lambda: serving(run) == 1, "serving with 1")
        assert "from 1 to 4096 engines, got 0" in finish(kitae("scale", str(run), "0"), 1)
        output = finish_and_check(command, run)
    finally:
        command.kill()
    assert output.count("has joined") == 3 and output.count("an engine has left") == 2
    assert "needs a run that goes on, toy-001 is finished" in finish(kitae("scale", str(run), "2"), 1)


@pytest.fixture
def nodes() -> Iterator[Any]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    from kitae.workers.ray.ray_session import OwnNodes

    own = OwnNodes.start(3)
    yield own
    own.close()


def test_a_node_with_an_engine_is_lost(run: Path, nodes: Any) -> None:
    """Its engine is started on another node; the trainer's is another one, which lives."""
    pools = {
        "trainer": "{ labels = { kitae-node = '0' }, cpus = 0.5 }",
        "engines": "{ place = 'strict-spread', labels = { kitae-kind = 'far' }, cpus = 0.5 }",
    }
    far = [nodes.add(number, labels={"kitae-node": str(number), "kitae-kind": "far"}) for number in (7, 8)]
    settings = ("cluster.backend=ray", f"cluster.address={nodes.address}", "engine.count=2")
    placed = [f"cluster.pools.{name}={value}" for name, value in pools.items()]
    command = kitae("train", str(RECIPE), VERIFIER, f"run.dir={run.parent}", *LONG, *settings, *placed)
    try:
        until(lambda: serving(run) == 2, "serving with 2")
        nodes.add(9, labels={"kitae-node": "9", "kitae-kind": "far"})
        began = time.monotonic()
        nodes.remove(far[0])
        until(lambda: sum(row["engine_restarts"] for row in steps(run)) == 1, "the loss")
        noticed = time.monotonic() - began
        until(lambda: serving(run) == 2, "serving with 2 again")
        print(f"noticed after {noticed:.1f} s, replaced after {time.monotonic() - began:.1f} s")
        output = finish_and_check(command, run)
    finally:
        command.kill()
    assert re.search(r"an engine was lost: the run goes on with 1 of 2, and starts another", output)


def test_all_parts_on_three_nodes_that_are_started_here(run: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    settings = ("training.steps=4", "eval.prompts=0", f"run.dir={run.parent}")
    spread = ("cluster.backend=ray", "cluster.nodes=3", "cluster.ranks=2", "engine.count=2", "cluster.verifiers=1")
    finish(kitae("train", str(RECIPE), VERIFIER, *settings))
    finish(kitae("train", str(RECIPE), VERIFIER, *settings, *spread))
    alone, together = steps(run), steps(run.with_name("toy-002"))
    assert [row["reward"] for row in alone] == [row["reward"] for row in together]
    for a, b in zip(alone, together, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert not list(Path("/tmp").glob("kitae-ray-*")) and not processes("kitae.trainer.parallel.rank_process")
