"""Held-out evaluation: the estimators against enumeration, and the whole of it against a scripted engine."""

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kitae.data.chat import Chat
from kitae.engines.base import Request, SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.episode import Episodes
from kitae.envs.single_turn import SingleTurn
from kitae.errors import EngineError, RequestError
from kitae.pipeline.evaluate import Evaluation, evaluate, interval_of, pass_at_k
from kitae.types import Message, Prompt
from kitae.verifiers.pool import VerifierPool

fast = settings(deadline=None, max_examples=40)


@fast
@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(case: tuple[int, int, int]) -> None:
    n, correct, k = case
    draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


shares = st.floats(0, 1, width=32)


@fast
@given(st.lists(shares, min_size=1, max_size=40) | st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_interval_contains_the_mean_and_stays_between_0_and_1(values: list[float]) -> None:
    found = interval_of(np.array(values, dtype=np.float32))
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert 0 <= found.low <= found.mean + 1e-6
    assert found.mean - 1e-6 <= found.high <= 1
    if not {*values} <= {0.0, 1.0}:
        assert min(values) - 1e-6 <= found.low and found.high <= max(values) + 1e-6


def test_interval_of_right_and_wrong_is_wilsons() -> None:
    """Known values: 10 of 10 and 1 of 20; it does not shrink to a point where all agree."""
    found = interval_of(np.ones(10, dtype=np.float32))
    assert (found.low, found.high) == pytest.approx((0.7225, 1.0), abs=1e-4)
    found = interval_of(np.array([1.0] + [0.0] * 19, dtype=np.float32))
    assert (found.low, found.high) == pytest.approx((0.0089, 0.2361), abs=1e-4)


def test_interval_of_unanimous_answers_contains_their_mean_exactly() -> None:
    for size, value in itertools.product(range(1, 130), (0.0, 1.0)):
        found = interval_of(np.full(size, value, dtype=np.float32))
        assert found.low <= found.mean <= found.high, (size, value)


def test_bootstrap_interval_is_about_two_standard_errors_and_repeatable() -> None:
    values = np.array([0.25, 0.75] * 200, dtype=np.float32)
    found = interval_of(values)
    standard_error = 0.25 / math.sqrt(400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)
    assert interval_of(values) == found


def test_nothing_to_average_is_nan() -> None:
    found = interval_of(np.array([], dtype=np.float32))
    assert all(math.isnan(x) for x in (found.mean, found.low, found.high))


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
