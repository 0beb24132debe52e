"""Collect numbers over the micro-batches of a step."""

from collections import defaultdict


class Meter:
    """Weighted means, totals, maxima and sample sizes by name: `meter.mean("entropy", 0.4, count=120)`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._totals: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self._weights: dict[str, tuple[float, float, float]] = {}

    def mean(self, name: str, value: float, count: float = 1.0) -> None:
        self._sums[name] += value * count
        self._counts[name] += count

    def total(self, name: str, value: float) -> None:
        self._totals[name] += value

    def max(self, name: str, value: float) -> None:
        """The largest value; one that is no number stays."""
        so_far = self._maxima.get(name, value)
        self._maxima[name] = so_far if so_far != so_far else max(value, so_far)

    def sample_size(self, name: str, total: float, squares: float, count: float) -> None:
        """Effective sample size (Σ w)² / (n Σ w²) over everything added: 1 when all weights are equal."""
        a, b, n = self._weights.get(name, (0.0, 0.0, 0.0))
        self._weights[name] = (a + total, b + squares, n + count)

    def result(self) -> dict[str, float]:
        means = {name: self._sums[name] / self._counts[name] for name in self._sums if self._counts[name]}
        sizes = {name: a**2 / max(1e-20, n * b) for name, (a, b, n) in self._weights.items()}
        return {**means, **self._totals, **self._maxima, **sizes}
