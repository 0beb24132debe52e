"""The addresses of a server, and the check of its key."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kitae.clients.addresses import host_name, is_loopback, means
from kitae.errors import ConfigError
from kitae.serving.handlers import ChatHandlers, no_responses
from kitae.serving.http_bodies import Handler, endpoint, json_response, refusal_of
from kitae.serving.refusals import Refused
from kitae.serving.server_metrics import Counters

_OPEN = ("/health",)


class KeyGuard:
    """ASGI middleware: a request without the key gets no answer, except at `/health`.

    A server without a key listens on the loopback address alone, and the Host header must name this machine (against
    DNS rebinding).
    """

    def __init__(self, app: ASGIApp, host: str, key: str = "") -> None:
        check_key(host, key)
        self._app, self._host, self._key = app, host, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await json_response(refused.as_json(), refused.status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if self._key:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scope["path"] in _OPEN or (scheme.lower() == "bearer" and self._admits(given.strip())):
                return None
            return Refused("the key must be sent as Authorization: Bearer KEY, got none or another", 401)
        name = host_name(headers.get("host", ""))
        return None if means(self._host, name) else Refused(f"this server does not answer to the name {name!r}", 421)

    def _admits(self, given: str) -> bool:
        return hmac.compare_digest(self._key.encode(), given.encode())


def check_key(host: str, key: str) -> None:
    if not key and not is_loopback(host):
        raise ConfigError(
            f"a server that others can reach needs a key, got none for {host}: set one with --api-key-env NAME"
        )


def chat_routes(handlers: ChatHandlers, counters: Counters) -> list[BaseRoute]:
    """The routes of chats, to be mounted anywhere: `Mount("/episodes/{token}", routes=chat_routes(handlers, …))`."""
    return [
        Route("/v1/chat/completions", endpoint(handlers.chat, counters), methods=["POST"]),
        Route("/v1/responses", endpoint(no_responses, counters), methods=["POST"]),
    ]


def model_routes(handlers: ChatHandlers, counters: Counters) -> list[BaseRoute]:
    """All routes of a language model."""
    return [
        *chat_routes(handlers, counters),
        Route("/v1/completions", endpoint(handlers.complete, counters), methods=["POST"]),
        Route("/tokenize", endpoint(handlers.tokenize, counters), methods=["POST"]),
        Route("/detokenize", endpoint(handlers.detokenize, counters), methods=["POST"]),
        Route("/v1/score", endpoint(_not_here("a language model"), counters), methods=["POST"]),
    ]


def name_routes(name: str, context: int, counters: Counters) -> list[BaseRoute]:
    """The list of models, which has one. context: the length of its context in tokens; 0: it is left out."""
    listed: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "kitae"}
    listed |= {"max_model_len": context} if context else {}

    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [listed]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != name:
            raise Refused(f"there is no model {request.path_params['name']!r} here, only {name!r}", 404)
        return json_response(listed)

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
    key: str = "",
    healthy: Callable[[], Awaitable[None]] | None = None,
) -> Starlette:
    """The app of these routes and of those that every server has. healthy: raises if the server cannot answer."""

    async def health(_: Request) -> Response:
        if healthy is not None:
            await healthy()
        return json_response({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(counters.page(), media_type="text/plain; version=0.0.4")

    shared = [
        *name_routes(name, context, counters),
        Route("/health", endpoint(health, counters)),
        Route("/metrics", metrics),
    ]
    guard = Middleware(KeyGuard, host=host, key=key)
    return Starlette(routes=[*routes, *shared], middleware=[guard], exception_handlers={404: _lost, 405: _lost})


async def _lost(_: Request, error: Exception) -> Response:
    refused = refusal_of(error)
    return json_response(refused.as_json(), refused.status)


def _not_here(what: str) -> Handler:
    async def refuse(_: Request) -> Response:
        raise Refused(f"this server serves {what}, which does not answer here", 404)

    return refuse
