"""The whole loop on a tiny model: reward rises, for each preset and setting, and failures are handled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import HERE, RECIPE, assert_ledger_balances, assert_same_metrics, rows, run_config, run_toy, toy_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from kitae.config.recipe import load_config
from kitae.errors import DataError, VerifierError
from kitae.evaluation.run_suites import Entrant, EvaluationSettings, evaluate_models
from kitae.evaluation.suites import own_suite
from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import go_on
from kitae.store.journal import Journal
from kitae.store.run_folder import RunStore
from kitae.trainer.optim import Optimizer, Update


@pytest.mark.sentinel
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.preset=grpo"],
        ["algorithm.preset=dr-grpo", "training.lr=1e-2"],
        ["algorithm.preset=dapo", "pipeline.refill=3"],
        ["algorithm.preset=grpo", "training.minibatches=2", "training.epochs=2", "training.lr=3e-3"],
        ["algorithm.preset=grpo", "model.lora_rank=8", "training.lr=2e-2", "training.steps=16"],
        ["algorithm.preset=grpo", "model.dtype=bfloat16", "training.checkpoint_activations=true", "training.steps=16"],
        ["algorithm.preset=grpo", "model.plain=true"],
    ],
    ids=["grpo", "dr-grpo", "dapo-refill", "several-updates", "lora", "bf16-checkpointing", "plain"],
)
def test_reward_rises(overrides: list[str], tmp_path: Path) -> None:
    result = run_toy(tmp_path, "training.steps=12", "training.lr=6e-3", *overrides)
    steps = [r for r in rows(result.folder) if r["kind"] == "step"]
    assert steps[0]["reward"] < 0.2
    # Adapters on a frozen random embedding cannot express the whole answer; everything else can.
    aim = 0.45 if "model.lora_rank=8" in overrides else 0.75
    assert steps[-1]["reward"] > aim, [round(r["reward"], 2) for r in steps]
    assert result.before and result.after and result.after["avg"] > result.before["avg"] + 0.3
    assert all(r["skipped_updates"] == 0 for r in steps)
    if "model.dtype=bfloat16" not in overrides:
        assert max(r["logp_gap_max"] for r in steps) < 1e-4, "engine and trainer disagree"
    assert AutoTokenizer.from_pretrained(result.folder / "model").chat_template
    AutoModelForCausalLM.from_pretrained(result.folder / "model")


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.preset=ppo", "algorithm.kl.coef=0.01", "algorithm.reference=frozen"],
        [
            "algorithm.kl.coef=0.01",
            "algorithm.reference=ema",
            "algorithm.reference.every=1",
            "pipeline.max_staleness=1",
        ],
        ["algorithm.kl.coef=0.01", "algorithm.reference=reset", "algorithm.reference.every=2", "model.plain=true"],
        ["model.lora_rank=4", "training.minibatches=2"],
    ],
    ids=["critic", "ema", "reset", "lora"],
)
def test_only_updates_write_to_what_learns(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter in bfloat16 is a half of its master: engine, reference, evaluation, checkpoints leave it as it is."""
    known: dict[Optimizer, list[torch.Tensor]] = {}
    plain = Optimizer.step

    def same(optimizer: Optimizer) -> bool:
        return all(map(torch.equal, known[optimizer], optimizer.parameters))

    def step(self: Optimizer, *arguments: Any, **settings: Any) -> Update:
        assert self not in known or same(self)
        update = plain(self, *arguments, **settings)
        known[self] = [p.detach().clone() for p in self.parameters]
        return update

    monkeypatch.setattr(Optimizer, "step", step)
    settings = ["model.dtype=bfloat16", "training.steps=4", "checkpoint.every=2", "eval.every=2"]
    run_toy(tmp_path, *settings, *overrides)
    assert len(known) == (2 if "algorithm.preset=ppo" in overrides else 1)
    assert all(map(same, known))


@pytest.mark.sentinel
def test_the_ledger_balances_and_the_same_seed_repeats(tmp_path: Path) -> None:
    settings = ["training.steps=4", "checkpoint.every=2", "eval.every=2"]
    first, second = run_toy(tmp_path, *settings), run_toy(tmp_path, *settings)
    assert_ledger_balances(first.folder, toy_config(tmp_path, *settings))
    assert_same_metrics(first.folder, second.folder)
    assert [r["step"] for r in rows(first.folder) if r["kind"] == "eval"] == [0, 2, 4]
    other = run_toy(tmp_path, *settings, "run.seed=1", "training.steps=1")
    assert rows(other.folder)[1]["reward"] != rows(first.folder)[1]["reward"]


def test_the_exported_model_is_what_was_evaluated(tmp_path: Path) -> None:
    result = run_toy(tmp_path, "training.steps=10")
    config = toy_config(tmp_path, f"model.path={result.folder / 'model'}")
    suite = replace(own_suite(config), count=config.eval.prompts)
    settings = EvaluationSettings(config.eval, config.engine, config.run.seed)
    report = evaluate_models([Entrant("trained", config.model)], [suite], settings)
    assert result.after and report.evaluations["trained", "toy"].avg.mean == result.after["avg"]


