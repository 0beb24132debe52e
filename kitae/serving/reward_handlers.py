"""The handler of a reward model: scores of answers, from the same process that verifiers use.

    POST /v1/score
    {"messages": [{"role": "user", "content": "Hello"}], "response": "Hello!"}         one answer
    {"messages": [… the last of them the assistant's]}                                 the same
    {"items": [{"messages": […], "response": "…"}, …]}                                 several
    {"text_1": "Hello", "text_2": "Hello!"}                                  a question and an answer, as texts

    {"data": [{"index": 0, "score": 0.71}, …]}

Answers that come within a few milliseconds of each other are scored as one batch. In a list, an answer that cannot be
scored has `"error"` in place of its score; a single answer is refused.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kitae.data.data_files import clip
from kitae.serving.admission import AdmissionControl
from kitae.serving.http_bodies import endpoint, json_response, unless_gone
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import RequestBody
from kitae.serving.request_reader import RequestReader
from kitae.serving.server_metrics import Counters
from kitae.verifiers.reward_model_verifier import RewardService

Talk = tuple[list[Any], str]
"""Messages, and the response to them."""

_MOST_ITEMS = 1024


class ScoreBody(RequestBody):
    """The body of `POST /v1/score`, in any of its three forms."""

    model: str = ""
    items: list[Any] | None = None
    text_1: str | None = None
    text_2: str | None = None
    messages: Any = None
    response: Any = None
    user: Any = None


class RewardHandlers:
    def __init__(
        self, service: RewardService, name: str, admission: AdmissionControl, reader: RequestReader[None]
    ) -> None:
        self._service, self._name, self._admission, self._reader = service, name, admission, reader

    async def score(self, request: Request) -> Response:
        talks, alone = await self._reader.read(request, lambda body, _: self._talks(ScoreBody.read(body)))
        with self._admission.take(len(talks)):
            work = asyncio.gather(*(self._one(*talk) for talk in talks))
            found = await unless_gone(request.receive, work)
        if alone and "error" in found[0]:
            raise Refused(found[0]["error"])
        rows = [{"index": i, "object": "score", **one} for i, one in enumerate(found)]
        return json_response({"object": "list", "model": self._name, "data": rows})

    def _talks(self, body: ScoreBody) -> tuple[list[Talk], bool]:
        if body.model and body.model != self._name:
            message = f"there is no model {clip(repr(body.model))} here, only {self._name!r}"
            raise Refused(message, 404, param="model")
        return _talks(body)

    async def _one(self, messages: list[Any], response: str) -> dict[str, Any]:
        found = await self._service.score(response, None, {"prompt_messages": messages})
        return {"score": found.components["reward_raw"]} if found.valid else {"error": found.detail}


def reward_routes(handlers: RewardHandlers, counters: Counters) -> list[BaseRoute]:
    async def elsewhere(_: Request) -> Response:
        raise Refused("this server serves a reward model: it answers at /v1/score alone", 404)

    others = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
    return [
        Route("/v1/score", endpoint(handlers.score, counters), methods=["POST"]),
        *(Route(path, endpoint(elsewhere, counters), methods=["POST"]) for path in others),
    ]


def _talks(body: ScoreBody) -> tuple[list[Talk], bool]:
    """The answers to score, and whether the body has a single one instead of a list."""
    items = body.items
    if items is not None:
        if not 0 < len(items) <= _MOST_ITEMS:
            raise Refused(f"items must be a list of 1 to {_MOST_ITEMS} objects, got {clip(repr(items))}", param="items")
        return [_talk(item, f"items[{i}]") for i, item in enumerate(items)], False
    if body.text_1 is not None or body.text_2 is not None:
        if body.text_1 is None or body.text_2 is None:
            raise Refused("text_1 and text_2 must both be texts", param="text_1")
        return [([{"role": "user", "content": body.text_1}], body.text_2)], True
    return [_talk({"messages": body.messages, "response": body.response}, "the body")], True


def _talk(item: Any, where: str) -> Talk:
    messages = item.get("messages") if isinstance(item, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{where} must have messages, a list, got {clip(repr(messages))}", param="messages")
    if extra := sorted(item.keys() - {"messages", "response"}):
        raise Refused(f"{where}: unknown field {extra[0]!r}", param=extra[0])
    response = item.get("response")
    if response is None:
        last = messages[-1]
        if not isinstance(last, Mapping) or last.get("role") != "assistant" or len(messages) < 2:
            raise Refused(f"{where} must have a response, or end with a message of the assistant", param="response")
        messages, response = messages[:-1], last.get("content")
    if not isinstance(response, str):
        raise Refused(f"{where}: the response must be a text, got {clip(repr(response))}", param="response")
    return messages, response
