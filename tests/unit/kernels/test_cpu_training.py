"""The parts of a training step on a CPU against plain autograd, and where the gradients of weights end up."""

import weakref

import pytest
import torch
from torch import Tensor

from kitae.kernels.allocation import set_master
from kitae.kernels.base import HeadNorms
from kitae.kernels.cpu import ops, training
from kitae.kernels.cpu.compile_cpp import cpu_library

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")
ROWS, WIDTH, DIM = 70, 96, 32


def assert_same_gradients(
    got: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: list[Tensor], grads: list[Tensor]
) -> None:
    pairs = zip(torch.autograd.grad(got, inputs, grads), torch.autograd.grad(expected, inputs, grads), strict=True)
    for a, b in (*zip(got, expected, strict=True), *pairs):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


def rotated(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = y.chunk(2, -1)
    return y * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", [DIM, 24])
def test_norm_queries_keys_and_values(bias: bool, dim: int) -> None:
    torch.manual_seed(0)
    modules = [torch.nn.Linear(WIDTH, n * dim, bias=bias) for n in (6, 2, 2)]
    x, gain = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    cos, sin = torch.randn(ROWS, dim), torch.randn(ROWS, dim)  # any numbers: both halves are read
    normed = torch.nn.functional.rms_norm(x, (WIDTH,), gain, 1e-6)
    q, k, v = (m(normed).view(ROWS, -1, dim) for m in modules)
    expected = (x, rotated(q, cos, sin), rotated(k, cos, sin), v)
    got = training.LAYERS.normed_qkv(x, (gain, 1e-6), cos, sin, dim, *modules)
    grads = [torch.randn_like(t) for t in expected]
    assert_same_gradients(got, expected, [x, gain, *(p for m in modules for p in m.parameters())], grads)


def heads_by_modules(
    x: Tensor, gain: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, dim: int, modules: list[torch.nn.Linear]
) -> tuple[Tensor, ...]:
    """As Qwen3's modules compute and round it."""

    def norm(y: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = y.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(y.dtype)

    q, k, v = (m(norm(x, gain, 1e-6)).view(len(x), -1, dim) for m in modules)
    q, k = norm(q, norms.queries, norms.eps), norm(k, norms.keys, norms.eps)
    return x, rotated(q, cos, sin), rotated(k, cos, sin), v


def heads_and_inputs(
    dim: int, heads: tuple[int, int], bias: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, HeadNorms, Tensor, Tensor, list[torch.nn.Linear]]:
    torch.manual_seed(0)
    counts = heads[0], heads[1], heads[1]
    modules = [torch.nn.Linear(WIDTH, n * dim, bias=bias, dtype=dtype) for n in counts]
    x, gain = (torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((ROWS, WIDTH), (WIDTH,)))
    norms = HeadNorms(*(torch.randn(dim, dtype=dtype).requires_grad_() for _ in range(2)), 1e-3)
    cos, sin = (torch.randn(ROWS, dim).to(dtype) for _ in range(2))
    return x, gain, norms, cos, sin, modules


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dim", "heads"), [(64, (6, 2)), (80, (5, 1)), (128, (3, 3)), (24, (7, 7))])
def test_norms_of_heads(dim: int, heads: tuple[int, int], bias: bool) -> None:
    x, gain, norms, cos, sin, modules = heads_and_inputs(dim, heads, bias, torch.float32)
    expected = heads_by_modules(x, gain, norms, cos, sin, dim, modules)
    got = training.LAYERS.normed_qkv(x, (gain, 1e-6), cos, sin, dim, *modules, heads=norms)
    grads = [torch.randn_like(t) for t in expected]
    inputs = [x, gain, norms.queries, norms.keys, *(p for m in modules for p in m.parameters())]
    assert_same_gradients(got, expected, inputs, grads)


def test_norms_of_heads_round_like_the_modules_in_bfloat16() -> None:
    """Values to the bit but for sums in another order, and gradients as near to those in fp32."""
    x, gain, norms, cos, sin, modules = heads_and_inputs(64, (6, 2), True, torch.bfloat16)
    inputs = [x, gain, norms.queries, norms.keys, *(p for m in modules for p in m.parameters())]
    plain = heads_by_modules(x, gain, norms, cos, sin, 64, modules)
    got = training.LAYERS.normed_qkv(x, (gain, 1e-6), cos, sin, 64, *modules, heads=norms)
    for a, b in zip(got, plain, strict=True):
        assert (a != b).float().mean() < 0.02
    grads = [torch.randn_like(t) for t in plain]
    found = [torch.autograd.grad(out, inputs, grads) for out in (got, plain)]
    for t in inputs:
        t.data = t.data.float()
    exact = heads_by_modules(x, gain, norms, cos.float(), sin.float(), 64, modules)
    wanted = torch.autograd.grad(exact, inputs, [g.float() for g in grads])
    for a, b, c in zip(*found, wanted, strict=True):
        assert (a.float() - c).norm() < 1.2 * (b.float() - c).norm() + 1e-3 * c.norm()


@pytest.mark.parametrize("in_order", [True, False])
def test_norm_of_a_sum_and_two_products(in_order: bool) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(ROWS, WIDTH) if in_order else torch.randn(WIDTH, ROWS).t() for _ in range(2))
    x, y = (t.requires_grad_() for t in rows)
    gain = torch.randn(WIDTH, requires_grad=True)
    modules = [torch.nn.Linear(WIDTH, 112, bias=False) for _ in range(2)]
    normed = torch.nn.functional.rms_norm(x + y, (WIDTH,), gain, 1e-6)
    expected = (x + y, *(m(normed) for m in modules))
    got = training.LAYERS.normed_pair(x, y, (gain, 1e-6), *modules)
    grads = [torch.randn_like(t) for t in expected]
    assert_same_gradients(got, expected, [x, y, gain, *(m.weight for m in modules)], grads)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_two_products_may_be_frozen(frozen: int) -> None:
    torch.manual_seed(0)
    x, y, gain = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    modules = [torch.nn.Linear(WIDTH, 112, bias=False) for _ in range(2)]
    modules[frozen].weight.requires_grad_(False)
    learns = modules[1 - frozen].weight
    normed = torch.nn.functional.rms_norm(x + y, (WIDTH,), gain, 1e-6)
    grad = torch.randn(ROWS, 112)
    training.LAYERS.normed_pair(x, y, (gain, 1e-6), *modules)[2 - frozen].backward(grad)
    assert modules[frozen].weight.grad is None
    torch.testing.assert_close(learns.grad, grad.t() @ normed, atol=2e-4, rtol=1e-4)


def test_gated_product_and_linear() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(ROWS, WIDTH).mul(3).requires_grad_() for _ in range(2))
    weight, grad = torch.randn(64, WIDTH, requires_grad=True), torch.randn(ROWS, 64)
    expected = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weight)
    wanted = torch.autograd.grad(expected, (gate, up, weight), grad)
    copies = [t.detach().clone().requires_grad_() for t in (gate, up, weight)]
    got = training.LAYERS.swiglu_linear(copies[0] + 0, copies[1] + 0, copies[2])  # it takes over what it is given
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for a, b in zip(torch.autograd.grad(got, copies, grad), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


def test_a_second_backward_pass_over_what_the_first_has_written_is_refused() -> None:
    gate, up, weight = (torch.randn(4, 16, requires_grad=True) for _ in range(3))
    out = training.LAYERS.swiglu_linear(gate + 0, up + 0, weight).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_several_linear_layers_of_one_input() -> None:
    torch.manual_seed(0)
    modules = [torch.nn.Linear(WIDTH, n, bias=n == 48) for n in (64, 48)]
    x = torch.randn(2, ROWS, WIDTH, requires_grad=True)
    expected = tuple(m(x) for m in modules)
    got = training.LAYERS.linears(x, *modules)
    grads = [torch.randn_like(t) for t in expected]
    assert_same_gradients(got, expected, [x, *(p for m in modules for p in m.parameters())], grads)


def test_rounds_like_the_modules_in_bfloat16() -> None:
    torch.manual_seed(0)
    rows, cos, sin = (torch.randn(*shape).bfloat16() for shape in ((9, 5, 40), (9, 40), (9, 40)))
    expected = rotated(rows[:, :3], cos, sin)
    got = rows.clone()
    ops.rotate(got, cos, sin, 3)
    assert torch.equal(got[:, :3], expected) and torch.equal(got[:, 3:], rows[:, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_accumulated_in_fp32(dtype: torch.dtype) -> None:
    parts = [torch.randn(7, 33).to(dtype) for _ in range(3)]
    total = None
    for part in parts:
        total = ops.accumulate(total, part)
    torch.testing.assert_close(total, sum(p.float() for p in parts))


@pytest.mark.parametrize("height", [64, 40])
def test_with_a_master_the_gradient_is_added_there_and_nowhere_else(height: int) -> None:
    """Also where tiles cannot compute it."""
    torch.manual_seed(0)
    module = torch.nn.Linear(WIDTH, height, bias=False, dtype=torch.bfloat16)
    master = module.weight.detach().float()
    set_master(module.weight, master)
    x, grad = torch.randn(ROWS, WIDTH).bfloat16(), torch.randn(ROWS, height).bfloat16()
    for _ in range(2):
        training.LAYERS.linears(x.clone().requires_grad_(), module)[0].backward(grad)
    assert module.weight.grad is None
    torch.testing.assert_close(master.grad, 2 * grad.float().t() @ x.float(), atol=0.5, rtol=1e-2)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("own", [True, False])
def test_rows_of_an_embedding_learn_where_its_gradient_is(padding: int | None, own: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Embedding(7, WIDTH, padding_idx=padding)
    tokens, grad = torch.tensor([[1, 2, 1, 6]]), torch.randn(1, 4, WIDTH)
    expected = torch.autograd.grad(module(tokens), module.weight, grad)[0]
    if own:
        set_master(module.weight, module.weight)
    got = training.embedding(tokens, module.weight, padding)
    assert torch.equal(got, module(tokens))
    for _ in range(2):
        training.embedding(tokens, module.weight, padding).backward(grad)
    torch.testing.assert_close(module.weight.grad, 2 * expected)


def test_a_parameter_that_is_its_own_master_is_freed_with_its_last_user() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    set_master(parameter, parameter)
    gone = weakref.ref(parameter)
    del parameter
    assert gone() is None
