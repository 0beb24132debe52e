"""The records that travel between the stages of the pipeline.

    Prompt ─► Segment ─► Chain ─► Rollout ─► Group ─► Sample ─► Batch ─► Row ─► MicroBatch
              (engine)   (environment)   (verifier)  (advantages)      (packing)  (trainer)

All of them are frozen. The engine writes tokens, their log-probs and the policy version that sampled each token once;
nothing derives them again from text. Shape legend for array names: T tokens of one sequence, G samples of one group.
`Batch` and `MicroBatch`, the only record that holds tensors, are in `kitae.trainer`, `Row` in `kitae.data.packing`.

The columns of a segment are tuples in memory, or lazy columns that lie in files of the run (`kitae.store.columns`).
Both are sequences with a known length. Code that handles only ids, lengths and scores reads no file.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from kitae.kept_sets import KeptSets

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
"""The experts that a forward pass chose: `[positions, L, K]` for consecutive positions, L layers and K experts each."""

FinishReason = Literal["stop", "length", "abort", "suspended"]
"""stop: a stop token or stop string was sampled; length: max_tokens, the context or the turns are used up; abort: the
caller cancelled the request; suspended: the answer was interrupted and will be continued later."""

Status = Literal["complete", "suspended", "failed"]


SampleKey = tuple[int, int, int]
"""The group, the index of the sample in it, and the chain of the sample."""

Tool = Mapping[str, Any]
"""A tool as chat templates take it, with its JSON schema: `{"type": "function", "function": {"name": "add", …}}`."""

GREEDY = -1
"""The index of the greedy response to a prompt; its samples have the indices 0, 1, 2, …"""


ROLE = "role/"
"""Before the name of a role: the component of a score that is this role's reward."""


TURN = "turn/"
"""Before the number of a turn of the model, from 0 on: the component of a score that is this turn's reward."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by a model: `ToolCall("python", {"code": "6 * 7"}, id="call_0")`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn: `Message("user", "Reverse 12, 34, 56")`, `Message("tool", "42", call_id="call_0")`.

    calls: the tool calls of an assistant. call_id, name: the call that a tool answers, and the name of the tool. parts:
    the parts of a content that is not one text, as chat templates take them: `({"type": "text", "text": "Look:"}, …)`.
    problem: the reason why a call in the message cannot be read; chat templates do not show it.
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
    """One turn of the model, parsed: `Turn("…", "Well …", calls=(ToolCall("add", {"a": 1}),))`.

    text: the whole text, without special tokens and cut before a stop string. content: the text without reasoning and
    calls. reasoning: the thinking of the model, where its format marks it. problem: the reason why something that looks
    like a tool call cannot be read; `calls` is empty then.
    """

    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""

    @property
    def told(self) -> str:
        """The content that a client gets: it includes a call that cannot be read."""
        return self.text if self.problem else self.content


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: the messages that the model reads, and what the verifier needs to judge the answer.

    `Prompt("reverse/train/17", (Message("user", "Reverse 12, 34, 56"),), reference="56, 34, 12")`
    The context holds the question as text and the other fields of the data. `gold` is a response that must score 1,
    where the data has one beside the reference, such as a solution beside test cases.
    """

    id: str
    messages: tuple[Message, ...]
    reference: Any
    context: Mapping[str, Any] = field(default_factory=dict)
    gold: str | None = None


class LazyText(ABC):
    """A text that is read from a file when it is needed, by `str(text)`."""

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str: ...


class Runs(Sequence[int]):
    """A run-length encoded sequence, for numbers that seldom change, such as versions of tokens.

    `Runs(((3, 510), (4, 2)))` is a sequence of 510 threes and 2 fours.
    """

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


class LazyArray:
    """An array in parts, some of which are lazy columns. Its length is known; using its numbers reads the files."""

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


def spliced(parts: Sequence[Any], dtype: npt.DTypeLike) -> "npt.NDArray[Any] | LazyArray":
    """The parts one after the other: an array, or a `LazyArray` where one of the parts is a lazy column."""
    if all(isinstance(part, tuple | np.ndarray | Runs) for part in parts):
        return _whole(parts, dtype)
    return LazyArray(parts, dtype)


