"""What episodes of a run share: the engine, limits, and the checks of what environments return."""

import asyncio
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from kitae.data.chat import Chat
from kitae.data.pictures import kept
from kitae.data.tool_arguments import function_of
from kitae.engines.base import Engine, Sampled, SamplingParams
from kitae.engines.constraint import Constraint
from kitae.envs.base import Agent, Environment, EpisodeLimits, Observation, Opening
from kitae.envs.blocking_calls import Blocked, WatchedCall, while_hurried
from kitae.errors import DataError, EngineError, Interrupted, RequestError, StalledError, StoreError, root_cause
from kitae.types import GREEDY, Chain, LazyText, Message, Prompt, Rollout, Score, Tool, ToolCall, Turn

MakeEnvironment = Callable[[Prompt], Environment | Agent]

LAST_SECONDS = 2.0
"""Time limit for closing an environment while the run is stopping."""

OWN_ERRORS = (EngineError, StoreError, StalledError, Interrupted)
"""Errors that end the run wherever they occur, except `RequestError`, which concerns one request."""

_LONGEST_REASON = 500  # characters
_LARGEST_REWARD = 1e30  # so that sums stay finite in single precision


class ResponseVerifier(Protocol):
    """Scores responses: a `VerifierPool`, or a replacement for one. A lazy response is read where it is judged."""

    async def score(self, response: str | LazyText, reference: Any, context: Mapping[str, Any]) -> Score: ...


@runtime_checkable
class GroupVerifier(ResponseVerifier, Protocol):
    """One that may judge all answers to a prompt in one call. grouped: whether they are best brought together."""

    @property
    def grouped(self) -> bool: ...
    async def scores(
        self, responses: Sequence[str | LazyText], reference: Any, contexts: Sequence[Mapping[str, Any]]
    ) -> list[Score]: ...


class Suspended(Exception):
    """The run is stopping. The sampled tokens are in the journal."""


class Failure(Exception):
    """The episode cannot go on, through no fault of the model. The message is the reason."""


@dataclass(slots=True)
class Running:
    """The episodes under way, by the ids of their rollouts. suspending: whether they should end as soon as they can."""

    episodes: "dict[str, RunningEpisode]" = field(default_factory=dict)
    suspending: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """What episodes share. label: keeps the random streams of training and evaluation apart.

    verifier: None if the environment gives all rewards. waiting: entered around each wait, with what is waited for and
    the id of the rollout. experts: whether the engine should return the experts that it chooses (mixture models).
    trains: whether somebody learns from the rollouts, and so must know what their tokens could have been.
    note: is told of environments that block everything, from another thread.
    """

    engine: Engine
    chat: Chat
    verifier: ResponseVerifier | None
    environment: MakeEnvironment
    sampling: SamplingParams
    seed: int
    label: str = "train"
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    waiting: Callable[[str, str], AbstractContextManager[None]] = lambda what, which: nullcontext()
    running: Running = field(default_factory=Running)
    experts: bool = False
    trains: bool = False
    note: Callable[[str], None] = lambda text: None

    def make(self, prompt: Prompt) -> Environment | Agent:
        """Make an environment. If that raises, the returned environment fails when it is started."""
        try:
            return self.environment(prompt)
        except (Exception, SystemExit) as error:
            if not is_episode_error(error):
                raise
            return _FailedEnvironment(Failure(f"making it raised {described(error)}"))

    def experts_from(self, chain: Chain, index: int) -> int | None:
        """The position from which the engine should return experts for a request on this chain; None: no experts are
        needed, as for greedy responses, which are not trained on."""
        return chain.unrouted if self.experts and index != GREEDY else None

    def keeps(self, index: int) -> bool:
        """Whether the engine should return what each token of this sample could have been."""
        return self.trains and index != GREEDY

    async def close(self, environment: Environment | Agent, which: str) -> str:
        """Close an environment, with a time limit. Returns what went wrong, or ""."""
        seconds = self.limits.seconds
        if self.running.suspending:  # the run is about to end, and must journal the rollout first
            seconds = min(seconds, LAST_SECONDS)
        try:
            with self.waiting("the environment to close", which):
                async with asyncio.timeout(seconds):
                    await WatchedCall(self.note, which, seconds, environment.close)
        except BaseException as error:
            if not isinstance(error, Blocked) and not is_episode_error(error):
                raise
            return f"the environment could not be closed: {described(error)}"
        return ""


