"""Speculative decoding changes nothing but time: all tests of the engine again with drafts, and what is its own."""

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kitae.engines.base import Completion
from kitae.engines.native import engine
from kitae.engines.native.ngram_speculation import LONGEST_MATCH, NgramDrafts
from kitae.engines.native.runner import Result
from kitae.engines.native.sequence import Decoding

sys.path.append(str(Path(__file__).parent))
import test_native_engine
from test_late_results import LateRunner
from test_native_engine import *  # noqa: F403
from test_native_engine import NativeEngine, Policy, Request, SamplingParams, TinyPolicy, with_engine


@pytest.fixture(autouse=True)
def speculating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines draft tokens unless they are told not to, also where so many sequences would not pay."""
    made = test_native_engine.make_engine
    monkeypatch.setattr(test_native_engine, "make_engine", lambda *a, **given: made(*a, **{"draft_tokens": 3, **given}))
    monkeypatch.setattr(engine.ModelRunner, "speculative_rows", 64)
    monkeypatch.setattr(engine.ModelRunner, "reread_share", 1e9)


def test_what_followed_the_longest_run_is_drafted() -> None:
    assert NgramDrafts([]).draft(3) == []
    assert NgramDrafts([1, 2, 3]).draft(3) == [], "3 is new"
    assert NgramDrafts([7, 1, 2, 9, 1, 2]).draft(3) == [9, 1, 2]
    assert NgramDrafts([5, 1, 8, 6, 1, 9, 5, 1]).draft(1) == [8], "5 1 is longer than 1, which was followed by 9 later"
    assert NgramDrafts([4, 4]).draft(3) == [4, 4, 4], "what is too short is repeated"
    assert NgramDrafts([1, 2, 1, 2, 1]).draft(4) == [2, 1, 2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_is_the_latest_of_the_longest_matches(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(4) for _ in range(60)]
    drafts = NgramDrafts(text[:20])
    drafts.extend(text[20:])
    ends = {n: [p for p in range(n, len(text)) if text[p - n : p] == text[-n:]] for n in range(1, LONGEST_MATCH + 1)}
    latest = next(ends[n][-1] for n in range(LONGEST_MATCH, 0, -1) if ends[n])
    period = len(text) - latest
    assert drafts.draft(5) == [text[latest + i % period] for i in range(5)]


def ask(policy: Policy, requests: list[Request], **settings: Any) -> tuple[list[Completion], int]:
    """Answers, and the steps that they took."""

    async def use(engine: NativeEngine) -> tuple[list[Completion], int]:
        decode, steps = engine.runner.decode, 0

        def counted(running: list[Decoding], width: int = 1) -> Result:
            nonlocal steps
            steps += 1
            return decode(running, width)

        engine.runner.decode = counted  # type: ignore[method-assign]
        return await asyncio.gather(*(engine.generate(r) for r in requests)), steps

    return with_engine(policy, use, **settings)  # type: ignore[no-any-return]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
def test_answers_are_the_same_in_fewer_steps(architecture: str, plain: bool, tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy(architecture)
    # Greedy answers of a random model soon go in circles; those that are sampled have limits, stops and filters.
    greedy = [Request(f"g{i}", (i + 3, *range(5, 30)), SamplingParams(0.0, 120), i) for i in range(3)]
    ways = [{}, {"top_p": 0.8}, {"stop_tokens": tuple(range(3, 40))}, {"stop_strings": ("a",)}]
    sampled = [
        Request(f"s{i}", tuple(range(9)), SamplingParams(0.4, 40 + i, **ways[i % 4]), i, share="s") for i in range(8)
    ]
    for requests in (greedy, sampled):
        expected, steps = ask(policy, requests, draft_tokens=0, plain=plain)
        drafted, fewer = ask(policy, requests, plain=plain)
        for one, other in zip(drafted, expected, strict=True):
            assert (one.tokens, one.finish, one.versions) == (other.tokens, other.finish, other.versions)
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)
        assert fewer < 0.7 * steps if requests is greedy else fewer <= steps, (fewer, steps)


def test_a_step_with_drafts_knows_what_late_results_say(
    tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sequences have no drafts, few have: between them all tokens must be known. Late as on a GPU."""
    policy = tiny_policy("llama")
    requests = [Request(f"{i}", (i + 3, *range(5, 30)), SamplingParams(0.0, 20 + 9 * i), i) for i in range(10)]
    plain, steps = ask(policy, requests, draft_tokens=0)
    monkeypatch.setattr(engine, "make_runner", lambda *made, **own: LateRunner(*made[:2], **own))
    monkeypatch.setattr(LateRunner, "speculative_rows", 12)
    drafted, fewer = ask(policy, requests)
    assert [c.tokens for c in drafted] == [c.tokens for c in plain] and fewer < 0.9 * steps, (fewer, steps)


def test_long_contexts_draft_less(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU rows of a sequence read its keys each for itself: at most half as much as the weights, more."""
    policy = tiny_policy("llama")
    if policy.device.type != "cpu":
        pytest.skip("rows share their reads there")
    monkeypatch.setattr(engine.ModelRunner, "reread_share", 0.5)
    runner = engine.ModelRunner(policy, engine.KVCache(policy, 0.01, 16), draft_tokens=3)
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    of_token = 2 * policy.layers * policy.kv_heads * policy.head_dim * 4

    def width(share: float, kernels: bool = True) -> int:
        length = int(share * weights / of_token)
        monkeypatch.setattr(runner, "kernels", runner.kernels if kernels else None)
        request = Request("r", (5,) * length, SamplingParams(), 0)
        return runner.width([Decoding(request, 0, 64, lambda _: None)])

    assert [width(share) for share in (0.1, 0.2, 0.4, 0.6)] == [4, 3, 2, 1]
    assert width(0.1, kernels=False) == 1, "without kernels they copy it"


def test_a_mixture_has_no_drafts(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("qwen3_moe")
    requests = [Request("r", (5, 6) * 10, SamplingParams(0.0, 40), 0)]
    assert ask(policy, requests)[1] == ask(policy, requests, draft_tokens=0)[1]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_an_answer_ends_at_its_limit(tokens: int, tiny_policy: TinyPolicy) -> None:
    request = Request("r", (5, 6) * 10, SamplingParams(temperature=0.0, max_tokens=tokens), 0)
    ((done,), _) = ask(tiny_policy("llama"), [request])
    assert len(done.tokens) == tokens and done.finish == "length"


def test_nothing_comes_after_a_stop_token(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama")
    prompt = (5, 6) * 10
    ((whole,), _) = ask(policy, [Request("r", prompt, SamplingParams(0.0, 60), 0)], draft_tokens=0)
    for stop in set(whole.tokens):
        ((done,), _) = ask(policy, [Request("r", prompt, SamplingParams(0.0, 60, stop_tokens=(stop,)), 0)])
        assert done.tokens == whole.tokens[: whole.tokens.index(stop) + 1] and done.finish == "stop"
