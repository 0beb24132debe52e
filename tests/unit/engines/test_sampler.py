"""Sampling: the right distribution, the right log-probs, independent streams."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitae.engines.base import SamplingParams, stream_seed
from kitae.engines.native.sampler import RowDraw, sample, uniforms
from kitae.kept_sets import ids_of
from kitae.kernels.base import DecodingKernels
from kitae.kernels.devices import decoding_kernels

KERNELS = decoding_kernels(torch.device("cpu"), torch.float32, 64)
BOTH = pytest.mark.parametrize("kernels", [KERNELS, None], ids=["kernels", "plain"])


def test_uniforms_are_uniform_and_depend_on_seed_and_position_only() -> None:
    u = uniforms([1] * 20000, list(range(20000)))
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert ((counts - 1000).abs() < 150).all()
    assert uniforms([7, 8], [3, 3])[1] == uniforms([8], [3])[0]
    assert len(set(uniforms(list(range(1000)), [0] * 1000).tolist())) == 1000


def test_stream_seeds_differ() -> None:
    assert len({stream_seed(0, "train", g, i) for g in range(50) for i in range(50)}) == 2500
    assert stream_seed(0, "train", 1, 12) != stream_seed(0, "train", 11, 2)


@BOTH
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float, kernels: DecodingKernels | None) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0])
    n = 40000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # evenly spread: frequencies are exact to 1/n
    tokens, logprobs, _ = sample(logits.repeat(n, 1), [RowDraw(SamplingParams(temperature))] * n, u, kernels=kernels)
    expected = torch.softmax(logits / temperature, -1)
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / n, expected, atol=2 / n, rtol=1e-4)
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-5, rtol=1e-5)


@BOTH
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {0, 3}),
        (SamplingParams(top_p=0.7), {0, 3}),
        (SamplingParams(top_p=0.01), {3}),
        (SamplingParams(min_p=0.3), {0, 3}),
        (SamplingParams(top_k=3, top_p=0.99, min_p=0.1), {0, 1, 3}),
    ],
)
def test_filters_renormalise(params: SamplingParams, kept: set[int], kernels: DecodingKernels | None) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0])
    n = 2000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    draws = [RowDraw(params, keeps=True)] * n
    tokens, logprobs, told = sample(logits.repeat(n, 1), draws, u, kernels=kernels)
    assert set(tokens.tolist()) == kept
    assert all(words is not None and set(ids_of(words, 5).tolist()) == kept for words in told)
    inside = torch.full((5,), float("-inf"))
    inside[list(kept)] = logits[list(kept)]
    torch.testing.assert_close(logprobs, torch.log_softmax(inside, -1)[tokens], atol=1e-5, rtol=1e-5)


@BOTH
def test_greedy_takes_the_first_maximum_and_reports_the_plain_logprob(kernels: DecodingKernels | None) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    where = torch.tensor([0.99], dtype=torch.float64)
    tokens, logprobs, _ = sample(logits, [RowDraw(SamplingParams(0.0))], where, kernels=kernels)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[:, 1])


@BOTH
def test_mixed_rows_do_not_influence_each_other(kernels: DecodingKernels | None) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    settings = [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(0.0), SamplingParams(0.3, top_k=5)]
    draws = [RowDraw(params) for params in settings]
    u = uniforms([1, 2, 3, 4], [0] * 4)
    tokens, logprobs, _ = sample(logits.clone(), draws, u, kernels=kernels)
    for i in range(4):
        token, logprob, _ = sample(logits[i : i + 1], draws[i : i + 1], u[i : i + 1], kernels=kernels)
        assert token[0] == tokens[i] and logprob[0] == logprobs[i]


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 700), st.integers(0, 10**6))
def test_kernel_and_plain_agree(u: float, vocabulary: int, seed: int) -> None:
    """The same draw from both implementations, up to a neighbour when the number falls on a border."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    where = torch.tensor([u], dtype=torch.float64)
    (a,), (logp_a,), _ = sample(logits, [RowDraw(SamplingParams())], where, kernels=KERNELS)
    (b,), (logp_b,), _ = sample(logits, [RowDraw(SamplingParams())], where, kernels=None)
    cumulative = torch.softmax(logits[0].double(), -1).cumsum(-1)
    assert a == b or abs(cumulative[min(a, b)] - u) < 1e-5
    torch.testing.assert_close(logp_a, torch.log_softmax(logits[0], -1)[a], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logp_b, torch.log_softmax(logits[0], -1)[b], atol=1e-4, rtol=1e-4)


def reference(logits: torch.Tensor, p: SamplingParams) -> set[int]:
    """Top-k, then top-p of what it leaves, then min-p, by sorting all of the vocabulary in double precision."""
    scaled = logits.double() / p.temperature
    order = scaled.argsort(descending=True, stable=True)[: p.top_k or None]
    probs = torch.softmax(scaled[order], -1)
    before = probs.cumsum(-1) - probs
    keep = ((before < p.top_p) | (p.top_p >= 1)) & (probs >= p.min_p * probs[0])
    return set(order[keep].tolist())


@given(
    st.integers(2, 3000), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 4.0]), st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]), st.sampled_from([0, 1, 40, 600, 10**6]),
    st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([KERNELS, None]),
)  # fmt: skip
def test_what_is_kept_is_what_sorting_everything_keeps(
    vocabulary: int, seed: int, spread: float, temperature: float, top_p: float, top_k: int, min_p: float,
    kernels: DecodingKernels | None,
) -> None:  # fmt: skip
    """Up to one token at an edge, where sums in float32 decide otherwise than those in double precision."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    expected = reference(logits[0], params)
    uniform = uniforms([seed], [0])
    (token,), (logprob,), (words,) = sample(logits, [RowDraw(params, keeps=True)], uniform, kernels=kernels)
    kept = set(range(vocabulary)) if words is None else set(ids_of(words, vocabulary).tolist())
    assert len(kept ^ expected) <= 1 + len(expected) // 500 and int(token) in kept
    inside = torch.tensor([logits[0, i] for i in sorted(kept)]) / temperature
    assert abs(logprob - torch.log_softmax(inside, -1)[sorted(kept).index(int(token))]) < 1e-4


def test_a_draw_behind_the_last_token_that_counts_is_that_token() -> None:
    """The number is so near to 1 that sums in float32 leave something over."""
    logits = torch.full((1, 1000), -1.0)
    logits[0, :3] = torch.tensor([2.0, 3.0, 2.5])
    almost = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    (token,), (logprob,), (words,) = sample(
        logits, [RowDraw(SamplingParams(top_k=3), keeps=True)], almost, kernels=KERNELS
    )
    assert words is not None and words.tolist() == [0, 1, 2] and token == 2
    assert abs(logprob - torch.log_softmax(torch.tensor([2.0, 3.0, 2.5]), -1)[2]) < 1e-5


@BOTH
def test_penalties_and_biases_change_logits_first(kernels: DecodingKernels | None) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -3.0]])
    params = SamplingParams(
        0.5, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias=((4, 3.0),)
    )
    draw = RowDraw(params, prompt=(2,), answer=(3, 3, 0))
    changed = torch.tensor([1.0 / 2 - 0.75, 0.0, -2.0, 2.0 / 2 - 1.25, 0.0])
    n = 4000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs, _ = sample(logits.repeat(n, 1), [draw] * n, u, kernels=kernels)
    expected = torch.softmax(changed / 0.5, -1)
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / n, expected, atol=2 / n, rtol=1e-4)
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-5, rtol=1e-5)
