"""Collect numbers over the micro-batches of a step."""

from collections import defaultdict


class Meter:
    """Weighted means, totals and maxima by name: `meter.mean("entropy", 0.4, count=120)`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._totals: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}

    def mean(self, name: str, value: float, count: float = 1.0) -> None:
        self._sums[name] += value * count
        self._counts[name] += count

    def total(self, name: str, value: float) -> None:
        self._totals[name] += value

    def max(self, name: str, value: float) -> None:
        self._maxima[name] = max(value, self._maxima.get(name, value))

    def result(self) -> dict[str, float]:
        means = {name: self._sums[name] / self._counts[name] for name in self._sums if self._counts[name]}
        return {**means, **self._totals, **self._maxima}
