"""Answers in the shape of OpenAI's API, whole or in pieces; the pieces joined are the whole.

Beyond that API, an answer has the version of the policy that sampled it (`version`, and in `system_fingerprint`), the
reason why a call could not be read (`problem`), and on demand (`return_token_ids`) the tokens, with a version each.

Log-probs of sampled tokens are those of the distribution that the tokens were drawn from. Where a client also wants
those of the likeliest tokens or of the prompt, all come from one pass over the text, so that they can be compared: at
the temperature of the request, before top-k, top-p and min-p.
"""

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kitae.engines.base import Sampled
from kitae.serving.answers import (
    AnswerRenderer,
    Asking,
    Choice,
    Json,
    Teller,
    arguments_of,
    tokens_told,
    version_of,
)
from kitae.serving.base import Answer
from kitae.serving.prompt_reader import PromptReader
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import ChatBody, CompletionBody
from kitae.serving.requests import AnswerOrder, read_chat, read_completion
from kitae.serving.text_scoring import ScoredText
from kitae.serving.token_text import TokenText
from kitae.types import ToolCall, Turn

_LOWEST = -9999.0  # what OpenAI's API writes for a log-prob that JSON has no number for


def speak_chat(body: Json, prompts: PromptReader, asking: Asking) -> Teller:
    return ResponseBuilder(read_chat(ChatBody.read(body), prompts, asking.retry), asking.renderer)


def speak_text(body: Json, prompts: PromptReader, asking: Asking) -> Teller:
    return ResponseBuilder(read_completion(CompletionBody.read(body), prompts, asking.retry), asking.renderer)


