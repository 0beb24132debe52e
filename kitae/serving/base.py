"""The seam between requests that come in over HTTP and the engine that samples the tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kitae.data.chat import Chat
from kitae.engines.base import Sampled, SamplingParams
from kitae.types import FinishReason, Message, Tool, Turn

OnTokens = Callable[[Sampled], None]
"""Is called with further tokens of an answer as they come."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer wanted, to a chat or to a text: `Ask("chat-17", messages=(Message("user", "Hello"),))`.

    messages, or prompt_tokens, or both: then the messages are these tokens already. tools belong to messages.
    seed: None lets the model draw one.
    retry: the client says that it has sent this request before and got no answer. thoughts: the client is told thinking
    apart from the answer also where there are no tools. role: for whom the model speaks, in an episode with several.
    """

    id: str
    messages: tuple[Message, ...] = ()
    prompt_tokens: tuple[int, ...] | None = None
    tools: tuple[Tool, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    retry: bool = False
    thoughts: bool = False
    role: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from a request to its first token and to its last, as the server saw them: `Timing(0.21, 1.4)`."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request, as sampled tokens and as the turn that they spell. The ids of its calls are unique among
    all answers, because clients refer to calls by id in later requests. timing: None where nobody measured."""

    prompt_tokens: tuple[int, ...]
    sampled: Sampled
    finish: FinishReason
    turn: Turn
    timing: Timing | None = field(default=None, compare=False)


def with_ids(turn: Turn, answer: str) -> Turn:
    """The same turn; the ids of its calls are made from the id of the answer."""
    calls = tuple(replace(call, id=f"call_{answer}_{i}") for i, call in enumerate(turn.calls))
    return replace(turn, calls=calls)


class Model(Protocol):
    """A model that answers requests.

    `ask` calls `on_tokens` with further tokens as they come, and has passed on all of them when it returns. Cancelling
    `ask` cancels the request. `ask` raises `RequestError` for a request that cannot be answered. `chat` turns messages
    into tokens and back.
    """

    @property
    def chat(self) -> Chat: ...
    async def ask(self, ask: Ask, on_tokens: OnTokens | None = None) -> Answer: ...
