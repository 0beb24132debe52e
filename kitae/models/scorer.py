"""Scores of whole conversations by a reward model: rendered as in training, packed into rows without padding.

A score is read at the last token of a conversation, which ends the answer. Answers to one question share its tokens in
a row. What else is in a row changes a score only by rounding.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kitae.data.chat import Chat
from kitae.data.examples import Conversation
from kitae.data.packing import Row, Span, lay_out, pack
from kitae.data.rendering import Rendered, Renderer
from kitae.errors import DataError
from kitae.kernels.transfer import send
from kitae.models.attention_seam import causal_mask, masked_attention
from kitae.models.scalar import ScalarModel
from kitae.models.span_states import SpanStates
from kitae.models.state_seam import MixerCall
from kitae.types import Message, Sample

_ROW = 2048  # tokens


def scored(sequence: Rendered) -> Rendered:
    """The sequence with one more token, which is its only loss token: the score is read from the state that predicts
    it.

    The value of this token does not matter, because nothing computes with it.
    """
    tokens_T = np.append(sequence.tokens_T, 0)
    return replace(sequence, tokens_T=tokens_T, mask_T=np.arange(len(tokens_T)) == len(tokens_T) - 1)


class Scorer:
    """`Scorer(model, Chat(tokenizer, generation_config)).score([conversation, …])`, without gradients."""

    def __init__(self, model: ScalarModel, chat: Chat, row: int = _ROW) -> None:
        """row: the most tokens of a row; a longer conversation has a row of its own."""
        self._model, self._chat = model, chat
        self._row = row
        self.max_tokens = model.policy.max_context
        self._renderer = Renderer(chat, "last", self.max_tokens)

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[float | DataError]:
        """The scores in order; an error if a conversation cannot be rendered or is longer than the model's context."""
        rendered = [self._render(messages) for messages in conversations]
        samples = [_sample(i, made) for i, made in enumerate(rendered) if isinstance(made, Rendered)]
        scores = dict[int, float]()
        for part in pack(samples, self._row):
            numbers = self._numbers(lay_out(part))
            scores.update({sample.index: number for sample, number in zip(part, numbers, strict=True)})
        return [made if isinstance(made, DataError) else scores[i] for i, made in enumerate(rendered)]

    def _render(self, messages: Sequence[Message]) -> Rendered | DataError:
        try:
            shown = self._chat.shielded(messages) if self._chat.shields else messages
            made = self._renderer.render(Conversation(tuple(shown)))
        except DataError as error:
            return error
        if made.cut:
            return DataError(f"a conversation must fit into {self.max_tokens} tokens, got {made.length}")
        return made

    def _numbers(self, row: Row) -> list[float]:
        device = self._model.policy.device
        tokens_T, positions_T, source_N = (send(a, device) for a in (row.tokens_T, row.positions_T, row.source_N))
        with torch.inference_mode():
            scores_N: Tensor = self._model(tokens_T, positions_T, RowAttention(row.spans, positions_T), source_N)
        return scores_N.tolist()


def _sample(index: int, sequence: Rendered) -> Sample:
    made = scored(sequence)
    return Sample(0, index, made.tokens_T, made.prompt_length, made.mask_T, made.mask_T.astype(np.float32))


class RowAttention:
    """Attention within each span of a row, and from it to its prefix. Forward passes only."""

    def __init__(self, spans: Sequence[Span], positions_T: Tensor) -> None:
        self._parts = [_part(span, positions_T.device) for span in spans]
        self._positions_T = positions_T
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # the same in every layer
        self._states = SpanStates(spans, positions_T.device)

    def carry(self, call: MixerCall) -> None:
        self._states.carry(call)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out_THD = q.new_empty(q.shape[1], q.shape[0], v.shape[2])
        for number, (own, seen_S) in enumerate(self._parts):
            mask = self._mask(number, window)
            q_own, k_seen, v_seen = q[:, own], k[:, seen_S], v[:, seen_S]
            if softcap is None and sinks is None:
                mixed = scaled_dot_product_attention(
                    q_own[None], k_seen[None], v_seen[None], attn_mask=mask, scale=scale, enable_gqa=True
                )
                out_THD[own] = mixed[0].transpose(0, 1)
            else:
                out_THD[own] = masked_attention(q_own, k_seen, v_seen, mask, scale=scale, softcap=softcap, sinks=sinks)
        return out_THD

    def _mask(self, number: int, window: int | None) -> Tensor:
        if (number, window) not in self._masks:
            own, seen_S = self._parts[number]
            self._masks[number, window] = causal_mask(self._positions_T[own], self._positions_T[seen_S], window)
        return self._masks[number, window]


def _part(span: Span, device: torch.device) -> tuple[slice, Tensor]:
    """The positions of a span, and all positions that it sees."""
    own = slice(span.start, span.start + span.length)
    before = np.arange(span.prefix_start, span.prefix_start + span.prefix_length)
    return own, torch.as_tensor(np.concatenate([before, np.arange(own.start, own.stop)]), device=device)
