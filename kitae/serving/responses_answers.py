"""Answers in the shape of OpenAI's Responses API, whole or as its events, and answers that one may go on from."""

import time
from collections.abc import Sequence
from typing import Any

from kitae.serving.answers import (
    AnswerPart,
    AnswerRenderer,
    Asking,
    Choice,
    Json,
    PartStream,
    Teller,
    arguments_of,
    parts_of,
    tokens_told,
)
from kitae.serving.base import Answer
from kitae.serving.kept_answers import KeptAnswer, KeptAnswers
from kitae.serving.prompt_reader import PromptReader
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import ChatBody
from kitae.serving.requests import AnswerOrder, read_chat, renamed
from kitae.serving.responses_bodies import ResponsesBody

_NONE: list[Json] = []  # log-probs
_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
_ECHOED = (
    *("instructions", "previous_response_id", "store", "max_output_tokens", "temperature", "top_p"),
    *("tools", "tool_choice", "parallel_tool_calls", "metadata"),
)


def speak_responses(body: Json, prompts: PromptReader, asking: Asking) -> Teller:
    read = ResponsesBody.read(body)
    before = find_kept(asking.kept, read.previous_response_id).messages if read.previous_response_id else ()
    with renamed(_NAMES):
        chat = ChatBody.read(read.as_chat(before))
        order = read_chat(chat, prompts, asking.retry, id="resp_", thoughts=True)
    return ResponseTeller(order, asking, read, before)


def find_kept(kept: KeptAnswers, id: str) -> KeptAnswer:
    found = kept.find(id)
    if found is None:
        message = f"there is no response {id[:100]!r} here that was stored: it may have been dropped for newer ones"
        raise Refused(message, 404, param="previous_response_id", code="previous_response_not_found")
    return found


class ResponseTeller:
    """A `PartTeller` of output items."""

    ends = b""

    def __init__(self, order: AnswerOrder, asking: Asking, body: ResponsesBody, before: Sequence[Json]) -> None:
        self.order = order
        self._renderer: AnswerRenderer = asking.renderer
        self._kept, self._body, self._before = asking.kept, body, before
        self._created = int(time.time())
        self._told = 0  # events

    def whole(self, choices: Sequence[Choice]) -> Json:
        (choice,) = choices
        answer = choice.answer
        thought = len(self._renderer.chat.encode(answer.turn.reasoning)) if answer.turn.reasoning else 0
        sizes = len(answer.prompt_tokens), len(answer.sampled.tokens)
        usage = {
            "input_tokens": sizes[0],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sizes[1],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": sum(sizes),
        }
        cut = answer.finish == "length" and not answer.turn.calls
        status = "incomplete" if cut else "completed"
        output = [self._item(part, part.text, status) for part in parts_of(answer.turn)]
        told = self._head(status, output) | {"usage": usage}
        told |= {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        told |= tokens_told(self.order, answer) | ({"unmet": choice.unmet} if choice.unmet else {})
        if self._body.store:
            self._keep(told, answer)
        return told

    def _keep(self, told: Json, answer: Answer) -> None:
        turn = answer.turn
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": arguments_of(c)}}
            for c in turn.calls
        ]
        news = [*self._body.messages, {"role": "assistant", "content": turn.told, "tool_calls": calls}]
        self._kept.keep(self.order.id, KeptAnswer(told, (*self._before, *news)), len(news))

    def stream(self, index: int) -> PartStream:
        return PartStream(self, self._renderer.growing(self.order, index))

    def pieces_of(self, choice: Choice) -> list[Json]:
        return self.stream(0).end(choice.answer, choice.unmet)

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        return []

    def failed(self, refused: Refused) -> Json:
        error = {"code": "server_error" if refused.status >= 500 else "invalid_prompt", "message": str(refused)}
        return self._event("response.failed", response=self._head("failed", []) | {"error": error})

    # Events.

    def begun(self) -> list[Json]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._head("in_progress", [])) for kind in kinds]

    def part_begun(self, index: int, part: AnswerPart) -> list[Json]:
        item = self._item(part, "", "in_progress") | ({} if part.kind == "call" else {"content": []})
        begun = self._event("response.output_item.added", output_index=index, item=item)
        if part.kind == "call":
            return [begun]
        return [begun, self._inside("content_part.added", index, part, {"part": _content(part, "")})]

    def part_grown(self, index: int, part: AnswerPart) -> list[Json]:
        match part.kind:
            case "text":
                return [self._inside("output_text.delta", index, part, {"delta": part.text, "logprobs": _NONE})]
            case "thinking":
                return [self._inside("reasoning_text.delta", index, part, {"delta": part.text})]
        return [self._inside("function_call_arguments.delta", index, part, {"delta": part.text})]

    def part_ended(self, index: int, part: AnswerPart) -> list[Json]:
        item = self._item(part, part.text)
        if part.kind == "call":
            told = {"arguments": part.text, "name": item["name"]}
            events = [self._inside("function_call_arguments.done", index, part, told)]
        else:
            kind, more = ("output_text", {"logprobs": _NONE}) if part.kind == "text" else ("reasoning_text", {})
            events = [
                self._inside(f"{kind}.done", index, part, {"text": part.text, **more}),
                self._inside("content_part.done", index, part, {"part": _content(part, part.text)}),
            ]
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def ended(self, choice: Choice) -> list[Json]:
        told = self.whole([choice])
        return [self._event(f"response.{told['status']}", response=told)]

    def _event(self, kind: str, **told: Any) -> Json:
        self._told += 1
        return {"type": kind, "sequence_number": self._told - 1, **told}

    def _inside(self, kind: str, index: int, part: AnswerPart, told: Json) -> Json:
        """An event of an item."""
        place = {"item_id": self._id_of(part), "output_index": index}
        place |= {} if part.kind == "call" else {"content_index": 0}
        return self._event(f"response.{kind}", **place, **told)

    def _head(self, status: str, output: list[Json]) -> Json:
        echoed = self._body.model_dump(mode="json", include=set(_ECHOED))
        return {
            "id": self.order.id,
            "object": "response",
            "created_at": self._created,
            "model": self._renderer.name,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **echoed,
            "text": {"format": self._body.text.format or {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "background": False,
            "output": output,
            "usage": None,
        }

    def _id_of(self, part: AnswerPart) -> str:
        if part.call is not None:
            return f"fc_{part.call.id.removeprefix('call_')}"
        return self.order.id.replace("resp_", "msg_" if part.kind == "text" else "rs_")

    def _item(self, part: AnswerPart, text: str, status: str = "completed") -> Json:
        """An output item; text: what of the part's text it has."""
        item: Json = {"id": self._id_of(part), "status": status}
        if part.call is not None:
            return item | {"type": "function_call", "call_id": part.call.id, "name": part.call.name, "arguments": text}
        content = [_content(part, text)]
        if part.kind == "thinking":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}


def _content(part: AnswerPart, text: str) -> Json:
    if part.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _NONE}
