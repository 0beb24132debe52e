"""Metrics over the micro-batches, ranks and updates of a step.

    Meter ── fetch ──► Totals ── add: micro-batches, ranks ──► Totals ── average: updates of a step ──► numbers

Each number carries the way it is aggregated, so it does not have to be derived from its name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kitae.types import FloatArray, SampleKey

if TYPE_CHECKING:
    from torch import Tensor

    from kitae.data.packing import Observed

    Number = float | Tensor  # a tensor holds one element

Key = Hashable
"""Names of metrics are strings. A number that the code acts on has a key of another type, and is no metric."""


class Kind(Enum):
    """How numbers of one name are aggregated over micro-batches and ranks, and then over the updates of a step."""

    MEAN = "Σ x n / Σ n; then the mean"
    TOTAL = "Σ x; then the mean"
    COUNT = "Σ x; then the sum"
    MAX = "the largest"
    SIZE = "effective sample size (Σ w)² / (n Σ w²); then the mean"


@dataclass(frozen=True, slots=True)
class Sum:
    """`Sum(Kind.MEAN, (48.0, 120.0))`: everything needed to go on adding."""

    kind: Kind
    sums: tuple[float, ...]

    def __add__(self, other: Sum) -> Sum:
        assert self.kind is other.kind, f"{self.kind} is not added to {other.kind}"
        if self.kind is Kind.MAX:
            return Sum(self.kind, (_largest(self.sums[0], other.sums[0]),))
        return Sum(self.kind, tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)))

    @property
    def value(self) -> float | None:
        """The aggregated number; None if there was nothing to measure."""
        match self.kind:
            case Kind.MEAN:
                total, count = self.sums
                return total / count if count else None
            case Kind.SIZE:
                weights, squares, count = self.sums
                return weights**2 / max(1e-20, count * squares)
            case Kind.MAX:
                return None if self.sums[0] == float("-inf") else self.sums[0]
            case _:
                return self.sums[0]


@dataclass(frozen=True, slots=True)
class Totals:
    """Metrics that can still be added to others.

    tokens: numbers of each loss token of the samples that are observed: `{(17, 3, 0): {"logp": [-0.1, -2.3], …}}`. They
    are not added up; if several updates train on a sample, the last one's numbers count.
    """

    entries: Mapping[Key, Sum] = field(default_factory=dict)
    tokens: Mapping[SampleKey, Mapping[str, FloatArray]] = field(default_factory=dict)

    @staticmethod
    def of(kind: Kind, **values: float) -> Totals:
        """`Totals.of(Kind.COUNT, skipped_updates=1)`, for kinds whose sums are one number."""
        return Totals({name: Sum(kind, (float(value),)) for name, value in values.items()})

    def __add__(self, other: Totals) -> Totals:
        mine = dict(self.entries)
        for key, entry in other.entries.items():
            mine[key] = mine[key] + entry if key in mine else entry
        return Totals(mine, {**self.tokens, **other.tokens})

    def __getitem__(self, key: Key) -> float | None:
        return self.entries[key].value if key in self.entries else None

    def only(self, kind: Kind) -> Totals:
        return Totals({key: entry for key, entry in self.entries.items() if entry.kind is kind})

    def numbers(self) -> dict[str, float]:
        """The metrics by name, without those that have no value."""
        found = ((key, self[key]) for key in self.entries if isinstance(key, str))
        return {key: value for key, value in found if value is not None}


def average(updates: Iterable[Totals]) -> Totals:
    """The metrics of a step from those of its updates, each of which has the same weight, whatever its size."""
    gathered: dict[Key, list[Sum]] = {}
    tokens: dict[SampleKey, Mapping[str, FloatArray]] = {}
    for totals in updates:
        tokens |= totals.tokens
        for key, entry in totals.entries.items():
            gathered.setdefault(key, []).append(entry)
    return Totals({key: _average(entries) for key, entries in gathered.items()}, tokens)


def _average(entries: list[Sum]) -> Sum:
    kind = entries[0].kind
    if kind in (Kind.COUNT, Kind.MAX):
        total = entries[0]
        for entry in entries[1:]:
            total += entry
        return total
    values = [value for entry in entries if (value := entry.value) is not None]
    return Sum(Kind.MEAN, (sum(values), float(len(values))))


class Meter:
    """Gathers the metrics of a pass: `meter.mean("entropy", 0.4, count=120)`.

    Tensors are kept until `totals`, which fetches all of them at once, so measuring never waits for a device.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Kind, Key, tuple[Number, ...]]] = []
        self._means: set[int] = set()  # indices of entries that have a mean where others have a sum
        self._tokens: list[tuple[Sequence[Observed], tuple[str, ...], Tensor]] = []

    def mean(self, name: Key, value: Number, count: Number = 1.0) -> None:
        self._means.add(len(self._entries))
        self.part(name, value, count)

    def part(self, name: Key, total: Number, count: Number) -> None:
        """Like `mean`, with the sum of `count` values instead of their mean."""
        self._entries.append((Kind.MEAN, name, (total, count)))

    def total(self, name: Key, value: Number) -> None:
        self._entries.append((Kind.TOTAL, name, (value,)))

    def max(self, name: Key, value: Number) -> None:
        """The largest value. NaN prevails, and -inf means that there is none."""
        self._entries.append((Kind.MAX, name, (value,)))

    def sample_size(self, name: Key, total: Number, squares: Number, count: Number) -> None:
        """Effective sample size (Σ w)² / (n Σ w²) over everything added: 1 when all weights are equal."""
        self._entries.append((Kind.SIZE, name, (total, squares, count)))

    def tokens(self, observed: Sequence[Observed], **numbers_N: Tensor) -> None:
        """Numbers of single tokens; only those of observed samples are kept."""
        if not observed:
            return
        import torch

        rows = torch.stack([values_N.detach().float() for values_N in numbers_N.values()])
        own = torch.cat([rows[:, s.start : s.stop] for s in observed], dim=1)
        self._tokens.append((observed, tuple(numbers_N), own))

    def totals(self) -> Totals:
        found: dict[Key, Sum] = {}
        numbers = iter(_fetch([number for _, _, group in self._entries for number in group]))
        for i, (kind, name, group) in enumerate(self._entries):
            first, *rest = (next(numbers) for _ in group)
            entry = Sum(kind, (first * rest[0] if i in self._means else first, *rest))
            found[name] = found[name] + entry if name in found else entry
        return Totals(found, {key: own for kept in self._tokens for key, own in _cut(*kept)})


def _largest(a: float, b: float) -> float:
    """The larger number; NaN prevails."""
    return a if a != a else b if b != b else max(a, b)


def _cut(
    observed: Sequence[Observed], names: Sequence[str], rows: Tensor
) -> Iterable[tuple[SampleKey, dict[str, FloatArray]]]:
    """The tokens' numbers of one micro-batch, by sample."""
    fetched, start = rows.cpu().numpy(), 0
    for sample in observed:
        stop = start + sample.stop - sample.start
        yield sample.key, dict(zip(names, fetched[:, start:stop], strict=True))
        start = stop


def _fetch(numbers: list[Number]) -> list[float]:
    """The numbers as floats, with a single copy from the device."""
    tensors = [number for number in numbers if not isinstance(number, int | float)]
    fetched: list[float] = []
    if tensors:
        import torch

        fetched = torch.stack([t.detach().double() for t in tensors]).tolist()
    values = iter(fetched)
    return [float(number) if isinstance(number, int | float) else next(values) for number in numbers]
