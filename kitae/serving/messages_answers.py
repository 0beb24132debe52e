"""Answers in the shape of Anthropic's Messages API, whole or as its events."""

import json
from collections.abc import Sequence

from kitae.serving.answers import (
    AnswerPart,
    AnswerRenderer,
    Asking,
    Choice,
    Json,
    PartStream,
    Teller,
    parts_of,
    tokens_told,
)
from kitae.serving.base import Answer
from kitae.serving.messages_bodies import MessagesBody
from kitae.serving.prompt_reader import PromptReader
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import ChatBody
from kitae.serving.requests import AnswerOrder, read_chat, renamed

_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


def speak_messages(body: Json, prompts: PromptReader, asking: Asking) -> Teller:
    with renamed(_NAMES):
        chat = ChatBody.read(MessagesBody.read(body).as_chat())
        order = read_chat(chat, prompts, asking.retry, id="msg_", thoughts=True)
    return MessageTeller(order, asking.renderer)


class MessageTeller:
    """A `PartTeller` of content blocks."""

    ends = b""

    def __init__(self, order: AnswerOrder, renderer: AnswerRenderer) -> None:
        self.order, self._renderer = order, renderer

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        content = [_block(part, part.text) for part in parts_of(choice.answer.turn)]
        usage = self._usage(choice.answer) | _UNCACHED
        return self._head(content, usage) | self._stopped(choice.answer) | self._extras(choice)

    def stream(self, index: int) -> PartStream:
        return PartStream(self, self._renderer.growing(self.order, index))

    def pieces_of(self, choice: Choice) -> list[Json]:
        return self.stream(0).end(choice.answer, choice.unmet)

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        return []

    def failed(self, refused: Refused) -> Json:
        return refused.as_message()

    # Events.

    def begun(self) -> list[Json]:
        """The length of the prompt is told where it is known already, and at the end again."""
        usage = {"input_tokens": len(self.order.asks[0].prompt_tokens or ()), "output_tokens": 0} | _UNCACHED
        return [{"type": "message_start", "message": self._head([], usage)}]

    def part_begun(self, index: int, part: AnswerPart) -> list[Json]:
        return [{"type": "content_block_start", "index": index, "content_block": _block(part, "")}]

    def part_grown(self, index: int, part: AnswerPart) -> list[Json]:
        kind, field = _DELTAS.get(part.kind, ("input_json_delta", "partial_json"))
        return [{"type": "content_block_delta", "index": index, "delta": {"type": kind, field: part.text}}]

    def part_ended(self, index: int, part: AnswerPart) -> list[Json]:
        return [{"type": "content_block_stop", "index": index}]

    def ended(self, choice: Choice) -> list[Json]:
        told = {"type": "message_delta", "delta": self._stopped(choice.answer), "usage": self._usage(choice.answer)}
        return [told | self._extras(choice), {"type": "message_stop"}]

    def _head(self, content: list[Json], usage: Json) -> Json:
        head: Json = {"id": self.order.id, "type": "message", "role": "assistant", "model": self._renderer.name}
        return head | {"content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _usage(self, answer: Answer) -> Json:
        return {"input_tokens": len(answer.prompt_tokens), "output_tokens": len(answer.sampled.tokens)}

    def _stopped(self, answer: Answer) -> Json:
        text = self._renderer.chat.decode(answer.sampled.tokens)
        found = [(text.find(stop), stop) for stop in self.order.asks[0].sampling.stop_strings if stop in text]
        stop = min(found)[1] if found and answer.finish == "stop" else None
        reason = "max_tokens" if answer.finish == "length" else "stop_sequence" if stop else "end_turn"
        return {"stop_reason": "tool_use" if answer.turn.calls else reason, "stop_sequence": stop}

    def _extras(self, choice: Choice) -> Json:
        return tokens_told(self.order, choice.answer) | ({"unmet": choice.unmet} if choice.unmet else {})


_UNCACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _block(part: AnswerPart, text: str) -> Json:
    """A content block; text: what of the part's text it has."""
    match part.kind:
        case "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text, "citations": None}
    assert part.call is not None
    return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": json.loads(text or "{}")}
