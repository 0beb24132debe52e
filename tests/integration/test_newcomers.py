"""What those who come from other trainers do first, and what they are told."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kitae
from kitae.cli.runs import plot
from kitae.config.recipe import make_config
from kitae.errors import ConfigError, DataError, VerifierError
from kitae.observe.observer import Silent
from kitae.ui.library import Library

pytestmark = pytest.mark.usefixtures("warm_verifiers")

TINY: dict[str, Any] = {
    "model": {"path": "tiny"},
    "training": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
    "sampling": {"max_tokens": 4},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


class Notes(Silent):
    def __init__(self) -> None:
        self.said = list[str]()

    def note(self, text: str) -> None:
        self.said.append(text)


def said_of(**changes: Any) -> str:
    notes = Notes()
    recipe = {**TINY, "data": {"path": "rows.jsonl"}}
    kitae.train({key: {**recipe.get(key, {}), **changes.get(key, {})} for key in {**recipe, **changes}}, observer=notes)
    return "\n".join(notes.said)


def test_what_is_hardly_meant_is_said() -> None:
    said = said_of(
        training={"lr": 5.0, "prompts_per_step": 9},
        model={"lora_alpha": 64.0},
        sampling={"max_tokens": 100_000},
        pipeline={},
        eval={},
    )
    assert "warning: training.lr = 5 is far above what AdamW takes" in said
    assert "training.prompts_per_step = 9 is more than the 8 rows" in said
    assert "model.lora_alpha = 64 has no effect: model.lora_rank is 0" in said
    assert "sampling.max_tokens = 100000 is more than fits: the context of tiny has" in said
    assert "verifier.name is not set: answers are judged by 'exact'" in said


def test_nothing_is_said_of_what_is_usual() -> None:
    said = said_of(verifier={"name": "number"})
    assert "warning" not in said and "verifier.name" not in said


def test_prompts_that_do_not_fit_are_found_before_the_first_step(folder: Path) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"question": "word " * 100_000, "answer": "1"}) + "\n")
    with pytest.raises(
        DataError, match=r"prompts must be shorter than the model's context of \d+ tokens, but of 1 that"
    ):
        said_of()
    assert not (folder / "runs").exists()


OWN = """
import time

def none(response, reference, context):
    return 1.0 if response == reference else None

def text(response, reference, context):
    return 1.0 if response == reference else "nan"

def hang(response, reference, context):
    while response != reference:
        time.sleep(0.01)
    return 1.0
"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [("none", "no reward applies"), ("text", "got str"), ("hang", "timed out")],
)
def test_a_verifier_that_fails_on_wrong_answers_is_caught(function: str, reason: str, folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    with pytest.raises(VerifierError, match=rf"4 of 4 wrong answers are not judged .*{reason}"):
        said_of(verifier={"name": f"own.py:{function}", "timeout": 0.5})


def test_a_switch_of_a_verifier_is_true_or_false() -> None:
    with pytest.raises(VerifierError, match="packages of verifier 'code' must be true or false, got 'off'"):
        said_of(verifier={"name": "code", "params": {"packages": "off"}})


@pytest.mark.parametrize("unset", ["data.hub=", "data.hub=none", 'data.hub=""'])
def test_a_source_of_a_recipe_can_be_unset(unset: str) -> None:
    values = {"data": {"hub": "openai/gsm8k", "eval_path": "rows.jsonl"}}
    config = make_config(values, [unset, "data.path=rows.jsonl", "data.eval_path=rows.jsonl"])
    assert config.flat()["data.path"] == "rows.jsonl" and config.flat()["data.hub"] is None
    with pytest.raises(ConfigError, match="data needs exactly one of task, gym, path, hub, got none"):
        make_config(values, [unset])


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("lora.rank=8", "unknown key lora.rank; Kitae calls it model.lora_rank"),
        ("training.per_device_train_batch_size=8", "Kitae calls it training.prompts_per_step"),
        ("peft.r=8", "unknown key peft.r; Kitae calls it model.lora_rank"),
    ],
)
def test_hints_lead_to_the_right_setting(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"data": {"task": "reverse"}}, [override])
    assert hint in str(caught.value) and len(str(caught.value)) < 200


def test_examples_without_held_out_ones_are_trained_on(folder: Path) -> None:
    (folder / "sft.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}", "completion": "a"}) + "\n" for n in range(8))
    )
    recipe = {"method": {"kind": "sft"}, "model": {"path": "tiny"}, "data": {"path": "sft.jsonl"}}
    result = kitae.train({**recipe, "training": {"steps": 1, "batch": 4}}, quiet=True)
    assert result.step == 1 and result.after is None


def test_a_resumed_run_says_from_where_it_goes_on() -> None:
    notes = Notes()
    result = kitae.train({**TINY, "data": {"task": "reverse"}, "eval": {"prompts": 0}}, quiet=True)
    kitae.resume(result.folder, overrides=["training.steps=2"], observer=notes)
    assert f"going on after step 1, from {result.folder}/checkpoints/step-000001" in "\n".join(notes.said)


def test_plots_without_matplotlib_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = kitae.train({**TINY, "data": {"task": "reverse"}, "eval": {"prompts": 0}}, quiet=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'kitae\[plots\]'"):
        plot(result.folder, None)


def test_the_page_of_runs_is_empty_where_there_are_none() -> None:
    assert Library([Path("runs")]).runs() == {}


COMMAND = """
import sys
from kitae.cli.main import run
sys.argv[0] = "kitae"
try:
    run()
except SystemExit:
    pass
print([name for name in ("torch", "transformers") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "command",
    [["--help"], ["train", "quickstart", "training.lrr=1"], ["train", "quickstart", "data.path=no.jsonl"]],
    ids=["help", "setting", "file"],
)
def test_help_and_errors_of_settings_need_no_torch(command: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", COMMAND, *command], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "[]", ran.stderr
