"""State of one request in the engine, and of a prompt that several requests share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from torch import Tensor

from kitae.data.pictures import PICTURE
from kitae.engines.base import Completion, Request, Sampled
from kitae.engines.native.grammars import Following
from kitae.engines.native.ngram_speculation import NgramDrafts
from kitae.engines.native.sampler import RowDraw, is_shaped
from kitae.kept_sets import KeptLog, Words
from kitae.models.adapters import Adapter
from kitae.types import ExpertArray, FinishReason, FloatArray

PrefixKey = tuple[str, tuple[int, ...], int]
Sketch = Sequence[float]


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt that is computed once. It holds one reference to each of its pages while requests may still join.

    `hidden` is the last hidden state of the prompt, from which every sample draws its first token. The pages hold the
    first `start` tokens already, where a session's cache begins the prompt. slot: of what mixers carry on from its end,
    where the model has mixers; until the prompt is computed, from its first `start` tokens.
    """

    key: PrefixKey
    pages: list[int]
    start: int = 0
    hidden: Tensor | None = None
    adapter: Adapter | None = None
    slot: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.key[1]


@dataclass(frozen=True, slots=True)
class SessionPrefix:
    """What the cache keeps of a session until its next request: the tokens, and the pages and the slot that hold
    them."""

    tokens: tuple[int, ...]
    pages: list[int]
    slot: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SwappedPages:
    """The contents of pages in the memory of the host: keys and values, their scales, and experts; and what mixers
    carry on. room: how many pages take as much memory."""

    pages: int
    tensors: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    room: int


@dataclass(slots=True, eq=False)
class Decoding:
    """A request that is being decoded. The cache holds all its tokens but the last generated one.

    swapped: the sequence's own pages while it is preempted, if the host had room for them. experts: those of positions
    from `request.experts_from` on, as they were chosen before the pages were given back; a second computation rounds
    otherwise, and may choose others. sketches: of the states that its own tokens were drawn from, where proofs are
    wanted. drafts: the text from which the host drafts tokens, once it has been asked to; drafted: those of the last
    step. kept: what the tokens could have been, where the request wants to know. following: its constraint, if any.
    shift: how much further than their places its own tokens are turned, after pictures with rows and columns.
    """

    request: Request
    seed: int
    limit: int
    done: Callable[[Completion | Exception], None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    prefix: Prefix | None = None
    swapped: SwappedPages | None = None
    experts: ExpertArray | None = None
    sketches: list[Sketch] = field(default_factory=list)
    drafts: NgramDrafts | None = None
    drafted: list[int] = field(default_factory=list)
    adapter: Adapter | None = None
    kept: KeptLog | None = None
    following: Following | None = None
    shift: int = 0

    @property
    def said(self) -> tuple[int, ...]:
        """The prompt without places of pictures."""
        prompt = self.request.prompt_tokens
        return prompt if max(prompt) < PICTURE else tuple(token for token in prompt if token < PICTURE)

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are drawn from the whole vocabulary, by the logits as they are."""
        return self.following is None and not is_shaped(self.request.sampling)

    def draw(self, ahead: int = 0, allowed: Words | None = None) -> RowDraw:
        """What decides its next token, or the one that comes after so many drafts."""
        answer = (*self.tokens, *self.drafted[:ahead])
        prompt = self.said if self.request.sampling.penalised else ()
        return RowDraw(self.request.sampling, prompt, answer, allowed, self.request.keeps)

    @property
    def key(self) -> PrefixKey:
        """The key of the prompt: equal for all requests that share this prompt, or the request's own."""
        return ("" if self.request.share else self.request.id, self.request.prompt_tokens, id(self.adapter))

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are, or must be, in the pages before the next decoding step."""
        return self.prompt_length + max(0, len(self.tokens) - 1)

    @property
    def capacity(self) -> int:
        """Tokens that are ever in the pages: the last one generated never is."""
        return self.prompt_length + self.limit - 1

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens that may come next, and fewer than the sequence may still sample."""
        if self.drafts is None:
            self.drafts = NgramDrafts(self.request.prompt_tokens)
        self.drafts.extend(self.tokens[len(self.drafts) - self.prompt_length :])
        drafted = self.drafts.draft(min(count, self.limit - len(self.tokens) - 1))
        self.drafted = list(takewhile(lambda token: token < PICTURE, drafted))
        if self.following is not None:
            self.drafted = self.following.drafted = self.following.keep_valid(self.drafted)
        return self.drafted

    def progress(self, known: int = 0) -> Sampled:
        """What the request could be continued from, after the first `known` tokens.

        The last token is left out, since it may be the one that ends the sequence.
        """
        return self.between(known, max(len(self.request.prior.tokens), len(self.versions) - 1))

    def between(self, start: int, stop: int) -> Sampled:
        part = slice(start, stop)
        kept = None if self.kept is None else self.kept.between(start, stop)
        sampled = tuple(self.tokens[part]), tuple(self.logprobs[part]), tuple(self.versions[part])
        return Sampled(*sampled, kept if kept is not None and kept.any else None)

    def completion(self, finish: FinishReason) -> Completion:
        proof: FloatArray | None = np.array(self.sketches, np.float32) if self.sketches else None
        return Completion.of(self.request.id, self.between(0, len(self.tokens)), finish, self.experts, proof)
