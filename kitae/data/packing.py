"""Pack samples into rows: one row of tokens for a forward and backward pass, no padding, each prompt only once.

A row is a list of spans. A prompt is a span of its own; every response that shares it is a span that attends to that
prompt and, causally, to itself. The last token of a response predicts nothing and is left out of the row.
Legend: T tokens of the row, N loss tokens (what the loss is summed over), in sample order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kitae.kept_sets import KeptSets, joined_sets
from kitae.types import ExpertArray, FloatArray, IntArray, Sample, SampleKey

Column = npt.NDArray[np.float32]

NO_RECORD = -1
"""In the place of each expert of a position that has no record."""


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
    experts_TLK: ExpertArray | None = None  # what a pass shall choose in its L layers that mix; NO_RECORD: its own
    kept_N: KeptSets | None = None  # the tokens over which log-probs are normalised; None: all

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
        key = _prompt(s) if share_prompts else i
        families.setdefault(key if s.unit is None else ("unit", s.unit), []).append(s)
    return families.values()


def _prompt(s: Sample) -> tuple[bytes, bytes]:
    """What samples have in common that share a prompt: its tokens, and the experts that it is computed with."""
    experts = b"" if s.experts is None else s.experts[: s.prompt_length].astype(np.int16).tobytes()
    return s.prompt_T.tobytes(), experts


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
    prompts = {_prompt(s): s.prompt_length for s in unit}
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


@dataclass(slots=True)
class _Layout:
    """Where the tokens of samples lie in a row. places: of each sample, the row positions of all its tokens but one."""

    share_prompts: bool
    tokens: list[IntArray] = field(default_factory=list)
    positions: list[IntArray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    places: list[IntArray] = field(default_factory=list)
    size: int = 0

    @classmethod
    def of(cls, samples: Sequence[Sample], share_prompts: bool) -> "_Layout":
        layout, prompts = cls(share_prompts), dict[tuple[bytes, bytes], Span]()
        for s in samples:
            layout._place(s, prompts)
        return layout

    def _place(self, s: Sample, prompts: dict[tuple[bytes, bytes], Span]) -> None:
        tokens_T = np.asarray(s.tokens_T)
        if not self.share_prompts:
            self.places.append(_range(self._add(tokens_T[:-1], 0, None)))
            return
        prompt, response = tokens_T[: s.prompt_length], tokens_T[s.prompt_length : -1]
        key = _prompt(s)
        if key not in prompts:
            prompts[key] = self._add(prompt, 0, None)
        own = self._add(response, s.prompt_length, prompts[key])
        places = np.concatenate([_range(prompts[key]), _range(own)])
        self.places.append(places[: s.length - 1])  # without a response, the prompt has one more

    def _add(self, piece: IntArray, first: int, prefix: Span | None) -> Span:
        span = Span(self.size, len(piece), prefix.start, prefix.length) if prefix else Span(self.size, len(piece))
        self.tokens.append(piece)
        self.positions.append(np.arange(first, first + len(piece)))
        if len(piece):
            self.spans.append(span)
        self.size += len(piece)
        return span


def _range(span: Span) -> IntArray:
    return span.start + np.arange(span.length)


def lay_out(samples: Sequence[Sample], share_prompts: bool = True, observed: Collection[SampleKey] = ()) -> Row:
    """One row; of columns, those that all of its samples have."""
    if not samples:
        return Row.empty()
    layout = _Layout.of(samples, share_prompts)
    shared = set.intersection(*(set(s.columns) for s in samples))
    mask = np.concatenate([s.mask_T for s in samples])
    return Row(
        tokens_T=np.concatenate(layout.tokens),
        positions_T=np.concatenate(layout.positions),
        spans=tuple(layout.spans),
        source_N=np.concatenate(layout.places)[np.concatenate([s.mask_T[1:] for s in samples])],
        target_N=np.concatenate([np.asarray(s.tokens_T) for s in samples])[mask],
        weight_N=np.concatenate([s.weight_T for s in samples])[mask],
        columns={name: np.concatenate([s.columns[name] for s in samples])[mask] for name in sorted(shared)},
        lengths=tuple(s.loss_tokens for s in samples),
        observed=_observed(samples, observed) if observed else (),
        experts_TLK=_experts(samples, layout),
        kept_N=joined_sets([(s.kept and s.kept[s.mask_T], s.loss_tokens) for s in samples]),
    )


def _experts(samples: Sequence[Sample], layout: _Layout) -> ExpertArray | None:
    known = [(s.experts, row_of_T) for s, row_of_T in zip(samples, layout.places, strict=True) if s.experts is not None]
    if not known:
        return None
    experts_TLK = np.full((layout.size, *known[0][0].shape[1:]), NO_RECORD, dtype=np.int16)
    for own, row_of_T in known:
        experts_TLK[row_of_T] = own
    return experts_TLK


def with_experts(samples: Sequence[Sample], experts_TLK: ExpertArray, share_prompts: bool) -> list[Sample]:
    """The samples of a row, each with its experts of those of the row's positions."""
    places = _Layout.of(samples, share_prompts).places
    return [replace(s, experts=experts_TLK[row_of_T]) for s, row_of_T in zip(samples, places, strict=True)]


def _observed(samples: Sequence[Sample], observed: Collection[SampleKey]) -> tuple[Observed, ...]:
    ends = np.cumsum([s.loss_tokens for s in samples]).tolist()
    found = zip(samples, [0, *ends], ends, strict=False)
    return tuple(Observed(s.key, start, stop) for s, start, stop in found if s.key in observed)
