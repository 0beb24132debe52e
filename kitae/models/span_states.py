"""Which tokens of a packed row follow which, for mixers: each span follows its prefix, or begins a sequence.

Spans of similar lengths are one batch, filled up at the end, where a causal mixer sees it last. The state after a
prompt is computed once and branches into its responses, with its gradient; mixers that cannot go on from a state with
several tokens compute the prompt again with each response.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kitae.data.packing import Span
from kitae.kernels.transfer import send
from kitae.models.state_seam import MixerCall
from kitae.types import IntArray

_FILLED = 1.25  # most tokens of a batch, those that fill it up included, for each token of its sequences


class SpanStates:
    """A `StateContext`. Spans cover the row in order; the prefix of one is another that has none."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._spans, self._device = spans, device

    def carry(self, call: MixerCall) -> None:
        if call.steps:
            for rows_BL in self._whole:
                call.run(rows_BL)
            return
        alone, prompts, branches = self._parts
        for rows_BL in alone:
            call.run(rows_BL)
        after = [call.run(rows_BL, {}) for rows_BL in prompts]
        states = {name: torch.cat([found[name] for found in after]) for name in after[0]} if after else {}
        for rows_BL, prompt_B in branches:
            call.run(rows_BL, {name: state.index_select(0, prompt_B) for name, state in states.items()})

    @functools.cached_property
    def _whole(self) -> list[Tensor]:
        """Every span after its prefix."""
        rows = [np.concatenate([_before(s), _own(s)]) for s in self._spans]
        return [self._filled([rows[i] for i in batch]) for batch in _batches([len(r) for r in rows])]

    @functools.cached_property
    def _parts(self) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Spans without prefix that nobody follows, those that others follow, and these, each with its prompt's
        number."""
        followed = {s.prefix_start for s in self._spans if s.prefix_length}
        first = [s for s in self._spans if not s.prefix_length]
        alone = [s for s in first if s.start not in followed]
        prompts = sorted((s for s in first if s.start in followed), key=lambda s: s.length)
        branches = [s for s in self._spans if s.prefix_length]
        number = {s.start: i for i, s in enumerate(prompts)}
        assert all(prompts[number[s.prefix_start]].length == s.prefix_length for s in branches)
        alike = [list(same) for _, same in itertools.groupby(prompts, key=lambda s: s.length)]
        after = []
        for batch in _batches([s.length for s in branches]):
            of = np.array([number[branches[i].prefix_start] for i in batch])
            # At least two tokens: a mixer may change the state in place where it gets one, which has no gradient.
            after.append((self._filled([_own(branches[i]) for i in batch], 2), send(of, self._device)))
        return (
            [self._filled([_own(alone[i]) for i in batch]) for batch in _batches([s.length for s in alone])],
            [self._filled([_own(s) for s in same]) for same in alike],  # what fills up would change the states
            after,
        )

    def _filled(self, rows: Sequence[IntArray], least: int = 1) -> Tensor:
        """`[B, L]`, filled up with the number of tokens in the row, which stands for a token of zeros."""
        total = sum(s.length for s in self._spans)
        filled = np.full((len(rows), max(least, *map(len, rows))), total, dtype=np.int64)
        for line, own in zip(filled, rows, strict=True):
            line[: len(own)] = own
        return send(filled, self._device)


def _own(s: Span) -> IntArray:
    return np.arange(s.start, s.start + s.length)


def _before(s: Span) -> IntArray:
    return np.arange(s.prefix_start, s.prefix_start + s.prefix_length)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of sequences that are computed together, the longest first."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = sum(lengths[j] for j in batch) + lengths[i]
        if batch and (len(batch) + 1) * lengths[batch[0]] > _FILLED * size:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
