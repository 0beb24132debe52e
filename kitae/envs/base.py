"""The environment seam: what the model talks to during one episode, and how far it may go."""

from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from kitae.serving.base import Model
from kitae.types import Message, Prompt, Tool, Turn


@dataclass(frozen=True, slots=True)
class Opening:
    """What the model reads first: `Opening((Message("user", "What is 17 * 23?"),), tools=(…,))`.

    tools: that the chat template is to tell the model of; its turns are then read for calls of them.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a model turn: `Observation((Message("tool", "4"),))`, or `Observation(done=True)`.

    messages: what the model reads next; at least one, unless the episode is done. Last words of one that is done are
    shown and given to the verifier, but no model reads them.
    reward: what the turn before was worth; None: the environment does not say.
    error: why the episode cannot go on, through no fault of the model. It is then worth nothing, not even a 0.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    error: str | None = None


class Environment(Protocol):
    """A single-use episode in which the model is asked by turns: `start` once, `step` after each turn that the model
    ended itself until one is done, `close` always and last.

    **Failures.** A call that raises, takes longer than its limit (its coroutine is then cancelled), or returns
    something else than it should costs its own episode, never the group or the run: it is counted as an error, and not
    trained on. What fails in `close` changes nothing any more and is only noted beside the verdict. A call that blocks
    the event loop cannot be ended: whatever takes long must be awaited.

    **Resuming.** An episode that was interrupted is continued in a new environment, which hears the recorded turns
    again, to get to the same state. What it answers to them is not used: the model has read the answers that are on
    record. One that has an end where the record goes on has failed.

    **Rewards.** Where the environment gave a reward to any turn, the score is the sum of its rewards, and no verifier
    is asked. Where it gave none, the verifier judges the last turn; a run without a verifier counts that as 0. So an
    environment either gives rewards or leaves it to the verifier; one that gives them only at the end is used without a
    verifier, which would otherwise judge the episodes that were cut off.
    """

    async def start(self) -> Opening: ...
    async def step(self, turn: Turn) -> Observation: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an agent's episode ended: `Outcome(1.0)`. reward None: the verifier judges the last answer."""

    reward: float | None = None
    detail: str = ""


@runtime_checkable
class Agent(Protocol):
    """A single-use episode that holds the conversation itself: it asks the model as often as it likes, also several
    things at once, and rewrites what was said as it likes.

    Each answer continues the context that the messages of its ask continue; where they continue none, the episode has
    one more chain. Failures are as with an `Environment`; its limit of seconds holds whenever it asks nothing, but not
    while it waits in `enter` for its turn to begin. One that was interrupted runs again from its beginning: what it
    asks as before is answered from the record.
    """

    async def enter(self) -> None: ...
    async def run(self, model: Model) -> Outcome: ...
    async def close(self) -> None: ...


class World(Protocol):
    """What all episodes of a run have in common: opened once, before the model is loaded, and closed at the end."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
    def make(self, prompt: Prompt) -> Environment | Agent: ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """How far an episode may go: `EpisodeLimits(turns=8, seconds=30, tokens=2048, context=32_768)`.

    turns: of the model, at most; one that needs more is cut off, with finish "length".
    seconds: for each call of the environment.
    tokens: of one observation; a longer one is a failure.
    context: tokens that the model can read, its own included; None: not known. An observation that finds no room in it
    cuts the episode off; if it is longer than all that was said before, it is a failure.
    How much the model may say in all its turns is `SamplingParams.max_tokens`; observations do not count there.
    """

    turns: int = 64
    seconds: float = 120.0
    tokens: int = 8192
    context: int | None = None