def _whole(parts: Sequence[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens from one source.

    `Segment("model", tokens=(42, 7, 2), logprobs=(-0.1, -0.7, -0.01), versions=(3, 3, 3))`
    Tokens of an environment (tool output, observations) have log-prob 0 and version -1 and are never trained on.
    reward: the reward that the environment gave for this turn of the model; None: it gave none.
    state, potential: the name of the state in which the model took this turn, and that state's potential, where the
    environment gives them.
    experts: the experts that the engine chose in this turn of the model, where they are recorded. They are those of the
    positions that the engine computed in this turn, and it does not compute the position of the last token. A turn of
    3 tokens after a prompt of 4 tokens has the experts of positions 0 to 5; after 5 tokens of the environment, a second
    turn of 2 tokens has those of positions 6 to 12.
    kept: what each token of the model could have been; None: any of the vocabulary.
    """

    source: Literal["model", "environment"]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    reward: float | None = None
    experts: ExpertArray | None = field(default=None, compare=False, repr=False)
    kept: KeptSets | None = None
    state: str = ""
    potential: float = 0.0

    @staticmethod
    def observed(tokens: Sequence[int]) -> "Segment":
        return Segment("environment", tuple(tokens), (0.0,) * len(tokens), (-1,) * len(tokens))


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict of a verifier on one response: `Score(1.0)`, or `Score.error("worker died")`.

    An error is never a 0: the sample is left out of its group and counted as an error.
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
    """One context as it grew: the prompt, then segments of the model and of the environment.

    `Chain(prompt_tokens=(1, 5, 9), segments=(Segment("model", …),))`
    role: who speaks in it, in an episode with several roles.
    """

    prompt_tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    role: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt_tokens + tuple(t for s in self.segments for t in s.tokens)

    @property
    def length(self) -> int:
        return len(self.prompt_tokens) + sum(len(s.tokens) for s in self.segments)

    @property
    def routed(self) -> Iterator[tuple[int, ExpertArray]]:
        """The recorded experts of each segment that has them, with the position of the first."""
        end = len(self.prompt_tokens)
        for s in self.segments:
            end += len(s.tokens)
            if s.experts is not None:
                yield end - 1 - len(s.experts), s.experts

    @property
    def unrouted(self) -> int:
        """The first position whose experts are not recorded."""
        known = 0
        for start, experts in self.routed:
            known = max(known, start + len(experts)) if start <= known else known
        return known


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode of one prompt.

    `Rollout(17, 3, (Chain((1, 5, 9), (Segment("model", …),)),), finish="stop", text="56, 34, 12", score=Score(1.0))`
    Most episodes have one chain. An episode whose context was rewritten has several, and still counts as one rollout.
    finish: how the last turn of the model ended. text: the turns of the model, with an empty line between them.
    status: complete; suspended, which means that it will be continued, with the answer of the environment where the
    last turn has ended; or failed, because the environment failed, and then the score says why.
    transcript: the messages of the conversation, including the prompt; empty where the conversation is the prompt and
    one answer.
    """

    group: int
    index: int
    chains: tuple[Chain, ...]
    finish: FinishReason
    text: str | LazyText
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
        text: str | LazyText,
        score: Score | None = None,
        status: Status = "complete",
    ) -> "Rollout":
        """A rollout with one chain."""
        return Rollout(group, index, (Chain(prompt_tokens, segments),), finish, text, score, status)

    @property
    def id(self) -> str:
        return f"{self.group}/{self.index}"

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of all chains."""
        return tuple(s for chain in self.chains for s in chain.segments)

    @property
    def response_length(self) -> int:
        """The number of tokens of the model, without those of an environment."""
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
    problem: str = ""  # why nothing was sampled: the prompt is impossible

    @property
    def valid(self) -> tuple[Rollout, ...]:
        """The rollouts that were scored without an error. The others are counted and not trained on."""
        return tuple(r for r in self.rollouts if r.score is not None and r.score.valid)

    @property
    def rewards_G(self) -> FloatArray:
        return np.array([r.score.value for r in self.valid if r.score is not None], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence for the trainer: tokens, a mask and a weight for the loss, and named columns.

    A prompt of 3 and a response of 2 tokens: `Sample(17, 3, tokens_T=[1, 5, 9, 42, 2], prompt_length=3,
    mask_T=[0, 0, 0, 1, 1], weight_T=[0, 0, 0, .5, .5], columns={"advantage": [0, 0, 0, 1, 1]})`
    Position t of the arrays describes token t; weights and columns are 0 where the mask is 0. The code that makes
    samples and the loss that reads them agree on the names of columns: likelihood needs none. `chain` is the number of
    the chain in its rollout. Samples with the same `unit`, such as a pair that is compared, are never cut into
    different micro-batches. Where the answer lies in files, tokens and log-probs are lazy arrays, whose parts are the
    prompt and the segments in order. experts: the experts of each position but the last, for a forward pass that must
    choose the same experts again. kept: what each token could have been; log-probs are over these tokens alone.
    """

    group: int
    index: int
    tokens_T: IntArray | LazyArray
    prompt_length: int
    mask_T: BoolArray
    weight_T: FloatArray
    columns: Mapping[str, FloatArray | LazyArray] = field(default_factory=dict)
    chain: int = 0
    unit: int | None = None
    experts: ExpertArray | None = None
    kept: KeptSets | None = None

    @property
    def key(self) -> SampleKey:
        return self.group, self.index, self.chain

    @property
    def length(self) -> int:
        return len(self.tokens_T)

    @property
    def prompt_T(self) -> IntArray:
        """The tokens of the prompt, which are always in memory."""
        found = self.tokens_T.parts[0] if isinstance(self.tokens_T, LazyArray) else self.tokens_T
        return np.asarray(found[: self.prompt_length])

    @property
    def loss_tokens(self) -> int:
        return int(self.mask_T.sum())

    def loss(self, column: str) -> FloatArray:
        """The values of a column at the tokens that are trained on."""
        return self.columns[column][self.mask_T]

    def spread(self, values: FloatArray | np.float32) -> FloatArray:
        """The inverse of `loss`: an array over all tokens, with 0 at tokens that are not trained on."""
        laid_out = np.zeros(self.length, dtype=np.float32)
        laid_out[self.mask_T] = values
        return laid_out

    def with_columns(self, **columns: FloatArray) -> "Sample":
        return replace(self, columns={**self.columns, **columns})
