"""Attention of packed rows by kernels against plain masked attention, span by span: values and gradients.

Without a GPU, where Triton is installed, in fp32 by its interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_spans_on_gpu.py
"""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kitae.data.packing import Span
from kitae.kernels.devices import has_triton
from kitae.trainer import packed_attention
from kitae.trainer.packed_attention import PackedAttention, _Spans

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, about rows of a tile that belong to nobody
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def row_of(*families: tuple[int, Sequence[int]]) -> list[Span]:
    """(prompt, lengths of its answers) each; a prompt of 0: spans without one."""
    found: list[Span] = []
    end = 0
    for prompt, answers in families:
        start = end
        if prompt:
            found.append(Span(start, prompt))
            end += prompt
        for length in answers:
            found.append(Span(end, length, start if prompt else 0, prompt))
            end += length
    return found


ROWS = {
    "shared prompts": row_of((21, (33, 1, 16)), (5, (1, 9))),
    "whole tiles": row_of((32, (32, 16))),
    "no prompts": row_of((0, (33, 1, 16))),
    "one row": row_of((0, (1,))),
    "answers that lie apart": [
        Span(0, 18), Span(18, 7), Span(25, 20, 0, 18), Span(45, 9, 18, 7), Span(54, 3, 0, 18)
    ],
    "a prefix within a span": [Span(0, 30), Span(30, 9, 5, 20), Span(39, 12, 0, 39), Span(51, 4, 5, 20)],
}  # fmt: skip
LONG = row_of((130, (512, 1, 300)), (0, (700, 65)), (1000, (3, 64, 200, 129)))


def attended(run: Callable[..., Tensor], x: Tensor, sinks: Tensor | None, heads: tuple[int, int]) -> list[Tensor]:
    """What comes out, and the gradients of what went in; queries, keys and values are parts of x."""
    x = x.detach().clone().requires_grad_()
    sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    q, k, v = (t.transpose(0, 1) for t in torch.split(x, [heads[0], heads[1], heads[1]], 1))
    out = run(q, k, v, sinks=sinks)
    inputs = [x] if sinks is None else [x, sinks]
    grad = torch.linspace(-1, 1, out.numel(), device=x.device).mul(900).sin().view_as(out).to(out.dtype)
    dx, *rest = torch.autograd.grad(out, inputs, grad)
    return [t.detach().float() for t in (out, *torch.split(dx, [heads[0], heads[1], heads[1]], 1), *rest)]