class ResponseBuilder:
    """Builds the JSON of the answers of one order."""

    ends = b"data: [DONE]\n\n"

    def __init__(self, order: AnswerOrder, renderer: AnswerRenderer) -> None:
        self.order, self.renderer = order, renderer
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice]) -> Json:
        version = max((version_of(c.answer) for c in choices), default=-1)
        body = self._head(version, pieces=False) | {
            "choices": [self._choice(c) for c in choices],
            "usage": self.usage([c.answer for c in choices]),
        }
        if self.order.token_ids and self.order.kind == "chat":
            body["prompt_token_ids"] = list(choices[0].answer.prompt_tokens)
        return body

    def usage(self, answers: Sequence[Answer]) -> Json:
        """A prompt counts once, however many answers it has."""
        prompts = sum(len(a.prompt_tokens) for a in answers[:: self.order.choices])
        sampled = sum(len(a.sampled.tokens) for a in answers)
        return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}

    def piece(self, choice: Json, version: int) -> Json:
        """A part of an answer, as an event of a stream."""
        unknown = {"usage": None} if self.order.usage else {}
        return self._head(version, pieces=True) | {"choices": [choice]} | unknown

    def stream(self, index: int) -> "StreamBuilder":
        return StreamBuilder(self, index)

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        """The event with the number of tokens used, where the client wants it."""
        version = max((version_of(a) for a in answers), default=-1)
        told = self._head(version, pieces=True) | {"choices": [], "usage": self.usage(answers)}
        return [told] if self.order.usage else []

    def failed(self, refused: Refused) -> Json:
        return refused.as_json()

    def pieces_of(self, choice: Choice) -> list[Json]:
        """A whole answer as events, for orders of which nothing can be sent before the end."""
        whole = self._choice(choice)
        finish, version = whole.pop("finish_reason"), version_of(choice.answer)
        if self.order.kind == "text":
            return [self.piece(whole | {"finish_reason": finish}, version)]
        message = whole.pop("message")
        calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = message | ({"tool_calls": calls} if calls else {})
        if self.order.token_ids:
            whole["prompt_token_ids"] = list(choice.answer.prompt_tokens)
        return [self.piece({"delta": delta, "finish_reason": finish, **whole}, version)]

    def _head(self, version: int, *, pieces: bool) -> Json:
        kind = "text_completion" if self.order.kind == "text" else "chat.completion" + (".chunk" if pieces else "")
        return {
            "id": self.order.id,
            "object": kind,
            "created": self._created,
            "model": self.renderer.name,
            "system_fingerprint": f"kitae-{version}" if version >= 0 else "kitae",
        }

    def _choice(self, choice: Choice) -> Json:
        answer, index = choice.answer, choice.index
        if self.order.kind == "text":
            said = {"text": self._echoed(index) + answer.turn.text, "logprobs": self._text_logprobs(choice)}
        else:
            told = self._chat_logprobs(answer, choice.scored) if self.order.logprobs else None
            said = {"message": self.message(answer.turn), "logprobs": told}
        extras = self.extras(answer) | ({"unmet": choice.unmet} if choice.unmet else {})
        return {"index": index, **said, "finish_reason": finish_of(answer), **extras}

    def extras(self, answer: Answer) -> Json:
        found = tokens_told(self.order, answer)
        if self.order.kind == "chat":
            found.pop("prompt_token_ids", None)  # one for all choices, beside them
        return found

    def message(self, turn: Turn) -> Json:
        message: Json = {"role": "assistant", "content": turn.told if turn.told or not turn.calls else None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        return message

    def _echoed(self, index: int) -> str:
        return self.order.prompt_texts[index // self.order.choices] if self.order.echo else ""

    # Log-probs.

    def _chat_logprobs(self, answer: Answer, scored: ScoredText | None) -> Json:
        first, sampled = len(answer.prompt_tokens) - 1, answer.sampled
        if scored is None:
            return {"content": self.entries(sampled, ((),) * len(sampled.tokens)), "refusal": None}
        compared = replace(sampled, logprobs=scored.logprobs[first:])
        return {"content": self.entries(compared, scored.top[first:]), "refusal": None}

    def entries(self, sampled: Sampled, tops: Sequence[Sequence[tuple[int, float]]]) -> list[Json]:
        return [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*one) for one in top]}
            for token, logprob, top in zip(sampled.tokens, sampled.logprobs, tops, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> Json:
        token_text = self.renderer.token_text
        return {"token": token_text.text(token), "logprob": _finite(logprob), "bytes": token_text.bytes(token)}

    def _text_logprobs(self, choice: Choice) -> Json | None:
        if not self.order.logprobs:
            return None
        answer, scored = choice.answer, choice.scored
        prompt, tokens = answer.prompt_tokens, [*answer.sampled.tokens]
        own = answer.sampled.logprobs if scored is None else scored.logprobs[len(prompt) - 1 :]
        logprobs: list[float | None] = [*map(_finite, own)]
        tops: list[Json | None] | None = None
        if scored and self.order.top:
            tops = self._tops(tokens, own, scored.top[len(prompt) - 1 :])
        if scored and self.order.echo:
            known, places = scored.logprobs[: len(prompt) - 1], scored.top[: len(prompt) - 1]
            tops = None if tops is None else [None, *self._tops(prompt[1:], known, places), *tops]
            tokens, logprobs = [*prompt, *tokens], [None, *map(_finite, known), *logprobs]
        offsets = Offsets(self.renderer.token_text)
        return {
            "tokens": [self.renderer.token_text.text(token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets.after(tokens),
        }

    def _tops(
        self, tokens: Sequence[int], logprobs: Sequence[float], places: Sequence[Sequence[tuple[int, float]]]
    ) -> list[Json | None]:
        return [self._top(*one) for one in zip(tokens, logprobs, places, strict=True)]

    def _top(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> Json:
        """Log-probs by text. Of several tokens with the same text, the likelier one counts."""
        found: Json = {}
        for one, value in (*top, (token, logprob)):
            text = self.renderer.token_text.text(one)
            found[text] = max(found.get(text, _LOWEST), _finite(value))
        return found


@dataclass(slots=True)
class Offsets:
    """Where in its text each token begins, in characters."""

    token_text: TokenText
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _length: int = 0

    def after(self, tokens: Sequence[int]) -> list[int]:
        found = []
        for token in tokens:
            found.append(self._length)
            if not self.token_text.is_special(token):
                self._length += len(self._decoder.decode(bytes(self.token_text.bytes(token))))
        return found


class StreamBuilder:
    """One answer as a stream: `hear` takes new tokens, `end` takes the whole answer, and both return events."""

    def __init__(self, builder: ResponseBuilder, index: int) -> None:
        self._builder, self._index = builder, index
        renderer = builder.renderer
        self._growing = renderer.growing(builder.order, index)
        self._offsets = Offsets(renderer.token_text)
        self._pending = Sampled()  # tokens that came and are in no event yet
        self._first = True
        self._version = -1

    def add(self, news: Sampled) -> list[Json]:
        self._pending = self._pending.then(news)
        self._version = news.versions[-1]
        text = self._growing.add(news.tokens)
        return [self._event(self._said(text), None)] if text else []

    def end(self, answer: Answer) -> list[Json]:
        builder, turn = self._builder, answer.turn
        self._version = version_of(answer)
        if builder.order.kind == "text":
            said = self._said(self._growing.end(turn.text))
        else:
            message = builder.message(turn)
            rest = self._growing.end(message["content"] or "")
            said = self._said(rest) if rest or not turn.calls else {"delta": {}}
            said["delta"] |= {key: message[key] for key in ("reasoning_content",) if key in message}
            if turn.calls:
                said["delta"]["tool_calls"] = [c | {"index": i} for i, c in enumerate(message["tool_calls"])]
        told = {key: value for key, value in builder.extras(answer).items() if key in ("version", "problem")}
        return [self._event(said, finish_of(answer), told, answer)]

    def _said(self, text: str) -> Json:
        return {"text": text} if self._builder.order.kind == "text" else {"delta": {"content": text}}

    def _event(self, said: Json, finish: str | None, extras: Json | None = None, answer: Answer | None = None) -> Json:
        order = self._builder.order
        tokens, self._pending = self._pending, Sampled()
        choice = {"index": self._index, **said, "logprobs": self._logprobs(tokens), "finish_reason": finish}
        choice |= extras or {}
        if order.token_ids:
            choice |= {"token_ids": list(tokens.tokens), "versions": list(tokens.versions)}
            if answer is not None:
                choice["prompt_token_ids"] = list(answer.prompt_tokens)
        if self._first:
            self._first = False
            if order.kind == "chat":
                choice["delta"] = {"role": "assistant", **choice["delta"]}
            elif order.echo:
                choice["text"] = order.prompt_texts[self._index // order.choices] + choice["text"]
        return self._builder.piece(choice, self._version)

    def _logprobs(self, tokens: Sampled) -> Json | None:
        if not self._builder.order.logprobs:
            return None
        if self._builder.order.kind == "chat":
            return {"content": self._builder.entries(tokens, ((),) * len(tokens.tokens)), "refusal": None}
        return {
            "tokens": [self._builder.renderer.token_text.text(token) for token in tokens.tokens],
            "token_logprobs": [*map(_finite, tokens.logprobs)],
            "top_logprobs": None,
            "text_offset": self._offsets.after(tokens.tokens),
        }


def finish_of(answer: Answer) -> str:
    if answer.turn.calls:
        return "tool_calls"
    return "length" if answer.finish == "length" else "stop"


def _call(call: ToolCall) -> Json:
    named = {"name": call.name, "arguments": arguments_of(call)}
    return {"id": call.id, "type": "function", "function": named}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
