"""AdamW in plain torch against torch's own, the compiled kernel against that, and averages that are kept in 16 bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kitae.kernels.adamw import adamw, chances, rounded, split, whole
from kitae.kernels.base import AdamWPace, AdamWPart, AdamWStep
from kitae.kernels.cpu import ops

SETTINGS: dict[str, Any] = {"rate": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
KERNELS = [adamw]
if ops.available(torch.device("cpu"), torch.float32):
    KERNELS.append(ops.adamw)
ONE = torch.tensor(1.0)


class State:
    def __init__(self, moments: torch.dtype, *, half: bool = False, size: int = 5003) -> None:
        generator = torch.Generator().manual_seed(3)
        start = torch.randn(size, generator=generator)
        self.own, self.rest = split(start) if half else (start, None)
        self.mean, self.square = torch.zeros(2, size, dtype=moments)

    def step(self, kernel: AdamWStep, grad: Tensor, step: int, scale: Tensor = ONE, **more: Any) -> None:
        pace = AdamWPace(step=step, **SETTINGS | more)
        kernel([AdamWPart(self.own, self.rest, grad, self.mean, self.square)], scale, pace)

    @property
    def master(self) -> Tensor:
        return self.own if self.rest is None else whole(self.own, self.rest)

    def copies(self) -> list[Tensor]:
        tensors = (self.own, self.rest, self.mean, self.square)
        return [t.clone() for t in tensors if t is not None]


def gradients(count: int, size: int = 5003) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, generator=generator) * 10 ** (-i % 4) for i in range(count)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__module__.split(".")[-1])
def test_the_same_as_torch(kernel: AdamWStep) -> None:
    ours = State(torch.float32)
    theirs = ours.master.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for i, grad in enumerate(gradients(20)):
        ours.step(kernel, grad * 2, i + 1, torch.tensor(0.5))
        theirs.grad = grad
        optimizer.step()
        torch.testing.assert_close(ours.master, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(len(KERNELS) < 2, reason="needs a C++ compiler")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_plain_one(moments: torch.dtype, half: bool) -> None:
    """To the last bit of what is kept in 16, but for sums that are right at a border."""
    one, other = State(moments, half=half), State(moments, half=half)
    for i, grad in enumerate(gradients(8)):
        one.step(adamw, grad, i + 1)
        other.step(ops.adamw, grad, i + 1)
    torch.testing.assert_close(one.master, other.master, rtol=1e-4, atol=1e-4)
    if moments == torch.bfloat16:
        for a, b in ((one.mean, other.mean), (one.square, other.square)):
            assert (a == b).float().mean() > 0.99
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__module__.split(".")[-1])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_a_split_master_is_the_whole_one(moments: torch.dtype, kernel: AdamWStep) -> None:
    """To the last bit, also of moments, whatever the numbers."""
    one, other = State(moments), State(moments, half=True)
    start = torch.cat([one.master[:2000], one.master[2000:4000] * 1e-39, one.master[4000:] * 1e30])
    start[:4] = torch.tensor([0.0, -0.0, 1 + 2**-8, -1 - 2**-8])
    one.own.copy_(start)
    other.own, other.rest = split(start)
    for i, grad in enumerate(gradients(8)):
        for state in (one, other):
            state.step(kernel, grad, i + 1, torch.tensor(0.7), rate=10.0 ** (-2 * (i % 5)))
        assert torch.equal(one.own.view(torch.int32), other.master.view(torch.int32))
        assert torch.equal(other.own, split(one.own)[0])
        assert torch.equal(one.mean, other.mean) and torch.equal(one.square, other.square)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__module__.split(".")[-1])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(kernel: AdamWStep, factor: float) -> None:
    state = State(torch.bfloat16, half=True)
    state.step(kernel, gradients(1)[0], 1)
    before = state.copies()
    state.step(kernel, gradients(1)[0], 2, torch.tensor(factor))
    assert all(torch.equal(a, b) for a, b in zip(before, state.copies(), strict=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__module__.split(".")[-1])
def test_small_changes_are_not_lost(kernel: AdamWStep) -> None:
    """An average over 1,000 steps moves by less than half of a bfloat16's last bit each time, and gets there."""
    state = State(torch.bfloat16, size=4000)
    nearest = torch.zeros(4000, dtype=torch.bfloat16)
    grad = torch.full((4000,), 0.3)
    for i in range(2000):
        state.step(kernel, grad, i + 1, betas=(0.9, 0.999), rate=0.0)
        nearest = (nearest.float() * 0.999 + 0.001 * 0.09).bfloat16()
    target = 0.09 * (1 - 0.999**2000)
    assert state.square.float().mean().item() == pytest.approx(target, rel=5e-3)
    assert (state.square.float() - target).abs().max() < 0.1 * target
    assert state.mean.float().mean().item() == pytest.approx(0.3, rel=2e-3)
    assert nearest[0] < 0.4 * target, "rounded to nearest it stands still"


def test_chances_are_fair_and_of_their_own_for_each_step() -> None:
    first, second = (chances(100_000, step, torch.device("cpu")) for step in (1, 2))
    for found in (first & 0xFFFF, first >> 16, second >> 16):
        assert found.min() >= 0 and found.max() < 2**16
        assert found.float().mean().item() == pytest.approx(2**15, rel=0.01)
    parts = torch.stack([first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16]).float()
    assert (torch.corrcoef(parts) - torch.eye(4)).abs().max() < 0.02
    assert torch.equal(first, chances(100_000, 1, torch.device("cpu")))


def test_rounding_by_chance_is_right_on_average() -> None:
    x = torch.tensor([1.0, 1 + 2**-9, -(1 + 2**-8 + 2**-10), 0.0, 1e-30, float("inf")])
    chance = torch.arange(2**16)
    for value in x:
        found = rounded(value.expand(2**16), chance).float()
        assert len(found.unique()) <= 2
        assert found.double().mean().item() == pytest.approx(value.item(), rel=1e-6)
