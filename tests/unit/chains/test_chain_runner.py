"""Chains on the tiny model: RAFT learns; being killed anywhere changes nothing; what was begun stays as it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kitae.chains import chain_runner
from kitae.chains.chain_file import ChainPlan, read_chain
from kitae.chains.chain_folder import read_record
from kitae.chains.chain_runner import inspect_chain, run_chain
from kitae.errors import ConfigChangedError, DataError, StoreError
from kitae.observe.observer import Bystander, Silent
from kitae.offline.loop import OfflineLoop
from kitae.store.run_folder import lock

SCORE = '''
def early(response, reference, context):
    """The share of letters from the first half of the alphabet."""
    return sum(c in "abcdefghijklm" for c in response.lower()) / max(1, len(response))
'''

TASK = """
recipe = "task.toml"
"""

RAFT = """
rounds = {rounds}
{evaluate}
[[stage]]
name = "answers"
recipe = "task.toml"
sample = {{ keep = "best", prompts = {prompts}, n = 6, truncated = true }}
[[stage]]
name = "learn"
method.kind = "sft"
model = {{ device = "cpu", dtype = "float32" }}
training = {{ lr = 1e-2, batch = 8, epochs = 1 }}
checkpoint.every = 1
eval.examples = 0
"""

RECIPE = """
[model]
path = "tiny"
device = "cpu"
dtype = "float32"
[data]
task = "arithmetic"
[verifier]
name = "score.py:early"
workers = 1
check_gold = false
[sampling]
max_tokens = 8
[engine]
memory_gb = 0.05
[eval]
prompts = 32
temperature = 1.0
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ChainPlan]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "task.toml").write_text(RECIPE)

    def make(
        rounds: int = 1, prompts: int = 8, output: str | None = None, evaluate: bool = False, **old: str
    ) -> ChainPlan:
        text = RAFT.format(rounds=rounds, prompts=prompts, evaluate=f"[evaluate]\n{TASK}" if evaluate else "")
        for key, value in old.items():
            text = text.replace(key, value)
        (tmp_path / "raft.toml").write_text(text)
        return read_chain(tmp_path / "raft.toml", Path(output) if output else None)

    return make


def go(chain: ChainPlan) -> list[str]:
    heard: list[str] = []

    class Heard(Silent):
        def note(self, text: str) -> None:
            heard.append(text)

    inspect_chain(chain)
    run_chain(chain, Bystander(Heard()))
    return heard


def weights(chain: ChainPlan) -> dict[str, torch.Tensor]:
    return load_file(chain.folder / "model" / "model.safetensors")


@pytest.mark.slow
def test_raft_learns_and_reports(write: Callable[..., ChainPlan]) -> None:
    chain = write(rounds=2, prompts=40, evaluate=True, **{"epochs = 1": "epochs = 3"})
    go(chain)
    report = json.loads((chain.folder / "report.json").read_text())
    scores = [report["start"]["avg"], *(line["score"][0] for line in report["stages"] if line["kind"] == "sft")]
    assert len(scores) == 3
    assert scores[-1] > scores[0] + 0.1, scores
    sampled = [line for line in report["stages"] if line["kind"] == "sample"]
    assert [line["rows"] for line in sampled] == [40, 40]
    assert sampled[1]["after"] > sampled[0]["after"] + 0.04  # of one round: what is trained last is not sampled
    assert all(line["tokens"] and line["seconds"] and line["peak_gb"] > 0.05 for line in report["stages"])
    assert report["final_model"] == "runs/raft/04-learn-001/model"
    page = (chain.folder / "report.md").read_text()
    assert "| 04-learn | sft | finished |" in page and "The last trained model is" in page
    assert not (chain.folder / "04-learn-001" / "checkpoints").exists()
    assert go(chain) == []  # finished: nothing is run again


class Killed(BaseException):
    pass


def killed_in(chain: ChainPlan, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: int) -> None:
    """Run until the nth call of something, and end there as hard as a process can end itself."""
    original, calls = getattr(place, name), 0

    def crash(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return original(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, crash)
        with pytest.raises(Killed):
            go(chain)


def test_a_chain_that_is_killed_everywhere_ends_the_same(
    write: Callable[..., ChainPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(prompts=16)
    go(whole)
    broken = write(prompts=16, output="broken")
    killed_in(broken, monkeypatch, chain_runner, "sample_file", 1)
    killed_in(broken, monkeypatch, chain_runner, "train", 1)
    (broken.folder / "02-learn-001").mkdir()  # killed while the run folder was made
    killed_in(broken, monkeypatch, OfflineLoop, "_learn", 2)
    heard = go(broken)
    assert [text for text in heard if text.startswith("stage")] == ["stage 02-learn, 2 of 2"]
    assert (broken.folder / "01-answers.jsonl").read_text() == (whole.folder / "01-answers.jsonl").read_text()
    ours, theirs = weights(broken), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.thorough
def test_a_sampled_file_that_was_complete_is_not_sampled_again(
    write: Callable[..., ChainPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = write()
    killed_in(chain, monkeypatch, chain_runner.Record, "finish", 1)
    before = (chain.folder / "01-answers.jsonl").stat().st_mtime_ns
    go(chain)
    assert (chain.folder / "01-answers.jsonl").stat().st_mtime_ns == before
    assert read_record(chain)[0]["01-answers"]["sampled"] == {"rows": 8}


def test_what_was_begun_keeps_its_settings(write: Callable[..., ChainPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    killed_in(write(), monkeypatch, chain_runner, "train", 1)
    with pytest.raises(ConfigChangedError, match=r"stage 01-answers: sample\.n: was 6, is 5"):
        go(write(**{"n = 6": "n = 5"}))
    with pytest.raises(ConfigChangedError, match=r"stage 02-learn: training\.lr: was 0\.01, is 0\.02"):
        go(write(**{"lr = 1e-2": "lr = 2e-2"}))
    with pytest.raises(ConfigChangedError, match="stage 02-learn is gone"):
        go(write(**{'"learn"': '"teach"'}))
    inspect_chain(write(rounds=2))  # what is to come may change


def test_nothing_to_train_on_is_said(write: Callable[..., ChainPlan]) -> None:
    chain = write(**{'keep = "best"': 'keep = "best", min_score = 2.0'})
    with pytest.raises(DataError, match="stage 01-answers kept none of 48 answers to 8 prompts"):
        go(chain)


def test_one_process_at_a_time_and_a_broken_record(write: Callable[..., ChainPlan]) -> None:
    chain = write()
    chain.folder.mkdir(parents=True)
    held = lock(chain.folder)
    with pytest.raises(StoreError, match="another process is working in"):
        go(chain)
    held.close()
    shutil.rmtree(chain.folder)
    chain.folder.mkdir()
    (chain.folder / "chain.json").write_text("{")
    with pytest.raises(StoreError, match=r"chain\.json is not the record of a chain"):
        go(chain)
