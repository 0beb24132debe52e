"""The contexts of an episode whose messages come from outside, as tokens.

A client sends all messages of a conversation with each ask. Where they are what was said before and something new, only
the new part becomes tokens; what was sampled stays the tokens that were sampled. Where they are not (the client has
rewritten its history, or goes back to an earlier point), a new chain begins: at the last point that is unchanged, whose
tokens it takes over as its prompt, so that each sampled token is trained on in one chain alone. Nothing is ever aligned
with tokens after the fact.
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
    """A chain as it grows; `number` names it in its episode.

    messages: what was said up to the last answer, as the client sends it back. points: after each answer, how many
    messages and segments there were. busy: an answer is on its way.
    """

    number: int
    tools: tuple[Tool, ...]
    prompt_tokens: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    points: list[tuple[int, int]] = field(default_factory=list)
    busy: bool = False

    def chain(self, segments: int | None = None) -> Chain:
        """The chain, or its first segments."""
        return Chain(self.prompt_tokens, tuple(self.segments[:segments]))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an ask stands: the thread it goes on with or begins, and the tokens that it adds to that.

    The thread gets what is added only with the answer: an ask that is taken back leaves nothing.
    """

    thread: Thread
    messages: tuple[Message, ...]
    added: tuple[int, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        return self.thread.chain().tokens + self.added


class Threads:
    """All contexts of an episode, in the order of their first answers."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._numbers = count()
        self._threads: list[Thread] = []

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(thread.chain() for thread in self._threads)

    def place(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Place:
        """Where these messages go on. Raises `RequestError` where there is nothing to answer, and `DataError` where the
        template cannot show them."""
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
        """The answer to what stands at a place, as tokens and as the client gets it."""
        thread = place.thread
        if place.added:
            thread.segments.append(Segment.observed(place.added))
        thread.segments.append(answer)
        thread.messages = (*place.messages, said)
        if thread not in self._threads:
            self._threads.append(thread)
        thread.points.append((len(thread.messages), len(thread.segments)))

    def _longest(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Thread, tuple[int, int]] | None:
        """The last point that these messages continue without an answer of somebody else; of several alike, one where a
        thread can go on."""
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
    """What of a message must be the same: clients drop and add empty fields, write JSON in their own way, and trim what
    the model said."""
    calls = tuple((call.name, dict(call.arguments)) for call in message.calls)
    text = text_of(message)
    return message.role, text.strip() if message.role == "assistant" else text, calls, message.call_id
