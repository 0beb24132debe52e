"""The records that travel between the stages of the pipeline.

    Prompt ─► Segment ─► Chain ─► Rollout ─► Group ─► Sample ─► Batch ─► Row ─► MicroBatch
              (engine)   (environment)   (verifier)  (advantages)      (packing)  (trainer)

All of them are frozen. Tokens, their log-probs and the policy version that sampled each of them are written once, by
the engine, and never derived again from text. Shape legend for array names: T tokens of one sequence, G samples of
one group. `Batch` and `MicroBatch`, the only record that holds tensors, live in `kitae.trainer`, `Row` in
`kitae.data.packing`.

Columns of a segment are in memory, as tuples, or lie in files of the run (`kitae.store.columns`): the same sequences,
whose length is known before anything is read. Who handles ids, lengths and scores alone reads nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
"""Of consecutive positions, the experts that a pass chose in each layer that mixes them: `[positions, L, K]`."""

FinishReason = Literal["stop", "length", "abort", "suspended"]
"""stop: a stop token or stop string; length: max_tokens, the context or the turns are used up; abort: cancelled by the
caller; suspended: interrupted, to be continued later."""

Status = Literal["complete", "suspended", "failed"]


SampleKey = tuple[int, int, int]
"""Group, index of the sample, chain."""

Tool = Mapping[str, Any]
"""A function as JSON schema, as chat templates take it: `{"type": "function", "function": {"name": "add", …}}`."""

GREEDY = -1
"""The index of the greedy response to a prompt, beside its samples 0, 1, 2, …"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model asked a tool to do: `ToolCall("python", {"code": "6 * 7"}, id="call_0")`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn: `Message("user", "Reverse 12, 34, 56")`, `Message("tool", "42", call_id="call_0")`.

    calls: what an assistant asked tools to do; call_id: which call a tool answers, and name: which tool. parts: where
    the content is not one text, its parts as chat templates take them: `({"type": "text", "text": "Look:"}, …)`.
    problem: why a call in it cannot be read; no template shows that.
    """

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    parts: tuple[Mapping[str, Any], ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said in one turn, as others read it: `Turn("…", "Well …", calls=(ToolCall("add", {"a": 1}),))`.

    text: all of it, without special tokens, cut before a stop string. content: what is left of it without reasoning and
    calls. reasoning: its thinking, where the model's format marks it. calls: of tools. problem: why something that
    looks like a call cannot be read; there are no calls then.
    """

    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""

    @property
    def told(self) -> str:
        """The content that a client is told: a call that cannot be read is a part of it."""
        return self.text if self.problem else self.content


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: what the model reads, and what the verifier needs to judge the answer.

    `Prompt("reverse/train/17", (Message("user", "Reverse 12, 34, 56"),), reference="56, 34, 12")`
    The context holds the question as text, and what else the data says. `gold` is a response that must score 1, where
    the data has one beside the reference (a solution beside test cases, say).
    """

    id: str
    messages: tuple[Message, ...]
    reference: Any
    context: Mapping[str, Any] = field(default_factory=dict)
    gold: str | None = None


class Unread(ABC):
    """A text that lies somewhere, and is read when somebody wants it: `str(text)`."""

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str: ...


class Runs(Sequence[int]):
    """Numbers that seldom change, as versions do from token to token: `Runs(((3, 510), (4, 2)))` are 512 of them."""

    __slots__ = ("_length", "runs")

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        same = groupby((run for run in runs if run[1]), key=lambda run: run[0])
        self.runs: tuple[tuple[int, int], ...] = tuple((value, sum(count for _, count in some)) for value, some in same)
        self._length = sum(count for _, count in self.runs)

    @staticmethod
    def of(values: Sequence[int]) -> "Runs":
        if isinstance(values, Runs):
            return values
        return Runs([(value, sum(1 for _ in same)) for value, same in groupby(values)])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return (value for value, count in self.runs for _ in range(count))

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> "Runs": ...
    def __getitem__(self, key: int | slice) -> "int | Runs":
        if not isinstance(key, slice):
            place = range(self._length)[key]
            ((value, _),) = self[place : place + 1].runs
            return value
        start, stop, step = key.indices(self._length)
        assert step == 1, "runs are cut, not thinned out"
        ends = list(accumulate(count for _, count in self.runs))
        cuts = [(v, min(stop, end) - max(start, end - n)) for (v, n), end in zip(self.runs, ends, strict=True)]
        return Runs([(value, count) for value, count in cuts if count > 0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> IntArray:
        values, counts = ([run[i] for run in self.runs] for i in (0, 1))
        return np.repeat(np.array(values, dtype=dtype or np.int64), counts)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Runs):
            return self.runs == other.runs
        return tuple(self) == other if isinstance(other, tuple) else False

    def __hash__(self) -> int:
        return hash(tuple(self))


class Late:
    """An array in parts, some of them unread: its length is known, its numbers are read when somebody looks at them."""

    __slots__ = ("_length", "dtype", "parts")

    def __init__(self, parts: Sequence[Any], dtype: npt.DTypeLike) -> None:
        self.parts = tuple(parts)
        self.dtype = np.dtype(dtype)
        self._length = sum(map(len, self.parts))

    def __len__(self) -> int:
        return self._length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return _whole(self.parts, dtype or self.dtype)

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = np.asarray(self)[key]
        return found


def spliced(parts: Sequence[Any], dtype: npt.DTypeLike) -> "npt.NDArray[Any] | Late":
    """One array of the parts; it is made later where some of them are unread."""
    if all(isinstance(part, tuple | np.ndarray | Runs) for part in parts):
        return _whole(parts, dtype)
    return Late(parts, dtype)


def _whole(parts: Sequence[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens from one source.

    `Segment("model", tokens=(42, 7, 2), logprobs=(-0.1, -0.7, -0.01), versions=(3, 3, 3))`
    Tokens of an environment (tool output, observations) have log-prob 0 and version -1 and are never trained on.
    reward: what the environment gave for this turn of the model; None: it did not say.
    experts: of a turn of the model, those that the engine chose for it, where somebody wants to know them. The last are
    of the last token but one: a turn of 3 tokens after a prompt of 4 has those of positions 0 to 5, and one of 2 tokens
    after an answer of 5 to it, those of positions 6 to 12.
    """

    source: Literal["model", "environment"]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    reward: float | None = None
    experts: ExpertArray | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def observed(tokens: Sequence[int]) -> "Segment":
        return Segment("environment", tuple(tokens), (0.0,) * len(tokens), (-1,) * len(tokens))


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier said of one response: `Score(1.0)`, or `Score.error("worker died")`.

    An error is never a 0: the sample leaves its group and is counted.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    outcome: Literal["scored", "error"] = "scored"
    detail: str = ""

    @staticmethod
    def error(reason: str) -> "Score":
        return Score(float("nan"), outcome="error", detail=reason)

    @property
    def valid(self) -> bool:
        return self.outcome == "scored"


