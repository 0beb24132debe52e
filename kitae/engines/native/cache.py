"""The key-value cache: a fixed budget of pages, counted references, and the tensors behind them."""

from collections.abc import Iterable

import torch

from kitae.errors import EngineError, ModelError
from kitae.models.policy import Policy
from kitae.models.routing import RouterShape
from kitae.types import ExpertArray


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


class KVCache:
    """Keys and values of all layers: per layer `[pages + 1, kv_heads, page_size, head_dim]`, in the policy's dtype.

    The pool never hands out the page after the last: rows of a batch that hold no sequence write there. Of a mixture
    whose choices are recorded, a page has the experts of its tokens as well, `[pages + 1, page_size, L, K]`: they are
    shared, copied, kept and computed again with the keys and values that they made.
    """

    def __init__(self, policy: Policy, memory_gb: float, page_size: int, routers: RouterShape | None = None) -> None:
        self._check(policy)
        element = torch.empty((), dtype=policy.dtype).element_size()
        page_bytes = 2 * policy.layers * policy.kv_heads * page_size * policy.head_dim * element
        page_bytes += page_size * routers.bytes if routers else 0
        self.pages = int(memory_gb * 2**30 // page_bytes)
        if self.pages < 2:
            raise EngineError(
                f"engine.memory_gb must hold at least two pages of {page_bytes / 2**20:.1f} MiB, got {memory_gb:g} GB"
            )
        self.page_size = page_size
        self._shape = (2, policy.layers, self.pages + 1, policy.kv_heads, page_size, policy.head_dim)
        self._all = torch.empty((2, 0), dtype=policy.dtype, device=policy.device)
        self._routers = routers
        self.experts: torch.Tensor | None = None
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
        self._all = self._all.new_empty(self._shape)
        self.keys, self.values = list(self._all[0]), list(self._all[1])
        if (r := self._routers) is not None:
            self.experts = self._all.new_empty((self.pages + 1, self.page_size, r.layers, r.top_k), dtype=r.dtype)

    def free(self) -> None:
        """Give the memory back. What was in it is lost; runners that have used it must go too."""
        self._all = self._all.new_empty((2, 0))
        self.keys, self.values, self.experts = [], [], None

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        """Copy whole pages in every layer: how a sample gets its own half-filled last page of a shared prompt."""
        if not source:
            return
        device = self._all.device
        there, here = torch.tensor(target, device=device), torch.tensor(source, device=device)
        self._all[:, :, there] = self._all[:, :, here]
        if self.experts is not None:
            self.experts[there] = self.experts[here]

    def experts_of(self, pages: list[int], start: int, stop: int) -> ExpertArray | None:
        """Those of positions [start, stop) of a sequence that has these pages; None: they are not recorded."""
        if self.experts is None:
            return None
        size = self.page_size
        first, last = start // size, -(-stop // size)
        rows = self.experts[torch.tensor(pages[first:last], dtype=torch.int64, device=self.experts.device)]
        found: ExpertArray = rows.flatten(0, 1)[start - first * size : stop - first * size].cpu().numpy()
        return found
