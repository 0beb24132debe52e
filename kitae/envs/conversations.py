"""The contexts of an agent's episode, as tokens.

A client sends all messages of a conversation with each request. If they are an earlier conversation with something
added, only the addition is encoded; sampled turns stay the tokens that were sampled. If they are not (the client has
rewritten its history, or returns to an earlier point), a new chain begins. It starts from the last point whose history
is unchanged, and takes over the tokens up to there as its prompt, so that each sampled token is trained on in one chain
only. Tokens are never aligned with text afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kitae.data.chat import Chat, text_of
from kitae.errors import RequestError
from kitae.types import Chain, Message, Segment, Tool


@dataclass(slots=True, eq=False)
class AgentConversation:
    """A chain while it grows; number: names it within its episode; role: who speaks in it.

    messages: the conversation up to the last answer, as the client sends it back. points: for each answer, the numbers
    of messages and segments after it. busy: whether an answer is being generated.
    """

    number: int
    tools: tuple[Tool, ...]
    prompt_tokens: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    points: list[tuple[int, int]] = field(default_factory=list)
    busy: bool = False
    role: str = ""

    def chain(self, segments: int | None = None) -> Chain:
        """The chain, or its first `segments` segments."""
        return Chain(self.prompt_tokens, tuple(self.segments[:segments]), self.role)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a request: the conversation that it continues or begins, and the tokens that it adds.

    The added tokens become part of the conversation only with the answer, so a cancelled request leaves no trace.
    """

    conversation: AgentConversation
    messages: tuple[Message, ...]
    added: tuple[int, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        return self.conversation.chain().tokens + self.added


class Conversations:
    """All conversations of an episode, in the order of their first answers."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._numbers = count()
        self._conversations: list[AgentConversation] = []

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(conversation.chain() for conversation in self._conversations)

    def find(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], role: str = "") -> Position:
        """Find the conversation of this role that these messages continue.

        Raises `RequestError` if there is nothing to answer, and `DataError` if the chat template cannot render the
        messages.
        """
        if not messages or messages[-1].role == "assistant":
            last = repr(messages[-1].role) if messages else "no message"
            raise RequestError(f"the last message must be one that the model can answer, got {last}")
        found = self._longest(messages, tools, role)
        if found is None:
            return Position(self._new(tools, self._chat.encode_prompt(messages, tools), role), messages)
        conversation, point = found
        said, segments = point
        added = self._following(conversation.segments[segments - 1], messages[said:])
        if point == conversation.points[-1] and not conversation.busy:
            return Position(conversation, messages, added)
        return Position(self._new(tools, conversation.chain(segments).tokens + added, role), messages)

    def _new(self, tools: tuple[Tool, ...], prompt_tokens: tuple[int, ...], role: str) -> AgentConversation:
        return AgentConversation(next(self._numbers), tools, prompt_tokens, role=role)

    def grow(self, position: Position, answer: Segment, said: Message) -> None:
        """Add the answer to a request, as tokens and as the message that the client gets."""
        conversation = position.conversation
        if position.added:
            conversation.segments.append(Segment.observed(position.added))
        conversation.segments.append(answer)
        conversation.messages = (*position.messages, said)
        if conversation not in self._conversations:
            self._conversations.append(conversation)
        conversation.points.append((len(conversation.messages), len(conversation.segments)))

    def _longest(
        self, messages: Sequence[Message], tools: Sequence[Tool], role: str
    ) -> tuple[AgentConversation, tuple[int, int]] | None:
        """The longest history that these messages continue without assistant messages of other origin. Of several equal
        ones, prefer one that can be continued in place."""
        best: tuple[tuple[int, bool], AgentConversation, tuple[int, int]] | None = None
        told = [_matched_form(message) for message in messages]
        foreign = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
        for conversation in (c for c in self._conversations if c.role == role):
            known = [_matched_form(message) for message in conversation.messages]
            for point in conversation.points:
                said = point[0]
                if not foreign < said < len(told) or conversation.tools != tools or told[:said] != known[:said]:
                    continue
                rank = said, point == conversation.points[-1] and not conversation.busy
                if best is None or rank > best[0]:
                    best = rank, conversation, point
        return None if best is None else best[1:]

    def _following(self, last: Segment, messages: Sequence[Message]) -> tuple[int, ...]:
        closed = len(last.tokens) > 0 and last.tokens[-1] in self._chat.stop_tokens
        return self._chat.encode_turn(messages, closed=closed)


def _matched_form(message: Message) -> Any:
    """The part of a message that clients return unchanged: they drop empty fields, reformat JSON and trim texts."""
    calls = tuple((call.name, dict(call.arguments)) for call in message.calls)
    text = text_of(message)
    return message.role, text.strip() if message.role == "assistant" else text, calls, message.call_id