@dataclass(frozen=True, slots=True)
class Chain:
    """One context as it grew: what the model read first, and what came after it, its own tokens and others.

    `Chain(prompt_tokens=(1, 5, 9), segments=(Segment("model", …),))`
    """

    prompt_tokens: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt_tokens + tuple(t for s in self.segments for t in s.tokens)

    @property
    def length(self) -> int:
        return len(self.prompt_tokens) + sum(len(s.tokens) for s in self.segments)

    @property
    def routed(self) -> Iterator[tuple[int, ExpertArray]]:
        """The experts that are known, each with the position that the first of them are of."""
        end = len(self.prompt_tokens)
        for s in self.segments:
            end += len(s.tokens)
            if s.experts is not None:
                yield end - 1 - len(s.experts), s.experts

    @property
    def unrouted(self) -> int:
        """The first position whose experts are not known."""
        known = 0
        for start, experts in self.routed:
            known = max(known, start + len(experts)) if start <= known else known
        return known


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode of one prompt.

    `Rollout(17, 3, (Chain((1, 5, 9), (Segment("model", …),)),), finish="stop", text="56, 34, 12", score=Score(1.0))`
    Most episodes have one chain; one whose context was rewritten on the way has several, and counts once all the same.
    finish: how the last turn of the model ended. text: what the model said, its turns with an empty line between them.
    status: complete; suspended, to be continued (where the last turn has ended, with the environment's answer); or
    failed, because its environment did, which its score then says.
    transcript: who said what, prompt included; empty where there is nothing beyond the messages of the prompt and one
    answer.
    """

    group: int
    index: int
    chains: tuple[Chain, ...]
    finish: FinishReason
    text: str | Unread
    score: Score | None = None
    status: Status = "complete"
    transcript: tuple[Message, ...] = ()

    @staticmethod
    def of(
        group: int,
        index: int,
        prompt_tokens: tuple[int, ...],
        segments: tuple[Segment, ...],
        finish: FinishReason,
        text: str | Unread,
        score: Score | None = None,
        status: Status = "complete",
    ) -> "Rollout":
        """With one chain."""
        return Rollout(group, index, (Chain(prompt_tokens, segments),), finish, text, score, status)

    @property
    def id(self) -> str:
        return f"{self.group}/{self.index}"

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of all chains."""
        return tuple(s for chain in self.chains for s in chain.segments)

    @property
    def response_length(self) -> int:
        """Tokens of the model; what an environment said does not count."""
        return sum(len(s.tokens) for s in self.segments if s.source == "model")


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt, complete and scored: `Group(17, Prompt(…), rollouts=(…8 of them…))`.

    `id` is the position of the prompt in the stream: unique in a run, and the key of everything about the group.
    """

    id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    greedy: Rollout | None = None  # a baseline for methods that want one; never trained on

    @property
    def valid(self) -> tuple[Rollout, ...]:
        """The rollouts whose verifier worked; the others are counted, not trained on."""
        return tuple(r for r in self.rollouts if r.score is not None and r.score.valid)

    @property
    def rewards_G(self) -> FloatArray:
        return np.array([r.score.value for r in self.valid if r.score is not None], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence as a trainer sees it: tokens, which of them are trained on, with what weight, and named columns.

    A prompt of 3 and a response of 2 tokens: `Sample(17, 3, tokens_T=[1, 5, 9, 42, 2], prompt_length=3,
    mask_T=[0, 0, 0, 1, 1], weight_T=[0, 0, 0, .5, .5], columns={"advantage": [0, 0, 0, 1, 1]})`
    Position t of the arrays describes token t; weights and columns are 0 where the mask is. Which columns there are is
    between whoever makes samples and the loss that reads them: likelihood needs none. `chain` counts the chains of one
    rollout. Samples of a `unit`, such as a pair that is compared, are never cut into different micro-batches. Where an
    answer is unread, so are its tokens and log-probs; the parts are then the prompt, and segment after segment.
    experts: of each position but the last, and each of its layers that mixes experts, those that were chosen: where a
    pass is to choose the same again.
    """

    group: int
    index: int
    tokens_T: IntArray | Late
    prompt_length: int
    mask_T: BoolArray
    weight_T: FloatArray
    columns: Mapping[str, FloatArray | Late] = field(default_factory=dict)
    chain: int = 0
    unit: int | None = None
    experts: ExpertArray | None = None

    @property
    def key(self) -> SampleKey:
        return self.group, self.index, self.chain

    @property
    def length(self) -> int:
        return len(self.tokens_T)

    @property
    def prompt_T(self) -> IntArray:
        """The tokens of the prompt, which are never unread."""
        found = self.tokens_T.parts[0] if isinstance(self.tokens_T, Late) else self.tokens_T
        return np.asarray(found[: self.prompt_length])

    @property
    def loss_tokens(self) -> int:
        return int(self.mask_T.sum())

    def loss(self, column: str) -> FloatArray:
        """The values of a column at the loss tokens."""
        return self.columns[column][self.mask_T]

    def spread(self, values: FloatArray | np.float32) -> FloatArray:
        """Values of the loss tokens, laid out over all tokens; 0 elsewhere."""
        laid_out = np.zeros(self.length, dtype=np.float32)
        laid_out[self.mask_T] = values
        return laid_out

    def with_columns(self, **columns: FloatArray) -> "Sample":
        return replace(self, columns={**self.columns, **columns})
