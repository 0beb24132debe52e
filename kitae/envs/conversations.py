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
class Thread:
    """A chain while it grows; number: names it within its episode.

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

    def chain(self, segments: int | None = None) -> Chain:
        """The chain, or its first `segments` segments."""
        return Chain(self.prompt_tokens, tuple(self.segments[:segments]))


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a request: the conversation that it continues or begins, and the tokens that it adds.

    The added tokens become part of the conversation only with the answer, so a cancelled request leaves no trace.
    """

    thread: Thread
    messages: tuple[Message, ...]
    added: tuple[int, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        return self.thread.chain().tokens + self.added


class Threads:
    """All conversations of an episode, in the order of their first answers."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._numbers = count()
        self._threads: list[Thread] = []

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(thread.chain() for thread in self._threads)

    def place(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Place:
        """Find the conversation that these messages continue.

        Raises `RequestError` if there is nothing to answer, and `DataError` if the chat template cannot render the
        messages.
        """
        if not messages or messages[-1].role == "assistant":
            last = repr(messages[-1].role) if messages else "no message"
            raise RequestError(f"the last message must be one that the model can answer, got {last}")
        found = self._longest(messages, tools)
        if found is None:
            return Place(self._new(tools, self._chat.encode_prompt(messages, tools)), messages)
        thread, point = found
        said, segments = point
        added = self._following(thread.segments[segments - 1], messages[said:])
        if point == thread.points[-1] and not thread.busy:
            return Place(thread, messages, added)
        return Place(self._new(tools, thread.chain(segments).tokens + added), messages)

    def _new(self, tools: tuple[Tool, ...], prompt_tokens: tuple[int, ...]) -> Thread:
        return Thread(next(self._numbers), tools, prompt_tokens)

    def grow(self, place: Place, answer: Segment, said: Message) -> None:
        """Add the answer to a request, as tokens and as the message that the client gets."""
        thread = place.thread
        if place.added:
            thread.segments.append(Segment.observed(place.added))
        thread.segments.append(answer)
        thread.messages = (*place.messages, said)
        if thread not in self._threads:
            self._threads.append(thread)
        thread.points.append((len(thread.messages), len(thread.segments)))

    def _longest(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Thread, tuple[int, int]] | None:
        """The longest history that these messages continue without assistant messages of other origin. Of several equal
        ones, prefer one that can be continued in place."""
        best: tuple[tuple[int, bool], Thread, tuple[int, int]] | None = None
        told = [_told(message) for message in messages]
        foreign = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
        for thread in self._threads:
            known = [_told(message) for message in thread.messages]
            for point in thread.points:
                said = point[0]
                if not foreign < said < len(told) or thread.tools != tools or told[:said] != known[:said]:
                    continue
                rank = said, point == thread.points[-1] and not thread.busy
                if best is None or rank > best[0]:
                    best = rank, thread, point
        return None if best is None else best[1:]

    def _following(self, last: Segment, messages: Sequence[Message]) -> tuple[int, ...]:
        closed = len(last.tokens) > 0 and last.tokens[-1] in self._chat.stop_tokens
        return self._chat.encode_turn(messages, closed=closed)


def _told(message: Message) -> Any:
    """What must be equal for two messages to match: clients drop and add empty fields, reformat JSON, and trim the
    model's text."""
    calls = tuple((call.name, dict(call.arguments)) for call in message.calls)
    text = text_of(message)
    return message.role, text.strip() if message.role == "assistant" else text, calls, message.call_id
