"""Attention over the paged cache: the engine's two `AttentionContext`s, one for prompts and one for decoding."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kitae.engines.native.page_cache import Kept, KVCache, Pages
from kitae.engines.native.state_cache import PromptStates, StepStates
from kitae.kernels.base import DecodingKernels, SpanKernels, SpanTable
from kitae.kernels.cuda import flash
from kitae.kernels.devices import training_kernels
from kitae.kernels.exact.exact_attention import Reach, attend
from kitae.models.attention_seam import causal_mask, masked_attention
from kitae.models.latent import SeesLatents
from kitae.models.state_seam import MixerCall


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens `[row, row + length)` of the packed row are positions `[start, start + length)` of a sequence."""

    row: int
    length: int
    start: int
    pages: list[int]


class PrefillAttention(SeesLatents):
    """Several prompts, or tails of preempted sequences, in one packed row. Writes every key and value, then attends.

    In half precision on a GPU all of them are one call of flash attention, or, where a model has softcaps or sinks and
    nothing is in the cache yet, of the kernels of training.
    """

    def __init__(
        self,
        cache: KVCache,
        stretches: list[Stretch],
        page_of_T: Tensor,
        slot_of_T: Tensor,
        states: PromptStates | None = None,
    ) -> None:
        self.cache, self.calls = cache, cache.calls()
        self.states = states
        self.stretches = stretches
        self.page_of_T = page_of_T
        self.slot_of_T = slot_of_T
        self.stored = False  # keys and values are in the pages already
        self.flash = _FlashLayout.of(cache, stretches) if flash.available(cache.like) else None

    def carry(self, call: MixerCall) -> None:
        assert self.states is not None
        self.states.carry(call)

    @functools.cached_property
    def spans(self) -> tuple[SpanKernels, SpanTable] | None:
        """Kernels of training that could do it, and how they see the row."""
        kernels = training_kernels(self.cache.like.device, self.cache.like.dtype) if self.flash is not None else None
        found = None if kernels is None else kernels.spans
        if found is None or not found.capped or any(s.start for s in self.stretches):
            return None
        return found, SpanTable(torch.tensor([(s.row, s.length, s.row, 0) for s in self.stretches]))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        kept = next(self.calls)
        if not self.stored:
            kept.write(self.page_of_T, self.slot_of_T, k, v, self.told_latent())
        if self.cache.eight_bits:  # see what later steps will see: answers do not depend on who was preempted
            k, v = (rows.transpose(0, 1) for rows in kept.at(self.page_of_T, self.slot_of_T))
        plain = softcap is None and sinks is None
        if self.flash is not None and plain and flash.available(q):
            return self.flash.attend(q, k, v, kept, scale, window)
        if not plain and self.spans is not None and q.shape[-1] in self.spans[0].sizes:
            kernels, table = self.spans
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            return kernels.forward(q, k, v, table, scale=scale, window=window, softcap=softcap, sinks=sinks)[0]
        out = torch.empty(q.shape[1], q.shape[0], q.shape[2], dtype=q.dtype, device=q.device)
        for stretch in self.stretches:
            rows = slice(stretch.row, stretch.row + stretch.length)
            if stretch.start == 0 and plain and window is None:
                mixed = torch.nn.functional.scaled_dot_product_attention(
                    q[None, :, rows], k[None, :, rows], v[None, :, rows], is_causal=True, scale=scale, enable_gqa=True
                )[0].transpose(0, 1)
            else:
                end = stretch.start + stretch.length
                positions = torch.arange(end, device=q.device)
                allowed = causal_mask(positions[stretch.start :], positions, window)
                seen_k, seen_v = kept.first(stretch.pages, end)
                mixed = masked_attention(q[:, rows], seen_k, seen_v, allowed, scale=scale, softcap=softcap, sinks=sinks)
            out[rows] = mixed
        return out


