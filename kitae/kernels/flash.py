"""Flash attention over packed sequences of different lengths, as torch ships it for GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


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
            return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

        return cls(starts(queries), starts(keys), max(queries), max(keys))


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, *, scale: float, window: int | None) -> Tensor:
    """q `[T, Hq, D]`, k and v `[S, Hkv, D]` → `[T, Hq, D]`, differentiable.

    Causal, aligned at the ends: the last query of a sequence sees its last key, the one before sees one key less.
    """
    reach = None if window is None else window - 1
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_key, 0.0, True, False,
        scale=scale, window_size_left=reach, window_size_right=None if reach is None else 0,
    )[0]  # fmt: skip
    return out
