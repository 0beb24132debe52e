"""What a resume does with a journal, a model or a reference that is not what the run had."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_config, toy_config
from safetensors.torch import load_file, save_file

from kitae.errors import ConfigError, CorruptError, ModelError, StoreError
from kitae.models.load import find_model
from kitae.observe.observer import Bystander, Silent
from kitae.run import train_run
from kitae.store.checkpoints import START
from kitae.store.journal import Journal
from kitae.trainer.learner import Learner

SETTINGS = ("training.steps=6", "training.prompts_per_step=2", "training.group_size=3", "checkpoint.every=2")
REST = ("checkpoint.keep=9", "eval.prompts=0", "sampling.max_tokens=6", "verifier.check_gold=false")


class Crash(Exception):
    pass


@contextmanager
def crash_at(step: int) -> Iterator[None]:
    learn = Learner.learn

    def fail(self: Learner, now: int, *arguments: Any, **settings: Any) -> Any:
        if now == step:
            raise Crash
        return learn(self, now, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Learner, "learn", fail)
        yield


class Notes(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def resume(run: Path, *overrides: str, **options: Any) -> list[str]:
    notes = Notes()
    train_run.resume(run, Bystander(notes), overrides, **options)
    return notes.said


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_same_weights(run: Path, other: Path) -> None:
    ours, theirs = weights(run), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_config(toy_config(tmp_path_factory.mktemp("whole"), *SETTINGS, *REST)).folder


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Before step 6, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("crashed")
    with crash_at(6):
        run_config(toy_config(folder, *SETTINGS, *REST))
    return folder / "toy-001"


@pytest.fixture
def run(crashed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(crashed, tmp_path / "run")


def change(run: Path, sql: str) -> None:
    with closing(Journal(run / "journal.sqlite")) as journal:
        assert journal._reader.execute(sql).rowcount


def test_a_journal_that_is_behind_its_checkpoint_is_refused_with_the_way_out(run: Path, whole: Path) -> None:
    change(run, "DELETE FROM marks WHERE step > 3")
    change(run, "DELETE FROM fates WHERE step > 3")
    change(run, "DELETE FROM rollouts WHERE group_id >= 6")
    change(run, "DELETE FROM prompts WHERE group_id >= 6")
    with pytest.raises(CorruptError, match=r"up to step 4, but .* ends at step 3, .* with --from step-000002$"):
        resume(run)
    resume(run, checkpoint="step-000002")
    assert_same_weights(run, whole)


def test_a_journal_of_nothing_leads_to_the_start(run: Path, whole: Path) -> None:
    for name in ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"):
        (run / name).unlink(missing_ok=True)
    with pytest.raises(CorruptError, match="--from start, which trains all steps again"):
        resume(run)
    resume(run, checkpoint=START)
    assert_same_weights(run, whole)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE rollouts SET tokens = zeroblob(length(tokens)) WHERE group_id = 8 AND sample = 0",
        "UPDATE rollouts SET value = 1 - value WHERE group_id = 9 AND sample = 2",
        "DELETE FROM rollouts WHERE group_id = 8 AND sample = 1",
    ],
)
def test_damage_in_a_step_that_is_trained_again_is_named_and_can_be_given_up(run: Path, whole: Path, sql: str) -> None:
    change(run, sql)
    with pytest.raises(CorruptError, match=r"journal|step 5"):
        resume(run)
    resume(run, checkpoint="step-000004" if "UPDATE" in sql else START, forget=True)
    assert_same_weights(run, whole)


def test_damage_in_what_is_pending_is_sampled_again(run: Path, whole: Path) -> None:
    change(run, "UPDATE rollouts SET logprobs = zeroblob(length(logprobs)) WHERE group_id = 10 AND sample = 0")
    assert any("sampled again: 1" in note for note in resume(run))
    assert_same_weights(run, whole)


def test_the_journal_of_a_twin_is_refused(run: Path, whole: Path) -> None:
    for ending in ("-wal", "-shm"):
        (run / f"journal.sqlite{ending}").unlink(missing_ok=True)
    shutil.copy(whole / "journal.sqlite", run / "journal.sqlite")
    shutil.copy(whole / "config.json", run / "config.json")  # else run.dir tells them apart
    with pytest.raises(CorruptError, match="or is of another run"):
        resume(run)


def test_a_damaged_journal_is_set_aside(run: Path, whole: Path) -> None:
    (run / "journal.sqlite").write_bytes(b"nothing" * 1000)
    with pytest.raises(StoreError, match="not a database"):
        resume(run)
    notes = resume(run, checkpoint=START, forget=True)
    assert any("set aside as" in note for note in notes)
    assert_same_weights(run, whole)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", None])
def test_settings_that_cannot_be_read_are_those_of_the_journal(run: Path, whole: Path, content: bytes | None) -> None:
    (run / "config.json").unlink()
    if content is not None:
        (run / "config.json").write_bytes(content)
    assert any("with the settings that its journal has" in note for note in resume(run))
    assert_same_weights(run, whole)


def test_files_that_are_only_shown_may_be_damaged(run: Path, whole: Path) -> None:
    for name in ("metrics.jsonl", "timeline.jsonl"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[:60] + b"\xff" + content[61:])
    (run / "checkpoints" / "step-000004.bak").mkdir()
    notes = resume(run)
    assert any("lines that are not what was written are left out: 1" in note for note in notes)
    assert_same_weights(run, whole)


def test_a_model_that_was_exchanged_is_refused(tmp_path: Path) -> None:
    found = find_model("tiny")
    assert found is not None
    model = shutil.copytree(found, tmp_path / "model")
    with crash_at(6):
        run_config(toy_config(tmp_path, *SETTINGS, *REST, f"model.path={model}", "model.lora_rank=2"))
    file = model / "model.safetensors"
    before = file.read_bytes()
    tensors = load_file(file)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"the models must be those .*model\.safetensors was changed"):
        resume(tmp_path / "toy-001")
    file.write_bytes(before)
    resume(tmp_path / "toy-001")


def test_a_run_that_was_extended_under_a_schedule_is_not_trained_again_as_if_it_had_not(tmp_path: Path) -> None:
    run = run_config(toy_config(tmp_path, *SETTINGS, *REST, "training.schedule=linear")).folder
    resume(run, "training.steps=8")
    with pytest.raises(ConfigError, match=r"training\.steps: was 6, is 8"):
        resume(run, checkpoint=START)


def test_another_order_of_sums_is_said(run: Path) -> None:
    notes = resume(run, "training.token_budget=64")
    assert any("steps 5 to 5 are trained again with another training.token_budget" in note for note in notes)
