"""Pack samples into rows: one row of tokens for a forward and backward pass, no padding, each group's prompt only once.

A row is a list of spans. A prompt is a span of its own; every response that shares it is a span that attends to that
prompt and, causally, to itself. The last token of a response predicts nothing and is left out of the row.
Legend: T tokens of the row, N loss tokens (what the loss is summed over), in sample order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kitae.types import FloatArray, IntArray, Sample, SampleKey

Column = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Row positions `[start, start + length)`, preceded by `[prefix_start, prefix_start + prefix_length)`."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """The loss tokens `[start, stop)` of a row are those of one sample: `Observed((17, 3, 0), 12, 20)`."""

    key: SampleKey
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one pass computes, as it is sent to whoever does: arrays only.

    Two responses of 2 and 3 tokens to one prompt of 4: T = 4 + 1 + 2 = 7, N = 5, `lengths` is (2, 3), and `source_N` is
    [3, 4, 3, 5, 6]: the row positions whose hidden states predict the loss tokens.
    """

    tokens_T: IntArray
    positions_T: IntArray
    spans: tuple[Span, ...]
    source_N: IntArray
    target_N: IntArray
    weight_N: FloatArray
    columns: Mapping[str, FloatArray]
    lengths: tuple[int, ...]  # loss tokens of each sample
    observed: tuple[Observed, ...] = ()  # samples whose single tokens somebody wants to see

    @staticmethod
    def empty() -> "Row":
        """One token and no loss: for a rank that has nothing to do while the others do."""
        nothing, none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        token = np.zeros(1, dtype=np.int64)
        return Row(token, token, (Span(0, 1),), nothing, nothing, none, {}, ())

    @property
    def loss_tokens(self) -> int:
        return len(self.target_N)

    def split(self, values_N: FloatArray) -> list[FloatArray]:
        """Cut a vector over loss tokens into one piece per sample."""
        return np.split(values_N, np.cumsum(self.lengths)[:-1]) if self.lengths else []


def pack(
    samples: Sequence[Sample], token_budget: int, share_prompts: bool = True, multiple: int = 1
) -> list[list[Sample]]:
    """Distribute samples over rows of at most `token_budget` tokens; one longer sample, or unit of samples, goes alone.

    Samples with a common prompt stay together as far as the budget allows, those of a unit always. Every sample appears
    exactly once. As few rows as first fit finds, evenly filled if that is possible: a short one would use the hardware
    badly. The number of rows is a multiple of `multiple`; rows that are missing for that are empty.
    """
    pieces = [p for family in _families(samples, share_prompts) for p in _cut(family, token_budget, share_prompts)]
    pieces.sort(key=lambda p: -p[0])
    alone = [p for p in pieces if p[0] > token_budget]
    rest = pieces[len(alone) :]
    bins = _first_fit(rest, token_budget)
    even = _even(rest, len(bins))
    rows = [content for _, content in alone + (even if all(size <= token_budget for size, _ in even) else bins)]
    return rows + [[] for _ in range(-len(rows) % multiple)]


Piece = tuple[int, list[Sample]]  # row tokens, samples


def _families(samples: Sequence[Sample], share_prompts: bool) -> Iterable[list[Sample]]:
    """Samples with the same prompt, if prompts are shared."""
    families: dict[object, list[Sample]] = {}
    for i, s in enumerate(samples):
        key = (s.group, s.prompt_T.tobytes()) if share_prompts else i
        families.setdefault(key if s.unit is None else ("unit", s.unit), []).append(s)
    return families.values()


def _cut(family: list[Sample], token_budget: int, share_prompts: bool) -> Iterable[Piece]:
    """The family in pieces that fit; a unit is not cut."""
    if family[0].unit is not None:
        yield _size(family, share_prompts), family
        return
    prompt = family[0].prompt_length
    piece: list[Sample] = []
    size = prompt
    for s in family:
        own = s.length - prompt
        if piece and size + own > token_budget:
            yield size, piece
            piece, size = [], prompt
        piece.append(s)
        size += own
    yield size, piece


def _size(unit: Sequence[Sample], share_prompts: bool) -> int:
    """Row tokens of a unit, whose samples may have one prompt or several."""
    if not share_prompts:
        return sum(s.length for s in unit)
    prompts = {s.prompt_T.tobytes(): s.prompt_length for s in unit}
    return sum(prompts.values()) + sum(s.length - s.prompt_length for s in unit)


def _first_fit(pieces: Sequence[Piece], token_budget: int) -> list[Piece]:
    bins: list[Piece] = []
    for size, piece in pieces:
        for i, (used, content) in enumerate(bins):
            if used + size <= token_budget:
                bins[i] = (used + size, content + piece)
                break
        else:
            bins.append((size, list(piece)))
    return bins


def _even(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Each piece to the emptiest of `count` bins."""
    bins: list[Piece] = [(0, []) for _ in range(count)]
    for size, piece in pieces:
        i = min(range(count), key=lambda i: bins[i][0])
        bins[i] = (bins[i][0] + size, bins[i][1] + piece)
    return bins


def lay_out(samples: Sequence[Sample], share_prompts: bool = True, observed: Collection[SampleKey] = ()) -> Row:
    """One row; of columns, those that all of its samples have."""
    if not samples:
        return Row.empty()
    tokens: list[IntArray] = []
    positions: list[IntArray] = []
    spans: list[Span] = []
    prompts: dict[bytes, Span] = {}
    source: list[IntArray] = []
    targets: list[IntArray] = []
    size = 0

    def add(piece: IntArray, first: int, prefix: Span | None) -> Span:
        nonlocal size
        span = Span(size, len(piece), prefix.start, prefix.length) if prefix else Span(size, len(piece))
        tokens.append(piece)
        positions.append(np.arange(first, first + len(piece)))
        if len(piece):
            spans.append(span)
        size += len(piece)
        return span

    for s in samples:
        tokens_T = np.asarray(s.tokens_T)
        targets.append(tokens_T[s.mask_T])
        prompt, response = tokens_T[: s.prompt_length], tokens_T[s.prompt_length : -1]
        if share_prompts:
            key = prompt.tobytes()
            if key not in prompts:
                prompts[key] = add(prompt, 0, None)
            before = prompts[key]
            own = add(response, s.prompt_length, before)
            row_of_T = np.concatenate([before.start + np.arange(before.length), own.start + np.arange(own.length)])
        else:
            own = add(tokens_T[:-1], 0, None)
            row_of_T = own.start + np.arange(own.length)
        source.append(row_of_T[np.flatnonzero(s.mask_T) - 1])
    shared = set.intersection(*(set(s.columns) for s in samples))
    return Row(
        tokens_T=np.concatenate(tokens),
        positions_T=np.concatenate(positions),
        spans=tuple(spans),
        source_N=np.concatenate(source),
        target_N=np.concatenate(targets),
        weight_N=np.concatenate([s.weight_T[s.mask_T] for s in samples]),
        columns={name: np.concatenate([s.loss(name) for s in samples]) for name in sorted(shared)},
        lengths=tuple(s.loss_tokens for s in samples),
        observed=_observed(samples, observed) if observed else (),
    )


def _observed(samples: Sequence[Sample], observed: Collection[SampleKey]) -> tuple[Observed, ...]:
    ends = np.cumsum([s.loss_tokens for s in samples]).tolist()
    found = zip(samples, [0, *ends], ends, strict=False)
    return tuple(Observed(s.key, start, stop) for s, start, stop in found if s.key in observed)
