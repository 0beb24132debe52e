"""The key-value cache: a fixed budget of pages, counted references, and the tensors behind them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kitae.engines.native.sequence import SwappedPages
from kitae.engines.native.state_cache import StateCache
from kitae.errors import EngineError
from kitae.models.latent import Latent
from kitae.models.policy import Policy
from kitae.models.routing import RouterShape
from kitae.types import ExpertArray

PAGE_SIZE = 16  # tokens
_MOST_PAGES = 2**20  # where they are small, or hold nothing because no layer attends


class PagePool:
    """Page numbers with reference counts. A page returns to the pool when its last holder releases it."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= self.free, f"asked for {count} pages with {self.free} free"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0
            if self._holders[page] == 0:
                self._free.append(page)


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys, or values, of one layer: `[pages + 1, kv_heads, page_size, head_dim]`, in the policy's dtype.

    scales: None, or, where numbers are 8 bits wide, the factor of each head of a token, `[pages + 1, kv_heads,
    page_size]`; the largest number of a head is 127.
    """

    numbers: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    def write(self, page_T: Tensor, slot_T: Tensor, rows_THD: Tensor) -> None:
        if self.scales is None:
            self.numbers[page_T, :, slot_T] = rows_THD
            return
        exact_THD = rows_THD.float()
        scale_TH = exact_THD.abs().amax(-1) / 127
        scale_TH = torch.where(scale_TH > 0, scale_TH, 1.0)
        self.numbers[page_T, :, slot_T] = (exact_THD / scale_TH[..., None]).round().to(torch.int8)
        self.scales[page_T, :, slot_T] = scale_TH

    def read(self, pages: Tensor | list[int]) -> Tensor:
        """Whole pages, `[..., kv_heads, page_size, head_dim]` for pages `[...]`."""
        return self._exact(self.numbers[pages], None if self.scales is None else self.scales[pages])

    def at(self, page_T: Tensor, slot_T: Tensor) -> Tensor:
        """`[T, kv_heads, head_dim]`."""
        scales = None if self.scales is None else self.scales[page_T, :, slot_T]
        return self._exact(self.numbers[page_T, :, slot_T], scales)

    def _exact(self, numbers: Tensor, scales: Tensor | None) -> Tensor:
        return numbers if scales is None else (numbers.float() * scales[..., None]).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a call of attention keeps of each token: keys and values, or, with latents, one row that both are made of.

    Then keys and values are the same pages.
    """

    keys: Pages
    values: Pages
    latent: Latent | None

    def write(self, page_T: Tensor, slot_T: Tensor, k: Tensor, v: Tensor, latent_TR: Tensor | None) -> None:
        """k, v `[H, T, D]`; latent: what they are made of, if that is kept."""
        if self.latent is not None:
            assert latent_TR is not None, "the projection of a latent must tell it to the context"
            self.keys.write(page_T, slot_T, self.latent.row(latent_TR, k))
            return
        self.keys.write(page_T, slot_T, k.transpose(0, 1))
        self.values.write(page_T, slot_T, v.transpose(0, 1))

    def at(self, page_T: Tensor, slot_T: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[T, H, D]`."""
        if self.latent is not None:
            return self.latent.expanded(self.keys.at(page_T, slot_T)[:, 0])
        return self.keys.at(page_T, slot_T), self.values.at(page_T, slot_T)

    def first(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, count, D]` of the first tokens of a sequence with these pages."""
        k, v = (each.read(pages).transpose(0, 1).flatten(1, 2)[:, :count] for each in (self.keys, self.values))
        if self.latent is None:
            return k, v
        k, v = self.latent.expanded(k[0])
        return k.transpose(0, 1), v.transpose(0, 1)


class KVCache:
    """Keys and values of all calls of attention in a pass of the model, in pages; each call has heads of its own size.

    The pool never hands out the page after the last: rows of a batch that hold no sequence write there. Of a mixture
    whose choices are recorded, a page has the experts of its tokens as well, `[pages + 1, page_size, L, K]`: they are
    shared, copied, kept and computed again with the keys and values that they made.

    states: what mixers carry on, in at most half of the memory: two slots for each of `sequences`, one of which may be
    its prompt's, or as many as fit; None: the model has no mixers.
    """

    def __init__(
        self,
        policy: Policy,
        memory_gb: float,
        page_size: int,
        routers: RouterShape | None = None,
        *,
        eight_bits: bool = False,
        sequences: int = 16,
    ) -> None:
        memory = memory_gb * 2**30
        self.states: StateCache | None = None
        self.slot_bytes = StateCache.bytes_of(policy)
        if self.slot_bytes:
            slots = min(2 * sequences, int(memory / 2) // self.slot_bytes - 1)
            if slots < 2:
                raise EngineError(
                    f"half of engine.memory_gb must hold at least three states of {self.slot_bytes / 2**20:.1f} MiB, "
                    f"got {memory_gb:g} GB"
                )
            self.states = StateCache(policy, slots)
            memory -= (slots + 1) * self.slot_bytes
        calls = policy.attended()
        self.latents = [None if policy.exact else call.latent for call in calls]
        self.sizes = [c.size if x is None else x.size for c, x in zip(calls, self.latents, strict=True)]
        width = min((call.size[1] for call in calls), default=policy.head_dim)
        self.like = torch.empty(0, width, dtype=policy.dtype, device=policy.device)
        of_number = 1 if eight_bits else self.like.element_size()
        of_tokens = (
            (2 if latent is None else 1) * heads * (dim * of_number + (4 if eight_bits else 0))
            for (heads, dim), latent in zip(self.sizes, self.latents, strict=True)
        )
        page_bytes = page_size * sum(of_tokens)
        page_bytes += page_size * routers.bytes if routers else 0
        self.page_bytes = max(1, page_bytes)
        self.pages = min(int(memory // self.page_bytes), _MOST_PAGES)
        if self.pages < 2:
            raise EngineError(
                f"engine.memory_gb must hold at least two pages of {page_bytes / 2**20:.1f} MiB, got {memory_gb:g} GB"
            )
        self.page_size = page_size
        self.eight_bits = eight_bits
        self._routers = routers
        self.experts: Tensor | None = None
        self.allocate()

    @property
    def is_even(self) -> bool:
        """Whether all layers keep as many heads of the same size."""
        return len(set(self.sizes)) == 1

    def allocate(self) -> None:
        if self.states:
            self.states.allocate()
        self.keys: list[Pages] = []
        self.values: list[Pages] = []
        self._by_page: list[tuple[Tensor, int]] = []  # all that pages hold, and the dimension along which they lie
        wanted = Counter[tuple[int, int]]()
        for size, latent in zip(self.sizes, self.latents, strict=True):
            wanted[size] += 2 if latent is None else 1
        made = {size: iter(self._pages(size, count)) for size, count in wanted.items()}
        for size, latent in zip(self.sizes, self.latents, strict=True):
            self.keys.append(next(made[size]))
            self.values.append(self.keys[-1] if latent is not None else next(made[size]))
        if (r := self._routers) is not None:
            self.experts = self.like.new_empty((self.pages + 1, self.page_size, r.layers, r.top_k), dtype=r.dtype)
            self._by_page.append((self.experts, 0))

    def _pages(self, size: tuple[int, int], count: int) -> list[Pages]:
        """So many of heads of one size, in one piece of memory."""
        heads, dim = size
        shape = count, self.pages + 1, heads, self.page_size
        numbers = self.like.new_empty((*shape, dim), dtype=torch.int8 if self.eight_bits else None)
        scales = self.like.new_empty(shape, dtype=torch.float32) if self.eight_bits else None
        self._by_page += [(tensor, 1) for tensor in (numbers, scales) if tensor is not None]
        return [Pages(numbers[i], None if scales is None else scales[i], self.like.dtype) for i in range(count)]

    def calls(self) -> Iterator[Kept]:
        """What each call of attention in a pass of the model keeps, in the order of the calls."""
        return map(Kept, self.keys, self.values, self.latents)

    def free(self) -> None:
        """Free the memory. Its contents are lost, and runners that have used it must be made again."""
        if self.states:
            self.states.free()
        self.keys, self.values, self.experts, self._by_page = [], [], None, []

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copy whole pages in every layer: how a sample gets its own half-filled last page of a shared prompt."""
        if not source:
            return
        there, here = (torch.tensor(pages, device=self.like.device) for pages in (target, source))
        for tensor, dim in self._by_page:
            tensor.index_copy_(dim, there, tensor.index_select(dim, here))

    @property
    def slot_pages(self) -> int:
        """How many pages take as much memory as a slot."""
        return -(-self.slot_bytes // self.page_bytes)

    def swap_out(self, pages: list[int], slot: int | None = None) -> SwappedPages:
        """Copy pages and a slot to the memory of the host. They may be reused at once, since the device works in
        order."""
        here = torch.tensor(pages, device=self.like.device)
        found = []
        for tensor, dim in self._by_page:
            picked = tensor.index_select(dim, here)
            host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=picked.is_cuda)
            found.append(host.copy_(picked, non_blocking=True))
        states = self.states.swap_out(slot) if self.states and slot is not None else ()
        return SwappedPages(len(pages), tuple(found), states, len(pages) + self.slot_pages)

    def swap_in(self, swapped: SwappedPages, pages: list[int], slot: int | None = None) -> None:
        if self.states and slot is not None:
            self.states.swap_in(swapped.states, slot)
        there = torch.tensor(pages, device=self.like.device)
        for (tensor, dim), host in zip(self._by_page, swapped.tensors, strict=True):
            tensor.index_copy_(dim, there, host.to(tensor.device, non_blocking=True))

    def experts_of(self, pages: list[int], start: int, stop: int) -> ExpertArray | None:
        """The experts of positions [start, stop) of a sequence with these pages; None if they are not recorded."""
        if self.experts is None:
            return None
        size = self.page_size
        first, last = start // size, -(-stop // size)
        rows = self.experts[torch.tensor(pages[first:last], dtype=torch.int64, device=self.experts.device)]
        found: ExpertArray = rows.flatten(0, 1)[start - first * size : stop - first * size].cpu().numpy()
        return found
