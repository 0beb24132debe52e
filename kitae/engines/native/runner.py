"""Turn the scheduler's plan into tensors, run the policy's modules, and sample."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from kitae.engines.native import sampler
from kitae.engines.native.page_cache import KVCache
from kitae.engines.native.paged_attention import DecodeAttention, ExactAttention, PrefillAttention, Stretch
from kitae.engines.native.scheduler import Admission
from kitae.engines.native.sequence import Decoding, Sketch
from kitae.engines.native.state_cache import Follows, PromptStates, StepStates
from kitae.engines.proof import directions, sketch
from kitae.errors import EngineError
from kitae.kept_sets import Words
from kitae.kernels.devices import decoding_kernels
from kitae.kernels.exact.exact_attention import Reach
from kitae.models.adapters import Adapter, RowAdapters, using
from kitae.models.policy import Policy
from kitae.models.routing import is_router, routers_of, watch_routing


class StepTokens(NamedTuple):
    """What a step gave, one of each for every row; the token is -1 in a row of a sequence that had ended before, and in
    that of a rejected draft.

    sketches: of the states that the tokens were drawn from, kept: the sets; empty and None where none are wanted.
    """

    tokens: list[int]
    logprobs: list[float]
    sketches: list[Sketch]
    kept: list[Words | None]


Result = Callable[[], StepTokens]
Draws = Callable[[], list[sampler.RowDraw]]  # waits for what decides the token of each row


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of a sequence, to be computed from `start` on, with the pages of all of them. before, after: the slots of
    what mixers carry on, from the tokens before the piece and after it."""

    tokens: tuple[int, ...]
    start: int
    pages: list[int]
    before: int | None
    after: int | None
    adapter: Adapter | None


