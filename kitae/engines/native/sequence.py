"""State of one request in the engine, and of a prompt that several requests share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kitae.engines.base import Completion, Request, Sampled
from kitae.engines.native.ngram_speculation import Repeats
from kitae.types import ExpertArray, FinishReason

PrefixKey = tuple[str, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt computed once. Holds one reference to each of its pages while `users` may still join.

    `hidden` is the last hidden state of the prompt: every sample draws its first token from it. The pages hold the
    first `start` tokens already.
    """

    key: PrefixKey
    pages: list[int]
    start: int = 0
    hidden: Tensor | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.key[1]


@dataclass(frozen=True, slots=True)
class Lease:
    """What is kept of a session until its next request: tokens, and the pages that hold them."""

    tokens: tuple[int, ...]
    pages: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Stowed:
    """What some pages hold, in the memory of the host: keys and values, their scales, experts."""

    pages: int
    tensors: tuple[Tensor, ...]


@dataclass(slots=True, eq=False)
class Decoding:
    """One request on its way. The cache holds all its tokens but the last generated one.

    stowed: where it was preempted, its own pages, if the host had room for them. experts: from `request.experts_from`
    on, those that were chosen before its pages were given back: what is computed again is rounded otherwise, and may
    choose others. repeats: its text, where the host guesses.
    """

    request: Request
    seed: int
    limit: int
    done: Callable[[Completion | Exception], None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    prefix: Prefix | None = None
    stowed: Stowed | None = None
    experts: ExpertArray | None = None
    repeats: Repeats | None = None

    @property
    def key(self) -> PrefixKey:
        """What is computed for all who ask the same and are willing to share, or for this request alone."""
        return ("" if self.request.share else self.request.id, self.request.prompt_tokens)

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

    def guess(self, count: int) -> list[int]:
        """At most `count` tokens that may come next, and no more than it may still sample before its last."""
        if self.repeats is None:
            self.repeats = Repeats(self.request.prompt_tokens)
        self.repeats.extend(self.tokens[len(self.repeats) - self.prompt_length :])
        return self.repeats.guess(min(count, self.limit - len(self.tokens) - 1))

    def progress(self, known: int = 0) -> Sampled:
        """What it could be continued from, after the first `known` tokens. The last token may be the one that ends it,
        so it is left out."""
        return self.between(known, max(len(self.request.prior.tokens), len(self.versions) - 1))

    def between(self, start: int, stop: int) -> Sampled:
        part = slice(start, stop)
        return Sampled(tuple(self.tokens[part]), tuple(self.logprobs[part]), tuple(self.versions[part]))

    def completion(self, finish: FinishReason) -> Completion:
        sampled = tuple(self.tokens), tuple(self.logprobs), tuple(self.versions)
        return Completion(self.request.id, *sampled, finish, self.experts)
