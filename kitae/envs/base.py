"""The environment seam: what the model talks to during one episode, and how far it may go; the simplest episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

from kitae.engines.constraint import Constraint
from kitae.serving.base import Model
from kitae.types import Message, Prompt, Tool, Turn


@dataclass(frozen=True, slots=True)
class Opening:
    """What the model reads first: `Opening((Message("user", "What is 17 * 23?"),), tools=(…,))`.

    tools: those that the chat template describes to the model, and whose calls are read from its turns.
    state, potential, constraint: as in `Observation`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    state: str = ""
    potential: float = 0.0
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a model turn: `Observation((Message("tool", "4"),))`, or `Observation(done=True)`.

    messages: what the model reads next; at least one, unless the episode is done. The last messages of an episode that
    is done are displayed and passed to the verifier, but no model reads them.
    reward: the reward of the turn before; None: the environment gives none.
    error: why the episode cannot go on, through no fault of the model. It then has no reward at all, not even 0.
    state: the name of the state that the model is in now, such as "key, room 3": turns of a group that begin in states
    of one name are compared with each other by some advantages. "": what the model has just read is the state.
    potential: how good that state is, as you guess; advantages by turn add γ × the next potential − this one to a
    reward, which changes no best policy.
    constraint: what the model's next turn must match; it is enforced, and trained on as such. None: any text.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    error: str | None = None
    state: str = ""
    potential: float = 0.0
    constraint: Constraint | None = None


class Environment(Protocol):
    """A single-use episode in which the model and the environment take turns: `start` once, `step` after each turn that
    the model ended itself until one is done, and last, always, `close`.

    **Failures.** A call fails if it raises, takes longer than its limit (its coroutine is then cancelled), or returns
    the wrong type. That costs its own episode, never the group or the run: the episode counts as an error and is not
    trained on. A failure of `close` has no effect but a note beside the verdict. Whatever takes long must be awaited:
    code that blocks the event loop holds up all episodes; it is named, and interrupted at its limit (`blocking_calls`).

    **Resuming.** An interrupted episode is continued in a new environment, which receives the recorded turns again to
    get to the same state. What it returns for them is not used: the model has already read the recorded observations.
    The episode fails if the new environment is done where the record goes on.

    **Rewards.** If the environment gave a reward to any turn, the score is the sum of its rewards, and the verifier is
    not called. If it gave none, the verifier judges the last turn; in a run without a verifier the score is then 0. So
    an environment either gives rewards or leaves that to the verifier. One that gives a reward only at the end should
    be used without a verifier, which would otherwise judge the episodes that were cut off. An environment with an
    attribute `judged = True` does both: the verifier judges the last turn in any case, and the score is its verdict and
    the rewards of the turns together. Advantages by turn read the reward of each turn; what is left of the score stands
    at the last.
    """

    async def start(self) -> Opening: ...
    async def step(self, turn: Turn) -> Observation: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an agent's episode ended: `Outcome(1.0)`. reward None: the verifier judges the last answer.

    turns: rewards of single answers, which are added to it, by their number: the first answer that was complete is 0.
    If only turns have rewards, their sum is the score. roles: rewards of single roles, by the names with which the
    model was asked (`Ask.role`); a role without one has that of the episode.
    """

    reward: float | None = None
    detail: str = ""
    turns: Mapping[int, float] = field(default_factory=dict)
    roles: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Agent(Protocol):
    """A single-use episode that drives the conversation itself: it sends the model any number of requests, also several
    at once, and may rewrite the conversation between them.

    Each answer continues the longest context that the request's messages continue; if they continue none, the episode
    gets one more chain. Failures are as with an `Environment`. The limit of seconds holds while no request is in
    flight, but not while the agent waits in `enter` for its turn to begin. An interrupted agent runs again from its
    beginning, and requests that it repeats are answered from the record.
    """

    async def enter(self) -> None: ...
    async def run(self, model: Model) -> Outcome: ...
    async def close(self) -> None: ...


class World(Protocol):
    """What all episodes of a run share: entered once, before the model is loaded, and exited at the end."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
    def make(self, prompt: Prompt) -> Environment | Agent: ...


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """How far an episode may go: `EpisodeLimits(turns=8, seconds=30, tokens=2048, context=32_768)`.

    turns: the most turns of the model; an episode that needs more is cut off, with finish "length".
    seconds: for each call of the environment.
    tokens: of one observation; a longer one is a failure.
    context: the most tokens that the model can read, its own included; None: not known. An observation that does not
    fit cuts the episode off; if it is longer than everything before it, it is a failure.
    turn_tokens: the most tokens of one turn of the model; one that needs more is cut, and the environment gets it as it
    is. None: no limit but that of the episode.
    deadline: seconds for the whole episode, by the wall and from its start, or from where it is continued. An episode
    that needs more is cut off: a call of the environment is ended there, a turn of the model may be completed.
    The most tokens of all the model's turns together is `SamplingParams.max_tokens`; observations do not count there.
    """

    turns: int = 64
    seconds: float = 120.0
    tokens: int = 8192
    context: int | None = None
    turn_tokens: int | None = None
    deadline: float | None = None


class SingleTurn:
    """Shows the prompt, and is done after the first response."""

    def __init__(self, prompt: Prompt) -> None:
        self._opening = Opening(prompt.messages)

    async def start(self) -> Opening:
        return self._opening

    async def step(self, turn: Turn) -> Observation:
        return Observation(done=True)

    async def close(self) -> None:
        pass