def test_groups_without_signal_are_dropped_and_replaced(tmp_path: Path) -> None:
    verifier = tmp_path / "half.py"
    verifier.write_text(
        "def score(response, reference, context):\n"
        "    if response == str(reference): return 1.0\n"
        "    return 0.0 if int(reference) % 2 else float(len(response) % 2)\n"
    )
    settings = [f"verifier.name={verifier}:score", "training.steps=3", "pipeline.refill=3", "eval.prompts=0"]
    result = run_toy(tmp_path, *settings, "algorithm.preset=dapo")
    steps = rows(result.folder)
    assert all(r["groups"] == 4 for r in steps), "refill must fill the batch"
    assert sum(r["groups_dropped"] for r in steps) > 0
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    fates = journal.groups()
    assert sum(fate == "trained" for _, _, fate, _ in fates) == 12
    assert {reason for _, _, fate, reason in fates if fate == "dropped"} == {"zero-variance"}
    journal.close()


def test_steps_without_any_signal_leave_the_weights_alone(tmp_path: Path) -> None:
    verifier = tmp_path / "one.py"
    verifier.write_text("def score(response, reference, context): return 1.0\n")
    result = run_toy(
        tmp_path, f"verifier.name={verifier}:score", "algorithm.preset=dapo", "training.steps=2", "eval.prompts=0"
    )
    for row in rows(result.folder):
        assert row["groups"] == 0 and row["groups_dropped"] == 4 and row["updates"] == 0


@pytest.mark.sentinel
def test_verifier_errors_are_counted_and_never_zero(tmp_path: Path) -> None:
    verifier = tmp_path / "shaky.py"
    verifier.write_text(
        "def score(response, reference, context):\n"
        "    if response == str(reference): return 1.0\n"
        "    if len(response) % 4 == 0: raise RuntimeError('no verdict')\n"
        "    return float(len(response) % 2)\n"
    )
    settings = [f"verifier.name={verifier}:score", "training.steps=2", "eval.prompts=0"]
    result = run_toy(tmp_path, *settings, "verifier.max_error_share=0.9")
    steps = rows(result.folder)
    assert all(0 < r["errors"] < r["rollouts"] for r in steps)
    with pytest.raises(VerifierError, match=r"could not be judged \(verifier.max_error_share is 0%\).*no verdict"):
        run_toy(tmp_path, *settings, "verifier.max_error_share=0")


def test_a_repaired_verifier_lets_the_run_go_on(tmp_path: Path) -> None:
    """Answers that could not be judged are judged again on resume; nothing is sampled twice."""
    verifier = tmp_path / "broken.py"
    verifier.write_text(
        "def score(response, reference, context):\n"
        "    if response.isdigit(): return float(response == str(reference))\n"
        "    raise RuntimeError('service is down')\n"
    )
    settings = [f"verifier.name={verifier}:score", "training.steps=2", "eval.prompts=0"]
    with pytest.raises(VerifierError, match="service is down"):
        run_toy(tmp_path, *settings)
    verifier.write_text("def score(response, reference, context): return float(len(response) % 2)\n")
    store = RunStore.open(tmp_path / "toy-001", ["verifier.check_gold=false"])
    before = {r.id: r.segments for g in range(4) for r in store.journal.rollouts(g)}
    assert len(before) == 32
    result = go_on(store, Bystander(Silent()))
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    assert before == {r.id: r.segments for g in range(4) for r in journal.rollouts(g)}
    assert all(r.score and r.score.valid for g in range(8) for r in journal.rollouts(g))
    journal.close()
    assert [r["errors"] for r in rows(result.folder)] == [0, 0]


def test_a_verifier_that_refuses_the_gold_answers_stops_the_run_first(tmp_path: Path) -> None:
    verifier = tmp_path / "no.py"
    verifier.write_text("def score(response, reference, context): return 0.0\n")
    with pytest.raises(VerifierError, match="16 of 16 reference answers do not score 1"):
        run_toy(tmp_path, f"verifier.name={verifier}:score")


def test_a_prompt_longer_than_the_context_costs_only_its_group(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = ['{"question": "%s", "answer": "7"}' % ("x" * 2000 if i == 2 else f"say {i}") for i in range(8)]
    data.write_text("\n".join(lines))
    recipe = tmp_path / "file.toml"
    recipe.write_text(RECIPE.read_text().replace('task = "arithmetic"', f'path = "{data}"\nshuffle = false'))
    config = load_config(
        recipe, [f"verifier.name={HERE / 'toy.py'}:digits", f"run.dir={tmp_path}", "eval.prompts=0", "training.steps=2"]
    )
    result = run_config(config)
    steps = rows(result.folder)
    assert [(r["groups"], r["groups_dropped"]) for r in steps] == [(3, 1), (4, 0)]
    journal = Journal(result.folder / "journal.sqlite", read_only=True)
    (complaint,) = [detail for _, kind, detail in journal.events() if kind == "bad prompt"]
    assert "leaves no room in the context" in complaint
    journal.close()


def test_bad_data_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        run_toy(tmp_path, "data.params.digits=0")
    assert not list(tmp_path.iterdir()), "no run folder was made"