class RunningEpisode(ABC):
    """One rollout while it comes about, for any kind of environment; call `run` once.

    record: the part of the rollout that the journal has. complaint: what went wrong when the environment was closed.
    asking: the id of the request whose tokens can be copied while they are generated, or "". copied_of_turn: how many
    of these tokens the journal has.
    """

    asking = ""

    def __init__(
        self,
        on: EpisodeContext,
        environment: Environment | Agent,
        group: int,
        index: int,
        prompt: Prompt,
        record: Rollout | None = None,
    ) -> None:
        self.complaint = ""
        self._on = on
        self._to_close = environment
        self._group, self._index, self._prompt = group, index, prompt
        self._sampling = replace(on.sampling, temperature=0.0) if index == GREEDY else on.sampling
        self._record = record
        self._deadline: asyncio.Timeout | None = None  # of the environment's call in progress

    @property
    def id(self) -> str:
        return f"{self._group}/{self._index}"

    @property
    def copied_of_turn(self) -> int:
        return 0

    async def run(self) -> Rollout:
        """Run the episode to its end. The rollout is complete, failed or suspended.

        Raises `RequestError` or `DataError` if the prompt is impossible, and the errors that end a whole run.
        """
        self._on.running.episodes[self.id] = self
        failure, suspended = "", False
        try:
            await self._play()
        except Suspended:
            suspended = True
        except Failure as problem:
            failure = f"environment: {problem}"
        finally:
            self.complaint = await self._on.close(self._to_close, self.id)
            del self._on.running.episodes[self.id]
        if suspended:
            return self._suspended()
        return self._failed(failure) if failure else self._complete()

    async def _go_on(self) -> None:
        """Raise `Suspended` if the run is stopping, or is about to."""
        await while_hurried(lambda: self._on.running.suspending)
        if self._on.running.suspending:
            raise Suspended

    def interrupt(self) -> None:
        """Stop waiting for the environment. It is called again when the episode is continued."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())

    @abstractmethod
    def grown(self, news: Sampled, least: int) -> tuple[Rollout, int] | None:
        """See `Episodes.grown`; news: the tokens of the request `asking` beyond `copied_of_turn`."""

    @abstractmethod
    async def _play(self) -> None: ...
    @abstractmethod
    def _suspended(self) -> Rollout: ...
    @abstractmethod
    def _failed(self, reason: str) -> Rollout: ...
    @abstractmethod
    def _complete(self) -> Rollout: ...


class _FailedEnvironment:
    """Replaces an environment that could not be made."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    async def start(self) -> Opening:
        raise self._failure

    async def step(self, turn: Turn) -> Observation:
        raise self._failure

    async def close(self) -> None:
        pass


def with_note(score: Score, complaint: str) -> Score:
    return replace(score, detail="; ".join(filter(None, (score.detail, complaint)))) if complaint else score


def is_episode_error(error: BaseException) -> bool:
    """Whether an environment's error concerns its episode only: it is not this task's cancellation or the run's end."""
    cause = root_cause(error) if isinstance(error, ExceptionGroup) else error
    if isinstance(cause, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    if isinstance(cause, SystemExit):  # `sys.exit()` in an environment's code; a run is ended by signals
        return True
    return isinstance(cause, Exception) and (isinstance(cause, RequestError) or not isinstance(cause, OWN_ERRORS))


def read_messages(name: str, found: object) -> tuple[Message, ...]:
    """The messages that an environment returned, checked so that they can be journalled."""
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
        messages = kept(found)
    except DataError as error:
        raise Failure(f"a message of {name} must show pictures that can be read: {error}") from error
    for message in messages:
        try:
            json.dumps(asdict(message))
        except Exception as error:
            raise Failure(f"a message of {name} must hold JSON: {described(error)}") from error
    return messages


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
    """The tools that an environment returned, checked so that templates and parsers of calls can use them."""
    if not isinstance(found, tuple | list):
        raise Failure(f"the tools of start must be a tuple, got {type(found).__name__}")
    for tool in found:
        if not isinstance(tool, Mapping) or not isinstance(function_of(tool).get("name"), str):
            raise Failure(f"a tool of start must be a schema with a function and its name, got {shortened(repr(tool))}")
        try:
            json.dumps(dict(tool))
        except Exception as error:
            raise Failure(f"a tool of start must hold JSON: {described(error)}") from error
    return tuple(found)


def read_constraint(name: str, found: object) -> Constraint | None:
    if found is not None and not isinstance(found, Constraint):
        raise Failure(f"the constraint of {name} must be a Constraint or None, got {type(found).__name__}")
    return found


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


def read_state(found: Opening | Observation) -> tuple[str, float]:
    """Name and potential of a state, checked so that they can be journalled."""
    if not isinstance(found.state, str):
        raise Failure(f"a state must be text, got {shortened(repr(found.state))}")
    long = len(found.state) > _LONGEST_REASON
    name = hashlib.sha256(found.state.encode(errors="backslashreplace")).hexdigest() if long else found.state
    return name, read_reward(found.potential) or 0.0


def described(error: BaseException) -> str:
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception:  # the error's own text raises
        return type(error).__name__


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} …"
