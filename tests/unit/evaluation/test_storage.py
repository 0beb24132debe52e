"""Answers on the disk: kept, found again, and never mixed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kitae.errors import StoreError
from kitae.evaluation.storage import Answers, fingerprint, plugin_digests
from kitae.types import Message, Prompt, Rollout, Score, Segment

PROMPTS = [Prompt(f"f:{i}", (Message("user", f"{i}?"),), {"right": [i]}) for i in range(3)]
SETTINGS = {"temperature": 0.0, "weights": "abc"}


def opened(folder: Path, prompts: list[Prompt] = PROMPTS, **changes: Any) -> Answers:
    answers = Answers(folder, "some/model", "gsm8k", {**SETTINGS, **changes})
    try:
        asyncio.run(answers.begin(prompts))
    except BaseException:
        answers.close()
        raise
    return answers


def add(answers: Answers, group: int, index: int, score: Score | None) -> None:
    said = Segment("model", (4, 2), (-0.1, -0.2), (0, 0))
    rollout = Rollout.of(group, index, (1,), (said,), "stop", "text", score)
    asyncio.run(answers.journal.add_rollout(rollout))


def test_all_answers_or_none(tmp_path: Path) -> None:
    answers = opened(tmp_path)
    for group in (0, 1, 2):
        assert answers.complete(PROMPTS, 1) is None
        add(answers, group, 0, Score(group / 2))
    assert answers.complete(PROMPTS, 2) is None
    assert answers.complete(PROMPTS[:1], 1) is not None
    answers.close()
    again = opened(tmp_path)
    found = again.complete(PROMPTS, 1)
    again.close()
    assert found is not None
    assert [g.rewards_G.tolist() for g in found] == [[0.0], [0.5], [1.0]]
    assert [g.prompt for g in found] == PROMPTS


@pytest.mark.parametrize("verdict", [None, Score.error("no server")])
def test_an_answer_without_a_verdict_is_not_complete(tmp_path: Path, verdict: Score | None) -> None:
    answers = opened(tmp_path)
    add(answers, 0, 0, verdict)
    assert answers.complete(PROMPTS[:1], 1) is None
    answers.close()


def test_other_settings_are_another_folder(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path, temperature=0.5)
    assert first.folder != second.folder
    assert first.folder.parent == second.folder.parent == tmp_path / "some-model"
    assert json.loads((second.folder / "settings.json").read_text()) == {**SETTINGS, "temperature": 0.5}
    first.close()
    second.close()


def test_more_problems_go_into_the_same_folder(tmp_path: Path) -> None:
    opened(tmp_path, PROMPTS[:1]).close()
    answers = opened(tmp_path, PROMPTS)
    assert answers.journal.prompt(2) is not None
    answers.close()


def test_other_problems_are_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(StoreError, match="holds answers to other problems: number 0 was f:0, is f:1"):
        opened(tmp_path, PROMPTS[1:])
    changed = [Prompt("f:0", PROMPTS[0].messages, {"right": [7]}), *PROMPTS[1:]]
    with pytest.raises(StoreError, match="its text has changed"):
        opened(tmp_path, changed)


def test_settings_that_do_not_fit_the_folder_are_refused(tmp_path: Path) -> None:
    answers = opened(tmp_path)
    asyncio.run(answers.journal.begin('{"temperature": 1.0}', []))
    answers.close()
    with pytest.raises(StoreError, match="holds answers with other settings"):
        opened(tmp_path)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    answers = opened(tmp_path)
    with pytest.raises(StoreError, match="another process is working in"):
        opened(tmp_path)
    answers.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot make the folder"):
        opened(tmp_path / "file")


def test_weights_have_a_fingerprint(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "copy", "trained", "longer")]
    weights = bytearray(range(256)) * 100_000  # several pieces, with gaps between them
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
    trained = bytearray(weights)
    trained[::1000] = b"\xff" * len(trained[::1000])
    (folders[2] / "model.safetensors").write_bytes(trained)
    (folders[3] / "model.safetensors").write_bytes(weights + b"\0")
    found = [fingerprint(folder) for folder in folders]
    assert found[0] == found[1]
    assert len({*found}) == 3


def test_one_s_own_files_are_part_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def score(): return 1")
    values = {"name": "compose", "params": {"parts": [{"name": f"{path}:score"}, {"name": "math"}]}}
    before = plugin_digests(values)
    assert list(before) == [f"{path}:score"]
    path.write_text("def score(): return 0")
    assert plugin_digests(values) != before
