"""Pack samples into micro-batches: one row of tokens, no padding, each group's prompt only once.

A row is a list of spans. A prompt is a span of its own; every response that shares it is a span that attends to that
prompt and, causally, to itself. The last token of a response predicts nothing and is left out of the row.
Legend: T tokens of the row, N loss tokens (what the loss is summed over), in sample order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kitae.kernels.transfer import send
from kitae.types import Sample


@dataclass(frozen=True, slots=True)
class Span:
    """Row positions `[start, start + length)`, preceded by `[prefix_start, prefix_start + prefix_length)`."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass.

    Two responses of 2 and 3 tokens to one prompt of 4: T = 4 + 1 + 2 = 7, N = 5, and `source_N` is
    [3, 4, 3, 5, 6]: the row positions whose hidden states predict the loss tokens.
    """

    tokens_T: Tensor
    positions_T: Tensor
    spans: tuple[Span, ...]
    source_N: Tensor
    target_N: Tensor
    sample_N: Tensor
    logp_mu_N: Tensor
    version_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    logp_old_N: Tensor | None
    logp_ref_N: Tensor | None
    value_N: Tensor | None
    return_N: Tensor | None
    cov_rank_N: Tensor | None
    score_N: Tensor
    samples: tuple[Sample, ...]

    def split(self, values_N: np.ndarray) -> list[np.ndarray]:
        """Cut a vector over loss tokens into one piece per sample."""
        return np.split(values_N, np.cumsum([s.loss_tokens for s in self.samples])[:-1])


def pack(samples: Sequence[Sample], token_budget: int, share_prompts: bool = True) -> list[list[Sample]]:
    """Distribute samples over micro-batches of at most `token_budget` row tokens; one longer sample goes alone.

    Samples with a common prompt stay together as far as the budget allows. Every sample appears exactly once. As few
    micro-batches as first fit finds, evenly filled if that is possible: a short one would use the hardware badly.
    """
    families: dict[object, list[Sample]] = {}
    for i, s in enumerate(samples):
        key = (s.group, s.tokens_T[: s.prompt_length].tobytes()) if share_prompts else i
        families.setdefault(key, []).append(s)
    pieces: list[Piece] = []
    for family in families.values():
        prompt = family[0].prompt_length
        piece: list[Sample] = []
        size = prompt
        for s in family:
            own = s.length - prompt
            if piece and size + own > token_budget:
                pieces.append((size, piece))
                piece, size = [], prompt
            piece.append(s)
            size += own
        pieces.append((size, piece))
    pieces.sort(key=lambda p: -p[0])
    alone = [p for p in pieces if p[0] > token_budget]
    rest = pieces[len(alone) :]
    bins = _first_fit(rest, token_budget)
    even = _even(rest, len(bins))
    return [content for _, content in alone + (even if all(size <= token_budget for size, _ in even) else bins)]


Piece = tuple[int, list[Sample]]  # row tokens, samples


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


def collate(samples: Sequence[Sample], device: torch.device, share_prompts: bool = True) -> MicroBatch:
    """Lay out one micro-batch."""
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    spans: list[Span] = []
    prompts: dict[bytes, Span] = {}
    source: list[np.ndarray] = []
    size = 0

    def add(piece: np.ndarray, first: int, prefix: Span | None) -> Span:
        nonlocal size
        span = Span(size, len(piece), prefix.start, prefix.length) if prefix else Span(size, len(piece))
        tokens.append(piece)
        positions.append(np.arange(first, first + len(piece)))
        if len(piece):
            spans.append(span)
        size += len(piece)
        return span

    for s in samples:
        prompt, response = s.tokens_T[: s.prompt_length], s.tokens_T[s.prompt_length : -1]
        if share_prompts:
            key = prompt.tobytes()
            if key not in prompts:
                prompts[key] = add(prompt, 0, None)
            before = prompts[key]
            own = add(response, s.prompt_length, before)
            row_of_T = np.concatenate([before.start + np.arange(before.length), own.start + np.arange(own.length)])
        else:
            own = add(s.tokens_T[:-1], 0, None)
            row_of_T = own.start + np.arange(own.length)
        source.append(row_of_T[np.flatnonzero(s.mask_T) - 1])

    def flat(name: str) -> Tensor:
        return send(np.concatenate([getattr(s, name)[s.mask_T] for s in samples]), device)

    def flat_or_none(name: str) -> Tensor | None:
        return flat(name) if all(getattr(s, name) is not None for s in samples) else None

    counts = [s.loss_tokens for s in samples]
    return MicroBatch(
        tokens_T=send(np.concatenate(tokens), device),
        positions_T=send(np.concatenate(positions), device),
        spans=tuple(spans),
        source_N=send(np.concatenate(source), device),
        target_N=flat("tokens_T"),
        sample_N=send(np.repeat(np.arange(len(samples)), counts), device),
        logp_mu_N=flat("logp_mu_T"),
        version_N=flat("versions_T"),
        advantage_N=flat("advantage_T"),
        weight_N=flat("weight_T"),
        logp_old_N=flat_or_none("logp_old_T"),
        logp_ref_N=flat_or_none("logp_ref_T"),
        value_N=flat_or_none("value_T"),
        return_N=flat_or_none("return_T"),
        cov_rank_N=flat_or_none("cov_rank_T"),
        score_N=send(np.repeat(np.array([s.score for s in samples], dtype=np.float32), counts), device),
        samples=tuple(samples),
    )
