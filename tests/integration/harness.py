"""Run the toy recipe in this process or as a command, and compare runs."""

from pathlib import Path
from typing import Any

from commands import Command

from kitae.config.recipe import load_config
from kitae.config.root import RLConfig
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import train
from kitae.store.run_folder import Metrics, Result

HERE = Path(__file__).parent
RECIPE = HERE / "toy.toml"
VERIFIER = f"verifier.name={HERE / 'toy.py'}:digits"

EXACT = ("reward", "length", "rollouts", "groups", "groups_dropped", "errors", "truncated")
LOST = {"engines", "engine_restarts", "teacher_restarts"}  # numbers that are there after somebody was lost
CLOSE = ("loss", "entropy", "grad_norm", "lr", "ratio", "value_loss", "kl_k1", "kl_coef", "entropy_coef")


def toy_config(folder: Path, *overrides: str) -> RLConfig:
    return load_config(RECIPE, [VERIFIER, f"run.dir={folder}", *overrides])


def run_toy(folder: Path, *overrides: str) -> Result:
    return run_config(toy_config(folder, *overrides))


def run_config(config: RLConfig) -> Result:
    return train(config, Bystander(Silent()))


def kitae(
    *arguments: str,
    script: str = "from kitae.cli.main import run; run()",
    cwd: Path | None = None,
    start_new_session: bool = False,
) -> Command:
    """Start the command line as a user would; one thread, so that tiny models are fast on a busy machine."""
    return Command(arguments, script, cwd or Path.cwd(), own_session=start_new_session)


def finish(process: Command, status: int = 0) -> str:
    output = process.ended(timeout=200)  # a busy machine
    assert process.returncode == status, output
    return output


def rows(folder: Path) -> list[dict[str, Any]]:
    return Metrics(folder / "metrics.jsonl").rows()


def assert_same_metrics(left: Path, right: Path, within: float = 1e-5) -> None:
    a, b = rows(left), rows(right)
    assert [(r["kind"], r["step"]) for r in a] == [(r["kind"], r["step"]) for r in b]
    for x, y in zip(a, b, strict=True):
        where = f"{x['kind']} {x['step']}"
        if x["kind"] == "eval":
            assert x == y, where
            continue
        for key in EXACT:
            assert x.get(key) == y.get(key), (where, key)
        assert not (x.keys() ^ y.keys()) - LOST, (where, x.keys() ^ y.keys())
        for key in x.keys() & set(CLOSE):
            assert abs(x[key] - y[key]) <= within * max(1.0, abs(y[key])), (where, key, x[key], y[key])


def assert_ledger_balances(store_folder: Path, config: RLConfig) -> None:
    """Every issued prompt has exactly one fate, every trained group all its rollouts."""
    from kitae.store.journal import Journal

    journal = Journal(store_folder / "journal.sqlite", read_only=True)
    fates = journal.groups()
    ids = [group for group, *_ in fates]
    assert ids == list(range(len(ids))), "a group was skipped or closed twice"
    counts = journal.counts()
    assert counts["prompts"] == counts["fates"] == config.training.steps * config.training.prompts_per_step
    assert counts["rollouts"] == counts["fates"] * config.training.group_size
    for group, step, _, _ in fates:
        assert step == group // config.training.prompts_per_step + 1
        for rollout in journal.rollouts(group):
            assert {v for s in rollout.segments for v in s.versions} == {step - 1}, "not on-policy"
    journal.close()