class ModelRunner:
    """The reference: every step runs the policy's modules and is done when it returns."""

    ahead = 0  # steps that may be launched before the results of an earlier one are read
    linger = 0.02  # seconds that an idle engine waits for more requests
    speculative_rows = 8  # most rows of a step with draft tokens: beyond, they cost more than they save
    reread_share = 0.5  # of the bytes of all weights: what rows of draft tokens may read again of keys and values

    def __init__(
        self, policy: Policy, cache: KVCache, *, plain: bool = False, draft_tokens: int = 0, proves: bool = False
    ) -> None:
        """plain: no compiled kernels, only torch.

        draft_tokens: of each sequence, where few are decoded; none in a mixture, where each row reads weights, and none
        with mixers, whose states do not forget a rejected one. proves: results have the sketch of each state.
        """
        self.policy = policy
        self.cache = cache
        self.device = policy.device
        self.directions = directions(policy.head.weight.shape[1], policy.device) if proves else None
        self.draft_tokens = 0 if cache.states or any(map(is_router, policy.model.modules())) else draft_tokens
        self._weight_bytes = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        self.kernels = None
        if not plain and cache.is_even:
            self.kernels = decoding_kernels(policy.device, policy.dtype, cache.sizes[0][1])
        self.adapters = RowAdapters(policy.device)
        self._routers = [] if cache.experts is None else routers_of(policy.model)
        self._step_states: StepStates | None = None  # of the step that is computed
        self._shift_B: Tensor | None = None  # of the step's rows, see `Decoding.shift`; None: no row has any

    def weights_changed(self) -> None:
        """Called after every weight update."""
        if self.policy.vision is not None and self.policy.vision.trained:
            self.policy.vision.forget()

    def rest(self) -> None:
        """Called when the engine is paused: memory that the next step can fill again is freed."""

    def prefill(self, admission: Admission) -> Result:
        """Compute new prompts, compute or swap in preempted tails, and sample the first token of fresh sequences."""
        states, size = self.cache.states, self.cache.page_size
        whole = states is not None or self.policy.vision is not None
        prompts = [
            _Piece(p.tokens, p.start, p.pages, p.slot if p.start else None, p.slot, p.adapter)
            for p in admission.prefixes
        ]
        # From the last shared page border on: the tail of the prompt goes into the sequence's own page again. Mixers
        # go on from the end of the prompt alone, which must be computed before; so does a prompt with pictures, none of
        # which may be cut.
        tails = [
            _Piece((*s.request.prompt_tokens, *s.tokens[:-1]), start, s.pages, s.slot, s.slot, s.adapter)
            for s in admission.resumed
            if s.swapped is None and s.cached > (start := s.prompt_length if whole else s.prompt_length // size * size)
        ]
        ends = self._compute(prompts if whole else prompts + tails)
        for prefix, end in zip(admission.prefixes, ends, strict=False):
            prefix.hidden = end.clone()
        for s in admission.resumed:
            if s.swapped is not None:
                first = s.prompt_length // size
                self.cache.swap_in(s.swapped, s.pages[first : first + s.swapped.pages], s.slot)
        self.cache.copy_pages([a for a, _ in admission.copies], [b for _, b in admission.copies])
        if states:
            states.copy([a for a, _ in admission.branches], [b for _, b in admission.branches])
        if whole:
            self._compute(tails)
        if not admission.fresh:
            return lambda: StepTokens([], [], [], [])
        prefixes = list(dict.fromkeys(s.prefix for s in admission.fresh))
        row_of = {id(prefix): row for row, prefix in enumerate(prefixes)}
        hidden = torch.stack([p.hidden for p in prefixes if p and p.hidden is not None])
        logits = self._logits(hidden)
        rows = torch.tensor([row_of[id(s.prefix)] for s in admission.fresh], device=self.device)
        return self._sample(logits[rows], admission.fresh, hidden[rows])

    def _compute(self, pieces: Sequence["_Piece"]) -> list[Tensor]:
        """Compute all of them in one row, with their keys, values and states; returns the last hidden state of each."""
        if not pieces:
            return []
        page_size = self.cache.page_size
        stretches: list[Stretch] = []
        row = 0
        for piece in pieces:
            stretches.append(Stretch(row, len(piece.tokens) - piece.start, piece.start, piece.pages))
            row += stretches[-1].length
        tokens_T = torch.tensor([token for p in pieces for token in p.tokens[p.start :]], device=self.device)
        positions = [(p.pages, t) for p in pieces for t in range(p.start, len(p.tokens))]
        positions_T = torch.tensor([t for _, t in positions], device=self.device)
        pages_T = torch.tensor([pages[t // page_size] for pages, t in positions], device=self.device)
        places = pages_T, positions_T % page_size
        context: PrefillAttention | ExactAttention
        if self.policy.exact:
            runs = [(s.row, s.length, s.start, s.pages) for s in stretches]
            group = self.policy.heads // self.policy.kv_heads
            context = ExactAttention(self.cache, Reach.of(runs, page_size, group, self.device), *places)
        else:
            context = PrefillAttention(self.cache, stretches, *places, self._follow(pieces, stretches))
        adapters = [p.adapter for p in pieces for _ in p.tokens[p.start :]]
        turned = self._turned(pieces, positions_T)
        with self.recording(*places), using(self.adapters.of(adapters)):
            hidden = self._prompt_states(tokens_T, turned, context)
        return [hidden[s.row + s.length - 1] for s in stretches]

    def _turned(self, pieces: Sequence["_Piece"], positions_T: Tensor) -> Tensor:
        """The positions that the tokens of pieces are turned by."""
        vision = self.policy.vision
        if vision is None or not vision.moves:
            return positions_T
        found = [(p, self.policy.turned(p.tokens)) for p in pieces]
        if all(turned is None for _, turned in found):
            return positions_T
        own = (torch.arange(len(p.tokens), device=self.device).expand(3, -1) if t is None else t for p, t in found)
        return torch.cat([turned[:, p.start :] for (p, _), turned in zip(found, own, strict=True)], 1)

    def _follow(self, pieces: Sequence["_Piece"], stretches: list[Stretch]) -> PromptStates | None:
        """How mixers compute these pieces."""
        if self.cache.states is None:
            return None
        both = zip(pieces, stretches, strict=True)
        parts = [Follows(s.row, s.length, p.before, p.after) for p, s in both if p.after is not None]
        return PromptStates(self.cache.states, parts, self.device)

    def _prompt_states(
        self, tokens_T: Tensor, positions_T: Tensor, context: PrefillAttention | ExactAttention
    ) -> Tensor:
        return self.policy.hidden(tokens_T, positions_T, context)

    def width(self, running: list[Decoding]) -> int:
        """Rows of each of these sequences in a step: one, and its draft tokens."""
        most = min(1 + self.draft_tokens, self.speculative_rows // max(1, len(running)))
        if most < 2:
            return 1
        # Rows of one sequence do not share what they read; without kernels they copy it.
        again = sum(s.cached for s in running) * self.cache.page_bytes / self.cache.page_size
        room = self.reread_share * self._weight_bytes / (1 if self.kernels is not None else 8)
        return min(most, 1 + int(room // max(1, again)))

    def decode(self, running: list[Decoding], width: int = 1) -> Result:
        """One token for every running sequence, and its accepted drafts: `width` rows of each sequence, in order."""
        texts = [[s.tokens[-1], *(s.draft(width - 1) if width > 1 else ())] for s in running]
        rows = [(s, i) for s, text in zip(running, texts, strict=True) for i in range(len(text))]
        lengths = np.array([s.cached + 1 + i for s, i in rows], dtype=np.int32)
        table = np.zeros((len(rows), max(len(s.pages) for s in running)), dtype=np.int32)
        for row, (s, _) in zip(table, rows, strict=True):
            row[: len(s.pages)] = s.pages
        lengths_B = torch.from_numpy(lengths).to(self.device)
        tokens_B = torch.tensor([token for text in texts for token in text], device=self.device)
        if self.cache.states:
            slots_B = torch.tensor([s.slot for s, _ in rows], device=self.device)
            self._step_states = StepStates(self.cache.states, slots_B)
        draws = self.prepare([s for s, _ in rows], [i for _, i in rows])
        self._shift_B = None
        if any(s.shift for s in running):
            self._shift_B = torch.tensor([s.shift for s, _ in rows], device=self.device)
        with using(self.adapters.of([s.adapter for s, _ in rows])):
            hidden = self._decode_states(tokens_B, lengths_B, torch.from_numpy(table).to(self.device))
        drawn = self._sample(self._logits(hidden), [s for s, _ in rows], hidden, [i for _, i in rows], draws)
        return drawn if width == 1 else lambda: accepted(texts, width, drawn())

    def _decode_states(self, tokens_B: Tensor, lengths_B: Tensor, table: Tensor) -> Tensor:
        size, last_B = self.cache.page_size, lengths_B.long() - 1
        page_B = table.gather(1, (last_B // size)[:, None])[:, 0].long()
        context: DecodeAttention | ExactAttention = DecodeAttention(
            self.cache, table, lengths_B, self.kernels, self._step_states
        )
        if self.policy.exact:
            context = ExactAttention(self.cache, Reach.of_last(table, lengths_B, size), page_B, last_B % size)
        with self.recording(page_B, last_B % size):
            return self.policy.hidden(tokens_B, last_B if self._shift_B is None else last_B + self._shift_B, context)

    def recording(self, page_T: Tensor, slot_T: Tensor) -> AbstractContextManager[None]:
        """The context of a pass of the policy's modules in which `writer` records their experts."""
        write = self.writer(page_T, slot_T)
        return nullcontext() if write is None else watch_routing(self._routers, write)

    def writer(self, page_T: Tensor, slot_T: Tensor) -> Callable[[int, Tensor], None] | None:
        """A function that writes the experts of a layer beside keys and values; None where the cache records none.

        Indices and values are tensors on the device, so a graph that captures the call writes whenever it is replayed.
        """
        experts = self.cache.experts
        if experts is None:
            return None

        def write(layer: int, experts_TK: Tensor) -> None:
            experts.select(2, layer)[page_T, slot_T] = experts_TK.to(experts.dtype)

        return write

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        return self.policy.logits(hidden_BH)

    def prepare(self, sequences: Sequence[Decoding], later: Sequence[int] | None = None) -> Draws:
        """Begin to find out what decides the token of each row, beside the pass of the model."""
        rows = list(zip(sequences, later or [0] * len(sequences), strict=True))
        followed = [(s.following, ahead) for s, ahead in rows if s.following is not None]
        masks = followed[0][0].grammars.masks(followed) if followed else None

        def draws() -> list[sampler.RowDraw]:
            found = iter(masks() if masks is not None else ())
            return [
                sampler.RowDraw(s.request.sampling)
                if s.is_plain
                else s.draw(ahead, None if s.following is None else next(found))
                for s, ahead in rows
            ]

        return draws

    def _sample(
        self,
        logits: Tensor,
        sequences: list[Decoding],
        hidden: Tensor,
        later: list[int] | None = None,
        draws: Draws | None = None,
    ) -> Result:
        """later: for each row, how many tokens it is ahead of its sequence. draws: what was prepared."""
        places = [len(s.tokens) + i for s, i in zip(sequences, later or [0] * len(sequences), strict=True)]
        uniform = sampler.uniforms([s.seed for s in sequences], places)
        draws = draws or self.prepare(sequences, later)
        drawn = sampler.sample(logits, draws(), uniform, kernels=self.kernels, exact=self.policy.exact)
        require_finite(bool(torch.isfinite(drawn.logprobs).all()))
        sketches = [()] * len(sequences) if self.directions is None else sketch(hidden, self.directions).tolist()
        done = StepTokens(drawn.tokens.tolist(), drawn.logprobs.tolist(), sketches, drawn.kept)
        return lambda: done


def accepted(texts: list[list[int]], width: int, drawn: StepTokens) -> StepTokens:
    """The draws of `width` rows for each text, of which the first token is known and the others are drafts.

    What is drawn after a rejected draft is no token: it becomes -1.
    """
    found, row = StepTokens([], [], [], []), 0
    for text in texts:
        right = 1
        while right < len(text) and drawn.tokens[row + right - 1] == text[right]:
            right += 1
        part, rejected = slice(row, row + right), width - right
        found.tokens.extend([*drawn.tokens[part], *[-1] * rejected])
        found.logprobs.extend([*drawn.logprobs[part], *[0.0] * rejected])
        found.sketches.extend([*drawn.sketches[part], *[()] * rejected])
        found.kept.extend([*drawn.kept[part], *[None] * rejected])
        row += len(text)
    return found


def refuse_float8(policy: Policy, decoder: str) -> NoReturn:
    """Raise `EngineError` for a policy that the decoder did not take; broken weights agree with nothing either."""
    require_finite(all(bool(p.isfinite().all()) for p in policy.model.parameters()))
    raise EngineError(
        f"engine.weights_dtype = 'float8' needs a model that the {decoder} decoder computes, got {policy.source}"
    )


def require_finite(finite: bool) -> None:
    if not finite:
        raise EngineError("the model's logits are not finite (NaN or infinity): the weights are broken")
