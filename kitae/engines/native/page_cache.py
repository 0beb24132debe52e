"""The key-value cache: a fixed budget of pages, counted references, and the tensors behind them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kitae.engines.native.sequence import SwappedPages
from kitae.errors import EngineError, ModelError
from kitae.models.policy import Policy
from kitae.models.routing import RouterShape
from kitae.types import ExpertArray

PAGE_SIZE = 16  # tokens


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


class KVCache:
    """Keys and values of all layers, in pages.

    The pool never hands out the page after the last: rows of a batch that hold no sequence write there. Of a mixture
    whose choices are recorded, a page has the experts of its tokens as well, `[pages + 1, page_size, L, K]`: they are
    shared, copied, kept and computed again with the keys and values that they made.
    """

    def __init__(
        self,
        policy: Policy,
        memory_gb: float,
        page_size: int,
        routers: RouterShape | None = None,
        *,
        eight_bits: bool = False,
    ) -> None:
        self._check(policy)
        self.like = torch.empty(0, policy.head_dim, dtype=policy.dtype, device=policy.device)
        heads = 2 * policy.layers * policy.kv_heads * page_size
        page_bytes = heads * (policy.head_dim + 4 if eight_bits else policy.head_dim * self.like.element_size())
        page_bytes += page_size * routers.bytes if routers else 0
        self.page_bytes = page_bytes
        self.pages = int(memory_gb * 2**30 // page_bytes)
        if self.pages < 2:
            raise EngineError(
                f"engine.memory_gb must hold at least two pages of {page_bytes / 2**20:.1f} MiB, got {memory_gb:g} GB"
            )
        self.page_size = page_size
        self.eight_bits = eight_bits
        self._shape = (2, policy.layers, self.pages + 1, policy.kv_heads, page_size, policy.head_dim)
        self._routers = routers
        self.experts: Tensor | None = None
        self.allocate()

    @staticmethod
    def _check(policy: Policy) -> None:
        own = policy.kv_heads, policy.head_dim
        for layer, (keys, values) in policy.attended().items():
            if keys != own or values != own:
                raise ModelError(
                    f"the engine keeps keys and values of {own[0]} heads of {own[1]} numbers in every layer, got "
                    f"{policy.source} with keys of {keys[0]} × {keys[1]} and values of {values[0]} × {values[1]} in "
                    f"layer {layer}"
                )

    def allocate(self) -> None:
        self._numbers = self.like.new_empty(self._shape, dtype=torch.int8 if self.eight_bits else None)
        self._scales = self.like.new_empty(self._shape[:-1], dtype=torch.float32) if self.eight_bits else None
        self.keys, self.values = ([self._pages(side, layer) for layer in range(self._shape[1])] for side in (0, 1))
        if (r := self._routers) is not None:
            self.experts = self.like.new_empty((self.pages + 1, self.page_size, r.layers, r.top_k), dtype=r.dtype)

    def _pages(self, side: int, layer: int) -> Pages:
        scales = None if self._scales is None else self._scales[side, layer]
        return Pages(self._numbers[side, layer], scales, self.like.dtype)

    def free(self) -> None:
        """Free the memory. Its contents are lost, and runners that have used it must be made again."""
        self._numbers, self._scales = self.like.new_empty((2, 0)), None
        self.keys, self.values, self.experts = [], [], None

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copy whole pages in every layer: how a sample gets its own half-filled last page of a shared prompt."""
        if not source:
            return
        there, here = (torch.tensor(pages, device=self.like.device) for pages in (target, source))
        for tensor, dim in self._by_page():
            tensor.index_copy_(dim, there, tensor.index_select(dim, here))

    def swap_out(self, pages: list[int]) -> SwappedPages:
        """Copy pages to the memory of the host. They may be reused at once, since the device works in order."""
        here = torch.tensor(pages, device=self.like.device)
        found = []
        for tensor, dim in self._by_page():
            picked = tensor.index_select(dim, here)
            host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=picked.is_cuda)
            found.append(host.copy_(picked, non_blocking=True))
        return SwappedPages(len(pages), tuple(found))

    def swap_in(self, swapped: SwappedPages, pages: list[int]) -> None:
        there = torch.tensor(pages, device=self.like.device)
        for (tensor, dim), host in zip(self._by_page(), swapped.tensors, strict=True):
            tensor.index_copy_(dim, there, host.to(tensor.device, non_blocking=True))

    def _by_page(self) -> list[tuple[Tensor, int]]:
        """All tensors that hold something of a page, each with the dimension along which pages lie."""
        found = [(self._numbers, 2)]
        found += [] if self._scales is None else [(self._scales, 2)]
        return found + ([] if self.experts is None else [(self.experts, 0)])

    def experts_of(self, pages: list[int], start: int, stop: int) -> ExpertArray | None:
        """The experts of positions [start, stop) of a sequence with these pages; None if they are not recorded."""
        if self.experts is None:
            return None
        size = self.page_size
        first, last = start // size, -(-stop // size)
        rows = self.experts[torch.tensor(pages[first:last], dtype=torch.int64, device=self.experts.device)]
        found: ExpertArray = rows.flatten(0, 1)[start - first * size : stop - first * size].cpu().numpy()
        return found
