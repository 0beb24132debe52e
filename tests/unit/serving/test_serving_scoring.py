"""Log-probs of texts: those of a plain pass, alone and in company."""

import asyncio
import random
from collections.abc import Callable

import pytest
import torch

from kitae.errors import RequestError
from kitae.models.policy import Policy
from kitae.serving.text_scoring import ScoredText, TextScorer


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_texts_in_company_have_the_log_probs_of_a_plain_pass(
    tiny_policy: Callable[..., Policy], architecture: str
) -> None:
    policy = tiny_policy(architecture)
    rng = random.Random(0)
    texts = [[rng.randrange(3, 250) for _ in range(length)] for length in (2, 40, 1, 300, 40, 3, 500)]

    async def run() -> list[ScoredText]:
        scorer = TextScorer(policy)
        found = await asyncio.gather(*(scorer.score(text, top=i % 3) for i, text in enumerate(texts)))
        await scorer.close()
        return found

    for i, (text, scored) in enumerate(zip(texts, asyncio.run(run()), strict=True)):
        expected = policy.score(torch.tensor(text)).tolist() if len(text) > 1 else []
        assert list(scored.logprobs) == pytest.approx(expected, abs=1e-4)
        assert {len(top) for top in scored.top} <= {i % 3} and len(scored.top) == len(text) - 1


def test_the_likeliest_come_first_and_temperature_flattens(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy()
    text = list(range(5, 25))

    async def run() -> list[ScoredText]:
        scorer = TextScorer(policy)
        found = await asyncio.gather(*(scorer.score(text, 259, temperature) for temperature in (1.0, 0.0, 4.0)))
        await scorer.close()
        return found

    one, greedy, flat = asyncio.run(run())
    assert one == greedy  # the model's own
    for token, logprob, top in zip(text[1:], one.logprobs, one.top, strict=True):
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True) and dict(top)[token] == logprob
        assert torch.tensor(values).exp().sum().item() == pytest.approx(1, abs=1e-4)
    assert all(a[0][1] > b[0][1] for a, b in zip(one.top, flat.top, strict=True))


def test_texts_that_cannot_be_scored_are_refused_and_others_are_not(tiny_policy: Callable[..., Policy]) -> None:
    async def run() -> None:
        scorer = TextScorer(tiny_policy())
        for tokens, message in ([[1] * 513, "512 tokens, got 513"], [[259], "0…258, got 259"], [[], "got none"]):
            with pytest.raises(RequestError, match=message):
                await scorer.score(tokens)
        waiting = [asyncio.create_task(scorer.score([1, 2, 3])) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert found[0] == found[2] and isinstance(found[1], asyncio.CancelledError)
        await scorer.close()

    asyncio.run(run())