class ExactAttention:
    """Exact mode, for prompts and decoding alike: writes every key and value, then attends as the trainer does.

    Rows without a sequence have a length of 0 in `reach`, and the slot after the last page.
    """

    def __init__(self, cache: KVCache, reach: Reach, page_of_T: Tensor, slot_of_T: Tensor) -> None:
        self.calls = cache.calls()
        self.reach = reach
        self.page_of_T = page_of_T
        self.slot_of_T = slot_of_T

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        kept = next(self.calls)
        kept.write(self.page_of_T, self.slot_of_T, k, v, None)
        return attend(
            q,
            kept.keys.numbers,
            kept.values.numbers,
            self.reach,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )


@dataclass(frozen=True, slots=True)
class _FlashLayout:
    """Where queries and keys of each stretch begin, and the pages of all keys if some are in the cache only."""

    bounds: flash.Bounds
    seen_pages: Tensor | None
    seen_slots: Tensor | None

    @classmethod
    def of(cls, cache: KVCache, stretches: list[Stretch]) -> "_FlashLayout":
        device, size = cache.like.device, cache.page_size
        bounds = flash.Bounds.of([s.length for s in stretches], [s.start + s.length for s in stretches], device)
        if all(s.start == 0 for s in stretches):
            return cls(bounds, None, None)
        ends = [(s.pages, s.start + s.length) for s in stretches]
        pages = torch.tensor([pages[t // size] for pages, end in ends for t in range(end)], device=device)
        slots = torch.tensor([t % size for _, end in ends for t in range(end)], device=device)
        return cls(bounds, pages, slots)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept, scale: float, window: int | None) -> Tensor:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if self.seen_pages is not None:
            assert self.seen_slots is not None
            k, v = kept.at(self.seen_pages, self.seen_slots)
        return flash.attend(q.transpose(0, 1), k, v, self.bounds, scale=scale, window=window)


class DecodeAttention(SeesLatents):
    """One new token for each of B sequences; `lengths` counts it."""

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        lengths: Tensor,
        kernels: DecodingKernels | None,
        states: StepStates | None = None,
    ) -> None:
        self.cache, self.calls = cache, cache.calls()
        self.states = states
        self.table = table
        self.lengths = lengths
        self.kernels = kernels
        if kernels is None:
            last = lengths.long() - 1
            self.page = table.gather(1, (last // cache.page_size)[:, None])[:, 0].long()
            self.slot = last % cache.page_size
            self.positions = torch.arange(table.shape[1] * cache.page_size, device=table.device)

    def carry(self, call: MixerCall) -> None:
        assert self.states is not None
        self.states.carry(call)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        kept = next(self.calls)
        latent, latent_BR = kept.latent, self.told_latent()
        if latent is not None:
            assert latent_BR is not None
            k = v = latent.row(latent_BR, k).transpose(0, 1)
            q = latent.queries(q)
        found = self._attend(q, k, v, kept, scale, window, softcap, sinks)
        return found if latent is None else latent.mixed(found)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Over what is kept; k and v are what the new tokens add to it."""
        keys, values = kept.keys, kept.values
        if self.kernels is not None:
            return self.kernels.attend(
                q, k, v, keys.numbers, values.numbers, self.table, self.lengths,
                scale=scale, window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
        keys.write(self.page, self.slot, k.transpose(0, 1))
        values.write(self.page, self.slot, v.transpose(0, 1))
        heads, batch, dim = q.shape
        kv_heads = k.shape[0]
        table = self.table.long()

        def gather(pages: Pages) -> Tensor:  # [B, Hkv, S, D]
            return pages.read(table).transpose(1, 2).flatten(2, 3)

        distance = (self.lengths.long() - 1)[:, None] - self.positions[None, :]
        allowed = distance >= 0
        if window is not None:
            allowed &= distance < window
        grouped = q.reshape(kv_heads, heads // kv_heads, batch, dim).permute(2, 0, 1, 3)  # [B, Hkv, r, D]
        scores = (grouped @ gather(keys).transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~allowed[:, None, None, :], float("-inf"))
        if sinks is not None:
            column = sinks.float().view(1, kv_heads, -1, 1).expand(batch, -1, -1, 1)
            weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        seen = gather(values)
        seen = seen.masked_fill(~allowed[:, None, :, None], 0)  # pages never written may hold NaN
        return (weights.to(v.dtype) @ seen).reshape(batch, heads, dim)
