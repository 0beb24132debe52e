"""Who answers a client: the seam between what comes in over HTTP and what samples the tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kitae.data.chat import Chat
from kitae.engines.base import Sampled, SamplingParams
from kitae.types import FinishReason, Message, Tool, Turn

Heard = Callable[[Sampled], None]
"""Is told of further tokens of an answer as they come."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer wanted, to a chat or to a text: `Ask("chat-17", messages=(Message("user", "Hello"),))`.

    Exactly one of messages and prompt_tokens is given; tools belong to messages. seed None: the model draws one. retry:
    the client says that it has asked this before and got no answer.
    """

    id: str
    messages: tuple[Message, ...] = ()
    prompt_tokens: tuple[int, ...] | None = None
    tools: tuple[Tool, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What was sampled for an ask, as tokens and as read. Its calls have ids that no other answer's have: clients keep
    whole conversations by them."""

    prompt_tokens: tuple[int, ...]
    sampled: Sampled
    finish: FinishReason
    turn: Turn


def with_ids(turn: Turn, answer: str) -> Turn:
    """A turn whose calls are named after the answer that has them."""
    calls = tuple(replace(call, id=f"call_{answer}_{i}") for i, call in enumerate(turn.calls))
    return replace(turn, calls=calls)


class Model(Protocol):
    """Whoever answers.

    `heard` is called with further tokens as they come; all of them have been heard when `ask` returns. A caller that is
    cancelled takes its request back. Raises `RequestError` where the ask is impossible. `chat` is how messages become
    tokens, and back.
    """

    @property
    def chat(self) -> Chat: ...
    async def ask(self, ask: Ask, heard: Heard | None = None) -> Answer: ...
