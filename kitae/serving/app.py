"""The addresses of a server, and the check of its keys."""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kitae.clients.addresses import host_name, is_loopback, means
from kitae.data.data_files import clip
from kitae.errors import ConfigError
from kitae.serving.api_keys import Account, KeyRing
from kitae.serving.chat_answers import speak_chat, speak_text
from kitae.serving.handlers import ChatHandlers
from kitae.serving.http_bodies import Handler, endpoint, json_response, refusal_of, refusal_response
from kitae.serving.messages_answers import speak_messages
from kitae.serving.refusals import Refused
from kitae.serving.responses_answers import speak_responses
from kitae.serving.server_metrics import Counters

_OPEN = ("/health",)
_CHATS = {
    "/v1/chat/completions": speak_chat,
    "/v1/responses": speak_responses,
    "/v1/messages": speak_messages,
}


class KeyGuard:
    """ASGI middleware: a request without a key gets no answer, except at `/health`, and each key has its limits.

    A server without a key listens on the loopback address alone, and the Host header must name this machine (against
    DNS rebinding).
    """

    def __init__(self, app: ASGIApp, host: str, keys: KeyRing | None = None) -> None:
        self._app, self._host, self._keys = app, host, keys or KeyRing([])
        check_key(host, self._keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            account = self._account(scope)
            limited = account.entered() if account and scope["method"] == "POST" else nullcontext()
            with limited:
                scope["account"], scope["arrived"] = account, time.monotonic()
                await self._app(scope, receive, send)
        except Refused as refused:
            await refusal_response(refused, scope)(scope, receive, send)

    def _account(self, scope: Scope) -> Account | None:
        """That of the key; None at an address that needs none."""
        headers = Headers(scope=scope)
        if self._keys.open:
            name = host_name(headers.get("host", ""))
            if not means(self._host, name):
                raise Refused(f"this server does not answer to the name {clip(repr(name))}", 421)
            return self._keys.account("")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        account = self._keys.account(sent) if sent else None
        if account is None and scope["path"] not in _OPEN:
            raise Refused("the key must be sent as Authorization: Bearer KEY or X-API-Key, got none or another", 401)
        return account


def check_key(host: str, keys: KeyRing) -> None:
    if keys.open and not is_loopback(host):
        raise ConfigError(
            f"a server that others can reach needs a key, got none for {host}: set one with --api-key-env NAME or "
            "--api-key-file FILE, or listen on 127.0.0.1 and let others come by ssh -L"
        )


def chat_routes(handlers: ChatHandlers, counters: Counters) -> list[BaseRoute]:
    """The routes of chats, to be mounted anywhere: `Mount("/episodes/{token}", routes=chat_routes(handlers, …))`."""
    kept = endpoint(handlers.kept_response, counters)
    return [
        *(
            Route(path, endpoint(handlers.speaking(speak), counters), methods=["POST"])
            for path, speak in _CHATS.items()
        ),
        Route("/v1/responses/{id}", kept, methods=["GET", "DELETE"]),
        Route("/v1/messages/count_tokens", endpoint(handlers.count_tokens, counters), methods=["POST"]),
        Route("/v1/embeddings", endpoint(_not_here("a language model"), counters), methods=["POST"]),
    ]


def model_routes(handlers: ChatHandlers, counters: Counters) -> list[BaseRoute]:
    """All routes of a language model."""
    return [
        *chat_routes(handlers, counters),
        Route("/v1/completions", endpoint(handlers.speaking(speak_text), counters), methods=["POST"]),
        Route("/tokenize", endpoint(handlers.tokenize, counters), methods=["POST"]),
        Route("/detokenize", endpoint(handlers.detokenize, counters), methods=["POST"]),
        Route("/v1/score", endpoint(_not_here("a language model"), counters), methods=["POST"]),
    ]


def name_routes(name: str, context: int, counters: Counters, more: Sequence[str] = ()) -> list[BaseRoute]:
    """The list of models: one, and more names of it with adapters. context: the length of its context in tokens; 0: it
    is left out."""

    def told(one: str) -> dict[str, Any]:
        """The second line is what Anthropic's clients read."""
        shared = {"id": one, "object": "model", "created": 0, "owned_by": "kitae"}
        shared |= {"type": "model", "display_name": one, "created_at": "1970-01-01T00:00:00Z"}
        return shared | ({"max_model_len": context} if context else {}) | ({"root": name} if one != name else {})

    listed = {one: told(one) for one in (name, *more)}

    async def models(_: Request) -> Response:
        ends = {"has_more": False, "first_id": name, "last_id": [*listed][-1]}
        return json_response({"object": "list", "data": [*listed.values()], **ends})

    async def model(request: Request) -> Response:
        if (wanted := request.path_params["name"]) not in listed:
            known = ", ".join(map(repr, listed))
            raise Refused(f"there is no model {clip(repr(wanted))} here, only {known}", 404)
        return json_response(listed[wanted])

    return [
        Route("/v1/models", endpoint(models, counters)),
        Route("/v1/models/{name:path}", endpoint(model, counters)),
    ]


def make_app(
    routes: Sequence[BaseRoute],
    counters: Counters,
    *,
    name: str,
    context: int,
    host: str,
    keys: KeyRing | None = None,
    healthy: Callable[[], Awaitable[None]] | None = None,
    more: Sequence[str] = (),
) -> Starlette:
    """The app of these routes and of those that every server has. healthy: raises if the server cannot answer.
    more: names of the model with adapters."""

    async def health(_: Request) -> Response:
        if healthy is not None:
            await healthy()
        return json_response({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(counters.page(), media_type="text/plain; version=0.0.4")

    shared = [
        *name_routes(name, context, counters, more),
        Route("/health", endpoint(health, counters)),
        Route("/metrics", metrics),
    ]
    guard = Middleware(KeyGuard, host=host, keys=keys)
    return Starlette(routes=[*routes, *shared], middleware=[guard], exception_handlers={404: _lost, 405: _lost})


async def _lost(request: Request, error: Exception) -> Response:
    return refusal_response(refusal_of(error), request.scope)


def _not_here(what: str) -> Handler:
    async def refuse(_: Request) -> Response:
        raise Refused(f"this server serves {what}, which does not answer here", 404)

    return refuse
