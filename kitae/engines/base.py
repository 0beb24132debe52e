"""The engine seam: everything that turns prompts into sampled tokens implements `Engine`."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kitae.engines.constraint import Constraint as Constraint
from kitae.kept_sets import KeptSets, joined_sets
from kitae.store.columns import joined
from kitae.types import ExpertArray, FinishReason, FloatArray, Segment

if TYPE_CHECKING:  # they need torch, and who only talks to an engine does not
    from kitae.weights.base import Manifest
    from kitae.weights.probe import Probe


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one response are drawn: `SamplingParams(temperature=1.0, max_tokens=64, stop_tokens=(2,))`.

    Temperature 0 is greedy: the likeliest token is taken, and its reported log-prob is the model's own at
    temperature 1. Otherwise the log-prob is that of the distribution really sampled from, after temperature, top-k,
    top-p and min-p (applied in this order).

    constraint: what the response must match. Penalties change logits before the temperature does: those of tokens in
    prompt and response (repetition, which divides what is above 0 and multiplies what is below), and in the response
    (presence: once; frequency: as often as they occur). logit_bias: is added to the logits of these tokens.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    constraint: Constraint | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalised(self) -> tuple[str, ...]:
        """The names of those settings that change logits, and are not off."""
        off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}
        return tuple(name for name, value in off.items() if getattr(self, name) != value)

    @property
    def shaped(self) -> tuple[str, ...]:
        """The names of those settings that only Kitae's own engines follow, and are not off."""
        return ("constraint",) * (self.constraint is not None and self.constraint.strict) + self.penalised


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a response, each with its log-prob and the policy version that sampled it, as the engine gave them.

    kept: what each could have been, where that was asked for (`Request.keeps`) and is not the whole vocabulary.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    kept: KeptSets | None = None

    @staticmethod
    def of(turn: Segment) -> "Sampled":
        return Sampled(turn.tokens, turn.logprobs, turn.versions, turn.kept)

    def segment(self, experts: ExpertArray | None = None) -> Segment:
        return Segment("model", self.tokens, self.logprobs, self.versions, experts=experts, kept=self.kept)

    def after(self, count: int) -> "Sampled":
        return self._cut(slice(count, None))

    def until(self, count: int) -> "Sampled":
        return self._cut(slice(count))

    def _cut(self, part: slice) -> "Sampled":
        kept = None if self.kept is None else self.kept[part]
        return Sampled(self.tokens[part], self.logprobs[part], self.versions[part], kept)

    def then(self, news: "Sampled") -> "Sampled":
        return Sampled(
            joined(self.tokens, news.tokens),
            joined(self.logprobs, news.logprobs),
            joined(self.versions, news.versions),
            joined_sets([(self.kept, len(self.tokens)), (news.kept, len(news.tokens))]),
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One wanted response.

    `Request("17/3", prompt_tokens=(1, 5, 9), sampling=SamplingParams(), seed=987654321, share="17")`
    id: unique among the requests in flight; `abort` takes it.
    seed: names the random stream: the same seed draws the same numbers whatever else is in the batch (the logits may
    differ by rounding).
    share: requests with the same key and the same prompt compute that prompt once, and go to the same engine where
    there are several.
    prior: what a suspended request had sampled. It is continued, not sampled again, and counts towards max_tokens.
    session: names a conversation. The prompt of its next request begins with this prompt and its completion, so an
    engine may keep its cache until then.
    experts_from: the first position for which the caller wants the experts that a mixture chose; None: no experts.
    prior_experts: the experts of the prior tokens from that position on; the completion's experts begin with them.
    keeps: the caller wants to know what each token could have been (`Completion.kept`), to train on it.
    """

    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    share: str = ""
    prior: Sampled = field(default_factory=Sampled)
    session: str = ""
    experts_from: int | None = None
    prior_experts: ExpertArray | None = field(default=None, compare=False, repr=False)
    keeps: bool = False


def rollout_of(name: str) -> tuple[int, int]:
    """Group and sample of what requests of a rollout are called: `rollout_of("train/17/3") == (17, 3)`."""
    _, group, sample = name.rsplit("/", 2)
    return int(group), int(sample)


def stream_seed(*parts: object) -> int:
    """A 63-bit `Request.seed` made from any printable parts: `stream_seed(run_seed, "train", 17, 3)`."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled: `Completion("17/3", (42, 2), (-.1, -.3), versions=(3, 3), finish="stop")`.

    The stop token, or the tokens that complete a stop string, are part of `tokens`.
    experts: the experts of positions from `Request.experts_from` up to the last token but one, since the last token is
    never computed. Each is the choice of the first computation: a second one rounds otherwise, and may choose others.
    None: nobody asked, or the engine does not record experts, or has lost them.
    proof: sketches of the states that the tokens were drawn from (`kitae.engines.proof`), but for prior tokens. None:
    the engine makes none, or has lost them.
    kept: the tokens that each could have been; None: nobody asked, or all of the vocabulary.
    """

    id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: FinishReason
    experts: ExpertArray | None = field(default=None, compare=False, repr=False)
    proof: FloatArray | None = field(default=None, compare=False, repr=False)
    kept: KeptSets | None = None

    @staticmethod
    def of(
        id: str, sampled: Sampled, finish: FinishReason, experts: ExpertArray | None = None,
        proof: FloatArray | None = None,
    ) -> "Completion":  # fmt: skip
        return Completion(id, sampled.tokens, sampled.logprobs, sampled.versions, finish, experts, proof, sampled.kept)

    @property
    def sampled(self) -> Sampled:
        return Sampled(self.tokens, self.logprobs, self.versions, self.kept)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A new policy version: `WeightUpdate(4, manifest, recompute=False)`.

    manifest: what was published, for an engine with weights of its own; None for one that shares the trainer's weights.
    Sequences in flight continue with the keys and values of the old weights in their cache, or, with `recompute`, after
    these were computed again.
    """

    version: int
    manifest: "Manifest | None" = None
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the current state.

    restarts: how often an engine's process was lost and started again. repaired: buckets of weights that a delta left
    damaged and that were loaded again. engines: how many engines serve behind this one. restored: sequences that were
    swapped in from the memory of the host after a preemption.
    """

    version: int
    prompt_tokens: int
    prompt_tokens_shared: int
    generated_tokens: int
    preemptions: int
    running: int
    waiting: int
    busy_seconds: float
    restarts: int = 0
    repaired: int = 0
    engines: int = 1
    restored: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers must know of an engine before they use it: `Capabilities(shares_weights=False, scores=True)`.

    shares_weights: the engine samples from the trainer's own parameters. It must be paused while they change, and a
    weight update is a version number alone. Other engines load the weights that a manifest names.
    scores: its `probe` returns log-probs of its own copy of the weights.
    seeded: the same request gives the same tokens whatever else is in flight, also when it is suspended and continued
    or its engine is lost, except where rounding decides a draw.
    stop_strings: the engine ends a response at a stop string; otherwise it stops at tokens alone.
    """

    shares_weights: bool
    scores: bool = False
    seeded: bool = True
    stop_strings: bool = True


@runtime_checkable
class Accountable(Protocol):
    """An engine that knows which of several servers answered a request, and can do without one of them.

    `sources`: the servers that worked on requests with this id up to its last slash; empty where that is forgotten.
    `refuse`: never use a server again. Its requests in flight go to others; the caller judges its earlier answers.
    """

    def sources(self, rollout: str) -> frozenset[str]: ...
    async def refuse(self, source: str, why: str) -> None: ...


class AnswerCheck(Protocol):
    """Judges the answers of engines that are not trusted, before anything uses them.

    `examine`: what is wrong with an answer, or "". served: the version that was served when the request was passed on.
    `refused`: an engine is out, and why; rollouts: those that it had answered before, like `Accountable.sources` names
    them. Both may raise, which ends the run. `taken`: metrics since the last call.

    `begin`: judge the answers of an engine from now on. held: the version that the trainer has, and its count of
    updates at that version. withdraw: gives up rollouts that no step was trained on, by group and sample, and returns
    how many these were. tell: is called with a sentence for each engine that is out.
    """

    def begin(
        self,
        engine: "Provable",
        held: Callable[[], tuple[int, int]],
        withdraw: Callable[[Sequence[tuple[int, int]]], Awaitable[int]],
        tell: Callable[[str], Awaitable[None]],
    ) -> None: ...
    def taken(self) -> dict[str, float]: ...
    async def examine(self, request: Request, done: Completion, served: int) -> str: ...
    async def refused(self, engine: str, why: str, rollouts: Sequence[str]) -> None: ...


@runtime_checkable
class Provable(Protocol):
    """An engine of several, whose answers are checked one by one. withdrawn: rollouts that an engine answered which is
    out by now; whoever samples one again takes it from here first."""

    check: AnswerCheck | None
    withdrawn: set[str]


class Engine(Protocol):
    """Async; every method may be called while sequences are in flight.

    `generate` raises `RequestError` when the request itself is impossible (empty, or longer than the context or the
    cache); other requests continue. `pause` returns when no step is running and starts no new one until `resume`;
    requests wait meanwhile. `abort` ends a request early: its `generate` returns what was sampled so far with finish
    "abort". `suspend` ends all requests in flight that way, with finish "suspended": a request with that `prior`
    continues one. `progress` returns for each request in flight, by id, the tokens from which it could be continued, as
    far as this side knows, without the first tokens that the caller has: `known` gives their number by id. Reported
    tokens are never taken back.

    `update_weights` takes effect between two decoding steps, and returns the version that is served; tokens sampled
    later carry it. It refuses a manifest that does not fit with `EngineError`, and continues as before. It raises
    `WeightsDamaged` when the weights did not arrive whole, and then takes no step until whole ones come. `probe` scores
    a fixed sequence (`kitae.weights.probe`), once for each engine behind this one that has weights of its own and
    scores; an engine that shares the trainer's gives none.

    `close` fails the requests in flight with `EngineError`; afterwards every method that would start or change
    something raises it. A cancelled caller leaves nothing behind.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(self, request: Request) -> Completion: ...
    async def update_weights(self, update: WeightUpdate) -> int: ...
    async def probe(self) -> "tuple[Probe, ...]": ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, request_id: str) -> None: ...
    async def suspend(self) -> None: ...
    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...
