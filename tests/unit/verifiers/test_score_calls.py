"""One calling convention for functions that judge: plain, async and batched, with some or all of the arguments."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitae.engines.base import SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import SingleTurn
from kitae.envs.rollouts import Episodes
from kitae.errors import VerifierError
from kitae.store.journal import Journal
from kitae.types import GREEDY, LazyText, Message, Prompt, Score
from kitae.verifiers.base import batched, verifier_of
from kitae.verifiers.compose import Composition
from kitae.verifiers.pool import VerifierPool
from kitae.verifiers.score_calls import call_scores
from kitae.verifiers.verifier_registry import resolve

FILE = """
import asyncio, os
from kitae.verifiers.base import batched

@batched
def rank(responses, references, contexts):
    order = sorted(responses, key=len)
    assert len(references) == len(contexts) == len(responses)
    return [{"score": float(order.index(r)), "together": len(responses), "of": c["which"]}
            for r, c in zip(responses, contexts)]

async def polite(response):
    await asyncio.sleep(0.5)
    return {"score": "please" in response, "pid": os.getpid()}

def short(response, limit=3):
    return len(response) <= limit

def only_numbers(response):
    return float(response) if response.isdigit() else None
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def scores(function: Callable[..., Any], *responses: str, reference: Any = "4", **params: Any) -> list[Score]:
    verifier = verifier_of("mine", function)
    return call_scores(verifier, responses, reference, [{"n": i} for i in range(len(responses))], params)


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda response: len(response) + 1, 3),
        (lambda completion, answer: float(answer), 4),
        (lambda response, reference, context: context["n"] + 7, 7),
        (lambda response, context: context["n"] + 8, 8),  # by name, where it is one of the three
        (lambda reference: float(reference) + 1, 5),
        (lambda response, limit=9: limit, 9),  # a captured value, not a reference
        (lambda response, reference=None: float(reference), 4),
        (lambda *given: float(given[1]), 4),
    ],
)
def test_a_function_takes_the_first_arguments_or_those_that_it_names(
    function: Callable[..., Any], value: float
) -> None:
    (score,) = scores(function, "ab")
    assert score == Score(float(value))


def test_options_are_still_options() -> None:
    def near(response: str, reference: str, *, distance: float) -> bool:
        return abs(float(response) - float(reference)) <= distance

    assert [s.value for s in scores(near, "5", "9", distance=1)] == [1.0, 0.0]
    assert "distance" in scores(near, "5")[0].detail


@pytest.mark.parametrize("function", [lambda: 1.0, lambda *, response: 1.0])
def test_a_function_without_a_place_for_the_response_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(VerifierError, match=r"'mine' must take \(response, reference, context\) or some of them, got"):
        verifier_of("mine", function)


def test_a_batched_function_is_called_once_for_all_answers() -> None:
    calls = []

    @batched
    def judge(responses: list[str], references: list[str], contexts: list[Any]) -> Any:
        calls.append((responses, references, [c["n"] for c in contexts]))
        return np.array([len(r) for r in responses])

    assert [s.value for s in scores(judge, "a", "bbb")] == [1.0, 3.0]
    assert calls == [(["a", "bbb"], ["4", "4"], [0, 1])]

    @batched
    async def some(responses: list[str]) -> list[Any]:
        return [1.0, None, {"score": 0.5, "style": 2.0}, "good"]

    one, none, styled, text = scores(some, *"abcd")
    assert one == Score(1.0) and styled == Score(0.5, {"style": 2.0})
    assert "no reward applies to this answer" in none.detail and "got str" in text.detail


@pytest.mark.parametrize(
    ("returned", "got"), [([1.0], "got 1 of them"), (1.0, "got float"), (None, "got NoneType"), ({}, "got dict")]
)
def test_a_batch_of_another_length_has_no_scores(returned: Any, got: str) -> None:
    found = scores(batched(lambda responses: returned), "a", "b")
    assert all(
        not s.valid and f"must return a list of 2 scores, one for each response, {got}" in s.detail for s in found
    )


def test_a_batch_that_raises_has_no_scores_and_says_where() -> None:
    @batched
    def raises(responses: list[str]) -> list[float]:
        raise KeyError("no such thing")

    found = scores(raises, "a", "b")
    assert len(found) == 2 and all("KeyError: 'no such thing' (test_score_calls.py:" in s.detail for s in found)


def test_async_functions_wait_together_and_fail_alone() -> None:
    waiting = 0
    most = 0

    async def ask(response: str) -> float:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.01)
        waiting -= 1
        if response == "bad":
            raise ValueError("no answer")
        return float(response)

    one, bad, two = scores(ask, "1", "bad", "2")
    assert (one, two, most) == (Score(1.0), Score(2.0), 3) and "ValueError: no answer" in bad.detail