def plain(row: list[Span], **settings: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        context = PackedAttention(row, q.device, q.shape[0], fused=False)
        return context.attend(0, q, k, v, sinks=sinks, **settings)

    return run


def kernels(row: list[Span], tile: tuple[int, int] | None = None, **settings: Any) -> Callable[..., Tensor]:
    """tile: rows of queries and of keys; without, those that the device prefers."""
    from kitae.kernels.cuda import spans

    made = spans.KERNELS
    if tile is not None:
        tiles = spans.Tiles(*(spans.Tile(*tile, 4, 2),) * 3)
        made = replace(
            made,
            forward=functools.partial(spans.forward, tiles=tiles),
            backward=functools.partial(spans.backward, tiles=tiles),
        )

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        table = PackedAttention(row, q.device, q.shape[0]).table
        rows = (t.transpose(0, 1) for t in (q, k, v))
        return _Spans.apply(*rows, sinks, table, settings["scale"], settings["window"], settings["softcap"], made)  # type: ignore[no-any-return, no-untyped-call]

    return run


def inputs(row: list[Span], heads: tuple[int, int], dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = row[-1].start + row[-1].length
    x = torch.randn(tokens, heads[0] + 2 * heads[1], dim, generator=generator)
    return x.to(DEVICE), torch.randn(heads[0], generator=generator).to(DEVICE)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize(
    ("tile", "softcap", "with_sinks"),
    [((16, 16), None, False), ((32, 16), 2.0, False), ((16, 32), None, True), ((32, 32), 2.0, True)],
)
def test_all_kinds_of_rows(
    name: str,
    window: int | None,
    tile: tuple[int, int],
    softcap: float | None,
    with_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the queries that see a block of keys are shared among programs."""
    from kitae.kernels.cuda import spans

    monkeypatch.setattr(spans, "_LEAST", 16)
    monkeypatch.setattr(spans, "_PROGRAMS", 10**6)
    x, sinks = inputs(ROWS[name], (2, 1), 16)
    settings = {"scale": 0.3, "window": window, "softcap": softcap}
    expected = attended(plain(ROWS[name], **settings), x, sinks if with_sinks else None, (2, 1))
    got = attended(kernels(ROWS[name], tile, **settings), x, sinks if with_sinks else None, (2, 1))
    assert_same(got, expected)


@pytest.mark.parametrize(("heads", "dim"), [((6, 1), 64), ((2, 2), 80), ((3, 1), 96), ((2, 1), 128), ((2, 1), 256)])
@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(None, None, True), (20, 5.0, False)])
def test_heads_of_all_sizes(
    heads: tuple[int, int], dim: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    row = ROWS["shared prompts"]
    x, sinks = inputs(row, heads, dim)
    settings = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    expected = attended(plain(row, **settings), x, sinks if with_sinks else None, heads)
    assert_same(attended(kernels(row, **settings), x, sinks if with_sinks else None, heads), expected)


def test_rows_may_lie_anyhow() -> None:
    """Heads first, as the modules of most families leave them."""
    row, settings = ROWS["shared prompts"], {"scale": 0.2, "window": None, "softcap": None}
    x, _ = inputs(row, (4, 2), 32)

    def by_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return kernels(row, (16, 16), **settings)(q.contiguous(), k.contiguous(), v.contiguous(), sinks)

    assert_same(attended(by_heads, x, None, (4, 2)), attended(plain(row, **settings), x, None, (4, 2)))


def test_large_scores_stay_numbers() -> None:
    row = ROWS["shared prompts"]
    x, sinks = inputs(row, (4, 2), 16)
    for softcap, with_sinks in itertools.product((None, 50.0), (None, sinks)):
        run = kernels(row, (16, 16), scale=1.0, window=None, softcap=softcap)
        assert all(t.isfinite().all() for t in attended(run, 300 * x, with_sinks, (4, 2)))


def test_what_is_no_number_stays_within_its_span() -> None:
    row = ROWS["shared prompts"]
    x, _ = inputs(row, (4, 2), 16)
    x[30, 1] = torch.nan  # a query of the first of three answers
    x[30, 6] = torch.nan  # and a value
    out, dq, dk, dv = attended(kernels(row, (16, 16), scale=0.3, window=None, softcap=None), x, None, (4, 2))
    for t in (out[:21], out[54:], dq[:21], dq[54:], dk[54:], dv[54:]):
        assert t.isfinite().all()
    assert out[30].isnan().any() and dq[30].isnan().any() and dk[:21].isnan().any()


@on_gpu
@pytest.mark.parametrize(
    ("heads", "dim", "window", "softcap", "with_sinks"),
    [
        ((12, 2), 128, None, None, False),
        ((12, 2), 128, 100, None, True),
        ((12, 2), 128, None, 10.0, False),
        ((12, 2), 128, 100, 10.0, True),
        ((8, 8), 64, 100, None, True),
        ((4, 1), 80, None, None, True),
        ((3, 3), 96, None, 10.0, True),
        ((4, 2), 256, None, 10.0, False),
        ((4, 2), 256, 100, 10.0, False),
    ],
)
@pytest.mark.parametrize("row", [LONG, ROWS["answers that lie apart"]])
def test_16_bits_are_as_near_to_fp32_as_plain_torch(
    row: list[Span], heads: tuple[int, int], dim: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """The few numbers of sinks may be off by a rounding more."""
    x, sinks = (t.bfloat16() for t in inputs(row, heads, dim))
    given = sinks if with_sinks else None
    settings = {"scale": dim**-0.5, "window": window, "softcap": softcap}
    exact = attended(plain(row, **settings), x.float(), given if given is None else given.float(), heads)
    got = attended(kernels(row, **settings), x, given, heads)
    rough = attended(plain(row, **settings), x, given, heads)
    for a, b, c in zip(got, rough, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + (1e-3 if c.dim() > 1 else 4e-3) * c.norm()
    again = attended(kernels(row, **settings), x, given, heads)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_softcaps_and_sinks_have_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop over spans. Plain rows in half precision have them too, and what flash attention gives."""
    monkeypatch.setattr(packed_attention, "masked_attention", None)
    row = ROWS["shared prompts"]
    x, sinks = (t.to(dtype) for t in inputs(row, (4, 2), 32))
    for softcap, given in ((3.0, None), (None, sinks), (3.0, sinks)):
        context = PackedAttention(row, DEVICE, 4)
        settings = {"scale": 0.2, "window": 9, "softcap": softcap}
        got = attended(functools.partial(context.attend, 0, **settings), x, given, (4, 2))
        expected = attended(kernels(row, **settings), x, given, (4, 2))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    settings = {"scale": 0.2, "window": None, "softcap": None}
    own, default, flash = (
        attended(attend, x, None, (4, 2))
        for attend in (
            kernels(row, **settings),
            functools.partial(PackedAttention(row, DEVICE, 4).attend, 0, **settings),
            functools.partial(PackedAttention(row, DEVICE, 4, compiled=False).attend, 0, **settings),
        )
    )
    for a, b, c in zip(own, default, flash, strict=True):
        assert torch.equal(b, c if dtype == torch.float32 else a)
        assert (a - c).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * c.norm()
