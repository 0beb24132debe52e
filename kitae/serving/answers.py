"""What a dialect must be able to say: the answers to one order, whole or as events.

    body ─► a `Speak` ─► a `Teller` with its `AnswerOrder` ─► handlers ask the model ─► JSON of the teller

Chats and texts have a teller of their own (`chat_answers`). Dialects whose answers are parts share `PartStream`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kitae.data.chat import Chat
from kitae.engines.base import Sampled
from kitae.serving.base import Answer
from kitae.serving.kept_answers import KeptAnswers
from kitae.serving.prompt_reader import PromptReader
from kitae.serving.refusals import Refused
from kitae.serving.requests import AnswerOrder
from kitae.serving.streamed_text import GrowingAnswer
from kitae.serving.text_scoring import ScoredText
from kitae.serving.token_text import TokenText
from kitae.types import ToolCall, Turn

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerRenderer:
    """Turns tokens into text for a client: `AnswerRenderer("smollm2-135m", chat, TokenText(tokenizer), early=True)`.

    name: the name of the model, as clients know it. early: see `kitae.serving.streamed_text.streams_early`.
    """

    name: str
    chat: Chat
    token_text: TokenText
    early: bool

    def growing(self, order: AnswerOrder, index: int) -> GrowingAnswer:
        ask = order.asks[index]
        early = (self.early or not ask.tools) and not ask.thoughts
        return GrowingAnswer(self.chat, self.token_text, ask.sampling.stop_strings, ask.tools, early)


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of an order, with the log-probs of its prompt and its tokens where the client wants them.

    unmet: the reason why it is not what was asked for; "": it is.
    """

    index: int
    answer: Answer
    scored: ScoredText | None = None
    unmet: str = ""


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks, and how an answer becomes text: `Asking(renderer, kept)`. retry: see `Ask`."""

    renderer: AnswerRenderer
    kept: KeptAnswers
    retry: bool = False


class AnswerStream(Protocol):
    """One answer as events: `add` takes new tokens, `end` the whole answer, and both return events."""

    def add(self, news: Sampled) -> list[Json]: ...
    def end(self, answer: Answer) -> list[Json]: ...


class Teller(Protocol):
    """Tells the answers to one order in a dialect. ends: what follows the last event of a stream."""

    ends: bytes

    @property
    def order(self) -> AnswerOrder: ...
    def whole(self, choices: Sequence[Choice]) -> Json: ...
    def stream(self, index: int) -> AnswerStream: ...
    def pieces_of(self, choice: Choice) -> list[Json]:
        """A whole answer as events, for orders of which nothing can be sent before the end."""

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        """What follows the events of all answers."""

    def failed(self, refused: Refused) -> Json:
        """The event that ends a stream which cannot go on."""


Speak = Callable[[Json, PromptReader, Asking], Teller]
"""Reads the body of a request in one dialect."""


# Answers as parts.


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """`AnswerPart("text", "Hello")`; the text of a call is its arguments as JSON."""

    kind: Literal["thinking", "text", "call"]
    text: str
    call: ToolCall | None = None


def parts_of(turn: Turn) -> list[AnswerPart]:
    """The parts of a turn; there is at least one."""
    thinking = [AnswerPart("thinking", turn.reasoning)] if turn.reasoning else []
    text = [AnswerPart("text", turn.told)] if turn.told or not turn.calls else []
    return [*thinking, *text, *(AnswerPart("call", arguments_of(call), call) for call in turn.calls)]


class PartTeller(Teller, Protocol):
    """A teller whose events begin, grow and end parts; index: of a part in its answer."""

    def begun(self) -> list[Json]: ...
    def part_begun(self, index: int, part: AnswerPart) -> list[Json]: ...
    def part_grown(self, index: int, part: AnswerPart) -> list[Json]:
        """part: of its kind, with the new text alone."""

    def part_ended(self, index: int, part: AnswerPart) -> list[Json]: ...
    def ended(self, choice: Choice) -> list[Json]: ...


class PartStream:
    """The only answer of an order as parts. Its text is told while it comes, and then comes first."""

    def __init__(self, teller: PartTeller, growing: GrowingAnswer) -> None:
        self._teller, self._growing = teller, growing
        self._begun = self._telling = False

    def add(self, news: Sampled) -> list[Json]:
        begun, text = self._begin(), self._growing.add(news.tokens)
        return begun + (self._text(text) if text else [])

    def end(self, answer: Answer, unmet: str = "") -> list[Json]:
        events, turn, teller = self._begin(), answer.turn, self._teller
        rest = self._growing.end(turn.told)
        parts = parts_of(turn)
        if self._telling:
            parts.sort(key=lambda part: part.kind != "text")
            events += self._text(rest) if rest else []
            events += teller.part_ended(0, parts[0])
        for index, part in enumerate(parts):
            if index or not self._telling:
                events += teller.part_begun(index, part)
                events += teller.part_grown(index, part) if part.text else []
                events += teller.part_ended(index, part)
        return events + teller.ended(Choice(0, answer, unmet=unmet))

    def _begin(self) -> list[Json]:
        first, self._begun = not self._begun, True
        return self._teller.begun() if first else []

    def _text(self, news: str) -> list[Json]:
        part, first = AnswerPart("text", news), not self._telling
        self._telling = True
        return (self._teller.part_begun(0, part) if first else []) + self._teller.part_grown(0, part)


def arguments_of(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def version_of(answer: Answer) -> int:
    """The version of the policy that sampled the last token; -1: none was sampled."""
    return answer.sampled.versions[-1] if answer.sampled.versions else -1


def tokens_told(order: AnswerOrder, answer: Answer) -> Json:
    """What Kitae says of an answer beyond what a dialect has: its version, its problem, on demand its tokens."""
    found: Json = {"version": version_of(answer)}
    if answer.turn.problem:
        found["problem"] = answer.turn.problem
    if order.token_ids:
        found |= {"token_ids": list(answer.sampled.tokens), "versions": list(answer.sampled.versions)}
        found["prompt_token_ids"] = list(answer.prompt_tokens)
    return found
