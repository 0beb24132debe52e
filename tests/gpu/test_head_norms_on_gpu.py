"""Queries and keys whose heads have norms (Qwen3), in Triton, against the model's own modules: values and gradients.

Without a GPU, where Triton is installed, in fp32 by its interpreter, which rounds bfloat16 otherwise:

    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_head_norms_on_gpu.py
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kitae.algorithms.config import AlgorithmConfig
from kitae.kernels.allocation import lay_together
from kitae.kernels.base import HeadNorms
from kitae.kernels.devices import has_triton
from kitae.models.config import ModelConfig
from kitae.models.fuse import fuse_with
from kitae.models.load import load_policy
from kitae.models.policy import Policy
from kitae.models.tiny import make_tiny

sys.path.append(str(Path(__file__).parents[1] / "unit/trainer"))

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, about rows of a tile that belong to nobody
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, EPS = 96, 1e-3  # an epsilon that counts


class Case:
    """Layers, norms and inputs; a row's queries, keys and values by modules, rotated after their norms."""

    def __init__(
        self, rows: int, heads: tuple[int, int], dim: int, *, bias: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        put: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
        self.dim, self.counts = dim, (heads[0], heads[1], heads[1])
        self.modules = [torch.nn.Linear(WIDTH, n * dim, bias=bias, **put) for n in self.counts]
        self.before, *self.norms = (Qwen3RMSNorm(n, eps=EPS).to(**put) for n in (WIDTH, dim, dim))
        for norm in (self.before, *self.norms):
            torch.nn.init.normal_(norm.weight)
        self.x = torch.randn(rows, WIDTH, **put).requires_grad_()
        angles = torch.randn(rows, dim // 2, device=DEVICE).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        wide = torch.randn(rows, 2 * sum(self.counts), dim, **put)
        self.grads = [torch.randn(rows, WIDTH, **put), *torch.split(wide, [2 * n for n in self.counts], 1)]
        self.grads = [g if g.dim() == 2 else g[:, : g.shape[1] // 2] for g in self.grads]  # rows with a stride

    def to(self, dtype: torch.dtype) -> None:
        for t in self.inputs:
            t.data = t.data.to(dtype)
        self.cos, self.sin, self.grads = self.cos.to(dtype), self.sin.to(dtype), [g.to(dtype) for g in self.grads]

    @property
    def inputs(self) -> list[Tensor]:
        return [self.x, *(p for m in (self.before, *self.norms, *self.modules) for p in m.parameters())]

    def by_modules(self) -> tuple[Tensor, ...]:
        q, k, v = (m(self.before(self.x)).view(len(self.x), -1, self.dim) for m in self.modules)
        return self.x, *self.normed_and_rotated(q, k), v

    def normed_and_rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (norm(t)[None].transpose(1, 2) for norm, t in zip(self.norms, (q, k), strict=True))
        q, k = apply_rotary_pos_emb(q, k, self.cos[None], self.sin[None])
        return q.transpose(1, 2)[0], k.transpose(1, 2)[0]

    def by_kernels(self) -> tuple[Tensor, ...]:
        from kitae.kernels.cuda import training

        return training.LAYERS.normed_qkv(
            self.x, (self.before.weight, EPS), self.cos, self.sin, self.dim, *self.modules, heads=self.heads
        )

    @property
    def heads(self) -> HeadNorms:
        return HeadNorms(self.norms[0].weight, self.norms[1].weight, EPS)

    def gradients(self, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.grads)


SIZES = [(70, (6, 2), 24), (33, (16, 8), 128), (19, (5, 1), 64), (16, (3, 3), 80), (1, (7, 7), 16), (5, (1, 1), 256)]


@pytest.mark.parametrize(("rows", "heads", "dim"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_values_and_gradients_are_those_of_the_modules(
    rows: int, heads: tuple[int, int], dim: int, bias: bool, side_by_side: bool
) -> None:
    case = Case(rows, heads, dim, bias=bias)
    if side_by_side:
        lay_together([m.weight for m in case.modules])
        lay_together([n.weight for n in case.norms])
    got, expected = case.by_kernels(), case.by_modules()
    for a, b in zip((*got, *case.gradients(got)), (*expected, *case.gradients(expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_few_programs_walk_over_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And give the same bits each time."""
    case = Case(150, (6, 2), 24)
    expected = case.gradients(case.by_modules())
    monkeypatch.setattr("kitae.kernels.cuda.training._PROGRAMS", 20)
    got, again = (case.gradients(case.by_kernels()) for _ in range(2))
    for a, b, c in zip(got, again, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-3, rtol=1e-4)


@on_gpu
@pytest.mark.parametrize(("rows", "heads", "dim"), SIZES)
def test_rounds_no_more_than_the_modules(rows: int, heads: tuple[int, int], dim: int) -> None:
    from kitae.kernels.cuda import training

    case = Case(rows, heads, dim, dtype=torch.bfloat16)
    qkv = torch.randn(rows, sum(case.counts), dim, device=DEVICE).bfloat16()
    before = qkv.clone()
    q, k, _ = torch.split(qkv, list(case.counts), 1)
    got = training._norm_heads(qkv.flatten(1), case.heads[:2], EPS, case.cos, case.sin, (*heads, dim))
    plain = case.normed_and_rotated(q, k)
    case.to(torch.float64)
    exact = case.normed_and_rotated(q.double(), k.double())  # a product may be added before it is rounded: nearer to it
    for a, b, c in zip(got, plain, exact, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        off, theirs = ((t - c).abs().mean() for t in (a, b))
        assert off < 1.02 * theirs + 1e-4, "rounded more than in the modules"
    assert torch.equal(qkv, before)


@on_gpu
@pytest.mark.parametrize(("rows", "heads", "dim"), SIZES)
def test_in_bfloat16_gradients_are_as_near_as_those_of_the_modules(rows: int, heads: tuple[int, int], dim: int) -> None:
    case = Case(rows, heads, dim, dtype=torch.bfloat16)
    got, plain = case.gradients(case.by_kernels()), case.gradients(case.by_modules())
    case.to(torch.float32)
    for a, b, exact in zip(got, plain, case.gradients(case.by_modules()), strict=True):
        errors = [float((t.float() - exact).norm()) for t in (a, b)]
        assert errors[0] < 1.2 * errors[1] + 1e-3 * float(exact.norm()), errors


def test_of_its_own_the_product_alone_is_kept() -> None:
    """In which the values lie; besides, the attention keeps queries and keys."""
    case = Case(70, (6, 2), 24)
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given = {t.untyped_storage().data_ptr() for t in (*case.inputs, case.cos, case.sin)}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        values = case.by_kernels()[3]
    assert [at for at in found if at not in given] == [values.untyped_storage().data_ptr()]
    assert found[values.untyped_storage().data_ptr()] == 70 * 10 * 24 * 4


@pytest.mark.parametrize(
    ("tied", "settings"),
    [(True, {}), (False, {}), (True, {"checkpoint_activations": True}), (True, {"share_prompts": False})],
)
def test_a_model_learns_the_same(tied: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    """Rows of several spans, with Triton's kernels in all layers, against the model's own modules."""
    from test_gradient import assert_same, gradient, make_samples

    from kitae.kernels.cuda import training

    folder = make_tiny(tmp_path, "qwen3", hidden=48)

    def policy(fused: bool) -> Policy:
        made = load_policy(ModelConfig(path=str(folder), dtype="float32", device=DEVICE.type, plain=True))
        if not tied:
            made.head.weight = torch.nn.Parameter(made.head.weight.detach().clone())
        for name, p in made.model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.data = torch.linspace(-1.5, 1.5, len(p), device=DEVICE)
        if fused:
            fuse_with(training.KERNELS.modules, made.model, made.device)
            assert all("forward" in vars(layer) for layer in made.decoder.layers)  # type: ignore[attr-defined]
        return made

    samples, algorithm = make_samples([(0, 5, 3), (0, 5, 9), (1, 12, 7), (2, 3, 4)]), AlgorithmConfig(preset="grpo")
    expected, got = (gradient(policy(fused), samples, algorithm, **settings) for fused in (False, True))
    assert sum("q_norm" in name or "k_norm" in name for name in got) == 4
    assert sum("embed" in name or "lm_head" in name for name in got) == (1 if tied else 2)
    assert_same(got, expected, 5e-5)
