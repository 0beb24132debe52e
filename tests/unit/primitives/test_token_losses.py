"""Each loss by numbers made by hand from its published formula."""

import math

import pytest
import torch

from kitae.errors import RequestError
from kitae.primitives.token_losses import LOSSES, find_loss

P = [-1.0, -0.5, -2.0, -0.1]  # log p
Q = [-1.2, -0.5, -1.0, -0.6]  # log q
A = [1.0, -2.0, 0.5, -1.0]
R = [math.exp(p - q) for p, q in zip(P, Q, strict=True)]  # 1.22, 1, 0.37, 1.65


def clip(r: float, low: float = 0.8, high: float = 1.2) -> float:
    return min(max(r, low), high)


def ppo(r: float, a: float) -> float:
    return -min(r * a, clip(r) * a)


MEAN = math.exp(sum(p - q for p, q in zip(P, Q, strict=True)) / 4)  # of the sequence
# value and gradient by log p of each token
EXPECTED = {
    "importance_sampling": ([-a * r for a, r in zip(A, R, strict=True)], [-a * r for a, r in zip(A, R, strict=True)]),
    "ppo": (
        [ppo(r, a) for r, a in zip(R, A, strict=True)],
        [0.0, 2.0, -0.5 * R[2], 1.0 * R[3]],  # the first is clipped; of the last, the worse side is not
    ),
    "cispo": (
        [-clip(r) * a * p for r, a, p in zip(R, A, P, strict=True)],
        [-clip(r) * a for r, a in zip(R, A, strict=True)],
    ),
    "dro": (
        [-(p * a - 0.5 * 0.05 * (p - q) ** 2) for p, q, a in zip(P, Q, A, strict=True)],
        [-(a - 0.05 * (p - q)) for p, q, a in zip(P, Q, A, strict=True)],
    ),
    "gspo": ([ppo(MEAN, a) for a in A], [-MEAN * a for a in A]),  # 0.93 is within the band
    "stable_reinforce": (
        [-min(r, 2.0) * a * p for r, a, p in zip(R, A, P, strict=True)],
        [-min(r, 2.0) * a for r, a in zip(R, A, strict=True)],
    ),
    "cross_entropy": ([-p * w for p, w in zip(P, (0.0, 1.0, 2.0, 1.0), strict=True)], [0.0, -1.0, -2.0, -1.0]),
}


def test_every_loss_has_its_numbers() -> None:
    assert EXPECTED.keys() == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name: str) -> None:
    logp = torch.tensor(P, requires_grad=True)
    inputs = {"logprobs": torch.tensor(Q), "advantages": torch.tensor(A), "weights": torch.tensor([0.0, 1, 2, 1])}
    loss, _ = find_loss(name, {})
    found = loss(logp, inputs, {})
    values, slopes = EXPECTED[name]
    torch.testing.assert_close(found.detach(), torch.tensor(values), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor(slopes), rtol=1e-5, atol=1e-6)


def test_the_ratio_of_a_sequence_is_that_of_the_tokens_that_the_mask_marks() -> None:
    logp = torch.tensor(P)
    inputs = {"logprobs": torch.tensor(Q), "advantages": torch.tensor(A)}
    loss, _ = find_loss("gspo", {})
    marked = loss(logp, inputs | {"sequence_ratio_mask": torch.tensor([1.0, 1.0, 0.0, 0.0])}, {})
    assert marked[1].item() == pytest.approx(2.0 * math.exp(0.1))


def test_thresholds_may_be_said_for_all_tokens_or_for_each() -> None:
    logp, inputs = torch.tensor(P), {"logprobs": torch.tensor(Q), "advantages": torch.tensor(A)}
    loss, _ = find_loss("cispo", {"clip_high_threshold": 1.5})
    assert loss(logp, inputs, {"clip_high_threshold": 1.5})[3].item() == pytest.approx(1.5 * -0.1)
    each = inputs | {"clip_high_threshold": torch.tensor([1.2, 1.2, 1.2, 1.1])}
    assert loss(logp, each, {})[3].item() == pytest.approx(1.1 * -0.1)


def test_a_loss_or_setting_that_nobody_knows_is_refused() -> None:
    with pytest.raises(RequestError, match=r"must be one of cross_entropy, .*, got 'other'"):
        find_loss("other", {})
    with pytest.raises(RequestError, match="the loss dro reads beta, got 'clip'"):
        find_loss("dro", {"clip": 1.0})
