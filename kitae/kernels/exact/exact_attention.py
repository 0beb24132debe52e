"""Attention of exact mode: what it gives for a query depends on that query and the keys before it alone, bit for bit.

It goes over the keys of a query in the order of their positions, in blocks that are counted from position 0, wherever
the keys lie: in the pages of the engine's cache or in a packed row of the trainer. Gradients may come from any kernel.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitae.kernels.cpu import ops

_RUN_ROWS = 64  # rows of queries, heads times tokens, that one program computes on a GPU


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
    run = ops.exact_attention
    if q.device.type == "cuda":
        from kitae.kernels.exact import exact_gpu

        run = exact_gpu.attend
    return run(
        q, keys, values, reach.runs, reach.table, reach.page_size,
        scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip


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
