"""Kernels of exact mode: what they give for a row depends on that row alone, bit for bit.

Libraries choose how to add up a matrix product by its shape, so a token's log-prob depends on how many others are
computed with it. Here it does not. On a CPU matrix products run in tiles of a fixed number of rows, the last one filled
up: the library always gets the same shape, and all rows of a shape are added up alike. On a GPU they are a Triton
kernel whose programs each add up whole rows in order. Attention goes over the keys of a query in the order of their
positions, in blocks that are counted from position 0, wherever the keys lie: in the pages of the engine's cache or in a
packed row of the trainer.

Gradients may come from any kernel. `kitae.models.exact` puts a model together from these.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitae.kernels import ops

TILE = 64  # rows of a matrix product on a CPU: fewer cost large batches more, more cost single sequences more
MANY = {"cpu": TILE + 1, "cuda": 1025}  # rows above which a product is computed as that of any number
_RUN_ROWS = 64  # rows of queries, heads times tokens, that one program computes on a GPU


def missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why these kernels cannot be used, or None."""
    if device.type == "cpu":
        needs = "a C++ compiler, float32 or bfloat16, and heads of 16, 32, 64, 80, 96, 128 or 256"
        return None if ops.available(device, dtype, head_dim) else f"on a CPU it needs {needs}"
    known = dtype in (torch.float32, torch.bfloat16) and head_dim % 16 == 0 and head_dim <= 256
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or not known:
        return "it needs a CPU, or a CUDA GPU with Triton; float32 or bfloat16; heads of a multiple of 16 up to 256"
    return None


def _gpu() -> Any:
    return importlib.import_module("kitae.kernels.exact_gpu")


# Matrix products


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for rows `[T, K]` and weight `[N, K]`, without a gradient."""
    if out is None:
        out = x.new_empty(len(x), len(weight))
    if x.device.type == "cuda":
        _gpu().product(x.contiguous(), weight, bias, out)
        return out
    x = x.contiguous()
    if x.data_ptr() % 64:  # libraries may treat the first elements of unaligned rows apart
        x = x.clone()
    whole = len(x) // TILE * TILE
    for i in range(0, whole, TILE):
        _multiply(x[i : i + TILE], weight, bias, out[i : i + TILE])
    if rest := len(x) - whole:
        tile = x.new_zeros(TILE, x.shape[1])
        tile[:rest] = x[whole:]
        out[whole:] = _multiply(tile, weight, bias, x.new_empty(TILE, len(weight)))[:rest]
    return out


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            torch.mm(grad, weight).view(x.shape) if needs_x else None,
            torch.mm(grad.t(), x.reshape(-1, x.shape[-1])) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `torch.nn.functional.linear` computes, differentiable."""
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


# Attention


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys the rows of a pass see.

    A run (row, count, position, begin) says that query rows `[row, row + count)` stand at positions `[position, …)` of
    a sequence whose key t is slot `t % page_size` of page `table[begin + t // page_size]`.
    """

    runs: Tensor  # int64 [runs, 4]
    table: Tensor  # int32, flat
    page_size: int

    @classmethod
    def of(
        cls,
        spans: Iterable[tuple[int, int, int, Sequence[int]]],
        page_size: int,
        group: int,
        device: torch.device,
    ) -> "Reach":
        """spans: (row, length, position, pages). group: query heads that share a key."""
        runs: list[tuple[int, int, int, int]] = []
        table: list[int] = []
        for row, length, position, pages in spans:
            most = length if device.type == "cpu" else max(1, _RUN_ROWS // _power_of_2(group))
            for i in range(0, length, most):
                runs.append((row + i, min(most, length - i), position + i, len(table)))
            table.extend(pages)
        return cls(torch.tensor(runs, device=device), torch.tensor(table, dtype=torch.int32, device=device), page_size)

    @classmethod
    def of_last(cls, table: Tensor, lengths: Tensor, page_size: int) -> "Reach":
        """Row i is the last of `lengths[i]` tokens, whose pages are row i of `table`; a length of 0: no token."""
        rows = torch.arange(len(lengths), device=lengths.device)
        lengths = lengths.long()
        runs = torch.stack((rows, lengths.clamp(max=1), lengths - 1, rows * table.shape[1]), 1)
        return cls(runs, table.reshape(-1), page_size)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: Reach,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q `[Hq, T, D]`, keys and values `[pages, Hkv, page_size, D]` → `[T, Hq, D]`, without a gradient.

    All may be strided but for the last dimension. Rows that no run names are left undefined.
    """
    assert all(t.stride(-1) == 1 for t in (q, keys, values)), "the head dimension must be contiguous"
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    run = _gpu().attend if q.device.type == "cuda" else ops.exact_attention
    out: Tensor = run(
        q, keys, values, reach.runs, reach.table, reach.page_size,
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return out


def as_pages(x: Tensor) -> Tensor:
    """A packed row `[Hkv, T, D]` as pages of one token each."""
    return x.transpose(0, 1).unsqueeze(2)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


Function = Callable[..., Tensor]


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Function, plain: Function, *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return value(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            out = ctx.plain(*inputs)
        return (None, None, *torch.autograd.grad(out, inputs, grads[0]))


def with_gradient_of(value: Function, plain: Function, *inputs: Tensor) -> Tensor:
    """`value(*inputs)`, with the gradient of `plain(*inputs)`, which is computed in the backward pass."""
    out: Tensor = _WithGradientOf.apply(value, plain, *inputs)  # type: ignore[no-untyped-call]
    return out
