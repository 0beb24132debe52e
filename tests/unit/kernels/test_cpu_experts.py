"""The experts of a layer on a CPU against plain autograd, and where the gradients of their weights end up."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kitae.kernels.allocation import set_master
from kitae.kernels.base import GateLimits
from kitae.kernels.cpu import ops
from kitae.kernels.cpu.compile_cpp import cpu_library
from kitae.kernels.cpu.training import experts

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler")
NAMES = ("x", "gates", "gate_up", "down")
CHOICES = {  # tokens, experts, how many each token gets
    "some": (70, 4, 2),
    "most have none": (3, 32, 2),
    "one token": (1, 8, 3),
    "one expert": (20, 1, 1),
    "all of them": (17, 3, 3),
    "several blocks": (400, 9, 4),
}


def inputs(
    tokens: int, count: int, top_k: int, dtype: torch.dtype = torch.float32, hidden: int = 48, inner: int = 40
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, chosen, gates, gate_up, down: all that may learn requires a gradient."""
    torch.manual_seed(0)
    gates, chosen = torch.randn(tokens, count).softmax(-1).topk(top_k)
    x, gate_up, down = (torch.randn(*n) for n in ((tokens, hidden), (count, 2 * inner, hidden), (count, hidden, inner)))
    x, gates, gate_up, down = (t.detach().to(dtype).requires_grad_() for t in (x, gates, gate_up / 7, down / 6))
    return x, chosen, gates, gate_up, down


