"""Collect numbers over the micro-batches of a step."""

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Number = float | Tensor  # a tensor holds one element


class Meter:
    """Weighted means, totals, maxima and sample sizes by name: `meter.mean("entropy", 0.4, count=120)`.

    Tensors are kept as they are until `result`, which fetches all of them at once: measuring never waits for a device.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, str, tuple[Number, ...]]] = []

    def mean(self, name: str, value: "Number", count: "Number" = 1.0) -> None:
        self._entries.append(("mean", name, (value, count)))

    def part(self, name: str, total: "Number", count: "Number") -> None:
        """Like `mean`, with the sum of `count` values instead of their mean."""
        self._entries.append(("part", name, (total, count)))

    def total(self, name: str, value: "Number") -> None:
        self._entries.append(("total", name, (value,)))

    def max(self, name: str, value: "Number") -> None:
        """The largest value; one that is no number stays, and -inf is the largest of none."""
        self._entries.append(("max", name, (value,)))

    def sample_size(self, name: str, total: "Number", squares: "Number", count: "Number") -> None:
        """Effective sample size (Σ w)² / (n Σ w²) over everything added: 1 when all weights are equal."""
        self._entries.append(("size", name, (total, squares, count)))

    def result(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        totals: dict[str, float] = defaultdict(float)
        maxima: dict[str, float] = {}
        weights: dict[str, tuple[float, float, float]] = {}
        numbers = iter(_fetch([number for _, _, group in self._entries for number in group]))
        for kind, name, group in self._entries:
            first, *rest = [next(numbers) for _ in group]
            if kind in ("mean", "part"):
                sums[name] += first * rest[0] if kind == "mean" else first
                counts[name] += rest[0]
            elif kind == "total":
                totals[name] += first
            elif kind == "max" and first != float("-inf"):
                so_far = maxima.get(name, first)
                maxima[name] = so_far if so_far != so_far else max(first, so_far)
            elif kind == "size":
                a, b, n = weights.get(name, (0.0, 0.0, 0.0))
                weights[name] = (a + first, b + rest[0], n + rest[1])
        means = {name: sums[name] / counts[name] for name in sums if counts[name]}
        sizes = {name: a**2 / max(1e-20, n * b) for name, (a, b, n) in weights.items()}
        return {**means, **totals, **maxima, **sizes}


def _fetch(numbers: "list[Number]") -> list[float]:
    """Plain floats, with one copy from the device."""
    tensors = [number for number in numbers if not isinstance(number, int | float)]
    fetched: list[float] = []
    if tensors:
        import torch

        fetched = torch.stack([t.detach().double() for t in tensors]).tolist()
    values = iter(fetched)
    return [float(number) if isinstance(number, int | float) else next(values) for number in numbers]
