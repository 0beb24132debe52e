"""Sampling: the right distribution, the right log-probs, independent streams."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitae.engines.base import SamplingParams, stream_seed
from kitae.engines.native.sampler import sample, uniforms
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
    tokens, logprobs = sample(logits.repeat(n, 1), [SamplingParams(temperature)] * n, u, kernels=kernels)
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
    tokens, logprobs = sample(logits.repeat(n, 1), [params] * n, u, kernels=kernels)
    assert set(tokens.tolist()) == kept
    inside = torch.full((5,), float("-inf"))
    inside[list(kept)] = logits[list(kept)]
    torch.testing.assert_close(logprobs, torch.log_softmax(inside, -1)[tokens], atol=1e-5, rtol=1e-5)


@BOTH
def test_greedy_takes_the_first_maximum_and_reports_the_plain_logprob(kernels: DecodingKernels | None) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, [SamplingParams(0.0)], torch.tensor([0.99], dtype=torch.float64), kernels=kernels)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[:, 1])


@BOTH
def test_mixed_rows_do_not_influence_each_other(kernels: DecodingKernels | None) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(0.0), SamplingParams(0.3, top_k=5)]
    u = uniforms([1, 2, 3, 4], [0] * 4)
    tokens, logprobs = sample(logits, params, u, kernels=kernels)
    for i in range(4):
        token, logprob = sample(logits[i : i + 1], params[i : i + 1], u[i : i + 1], kernels=kernels)
        assert token[0] == tokens[i] and logprob[0] == logprobs[i]


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 700), st.integers(0, 10**6))
def test_kernel_and_plain_agree(u: float, vocabulary: int, seed: int) -> None:
    """The same draw from both implementations, up to a neighbour when the number falls on a border."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    where = torch.tensor([u], dtype=torch.float64)
    (a,), (logp_a,) = sample(logits, [SamplingParams()], where, kernels=KERNELS)
    (b,), (logp_b,) = sample(logits, [SamplingParams()], where, kernels=None)
    cumulative = torch.softmax(logits[0].double(), -1).cumsum(-1)
    assert a == b or abs(cumulative[min(a, b)] - u) < 1e-5
    torch.testing.assert_close(logp_a, torch.log_softmax(logits[0], -1)[a], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logp_b, torch.log_softmax(logits[0], -1)[b], atol=1e-4, rtol=1e-4)
