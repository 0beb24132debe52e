"""What top-p, top-k and min-p kept is recorded, and the trainer's log-probs are over the same tokens."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exact import TinyPolicy, gap, generate, requests, to_samples, with_adapters

from kitae.engines.base import Completion, Request, Sampled, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.kept_sets import KeptLog, KeptSets, ids_of, joined_sets, words_of
from kitae.models.logprobs import Head, HeadTransform, KeptColumns, token_logprobs
from kitae.models.policy import Policy
from kitae.trainer.sample_wire import samples_of_wire, samples_to_wire

KINDS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 7},
    {"min_p": 0.05},
    {"top_p": 0.7, "top_k": 60, "min_p": 0.01},
]
VOCABULARY = 300

tokens_kept = st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1)


def kept_sets(each: list[set[int] | None]) -> KeptSets:
    log = KeptLog(VOCABULARY)
    for ids in each:
        log.add(None if ids is None else words_of(np.array(sorted(ids)), VOCABULARY))
    return log.between(0, len(each))


def spelt(sets: KeptSets) -> list[set[int] | None]:
    return [None if words is None else set(ids_of(words, VOCABULARY).tolist()) for words in sets]


@given(st.lists(tokens_kept, max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_sets_are_cut_joined_and_sent_as_they_are(each: list[set[int] | None], a: int, b: int) -> None:
    start, stop = sorted((min(a, len(each)), min(b, len(each))))
    sets = kept_sets(each)
    assert spelt(sets) == each and spelt(sets[start:stop]) == each[start:stop]
    assert len(sets[start:stop].starts) - 1 == len({frozenset(s) for s in each[start:stop] if s is not None})
    parts = [(sets[:start], start), (None, 2), (sets[start:], len(each) - start)]
    joined = joined_sets(parts)
    assert spelt(joined or KeptSets.whole(len(each) + 2)) == [*each[:start], None, None, *each[start:]]
    assert KeptSets.of_arrays(sets.to_arrays()) == sets


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("transform", [HeadTransform(), HeadTransform(2.0, 5.0)])
def test_gradients_are_those_of_the_renormalised_distribution(
    compiled: bool, transform: HeadTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("kitae.models.logprobs.training_kernels", lambda device, dtype: None)
    torch.manual_seed(0)
    n, temperature = 9, 0.7
    hidden, weight = torch.randn(n, 16), torch.randn(VOCABULARY, 16)
    target = torch.randint(0, VOCABULARY, (n,))
    each = [None if i % 4 == 3 else {int(t), *range(i * 9, 40 * i)} for i, t in enumerate(target)]
    inside = torch.tensor([[ids is None or v in ids for v in range(VOCABULARY)] for ids in each])
    found = []
    for ours in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            kept = KeptColumns.of(kept_sets(each), torch.device("cpu"))
            logp, entropy = token_logprobs(
                Head(w, None, transform, exact=False), h, target,
                temperature=temperature, chunk=4, entropy_grad=True, kept=kept,
            )  # fmt: skip
        else:
            logits = transform(h @ w.t()).masked_fill(~inside, -1e9) / temperature
            logp_NV = torch.log_softmax(logits, -1)
            logp, entropy = logp_NV.gather(1, target[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)
        (logp * torch.arange(1.0, n + 1)).sum().add(0.3 * entropy.sum()).backward()
        found.append((logp, entropy, h.grad, w.grad))
    for got, expected in zip(*found, strict=True):
        assert got is not None and expected is not None
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def shaped(asked: list[Request], kinds: list[dict[str, Any]] = KINDS) -> list[Request]:
    """Each with one of these settings in turn, but for every fifth."""
    return [
        r if i % 5 == 4 else replace(r, keeps=True, sampling=replace(r.sampling, **kinds[i % len(kinds)]))
        for i, r in enumerate(asked)
    ]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(
    ("dtype", "exact", "lora"), [("float32", True, 0), ("bfloat16", True, 4), ("float32", False, 4)]
)
def test_the_trainer_finds_what_the_engine_reported(
    dtype: str, exact: bool, lora: int, drafts: bool, tiny_policy: TinyPolicy
) -> None:
    policy = with_adapters(tiny_policy("llama", dtype=dtype, exact=exact, lora_rank=lora))
    asked = shaped(requests(4))
    done, _ = generate(policy, asked, speculation=drafts)
    for r, c in zip(asked, done, strict=True):
        assert (c.kept is not None) == r.keeps
        for token, words in zip(c.tokens, c.kept or (), strict=False):
            ids = ids_of(words, policy.vocabulary) if words is not None else np.arange(policy.vocabulary)
            assert token in ids and len(ids) <= (r.sampling.top_k or policy.vocabulary)
    samples = to_samples(asked, done)
    largest = 0.0 if exact else 1e-4
    assert gap(policy, samples) <= largest
    assert gap(policy, samples, share_prompts=False) <= largest
    (sent,), _ = samples_of_wire(*samples_to_wire([samples]))
    assert gap(policy, [replace(s, columns=o.columns) for s, o in zip(sent, samples, strict=True)]) <= largest
    whole = [replace(s, kept=None) for s in samples]
    assert gap(policy, whole) > 0.01, "over the whole vocabulary they are others"


def test_a_continued_answer_has_the_sets_of_both_parts(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy("llama", exact=True)
    (asked,) = shaped([Request("0/0", (5, 6, 7), SamplingParams(0.8, 24), 3, share="0")])

    async def run(engine: NativeEngine) -> tuple[Completion, Completion]:
        whole = await engine.generate(asked)
        prior = whole.sampled.until(9)
        assert isinstance(prior, Sampled) and prior.kept is not None and len(prior.kept) == 9
        return whole, await engine.generate(replace(asked, prior=prior))

    whole, continued = asyncio.run(with_engine(policy, run))
    assert continued == whole and whole.kept is not None and len(whole.kept) == 24


async def with_engine(policy: Policy, use: Any) -> Any:
    engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
    try:
        return await use(engine)
    finally:
        await engine.close()


def test_old_sets_are_replayed_under_new_weights(tiny_policy: TinyPolicy) -> None:
    """The set is that of the version that sampled, whatever the new one would keep."""
    policy = tiny_policy("llama")
    asked = shaped(requests(2))
    samples = to_samples(asked, generate(policy, asked)[0])
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    moved = gap(policy, samples)
    assert 1e-3 < moved < 20, "finite: no token has left its set"
