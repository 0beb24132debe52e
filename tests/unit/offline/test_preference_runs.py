"""Runs of DPO, KTO and reward models on the tiny model: what they learn, and that stopping changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_loop import go_on, rows_of, run_stage, stage_config, write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from kitae.config.recipe import override_config
from kitae.config.root import StageConfig
from kitae.errors import ConfigError, DataError, ModelError
from kitae.observe.observer import Bystander, Silent
from kitae.offline.example_batches import ExampleBatches
from kitae.offline.loop import OfflineLoop
from kitae.offline.reference_logprobs import ReferenceLogProbs
from kitae.run import train_run
from kitae.run.plan import check, make_plan
from kitae.run.train_run import train
from kitae.store.run_folder import RunStore

KINDS = ("dpo", "kto", "reward")


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"say {i}", "chosen": "yes " * (1 + i % 3), "rejected": "no " * (1 + i % 4), "margin": 0.1 * (i % 3)}
        for i in range(start, start + count)
    ]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., StageConfig]:
    """Rows of pairs serve every kind: KTO reads each as two answers with a label."""
    write_rows(tmp_path / "train.jsonl", pairs(12))
    write_rows(tmp_path / "held_out.jsonl", pairs(3, 90))

    def config(kind: str, *overrides: str, **training: Any) -> StageConfig:
        return stage_config(tmp_path, *overrides, kind=kind, **{"lr": 1e-3, "epochs": 4, **training})

    return config


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder) if row["kind"] == "step"]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_preferred_wins(kind: str, make: Callable[..., StageConfig]) -> None:
    result = run_stage(make(kind))
    steps = steps_of(result.folder)
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert steps[-1]["reward_chosen"] > 0 > steps[-1]["reward_rejected"]
    assert steps[-1]["accuracy"] > 0.8
    assert result.before is not None and result.after is not None
    assert result.after["avg"] == 1.0 > result.before["avg"]


@pytest.mark.thorough  # `test_loop` has one for all methods
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    kind: str, lora: int, make: Callable[..., StageConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(kind, f"model.lora_rank={lora}", "training.steps=6", "eval.every=3")
    whole = run_stage(config).folder
    learn = OfflineLoop._learn

    async def crash(self: OfflineLoop, step: int, items: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return await learn(self, step, items)

    with monkeypatch.context() as patch:
        patch.setattr(OfflineLoop, "_learn", crash)
        with pytest.raises(KeyboardInterrupt):
            run_stage(config)
    broken = tmp_path / "stage-002"

    def computed(self: ReferenceLogProbs, found: Any) -> None:
        pytest.fail("the log-probs of the reference are there already")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceLogProbs, "_write", computed)
        go_on(broken)
    assert rows_of(broken) == rows_of(whole)
    ours, theirs = (load_file(f / "model" / "model.safetensors") for f in (broken, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.thorough
def test_more_steps_need_more_of_the_reference_and_get_it_from_the_first_weights(
    make: Callable[..., StageConfig], tmp_path: Path
) -> None:
    """One epoch of 12 pairs has three steps; a run of two of them knows eight pairs."""
    config = make("dpo", "training.steps=2", "eval.examples=0", "checkpoint.every=1")
    short = run_stage(config).folder
    assert len(list((short / "reference").iterdir())) == 1
    store = RunStore.open(short, ["training.steps=3"])
    assert isinstance(store.config, StageConfig)
    train_run.go_on(store, Bystander(Silent()))
    whole = run_stage(override_config(config, ["training.steps=3"])).folder
    assert len(list((short / "reference").iterdir())) == 2
    found, expected = steps_of(short)[-1], steps_of(whole)[-1]
    assert found["step"] == expected["step"] == 3
    # Other sequences lay in the rows that scored them, so sums may differ in their last bits.
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("loss", ["ipo-token", "simpo", "orpo", "robust"])
def test_a_reference_is_computed_where_the_loss_has_one(loss: str, make: Callable[..., StageConfig]) -> None:
    result = run_stage(make("dpo", f"method.loss={loss}", "training.steps=2"))
    assert (result.folder / "reference").is_dir() is (loss not in ("simpo", "orpo"))


def test_the_first_step_of_dpo_loses_log_2(make: Callable[..., StageConfig]) -> None:
    first = steps_of(run_stage(make("dpo", "training.steps=1")).folder)[0]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["margin"] == pytest.approx(0, abs=1e-4)


@pytest.mark.thorough
def test_how_rows_are_cut_does_not_matter(make: Callable[..., StageConfig]) -> None:
    for kind in KINDS:
        wide, narrow = (
            steps_of(run_stage(make(kind, "training.steps=2", f"training.token_budget={b}")).folder) for b in (0, 40)
        )
        assert wide[-1]["loss"] == pytest.approx(narrow[-1]["loss"], rel=1e-4), kind


@pytest.mark.thorough
def test_a_prompt_is_computed_once_for_both_answers(make: Callable[..., StageConfig]) -> None:
    """Tokens of the rows: with shared prompts, fewer by the prompts of the batch."""
    shared, apart = (
        steps_of(run_stage(make("dpo", "training.steps=1", f"model.plain={s}")).folder)[0] for s in ("false", "true")
    )
    assert shared["loss_tokens"] == apart["loss_tokens"]
    assert shared["train_tokens"] < 0.75 * apart["train_tokens"]


def test_a_reward_model_is_exported_as_a_classifier(make: Callable[..., StageConfig], tmp_path: Path) -> None:
    folder = run_stage(make("reward", "method.margin_coef=1", "method.centring=0.01")).folder / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def score(answer: str) -> float:
        turns = [{"role": "user", "content": "say 90"}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
        with torch.no_grad():
            return float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0])

    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    assert score("yes ") > 0 > score("no ")


def test_wrong_settings_are_refused_before_anything_loads(make: Callable[..., StageConfig]) -> None:
    with pytest.raises(ConfigError, match=r"method\.label_smoothing is set to 0\.1, but loss 'sigmoid' does not read"):
        make("dpo", "method.label_smoothing=0.1")
    with pytest.raises(ConfigError, match=r"method\.loss must be one of sigmoid, .*did you mean 'simpo'"):
        make("dpo", "method.loss=simop")
    with pytest.raises(ConfigError, match=r"method\.sft_coef must be 0 with loss 'orpo'"):
        make("dpo", "method.loss=orpo", "method.sft_coef=0.5")
    with pytest.raises(ConfigError, match=r"must not both be 0"):
        make("kto", "method.desirable=0", "method.undesirable=0")


def test_bad_rows_are_named(make: Callable[..., StageConfig], tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [*pairs(2), {"prompt": "a", "chosen": "b"}])
    for kind in KINDS:
        with pytest.raises(DataError, match=r"train\.jsonl:3"):
            ExampleBatches(make(kind))


def test_margins_that_no_row_has_are_refused(make: Callable[..., StageConfig], tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "margin"} for row in pairs(4)]
    write_rows(tmp_path / "train.jsonl", rows)
    for look in (check, ExampleBatches):
        with pytest.raises(DataError, match=r"method\.margin_coef is 1, but no row has a margin"):
            look(make("reward", "method.margin_coef=1"))


def test_kto_needs_two_prompts_and_says_so_before_a_model_is_loaded(
    make: Callable[..., StageConfig], tmp_path: Path
) -> None:
    write_rows(tmp_path / "train.jsonl", pairs(1))
    for look in (check, ExampleBatches):
        with pytest.raises(
            DataError, match=r"kto needs answers to at least two prompts, got one: that of train\.jsonl"
        ):
            look(make("kto"))
    write_rows(tmp_path / "train.jsonl", pairs(2))
    assert run_stage(make("kto", "training.batch=1", "training.steps=1", "eval.examples=0")).step == 1


def test_partners_of_kto_do_not_depend_on_how_many_steps_are_trained(make: Callable[..., StageConfig]) -> None:
    """Nor on which: 5 does not divide the 24 answers."""
    data = ExampleBatches(make("kto", "training.batch=5"))

    def partners(steps: int) -> dict[str, list[int]]:
        found = {item.id: item.partner for item in data.trained(steps)}
        return {id: partner.tokens_T.tolist() for id, partner in found.items() if partner is not None}

    few, some, all_of_them = partners(1), partners(3), partners(9)
    assert (len(few), len(some), len(all_of_them)) == (5, 15, 24)
    assert few.items() <= some.items() <= all_of_them.items()
    again = {item.id: item.partner for step in range(1, 10) for item in data.batch(step)}
    assert {id: p.tokens_T.tolist() for id, p in again.items() if p is not None} == all_of_them


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("lora", [0, 4])
def test_a_reward_model_is_trained_further(make: Callable[..., StageConfig], tmp_path: Path, lora: int) -> None:
    """It begins where it ended: with its own head, which a language model would have to learn first."""
    first = run_stage(make("reward", "training.steps=6"))
    second = run_stage(make("reward", f"model.path={first.folder}", f"model.lora_rank={lora}", "training.steps=2"))
    assert first.after is not None and second.before is not None
    assert second.before["avg"] == first.after["avg"] > 0.5
    before, after = steps_of(first.folder)[-1], steps_of(second.folder)[0]
    assert after["loss"] < before["loss"] + 0.1 and after["loss"] < 0.6
    model = AutoModelForSequenceClassification.from_pretrained(second.folder / "model")
    assert model.config.num_labels == 1 and model.score.weight.abs().sum() > 0
    with pytest.raises(ModelError, match="must be a language model, got a reward model"):
        make_plan(make("dpo", f"model.path={first.folder}"), print)


def test_it_is_said_that_data_are_read_and_a_reference_is_computed(make: Callable[..., StageConfig]) -> None:
    said: list[str] = []

    class Heard(Silent):
        def note(self, text: str) -> None:
            said.append(text)

        def status(self, text: str) -> None:
            said.append(text)

    config = make("dpo", "training.steps=2", "training.batch=6")
    run = train(config, Bystander(Heard())).folder
    assert said[0] == f"reading {config.data.path}: every example is rendered and measured once"
    folder = run / "reference"
    expected = [
        "computing the log-probs of the reference, once, before the first step",
        "computing the log-probs of the reference: 30 answers so far",
        f"the reference has scored 30 answers, which are kept in {folder}",
    ]
    assert [text for text in said if "reference" in text] == expected
