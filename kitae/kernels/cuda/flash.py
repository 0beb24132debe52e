"""Flash attention over packed sequences of different lengths, as torch ships it for GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitae.kernels.transfer import send


def available(like: Tensor) -> bool:
    dim = like.shape[-1]
    return like.device.type == "cuda" and like.dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and dim <= 256


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where the queries and the keys of each sequence begin in their packed rows, as int32 `[sequences + 1]`."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "Bounds":
        def starts(lengths: Sequence[int]) -> Tensor:
            return send(np.array([0, *accumulate(lengths)], dtype=np.int32), device)

        return cls(starts(queries), starts(keys), max(queries), max(keys))


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, *, scale: float, window: int | None) -> Tensor:
    """q `[T, Hq, D]`, k and v `[S, Hkv, D]` → `[T, Hq, D]`, differentiable.

    Causal, aligned at the ends: the last query of a sequence sees its last key, the one before sees one key less.
    """
    out: Tensor = _Flash.apply(q, k, v, bounds, scale, window)  # type: ignore[no-untyped-call]
    return out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, window: int | None) -> Tensor:
        reach = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_key, 0.0, True, False,
            scale=scale, **reach,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, state, unused)
        ctx.rest = (bounds, scale, reach)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, state, unused = ctx.saved_tensors
        bounds, scale, reach = ctx.rest
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, k, v, out, lse, bounds.queries, bounds.keys, bounds.longest_query,
            bounds.longest_key, 0.0, True, state, unused, scale=scale, **reach,
        )  # fmt: skip
        return dq, dk, dv, None, None, None
