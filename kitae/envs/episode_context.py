"""What episodes need, and what may become of one on its way."""

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Protocol

from kitae.data.chat import Chat
from kitae.data.tool_arguments import function_of
from kitae.engines.base import Engine, Sampled, SamplingParams
from kitae.envs.base import Agent, Environment, EpisodeLimits, Observation, Opening
from kitae.errors import EngineError, Interrupted, RequestError, StalledError, StoreError, root_cause
from kitae.types import GREEDY, Chain, Message, Prompt, Rollout, Score, Tool, ToolCall, Turn, Unread

MakeEnvironment = Callable[[Prompt], Environment | Agent]

LAST_SECONDS = 2.0
"""To close an environment while the run is stopping."""

OWN_ERRORS = (EngineError, StoreError, StalledError, Interrupted)
"""They end the run, whoever calls into them; but for a `RequestError`, which is about one request."""

_LONGEST_REASON = 500  # characters
_LARGEST_REWARD = 1e30  # so that their sum is a number in single precision


class Judge(Protocol):
    """Scores a response: a `VerifierPool`, or whatever stands in for one. A response that is unread is read where it is
    judged."""

    async def score(self, response: str | Unread, reference: Any, context: Mapping[str, Any]) -> Score: ...


class Suspended(Exception):
    """The run is stopping; what was sampled is in the journal."""


class Failure(Exception):
    """The episode cannot go on, and the model is not to blame; the message says why."""


class InFlight(Protocol):
    """An episode under way, as those see it who stop or copy it.

    asking: the id of a request whose tokens can be copied as they come, or "". copied_of_turn: how many of them the
    journal has.
    """

    @property
    def asking(self) -> str: ...
    @property
    def copied_of_turn(self) -> int: ...
    def interrupt(self) -> None: ...
    def grown(self, news: Sampled, least: int) -> tuple[Rollout, int] | None: ...


@dataclass(slots=True)
class Running:
    """The episodes under way, by the ids of their rollouts. suspending: they end as soon as they can."""

    episodes: dict[str, InFlight] = field(default_factory=dict)
    suspending: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """What episodes need. `label` keeps the random streams of training and evaluation apart.

    verifier: None where the environment gives all rewards. `waiting` is entered around each wait, with what is waited
    for and by which rollout. experts: whether those that the engine chooses are wanted, of a mixture.
    """

    engine: Engine
    chat: Chat
    verifier: Judge | None
    environment: MakeEnvironment
    sampling: SamplingParams
    seed: int
    label: str = "train"
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    waiting: Callable[[str, str], AbstractContextManager[None]] = lambda what, which: nullcontext()
    running: Running = field(default_factory=Running)
    experts: bool = False

    def make(self, prompt: Prompt) -> Environment | Agent:
        """One that could not be made fails when it is started."""
        try:
            return self.environment(prompt)
        except (Exception, SystemExit) as error:
            if not is_its_own(error):
                raise
            return _Unmade(Failure(f"making it raised {told(error)}"))

    def experts_from(self, chain: Chain, index: int) -> int | None:
        """Of which position on the engine shall tell its experts with what comes after a chain; nobody trains on greedy
        answers."""
        return chain.unrouted if self.experts and index != GREEDY else None

    async def close(self, environment: Environment | Agent, which: str) -> str:
        """Close an environment, in the time that it has. What went wrong, or ""."""
        seconds = self.limits.seconds
        if self.running.suspending:  # what was sampled must be in the journal soon
            seconds = min(seconds, LAST_SECONDS)
        try:
            with self.waiting("the environment to close", which):
                async with asyncio.timeout(seconds):
                    await environment.close()
        except BaseException as error:
            if not is_its_own(error):
                raise
            return f"the environment could not be closed: {told(error)}"
        return ""


class _Unmade:
    """Stands where an environment would."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    async def start(self) -> Opening:
        raise self._failure

    async def step(self, turn: Turn) -> Observation:
        raise self._failure

    async def close(self) -> None:
        pass


def noted(score: Score, complaint: str) -> Score:
    return replace(score, detail="; ".join(filter(None, (score.detail, complaint)))) if complaint else score


def is_its_own(error: BaseException) -> bool:
    """Whether an error that comes out of an environment is its own: not the end of this task, nor of the run."""
    cause = root_cause(error) if isinstance(error, ExceptionGroup) else error
    if isinstance(cause, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    if isinstance(cause, SystemExit):  # `sys.exit()` in somebody's code; who wants to end the run sends a signal
        return True
    return isinstance(cause, Exception) and (isinstance(cause, RequestError) or not isinstance(cause, OWN_ERRORS))


def read_messages(name: str, found: object) -> tuple[Message, ...]:
    """What an environment says, if it is messages that can be kept."""
    if not isinstance(found, tuple | list):
        raise Failure(f"the messages of {name} must be a tuple, got {type(found).__name__}")
    for message in found:
        if not isinstance(message, Message):
            raise Failure(f"the messages of {name} must be of type Message, got {type(message).__name__}")
        if not all(isinstance(text, str) for text in _texts(message)):
            raise Failure(f"role and content of a message of {name} must be text, got {shortened(repr(message))}")
        if not _has_calls(message.calls) or not _has_parts(message.parts):
            raise Failure(f"calls must be of type ToolCall and parts mappings, got {shortened(repr(message))}")
        try:
            json.dumps(asdict(message))
        except Exception as error:
            raise Failure(f"a message of {name} must hold JSON: {told(error)}") from error
    return tuple(found)


def _texts(message: Message) -> tuple[object, ...]:
    return message.role, message.content, message.call_id, message.name, message.problem


def _has_calls(found: object) -> bool:
    return isinstance(found, tuple | list) and all(
        isinstance(call, ToolCall)
        and isinstance(call.arguments, Mapping)
        and isinstance(call.name, str)
        and isinstance(call.id, str)
        for call in found
    )


def _has_parts(found: object) -> bool:
    return isinstance(found, tuple | list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in found
    )


def read_tools(found: object) -> tuple[Tool, ...]:
    """The tools that an environment has, if templates and readers of calls can use them."""
    if not isinstance(found, tuple | list):
        raise Failure(f"the tools of start must be a tuple, got {type(found).__name__}")
    for tool in found:
        if not isinstance(tool, Mapping) or not isinstance(function_of(tool).get("name"), str):
            raise Failure(f"a tool of start must be a schema with a function and its name, got {shortened(repr(tool))}")
        try:
            json.dumps(dict(tool))
        except Exception as error:
            raise Failure(f"a tool of start must hold JSON: {told(error)}") from error
    return tuple(found)


def read_reward(found: object) -> float | None:
    if found is None:
        return None
    try:
        reward = float(found) if isinstance(found, Real) else math.nan
    except OverflowError:
        reward = math.inf
    if not abs(reward) <= _LARGEST_REWARD:
        raise Failure(f"a reward must be a finite number or None, got {shortened(repr(found))}")
    return reward


def told(error: BaseException) -> str:
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception:  # it cannot even say what it is
        return type(error).__name__


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} …"
