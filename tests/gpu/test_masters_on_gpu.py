"""AdamW in Triton on bfloat16 parameters and what they lack of their masters, against the same on whole masters.

Without a GPU, where Triton is installed, by its interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_masters_on_gpu.py
"""

import os

import pytest
import torch
from torch import Tensor

from kitae.kernels.adamw import adamw as plain
from kitae.kernels.adamw import split, whole
from kitae.kernels.base import AdamWPace, AdamWPart
from kitae.kernels.devices import has_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, about integers that wrap around
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(5001,), (64, 48), (3,)]  # also what no 16 divides


class Weights:
    """halves: bfloat16 and the rest, or fp32."""

    def __init__(self, start: list[Tensor], moments: torch.dtype, *, halves: bool) -> None:
        self.held = [split(t) if halves else (t.clone(), None) for t in start]
        self.moments = [tuple(torch.zeros(2, *t.shape, dtype=moments, device=DEVICE)) for t in start]

    def parts(self, grads: list[Tensor]) -> list[AdamWPart]:
        return [AdamWPart(*held, g, *m) for held, g, m in zip(self.held, grads, self.moments, strict=True)]

    def masters(self) -> list[Tensor]:
        return [weight.clone() if rest is None else whole(weight, rest) for weight, rest in self.held]


def starting() -> list[Tensor]:
    torch.manual_seed(0)
    start = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    start[0][:6] = torch.tensor([0.0, -0.0, 1 + 2**-8, -1 - 2**-8, 3e38, -1e-30])
    return start


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_split_masters_are_whole_ones_to_the_bit(moments: torch.dtype) -> None:
    from kitae.kernels.cuda import training

    start = starting()
    one, other = (Weights(start, moments, halves=halves) for halves in (False, True))
    for step in range(1, 7):
        grads = [torch.randn_like(t) for t in start]
        pace = AdamWPace(step, 10.0**-step, (0.9, 0.99), 1e-8, 0.1)
        factor = torch.tensor(float("nan") if step == 4 else 0.5, device=DEVICE)
        before = other.masters()
        for weights in (one, other):
            training.adamw(weights.parts(grads), factor, pace)
        for a, b, was in zip(one.masters(), other.masters(), before, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
            assert torch.equal(b, was) == (step == 4)
        for (weight, _), master in zip(other.held, one.masters(), strict=True):
            assert torch.equal(weight, split(master)[0])
        for a, b in zip(one.moments, other.moments, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_near_plain_torch() -> None:
    from kitae.kernels.cuda import training

    start = starting()
    one, other = (Weights(start, torch.float32, halves=True) for _ in range(2))
    for step in range(1, 4):
        grads = [torch.randn_like(t) for t in start]
        pace = AdamWPace(step, 1e-2, (0.9, 0.99), 1e-8, 0.1)
        for step_of, weights in ((training.adamw, one), (plain, other)):
            step_of(weights.parts(grads), torch.tensor(1.0, device=DEVICE), pace)
    for a, b in zip(one.masters(), other.masters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
