"""The kernels of exact mode against plain references, and each row against the same row alone."""

import pytest
import torch

from kitae.kernels.exact.exact_attention import Reach, as_pages, attend, with_gradient_of
from kitae.kernels.exact.exact_products import linear, product
from kitae.models.attention_seam import causal_mask, masked_attention

DTYPES = [torch.float32, torch.bfloat16]
DEVICE = "cpu"


@pytest.fixture
def device() -> str:
    return DEVICE


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
    error = (a.float() - b.float()).norm() / b.float().norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), error


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(96, 40), (1000, 333)])
def test_products_of_rows(k: int, n: int, dtype: torch.dtype, bias: bool, device: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(200, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    shift = torch.randn(n, device=device, dtype=dtype) if bias else None
    whole = product(x, weight, shift)
    close(whole, torch.nn.functional.linear(x.float(), weight.float(), None if shift is None else shift.float()), dtype)
    for first, last in ((0, 1), (1, 3), (3, 67), (37, 200), (199, 200)):
        assert torch.equal(product(x[first:last], weight, shift), whole[first:last]), (first, last)
    out = torch.full((210, n), 7.0, device=device, dtype=dtype)
    product(x, weight, shift, out[:200])
    assert torch.equal(out[:200], whole) and (out[200:] == 7).all()


def test_linear_has_the_gradient_of_a_linear_layer(device: str) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(s, device=device, requires_grad=True) for s in ((2, 70, 33), (21, 33), (21,))]
    grad = torch.randn(2, 70, 21, device=device)
    found = torch.autograd.grad(linear(*parts), parts, grad)
    for a, b in zip(found, torch.autograd.grad(torch.nn.functional.linear(*parts), parts, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 64), (3, 3, 80), (7, 1, 128)])
def test_attention_over_pages_and_rows(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None, softcap: float | None, device: str
) -> None:
    """One sequence of 150 tokens, as one row of the trainer and token by token over pages in any order."""
    torch.manual_seed(0)
    length, size, group = 150, 16, heads // kv_heads
    q = torch.randn(length, heads, dim, device=device, dtype=dtype).transpose(0, 1)
    k, v = (torch.randn(length, kv_heads, dim, device=device, dtype=dtype).transpose(0, 1) for _ in range(2))
    sinks = torch.randn(heads, device=device) if softcap else None
    settings = {"scale": dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
    where = torch.device(device)
    row = Reach.of([(0, length, 0, range(length))], 1, group, where)
    whole = attend(q, as_pages(k), as_pages(v), row, **settings)  # type: ignore[arg-type]
    positions = torch.arange(length, device=device)
    allowed = causal_mask(positions, positions, window)
    plain = masked_attention(q.float(), k.float(), v.float(), allowed, scale=dim**-0.5, softcap=softcap, sinks=sinks)
    close(whole, plain, dtype)
    pages = [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    keys, values = (torch.full((11, kv_heads, size, dim), torch.nan, device=device, dtype=dtype) for _ in range(2))
    at = torch.tensor([pages[t // size] for t in range(length)]), positions.cpu() % size
    for cache, x in ((keys, k), (values, v)):
        cache[at[0].to(where), :, at[1].to(where)] = x.transpose(0, 1)
    spans = [(0, 37, 0, pages), (37, 1, 37, pages), (38, length - 38, 38, pages)]
    paged = attend(q, keys, values, Reach.of(spans, size, group, where), **settings)  # type: ignore[arg-type]
    assert torch.equal(paged, whole)
    for t in (0, 15, 16, 64, 149):
        table = torch.tensor([pages, pages], dtype=torch.int32, device=device)
        lengths = torch.tensor([0, t + 1], dtype=torch.int32, device=device)
        last = Reach.of_last(table, lengths, size)
        one = attend(q[:, [0, t]], keys, values, last, **settings)  # type: ignore[arg-type]
        assert torch.equal(one[1], whole[t]), t


def test_a_borrowed_gradient(device: str) -> None:
    x = torch.randn(5, device=device, requires_grad=True)
    out = with_gradient_of(lambda a, b: a * 0 + 3, lambda a, b: a * b, x, x * 2)
    assert (out == 3).all()
    out.sum().backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())
