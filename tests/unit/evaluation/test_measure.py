"""Evaluation against a scripted engine."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kitae.data.chat import Chat
from kitae.data.config import DataConfig
from kitae.engines.base import Request, SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import SingleTurn
from kitae.envs.environment_registry import Simple
from kitae.envs.rollouts import Episodes
from kitae.errors import EngineError, RequestError
from kitae.evaluation.measure import Evaluation, evaluate, measure, suite_episodes
from kitae.evaluation.suites import MATHS, Scoring, Suite
from kitae.rl.config import EvalConfig
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment
from kitae.verifiers.pool import VerifierPool


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Callable[[str], Path]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder("llama"))


def evaluated(
    tokenizer: Any,
    answers: list[list[str]],
    references: Sequence[Any] | None = None,
    max_tokens: int = 20,
    verifier: str = "exact",
) -> Evaluation:
    """Evaluate an engine that answers prompt i, sample j with `answers[i][j]`; "!" is refused, "broken" breaks it."""
    chat = Chat(tokenizer)
    wanted = references or ["yes"] * len(answers)
    prompts = [Prompt(f"p/{i}", (Message("user", f"question {i}"),), r) for i, r in enumerate(wanted)]

    def respond(request: Request) -> list[int]:
        _, group, index, _ = request.id.split("/")
        answer = answers[int(group)][int(index)]
        if answer == "!":
            raise RequestError(f"request {request.id!r}: too long")
        if answer == "broken":
            raise EngineError("out of memory")
        assert request.prompt_tokens == chat.encode_prompt(prompts[int(group)].messages)
        return [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    async def body() -> Evaluation:
        async with VerifierPool(verifier, workers=1) as pool:
            sampling = SamplingParams(max_tokens=max_tokens, stop_tokens=chat.stop_tokens)
            runner = Episodes(FakeEngine(respond), chat, pool, SingleTurn, sampling, seed=0, label="eval")
            return await evaluate(runner, prompts, len(answers[0]))

    return asyncio.run(body())


def test_evaluation_of_four_samples(tokenizer: Any) -> None:
    found = evaluated(tokenizer, [["yes", "no", "no", "no"], ["yes", "yes", "yes", "no"], ["no", "no", "no", "no"]])
    assert (found.prompts, found.samples, found.errors, found.truncated) == (3, 4, 0, 0)
    assert found.avg.mean == pytest.approx((1 / 4 + 3 / 4 + 0) / 3)
    assert {k: e.mean for k, e in found.passed.items()} == pytest.approx(
        {1: (1 / 4 + 3 / 4) / 3, 2: (1 / 2 + 1) / 3, 4: 2 / 3}
    )
    assert found.length == pytest.approx((4 * 4 + 8 * 3) / 12), "bytes of the answer and a stop token"
    assert [g.prompt.id for g in found.groups] == ["p/0", "p/1", "p/2"]
    row = found.row()
    assert row["avg"] == found.avg.mean
    assert row["pass@4_low"] <= row["pass@4"] <= row["pass@4_high"]
    assert json.loads(json.dumps(row)) == row


def test_one_sample_each(tokenizer: Any) -> None:
    found = evaluated(tokenizer, [["yes"], ["no"], ["yes"], ["yes"]])
    assert found.avg.mean == 0.75
    assert list(found.passed) == [1]
    assert found.passed[1] == found.avg


@pytest.mark.parametrize(("samples", "ks"), [(2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 4, 5])])
def test_which_k_are_reported(tokenizer: Any, samples: int, ks: list[int]) -> None:
    assert list(evaluated(tokenizer, [["yes"] * samples]).passed) == ks


def test_truncated_answers_are_counted(tokenizer: Any) -> None:
    found = evaluated(tokenizer, [["yes"], ["a very long answer"]], max_tokens=4)
    assert found.truncated == 0.5
    assert found.length == 4


def test_answers_that_cannot_be_judged_are_counted_and_left_out(tokenizer: Any) -> None:
    unjudgeable = {1, 2}  # a reference that is no JSON
    found = evaluated(tokenizer, [["yes", "no"], ["yes", "yes"]], references=["yes", unjudgeable])
    assert found.errors == 2
    assert found.avg.mean == 0.5
    assert found.passed[2].mean == 1
    nothing = evaluated(tokenizer, [["yes"]], references=[unjudgeable])
    assert math.isnan(nothing.avg.mean)
    assert nothing.errors == 1


def test_pass_at_k_leaves_out_groups_with_fewer_than_k_judged_answers(tokenizer: Any, tmp_path: Path) -> None:
    verifier = tmp_path / "choosy.py"
    verifier.write_text("def score(response, reference, context):\n    return {'yes': 1.0, 'no': 0.0}[response]\n")
    found = evaluated(tokenizer, [["yes", "?"], ["no", "yes"]], verifier=f"{verifier}:score")
    assert found.errors == 1
    assert found.avg.mean == pytest.approx((1 + 0.5) / 2)
    assert {k: e.mean for k, e in found.passed.items()} == pytest.approx({1: 0.75, 2: 1.0})


def test_answers_to_an_impossible_prompt_count_as_not_judged(tokenizer: Any) -> None:
    found = evaluated(tokenizer, [["yes", "no"], ["!", "!"]])
    assert (found.prompts, found.errors) == (2, 2)
    assert found.avg.mean == 0.5
    assert [len(g.rollouts) for g in found.groups] == [2, 0]
    nothing = evaluated(tokenizer, [["!"]])
    assert (nothing.errors, nothing.length, nothing.truncated) == (1, 0, 0)


def test_a_broken_engine_ends_the_evaluation_with_its_own_error(tokenizer: Any) -> None:
    """Not a group of exceptions, which no caller expects and the command line would print as a traceback."""
    with pytest.raises(EngineError, match="out of memory"):
        evaluated(tokenizer, [["yes", "yes"], ["broken", "yes"]])


def judged(*groups: list[tuple[str, Score]]) -> list[Group]:
    """Groups of answers with their verdicts."""

    def rollout(group: int, index: int, text: str, score: Score) -> Rollout:
        said = Segment("model", (1,) * len(text), (0.0,) * len(text), (0,) * len(text))
        return Rollout.of(group, index, (1,), (said,), "stop", text, score)

    prompt = Prompt("p", (Message("user", "?"),), "18")
    return [
        Group(g, prompt, tuple(rollout(g, i, text, score) for i, (text, score) in enumerate(answers)))
        for g, answers in enumerate(groups)
    ]


def strict_and_last(strict: float, last: float) -> Score:
    return Score(strict, {"strict": strict, "last": last})


def test_each_scoring_has_marks_of_its_own_and_a_vote_of_its_own() -> None:
    """By hand: three say 18, but only one of them in the form that was asked for."""
    groups = judged(
        [
            ("#### 18", strict_and_last(1, 1)),
            ("It is 18", strict_and_last(0, 1)),
            ("18.0 eggs", strict_and_last(0, 1)),
            ("#### 7", strict_and_last(0, 0)),
        ]
    )
    found = measure(groups, 4, MATHS)
    strict, last = found.marks
    assert (strict.label, last.label) == ("strict", "last")
    assert (strict.avg.mean, last.avg.mean) == (0.25, 0.75)
    assert (strict.voted[4].mean, last.voted[4].mean) == (0.5, 1.0), "18 and 7 are level; 18 has three of four"
    assert last.voted[2].mean == pytest.approx((3 * 1 + 3 * 0.5) / 6)
    row = found.row()
    assert (row["avg"], row["last/avg"], row["maj@4"], row["last/pass@2"]) == (0.25, 0.75, 0.5, 1.0)
    assert row["partial"] is False


def test_partial_credit_is_said_so() -> None:
    assert measure(judged([("a", Score(0.5))], [("b", Score(1.0))]), 1).row()["partial"] is True
    assert measure(judged([("a", Score(0.0))], [("b", Score(1.0))]), 1).row()["partial"] is False


def test_who_cannot_vote_has_no_majority() -> None:
    code = (Scoring("score", "code"),)
    assert not measure(judged([("def f(): pass", Score(1.0))] * 2), 2, code).marks[0].voted


def test_a_suite_is_asked_with_its_own_limits_and_streams(tokenizer: Any) -> None:
    chat = Chat(tokenizer)
    episodes = Episodes(FakeEngine(lambda request: [5]), chat, None, SingleTurn, SamplingParams(stop_strings=("x",)), 0)
    suite = Suite("s", DataConfig(task="reverse"), (Scoring("score", "exact"),), 33, stop=("END",), label="eval:s")
    pool = VerifierPool("exact")
    asked = suite_episodes(episodes, suite, pool, Simple(SingleTurn), EvalConfig(temperature=0.5, top_p=0.9, samples=2))
    assert (asked.sampling.max_tokens, asked.sampling.stop_strings, asked.sampling.temperature) == (33, ("END",), 0.5)
    assert (asked.label, asked.verifier) == ("eval:s", pool)
    assert asked.running is not episodes.running
    assert suite_episodes(episodes, suite, pool, Simple(SingleTurn), EvalConfig(max_tokens=7)).sampling.max_tokens == 7
