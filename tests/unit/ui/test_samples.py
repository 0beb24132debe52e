"""A group in full, and tokens with their columns: those of the journal, and those that training noted."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from written_runs import HOSTILE, WrittenRun, damage, rollout

from kitae.errors import CorruptError, StoreError
from kitae.observe.diagnosis import diagnose
from kitae.observe.token_numbers import TokenFiles
from kitae.store.journal import Journal
from kitae.types import Chain, Message, Prompt, Rollout, Score, Segment, ToolCall
from kitae.ui import samples


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return WrittenRun(tmp_path).step([[0.0, None], [1.0]], text=HOSTILE).finish()


def test_a_group_has_its_prompt_its_samples_and_its_neighbours(run: Path) -> None:
    view = samples.group(run, 0)
    assert (view.prompt_id, view.reference, view.fate, view.step) == ("reverse/0", "answer 0", "trained", 1)
    assert (view.previous, view.next, view.suspended) == (None, 1, 0)
    right, failed = view.samples
    assert (right.value, right.components, right.text, right.versions) == (0.0, {"exact": 0.0}, HOSTILE, [0])
    assert (failed.value, failed.outcome, failed.detail) == (None, "error", "exit 0 in 'x1'")
    with pytest.raises(StoreError, match="toy-001 has no group 9"):
        samples.group(run, 9)


def test_the_columns_of_tokens_equal_what_the_engine_gave(run: Path) -> None:
    found = samples.tokens(run, 0, 1)
    (chain,) = found.chains
    (segment,) = rollout(0, 1, None).segments
    assert chain.tokens == list(segment.tokens)
    assert chain.columns == {"logprob": list(segment.logprobs), "version": [0] * 4}
    assert len(chain.prompt) == 2 and all(chain.by_model)
    with pytest.raises(StoreError, match="no sample 7 of group 0"):
        samples.tokens(run, 0, 7)


def test_a_damaged_answer_says_so_in_its_own_place(tmp_path: Path) -> None:
    """Those who look at a run see all the rest of it."""
    run = WrittenRun(tmp_path).step([[0.0, 1.0]], in_files=True).finish()
    journal = Journal(run / "journal.sqlite", read_only=True)
    file = damage(run, journal.rollouts(0)[0])
    journal.close()
    bad, good = samples.group(run, 0).samples
    assert f"{file}: the answer at byte 0 (3 tokens) must have the checksum" in bad.text
    assert good.text == "answer 0.1" and bad.value == 0.0
    with pytest.raises(CorruptError, match=file):
        samples.tokens(run, 0, 0)
    assert [s.title for s in diagnose(run) if file in s.evidence] == []


def test_turns_calls_and_several_contexts_are_shown(tmp_path: Path) -> None:
    made = WrittenRun(tmp_path)
    first = Chain((1,), (Segment("model", (5, 6), (-0.5, -1.0), (0, 0), 0.25), Segment.observed((7,))))
    second = Chain((1, 2), (Segment("model", (8,), (-2.0,), (1,)),))
    said = (
        Message("user", "What is 6 * 7?"),
        Message("assistant", "", (ToolCall("python", {"code": "6 * 7"}),)),
        Message("tool", "42", name="python"),
    )
    episode = Rollout(0, 0, (first, second), "stop", "42", Score(1.0), transcript=said)
    asyncio.run(made.store.journal.add_prompt(0, Prompt("p", said[:1], {"a": 1}, {"k": 2}), 0, 0))
    asyncio.run(made.store.journal.add_rollout(episode))
    run = made.close()
    (sample,) = samples.group(run, 0).samples
    assert (sample.turns, sample.length, sample.rewards, sample.versions) == (2, 3, [0.25], [0, 1])
    assert [turn.role for turn in sample.transcript] == ["user", "assistant", "tool"]
    assert sample.transcript[1].calls == ["python(code='6 * 7')"]
    one, two = samples.tokens(run, 0, 0).chains
    assert one.by_model == [True, True, False] and one.columns["logprob"] == [-0.5, -1.0, None]
    assert two.columns == {"logprob": [-2.0], "version": [1]}


def test_what_training_noted_appears_as_columns(run: Path) -> None:
    assert set(samples.tokens(run, 0, 0).chains[0].columns) == {"logprob", "version"}  # the run has recorded none
    noted = {"logp": [-1.0, -2.0, -0.5], "entropy": [0.5, 0.25, np.nan], "gate": [1.0, 0.0, 1.0], "version": [0, 0, 0]}
    columns = {name: np.array(values, dtype=np.float32) for name, values in noted.items()}
    TokenFiles(run, 256, pytest.fail).write(1, {(0, 0, 0): columns})
    shown = samples.tokens(run, 0, 0).chains[0].columns
    assert shown["entropy"] == [0.5, 0.25, None] and shown["gate"] == [1.0, 0.0, 1.0]
    assert set(shown) == {"logprob", "version", "logp", "entropy", "gate"}
    assert set(samples.tokens(run, 0, 1).chains[0].columns) == {"logprob", "version"}
    next((run / "tokens").iterdir()).write_bytes(b"damaged")
    assert set(samples.tokens(run, 0, 0).chains[0].columns) == {"logprob", "version"}


def test_columns_are_laid_out_by_their_length() -> None:
    by_model = [True, False, True]
    assert samples._laid_out([1, 2], by_model, 4) == [1, None, 2]
    assert samples._laid_out([1, 9, 2], by_model, 4) == [1, None, 2]
    assert samples._laid_out([0, 0, 0, 0, 1, 9, 2], by_model, 4) == [1, None, 2]
    assert samples._laid_out([1], by_model, 4) is None


def test_parts_of_a_column_go_to_their_context() -> None:
    noted = {"entropy": [1.0, 2.0, 3.0], "chain": [0, 1, 1], "version": [0, 0, 0]}
    assert samples._of_chain(noted, 1) == {"entropy": [2.0, 3.0]}