def test_none_is_left_out_of_a_sum(mine: str) -> None:
    compose = Composition(resolve)
    parts = [{"name": f"{mine}:only_numbers", "weight": 0.5}, {"name": f"{mine}:short", "weight": 2.0}]
    assert compose("12", None, {}, parts=parts) == Score(8.0, {"only_numbers": 12.0, "short": 1.0})
    assert compose("ab", None, {}, parts=parts) == Score(2.0, {"short": 1.0})
    assert "no reward applies" in compose("ab", None, {}, parts=parts[:1]).detail


def test_a_batched_part_makes_the_sum_batched(mine: str) -> None:
    parts = [{"name": f"{mine}:short", "gate": 1.0}, {"name": f"{mine}:rank", "weight": 0.5}]
    whole = Composition(resolve).prepare({"parts": parts})
    assert whole.batched
    found = call_scores(whole, ["aaa", "b", "too long"], None, [{"which": i} for i in range(3)], {"parts": parts})
    assert [s.value for s in found] == [1.5, 1.0, 0.0]
    assert found[0].components == {"short": 1.0, "rank": 1.0, "rank/together": 2.0, "rank/of": 0.0}
    assert found[2].components == {"short": 0.0, "rank": 0.0}, "its gate is closed: it is not shown to the second"


@pytest.mark.usefixtures("warm_verifiers")
def test_a_pool_brings_a_group_together_where_the_function_wants_it(mine: str) -> None:
    async def work() -> None:
        async with VerifierPool(f"{mine}:rank", workers=2) as pool:
            assert pool.grouped
            found = await pool.scores(["aaa", "b"], None, [{"which": 0}, {"which": 1}])
            assert found == [Score(1.0, {"together": 2.0, "of": 0.0}), Score(0.0, {"together": 2.0, "of": 1.0})]
            assert (pool.stats.checked, pool.stats.errors) == (2, 0)
        async with VerifierPool(f"{mine}:polite", workers=1) as pool:
            began = asyncio.get_running_loop().time()
            found = await pool.scores(["please"] * 8 + ["now"], None, [{}] * 9)
            assert [s.value for s in found] == [1.0] * 8 + [0.0] and len({s.components["pid"] for s in found}) == 1
            assert asyncio.get_running_loop().time() - began < 0.5 * 5, "they waited together"
        async with VerifierPool(f"{mine}:short", workers=2) as pool:
            assert not pool.grouped
            assert [s.value for s in await pool.scores(["a", "too long"], None, [{}, {}])] == [1.0, 0.0]

    asyncio.run(work())


class Ranking:
    """Judges the answers to a prompt together, by their length."""

    grouped = True

    def __init__(self) -> None:
        self.calls = list[list[str]]()

    async def score(self, response: str | LazyText, reference: Any, context: Mapping[str, Any]) -> Score:
        raise AssertionError("groups are judged together")

    async def scores(self, responses: Any, reference: Any, contexts: Any) -> list[Score]:
        self.calls.append(sorted(map(str, responses)))
        return [Score(float(len(str(r)))) for r in responses]


class Tokenizer:
    eos_token_id = 0
    bos_token_id = None
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


def test_a_group_is_judged_in_one_call_and_journalled(tmp_path: Path) -> None:
    from kitae.data.chat import Chat

    journal, judge = Journal(tmp_path / "journal.sqlite"), Ranking()
    prompt = Prompt("p", (Message("user", "2 + 2"),), "4")
    engine = FakeEngine(lambda request: [65 + int(request.id.split("/")[1]) % 20] * (1 + int(request.id[-1])))
    episodes = Episodes(engine, Chat(Tokenizer()), judge, SingleTurn, SamplingParams(max_tokens=200), 0)
    group = asyncio.run(episodes.group(7, prompt, 3, journal, greedy=True))
    assert sorted(map(len, judge.calls)) == [1, 3], "the greedy answer is none of the group"
    assert group.greedy is not None and group.greedy.index == GREEDY and group.greedy.score is not None
    assert all(r.score == Score(float(len(str(r.text)))) for r in group.rollouts)
    assert {r.index: r.score for r in journal.rollouts(7)} == {
        r.index: r.score for r in (*group.rollouts, group.greedy)
    }
    asyncio.run(episodes.group(7, prompt, 3, journal, greedy=True))
    assert len(judge.calls) == 2, "what was judged stays so"
    journal.close()
