"""Sequence parallelism: the tokens of a row are split over the processes of a group, attention is computed by heads.

Each process has `t` successive tokens of a row of T; the last ones are padding if T is no multiple. Around attention
the processes exchange tokens for heads: each sends its tokens for all heads but its own, and receives all tokens for
its own heads. Everything else (projections, MLPs, norms, head) treats each token alone. The process with the state that
predicts a loss token computes that token's number; then all processes get all numbers. Legend: T tokens of the row, t
of this process; N loss tokens of the row, n of this process.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from kitae.models.attention_seam import AttentionContext
from kitae.trainer.parallel.collectives import exchange


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of a row that this process has; `own_n`: the indices of its loss tokens within the row's.

    Of 5 tokens the second of two processes has `tokens_t` [6, 2, 0], where the last one is padding.
    """

    tokens_t: Tensor
    positions_t: Tensor
    source_n: Tensor
    own_n: Tensor

    @classmethod
    def of(cls, tokens_T: Tensor, positions_T: Tensor, source_N: Tensor, group: dist.ProcessGroup) -> "RowPart":
        size, place = dist.get_world_size(group), dist.get_rank(group)
        length = -(-len(tokens_T) // size)
        tokens, positions = (
            pad(x, (0, size * length - len(x))).view(size, length)[place] for x in (tokens_T, positions_T)
        )
        own_n = (source_N // length == place).nonzero()[:, 0]
        return cls(tokens, positions, source_N[own_n] - place * length, own_n)


class SplitAttention:
    """`AttentionContext` for a part of the tokens. whole: attention over the whole row, for any number of heads."""

    def __init__(self, whole: AttentionContext, tokens: int, group: dist.ProcessGroup) -> None:
        self._whole = whole
        self._tokens = tokens  # of the row
        self._group = group
        self._size = dist.get_world_size(group)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        size, length = self._size, q.shape[1]
        if k.shape[0] < size:  # each process needs a key-value head of its own
            k, v = (x.repeat_interleave(size // x.shape[0], 0) for x in (k, v))
        heads = [x.shape[0] // size for x in (q, k, v)]
        sent = torch.cat([x.reshape(size, -1, *x.shape[1:]) for x in (q, k, v)], 1)  # [process, its heads, t, D]
        got = exchange(sent, self._group).transpose(0, 1).flatten(1, 2)[:, : self._tokens]
        own = None if sinks is None else sinks.view(size, -1)[dist.get_rank(self._group)]
        q, k, v = torch.split(got, heads)
        out = self._whole.attend(layer, q, k, v, scale=scale, window=window, softcap=softcap, sinks=own)
        filled = pad(out, (0, 0, 0, 0, 0, size * length - self._tokens))
        return exchange(filled.view(size, length, *out.shape[1:]), self._group).transpose(0, 1).flatten(1, 2)
