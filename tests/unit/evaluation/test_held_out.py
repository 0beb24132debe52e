"""Results of single held-out prompts in run folders: kept, read again, compared in pairs, and why not."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from written_runs import WrittenRun

from kitae.evaluation.held_out import answers_at, answers_of, forget_after, keep_examples, last_results, pair
from kitae.evaluation.statistics import compare
from kitae.store.run_summary import RunView
from kitae.types import Message, Prompt, Rollout, Score, Segment


def prompts(first: int, count: int) -> list[Prompt]:
    return [Prompt(f"t/{i}", (Message("user", f"{i}?"),), str(i)) for i in range(first, first + count)]


def answered(run: Path, step: int, asked: list[Prompt], scores: list[float | None]) -> None:
    async def write() -> None:
        answers = answers_of(run, step, "toy", True, {"temperature": 0.0})
        try:
            await answers.begin(asked)
            for group, score in enumerate(scores):
                verdict = Score.error("no") if score is None else Score(score)
                said = Segment("model", (4,), (-0.1,), (step,))
                await answers.journal.add_rollout(Rollout.of(group, 0, (1,), (said,), "stop", f"said {group}", verdict))
        finally:
            answers.close()

    asyncio.run(write())


def evaluated(folder: Path, name: str, asked: list[Prompt], scores: list[float | None]) -> Path:
    run = WrittenRun(folder, name).evaluate(0.5).finish()
    answered(run, 0, asked, scores)
    return run


def test_runs_are_compared_on_the_prompts_that_both_were_judged_on(tmp_path: Path) -> None:
    first = evaluated(tmp_path, "a", prompts(0, 6), [0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    second = evaluated(tmp_path, "b", prompts(1, 6), [1.0, 1.0, 1.0, 1.0, None, 0.0])
    found = pair(first, second)
    x, y = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0, 1.0])
    assert found.difference == compare(x.astype(np.float32), y.astype(np.float32))
    assert (found.first, found.second, found.reason) == (0.5, 1.0, "")
    assert found.difference is not None and found.difference.test == "McNemar" and found.difference.problems == 4


def test_the_same_id_with_another_text_is_another_prompt(tmp_path: Path) -> None:
    asked = prompts(0, 2)
    others = [Prompt(p.id, (Message("user", "other"),), p.reference) for p in asked]
    found = pair(evaluated(tmp_path, "a", asked, [1.0, 1.0]), evaluated(tmp_path, "b", others, [1.0, 1.0]))
    assert found.difference is None
    assert found.reason == "they have no held-out prompt in common: 2 of a-001, 2 of b-001"


def test_it_is_said_why_nothing_can_be_compared(tmp_path: Path) -> None:
    whole = evaluated(tmp_path, "whole", prompts(0, 2), [1.0, 0.0])
    assert pair(whole, WrittenRun(tmp_path, "none").finish()).reason == "none-001 has no evaluation yet"
    old = WrittenRun(tmp_path, "old").evaluate(0.5).finish()
    assert pair(whole, old).reason == "old-001 kept no results of single prompts"
    broken = evaluated(tmp_path, "broken", prompts(0, 2), [1.0, 0.0])
    next(broken.glob("evaluations/*/own/*/answers.sqlite")).write_bytes(b"no database at all, but long enough" * 9)
    assert "not a database" in pair(whole, broken).reason


def test_an_evaluation_that_the_metrics_do_not_have_is_not_complete(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "a", prompts(0, 2), [1.0, 0.0])
    answered(run, 5, prompts(0, 2), [1.0])
    found = last_results(RunView(run))
    assert found is not None and (found.step, list(found.values.values())) == (0, [1.0, 0.0])


def test_answers_come_with_their_prompts(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "a", prompts(0, 2), [1.0, None])
    one, two = answers_at(run, 0).values()
    assert (one.prompt.id, one.rollouts[0].text, one.value, two.value) == ("t/0", "said 0", 1.0, None)
    assert answers_at(run, 3) == {}


def test_what_is_given_up_is_forgotten(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "a", prompts(0, 1), [1.0])
    for step in (5, 10):
        answered(run, step, prompts(0, 1), [1.0])
    forget_after(run, 5)
    assert [bool(answers_at(run, step)) for step in (0, 5, 10)] == [True, True, False]


def test_numbers_of_examples_are_kept_whole(tmp_path: Path) -> None:
    runs = [WrittenRun(tmp_path, name).evaluate(0.5).finish() for name in "ab"]
    keep_examples(runs[0], 0, {"x": 2.0, "y": 1.5, "z": float("nan")})
    keep_examples(runs[1], 0, {"x": 1.0, "y": 1.0, "z": 3.0})
    found = pair(*runs).difference
    assert found is not None and found.problems == 2
    assert found.interval.mean == pytest.approx(-0.75) and found.test == "sign flips"
