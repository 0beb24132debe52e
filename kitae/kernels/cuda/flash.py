"""Flash attention over packed sequences of different lengths, and that of cuDNN for a long one, as torch ships them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitae.kernels.transfer import send

_LONG = 8192  # tokens of a sequence from which cuDNN pays


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


def is_alone(bounds: Bounds, window: int | None) -> bool:
    """Whether it is one long sequence, for which cuDNN pays, where no gradient is wanted."""
    return len(bounds.queries) == 2 and bounds.longest_query == bounds.longest_key >= _LONG and window is None


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, *, scale: float, window: int | None) -> Tensor:
    """q `[T, Hq, D]`, k and v `[S, Hkv, D]` → `[T, Hq, D]`, differentiable.

    Causal, aligned at the ends: the last query of a sequence sees its last key, the one before sees one key less.
    """
    alone = is_alone(bounds, window) and not torch.is_grad_enabled()
    if alone and _cudnn_agrees(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2]):
        return attend_alone(q, k, v, scale)
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


def attend_alone(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One whole sequence, without gradients: by cuDNN, twice as fast on a GPU of the Hopper generation.

    cuDNN makes a plan for each length, which takes longer than a layer. So lengths are rounded up, by 6 % on average;
    what is beyond the end is seen by nobody before it.
    """
    step = 1 << max(0, (len(q) - 1).bit_length() - 4)
    rest = -len(q) % step
    sides = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rest)).transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(*sides, None, False, 0.0, True, False, scale=scale)[0]
    return out[0].transpose(0, 1)[: len(q)]  # type: ignore[no-any-return]


@functools.cache
def _cudnn_agrees(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether cuDNN is there, and computes heads of this kind as flash attention does."""
    if torch.cuda.get_device_capability(device) < (9, 0) or dim > 128:
        return False
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(100, n, dim, generator=generator, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads)
    )
    try:
        got = attend_alone(q, k, v, 0.1)
    except RuntimeError:
        return False
    expected = attend(q, k, v, Bounds.of([100], [100], device), scale=0.1, window=None)
    return bool((got.float() - expected.float()).norm() < 0.02 * expected.float().norm())