def plainly(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert for every token, and 0 times those that it has not chosen."""
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, -1)
    out = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, down)
    weights = torch.zeros(len(x), len(down), dtype=x.dtype).scatter(1, chosen, gates)
    return torch.einsum("te,teh->th", weights, out)


def in_fp32(given: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().float().requires_grad_() if t.is_floating_point() else t for t in given]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> bool:
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


@pytest.mark.parametrize("name", CHOICES)
def test_values_and_gradients_are_those_of_plain_torch(name: str) -> None:
    given = inputs(*CHOICES[name])
    x, _, gates, gate_up, down = given
    grad = torch.randn_like(x)
    expected, got = plainly(*given), experts(*given)
    assert close(got, expected)
    learning = [x, gates, gate_up, down]
    of_plain, of_ours = (torch.autograd.grad(out, learning, grad) for out in (expected, got))
    for what, a, b in zip(NAMES, of_ours, of_plain, strict=True):
        assert close(a, b), what


def limits_of(count: int, dtype: torch.dtype = torch.float32, hidden: int = 48, inner: int = 40) -> GateLimits:
    """So low that many gates and ups reach them."""
    biases = (torch.randn(count, n).to(dtype).requires_grad_() for n in (2 * inner, hidden))
    return GateLimits(*biases, alpha=1.7, limit=0.75)


def with_limits(x: Tensor, chosen: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, limits: GateLimits) -> Tensor:
    """Token by token, as `GateLimits` says it."""
    rows = []
    for t, row in enumerate(x):
        made = []
        for e, gate in zip(chosen[t], gates[t], strict=True):
            both = row @ gate_up[e] + limits.gate_up_bias[e]
            g, u = both[::2].clamp(max=limits.limit), both[1::2].clamp(-limits.limit, limits.limit)
            made.append(gate * (((u + 1) * g * (limits.alpha * g).sigmoid()) @ down[e] + limits.down_bias[e]))
        rows.append(sum(made[1:], made[0]))
    return torch.stack(rows)


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
def test_limits_and_biases(name: str, dtype: torch.dtype, master: bool) -> None:
    """With masters, twice: gradients are added to what is there."""
    x, chosen, gates, gate_up, down = inputs(*CHOICES[name], dtype)
    gate_up, down = (w.detach().transpose(1, 2).contiguous().requires_grad_() for w in (gate_up, down))
    limits = limits_of(len(down), dtype)
    learning = [x, gates, gate_up, down, limits.gate_up_bias, limits.down_bias]
    wide = [t.detach().double().requires_grad_() for t in learning]
    expected = with_limits(wide[0], chosen, *wide[1:4], limits._replace(gate_up_bias=wide[4], down_bias=wide[5]))
    tolerance = 1e-6 if dtype == torch.float32 else 0.1  # rounded, some are on the other side of a limit
    grad = torch.randn_like(x)
    gradients = torch.autograd.grad(expected, wide, grad.double())
    masters = [t.detach().float() for t in learning]
    for t, m in zip(learning[2:], masters[2:], strict=True) if master else ():
        set_master(t, m)
    for _ in range(2 if master else 1):
        out = experts(x, chosen, gates, gate_up, down, limits)
        out.backward(grad)
    assert close(out, expected, tolerance)
    for i, (t, m, plain) in enumerate(zip(learning, masters, gradients, strict=True)):
        found = m.grad if master and i > 1 else t.grad
        assert found is not None and close(found, plain * (1 + master), tolerance), i
        assert not (master and i > 1) or t.grad is None


def test_what_is_no_number_stays_none_within_limits() -> None:
    both = torch.tensor([[torch.nan, 1.0, 2.0, torch.nan, 3.0, 4.0]])
    found = ops.gate_rows(both, limits_of(1, inner=3))
    assert found.isnan().tolist() == [[True, True, False]]


def test_rows_in_any_order_of_memory() -> None:
    x, chosen, gates, gate_up, down = inputs(20, 4, 2)
    turned = [t.detach().t().contiguous().t().requires_grad_() for t in (x, gates)]
    grad = torch.randn(48, 20).t()
    expected = torch.autograd.grad(plainly(x, chosen, gates, gate_up, down), (x, gates), grad)
    got = torch.autograd.grad(experts(turned[0], chosen.t().contiguous().t(), turned[1], gate_up, down), turned, grad)
    assert all(close(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("learns", NAMES)
def test_all_but_one_may_be_frozen(learns: str) -> None:
    given = inputs(30, 6, 2)
    x, _, gates, gate_up, down = given
    named = dict(zip(NAMES, (x, gates, gate_up, down), strict=True))
    expected = torch.autograd.grad(plainly(*given).square().sum(), named[learns])[0]
    for name, tensor in named.items():
        tensor.requires_grad_(name == learns)
        set_master(tensor, tensor)  # a frozen one gets no gradient there either
    experts(*given).square().sum().backward()
    assert [name for name, tensor in named.items() if tensor.grad is not None] == [learns]
    assert close(named[learns].grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "own"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)])
def test_with_masters_gradients_are_added_there_and_nowhere_else(dtype: torch.dtype, own: bool) -> None:
    given = inputs(30, 6, 2, dtype)
    grad = torch.randn_like(given[0])
    wide = in_fp32(given)
    expected = torch.autograd.grad(plainly(*wide), wide[3:], grad.float())
    weights = given[3:]
    masters = [w if own else w.detach().float() for w in weights]
    for weight, master in zip(weights, masters, strict=True):
        set_master(weight, master)
    for times in (1, 2):
        before = [m.grad for m in masters]
        experts(*given).backward(grad)
        for weight, master, old, plain in zip(weights, masters, before, expected, strict=True):
            assert master.grad is not None and (old is None or old is master.grad) and (own or weight.grad is None)
            assert close(master.grad, times * plain, 1e-6 if dtype == torch.float32 else 2e-2)


def test_weights_that_nobody_chose_are_not_touched() -> None:
    """What is no number in them reaches nothing."""
    x, chosen, gates, gate_up, down = inputs(3, 32, 2)
    idle = sorted(set(range(32)) - set(chosen.flatten().tolist()))
    with torch.no_grad():
        gate_up[idle], down[idle] = torch.nan, torch.nan
    for weights in (gate_up, down):
        set_master(weights, weights)
        weights.grad = torch.zeros_like(weights)
        weights.grad[idle] = 7.0
    out = experts(x, chosen, gates, gate_up, down)
    out.sum().backward()
    assert out.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    for weights in (gate_up, down):
        assert weights.grad is not None and (weights.grad[idle] == 7).all()


def test_a_second_backward_pass_over_what_the_first_has_written_is_refused() -> None:
    out = experts(*inputs(9, 4, 2)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_is_as_close_to_fp32_in_bfloat16_as_plain_torch() -> None:
    given, grad = inputs(70, 4, 2, torch.bfloat16), torch.randn(70, 48).bfloat16()

    def found(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        out = function(*tensors)
        learning = [t for t in tensors if t.is_floating_point()]
        return [out.detach(), *torch.autograd.grad(out, learning, grad.to(out.dtype))]

    exact, plain, ours = found(plainly, in_fp32(given)), found(plainly, given), found(experts, given)
    for e, p, o in zip(exact, plain, ours, strict=True):
        assert (o.float() - e).norm() <= 1.2 * (p.float() - e).norm()
        assert o.dtype == torch.bfloat16


def test_sums_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    rows, place = torch.randn(300, 200), torch.randint(0, 9, (300,))
    grad, both, weight = torch.randn(300, 70), torch.randn(300, 140), torch.rand(300)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        total, act, dboth = torch.zeros(9, 200), grad.clone(), both.clone()
        ops.add_rows(total, place, rows, weight)
        dweight = ops.gate_rows_again(act, dboth, weight)
        found.append((ops.gate_rows(both), total, act, dboth, dweight))
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    expected = torch.zeros(9, 200).index_add(0, place, rows * weight[:, None])
    torch.testing.assert_close(found[0][1], expected, atol=1e-5, rtol=1e-5)
