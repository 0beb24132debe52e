"""Divergences of student and teacher: values by hand, limits, gradients, and that chunks change nothing."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kitae.algorithms.advantages import SequenceRewards, reverse_kl
from kitae.algorithms.distillation import divergence, generalised_jsd
from kitae.errors import ConfigError, ModelError
from kitae.kernels.allocation import set_master
from kitae.models.logprobs import Head, HeadTransform

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def log(*probs: float) -> Tensor:
    return torch.tensor([probs], dtype=torch.float64).log()


def head(vocabulary: int, hidden: int, seed: int, **transform: Any) -> Head:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in ((vocabulary, hidden), (vocabulary,))
    )
    return Head(weight, bias, HeadTransform(**transform), exact=False)


def states(rows: int, hidden: int, seed: int) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(
    student: Head, student_NH: Tensor, teacher: Head, teacher_NH: Tensor, *, beta: float, temperature: float = 1.0
) -> Tensor:
    """The same with all logits at once, by autograd."""
    logq = student.transform(student_NH @ student.weight.T + student.bias).div(temperature).log_softmax(-1)
    logp = teacher.transform(teacher_NH @ teacher.weight.T + teacher.bias).div(temperature).log_softmax(-1)
    p, q = logp.exp(), logq.exp()
    if beta == 0:
        return (p * (logp - logq)).sum(-1)
    if beta == 1:
        return (q * (logq - logp)).sum(-1)
    logm = (beta * p + (1 - beta) * q).log()
    return beta * (p * (logp - logm)).sum(-1) + (1 - beta) * (q * (logq - logm)).sum(-1)


def test_values_by_hand() -> None:
    """p = (½, ½), q = (¼, ¾)."""
    p, q = log(0.5, 0.5), log(0.25, 0.75)
    forward = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    reverse = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert divergence(p, q, 0.0).item() == pytest.approx(forward)
    assert divergence(p, q, 1.0).item() == pytest.approx(reverse)
    m = (0.375, 0.625)
    half = 0.5 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    half += 0.5 * (0.25 * math.log(0.25 / m[0]) + 0.75 * math.log(0.75 / m[1]))
    assert divergence(p, q, 0.5).item() == pytest.approx(half)


def test_the_ends_are_limits_up_to_a_factor() -> None:
    p, q = log(0.5, 0.3, 0.2), log(0.1, 0.3, 0.6)
    small = 1e-6
    assert (divergence(p, q, small) / small).item() == pytest.approx(divergence(p, q, 0.0).item(), rel=1e-4)
    assert (divergence(p, q, 1 - small) / small).item() == pytest.approx(divergence(p, q, 1.0).item(), rel=1e-4)


@pytest.mark.parametrize("beta", BETAS)
def test_it_is_symmetric_under_a_swap_and_zero_only_for_equals(beta: float) -> None:
    p, q = log(0.5, 0.3, 0.2), log(0.1, 0.3, 0.6)
    assert divergence(p, q, beta).item() == pytest.approx(divergence(q, p, 1 - beta).item())
    assert divergence(p, q, beta).item() > 0.01
    assert divergence(p, p, beta).item() == pytest.approx(0, abs=1e-12)


def test_half_is_bounded_by_log_2() -> None:
    assert divergence(log(1 - 1e-12, 1e-12), log(1e-12, 1 - 1e-12), 0.5).item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("transform", [{}, {"scale": 0.5, "softcap": 2.0}])
@pytest.mark.parametrize("chunk", [3, 100])
def test_chunks_give_values_and_gradients_of_the_plain_form(
    beta: float, transform: dict[str, float], chunk: int
) -> None:
    student, teacher = head(11, 4, 0, **transform), head(11, 6, 1)
    hidden, taught = states(7, 4, 2).requires_grad_(), states(7, 6, 3)
    leaves = (hidden, student.weight.requires_grad_(), student.bias.requires_grad_())
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    found = generalised_jsd(student, hidden, teacher, taught, beta=beta, temperature=1.7, chunk=chunk)
    expected = plain(student, hidden, teacher, taught, beta=beta, temperature=1.7)
    assert torch.allclose(found, expected, atol=1e-12)
    got = torch.autograd.grad((found * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_by_finite_differences(beta: float) -> None:
    student, teacher, taught = head(6, 3, 0), head(6, 3, 1), states(4, 3, 3)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = Head(weight, bias, student.transform, exact=False)
        return generalised_jsd(own, hidden, teacher, taught, beta=beta, chunk=3)

    leaves = states(4, 3, 2), student.weight, student.bias
    assert torch.autograd.gradcheck(function, tuple(x.requires_grad_() for x in leaves))


def test_a_second_backward_pass_makes_the_logits_again() -> None:
    student, teacher = head(11, 4, 0), head(11, 4, 1)
    hidden = states(7, 4, 2).requires_grad_()
    loss = generalised_jsd(student, hidden, teacher, states(7, 4, 3), beta=0.5, chunk=3).sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    assert torch.allclose(first, second)


def test_the_gradient_of_a_weight_with_a_master_goes_there() -> None:
    student, teacher = head(11, 4, 0), head(11, 4, 1)
    weight = student.weight.float().requires_grad_()
    teacher = Head(teacher.weight.float(), None, HeadTransform(), exact=False)
    hidden, taught = states(7, 4, 2).float(), states(7, 4, 3).float()
    (expected,) = torch.autograd.grad(
        generalised_jsd(Head(weight, None, HeadTransform(), False), hidden, teacher, taught, beta=0.5).sum(), weight
    )
    master = weight.detach().clone()
    set_master(weight, master)
    generalised_jsd(Head(weight, None, HeadTransform(), False), hidden, teacher, taught, beta=0.5).sum().backward()
    assert weight.grad is None
    assert master.grad is not None and torch.allclose(master.grad, expected)


@pytest.mark.parametrize("beta", BETAS)
def test_a_token_that_neither_can_say_is_no_nan(beta: float) -> None:
    weight, bias = torch.eye(3), torch.tensor([0.0, 0.0, -math.inf])
    forbidding = Head(weight, bias, HeadTransform(), exact=False)
    hidden = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    loss = generalised_jsd(forbidding, hidden, forbidding, torch.tensor([[0.0, 1.0, 0.0]]), beta=beta)
    loss.sum().backward()
    assert loss.isfinite().all() and hidden.grad is not None and hidden.grad.isfinite().all()


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"beta must be between 0 and 1, got 1\.5"):
        generalised_jsd(head(5, 3, 0), states(2, 3, 0), head(5, 3, 1), states(2, 3, 1), beta=1.5)
    with pytest.raises(ModelError, match="one vocabulary, got 5 and 6 tokens"):
        generalised_jsd(head(5, 3, 0), states(2, 3, 0), head(6, 3, 1), states(2, 3, 1), beta=0.5)


def test_the_policy_gradient_of_the_advantage_is_that_of_the_reverse_kl() -> None:
    """E_q[(log p − log q) ∇ log q] = −∇ KL(q ‖ p), summed over the whole vocabulary."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    logp, logq = log(0.2, 0.5, 0.3)[0], logits.log_softmax(-1)
    rewards = np.zeros(3, dtype=np.float32)
    old, teacher = logq.detach().float().numpy(), logp.float().numpy()
    advantage = torch.from_numpy(reverse_kl(SequenceRewards(rewards, logp_old_T=old, logp_teacher_T=teacher)))
    (got,) = torch.autograd.grad((logq.exp().detach() * advantage * logq).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(divergence(logp[None], logq[None], 1.0).sum(), logits)
    assert torch.allclose(got, -wanted, atol=1e-6)
