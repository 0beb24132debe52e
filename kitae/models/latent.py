"""Latent attention (DeepSeek-V2 and those after it): keys and values of all heads are products of one short latent.

A token's key has, in each head, a part that is a product of its latent, and one that is rotated and the same in all
heads. The engine keeps latent and rotated part alone, which is one key for all heads. In decoding the products move
from the keys to the queries, and from the values to what attention gives, so keys and values are never made. A model is
recognised by the projection that makes them, and a probe must show that they are what is written here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

_PROJECTION = "kv_b_proj"
_PARTS = "kitae_parts"


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """`Latent(kv_b_proj, heads=16, own=128, rotated=64, value=128)`: from the latent of a token to keys and values.

    expand: the projection. own: numbers of a key that are a product of the latent; rotated: those that are not. value:
    numbers of a value. Keys, or values, end in zeros where they are shorter than the others.
    """

    expand: nn.Linear
    heads: int
    own: int
    rotated: int
    value: int

    @property
    def rank(self) -> int:
        return self.expand.in_features

    @property
    def size(self) -> tuple[int, int]:
        """Heads and size of what is kept of a token."""
        return 1, self.rank + self.rotated

    def row(self, latent_TR: Tensor, k: Tensor) -> Tensor:
        """What is kept of tokens, `[T, 1, R]`; k `[H, T, D]`."""
        return torch.cat((latent_TR, k[0, :, self.own : self.own + self.rotated]), -1)[:, None]

    def queries(self, q: Tensor) -> Tensor:
        """Queries for what is kept, from those for keys: `[H, T, D]` → `[H, T, R]`."""
        keys = self._weights()[:, : self.own]
        return torch.cat((torch.bmm(q[..., : self.own], keys), q[..., self.own : self.own + self.rotated]), -1)

    def mixed(self, found_THR: Tensor) -> Tensor:
        """What attention gives over values, from what it gives over rows that are kept: `[T, H, value]`."""
        values = self._weights()[:, self.own :]
        return torch.bmm(found_THR[..., : self.rank].transpose(0, 1), values.mT).transpose(0, 1)

    def expanded(self, rows_TR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[T, H, D]` of rows that were kept."""
        latent_TR, rotated_TR = rows_TR[:, : self.rank], rows_TR[:, self.rank :]
        both = linear(latent_TR, self.expand.weight).view(len(rows_TR), self.heads, self.own + self.value)
        k = torch.cat((both[..., : self.own], rotated_TR[:, None].expand(-1, self.heads, -1)), -1)
        v = both[..., self.own :]
        size = max(k.shape[2], v.shape[2])
        return pad(k, (0, size - k.shape[2])), pad(v, (0, size - v.shape[2]))

    def _weights(self) -> Tensor:
        return self.expand.weight.view(self.heads, self.own + self.value, self.rank)

    def makes(self, latent_TR: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these keys and values `[H, T, D]` are those of the latent."""
        rows = self.row(latent_TR, k)[:, 0]
        for found, expected in zip(self.expanded(rows), (k, v), strict=True):
            given = expected.transpose(0, 1).float()
            if found.shape != given.shape or (found.float() - given).norm() > 1e-2 * given.norm():
                return False
        return True


class SeesLatents:
    """The base of contexts that are told the latent that keys and values of their next call are made of."""

    _told: tuple[nn.Linear, Tensor] | None = None

    def tell(self, expand: nn.Linear, latent_TR: Tensor) -> None:
        self._told = expand, latent_TR.reshape(-1, expand.in_features)

    def told(self) -> tuple[nn.Linear, Tensor] | None:
        found, self._told = self._told, None
        return found

    def told_latent(self) -> Tensor | None:
        found = self.told()
        return None if found is None else found[1]


def latent_of(told: tuple[nn.Linear, Tensor] | None, k: Tensor, v: Tensor) -> Latent | None:
    """What makes keys and values `[H, T, D]` of what was told; None: it is not known."""
    if told is None:
        return None
    expand, latent_TR = told
    own, rotated, value = getattr(expand, _PARTS)
    found = Latent(expand, k.shape[0], own, rotated, value)
    return found if found.makes(latent_TR, k, v) else None


def projections_of(model: nn.Module) -> Iterator[nn.Linear]:
    """The projections that make keys and values of latents. One with adapters gets a name of its own, and none of
    these."""
    for module in model.modules():
        expand: Any = getattr(module, _PROJECTION, None)
        parts: tuple[Any, ...] = tuple(
            getattr(module, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        if type(expand) is nn.Linear and getattr(expand, "bias", None) is None and None not in parts:
            setattr(expand, _PARTS, parts)
            yield expand
