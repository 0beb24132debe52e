"""HTTP around the handlers: bodies, errors as JSON, streams of events, and clients that close their connection.

When a client closes its connection, the work for its request is cancelled.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from traceback import clear_frames
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kitae.data.data_files import clip
from kitae.errors import EngineError, KitaeError, RequestError, root_cause
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import READING, ReadingLimits, read_json
from kitae.serving.server_metrics import Counters

T = TypeVar("T")
Json = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]

_GONE = 499  # the status in the metrics; no client reads it
_log = logging.getLogger("kitae.serving")


class GoneError(Exception):
    """The client closed its connection before the answer."""


async def receive_body(
    request: Request,
    limits: ReadingLimits = READING,
    hold: Callable[[int], None] = lambda size: None,
    kinds: tuple[str, ...] = ("application/json",),
) -> bytes:
    """The bytes of a body. hold: is called with their number so far, and may refuse more. kinds: of content, which a
    page of another site cannot send without a preflight request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise Refused(f"the content-type must be {' or '.join(kinds)}, got {clip(kind) or 'none'}", 415)
    body, most = bytearray(), limits.body_bytes
    declared = request.headers.get("content-length", "")[:20]
    if declared.isdecimal() and int(declared) > most:
        raise Refused(f"a body must have at most {most} bytes, got {declared}", 413)
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise Refused(f"a body must have at most {most} bytes, got more", 413)
                hold(len(body))
    except TimeoutError:
        message = f"a body must have come after {limits.seconds:g} s, got {len(body)} bytes of it"
        raise Refused(message, 408, code="too_slow") from None
    except ClientDisconnect:
        raise GoneError from None
    return bytes(body)


async def read_body(request: Request) -> Json:
    return read_json(await receive_body(request))


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. When the client closes the connection, cancels `work` and raises `GoneError`."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_end(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        await end_tasks(working, watching)


async def end_tasks(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, wait for them, and forget where in the request they were cancelled."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        try:
            task.exception()
        except asyncio.CancelledError as error:
            forget_places(error)


def forget_places(error: BaseException) -> None:
    """Empty the frames in which an error was raised and passed on, and those of the errors behind it.

    They hold the request and all that was made of it, and often the error or its task itself: a circle of megabytes
    that only a full collection of garbage ends, which is rare.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        seen.add(id(one))
        clear_frames(one.__traceback__)
        behind = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        waiting += [other for other in behind if other is not None and id(other) not in seen]


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, headers, "application/json")


def refusal_response(refused: Refused, scope: Scope) -> Response:
    """In the shape that the client reads: Anthropic's by its path, or by the header that its clients send."""
    messages = "/v1/messages" in scope["path"] or "anthropic-version" in Headers(scope=scope)
    return json_response(refused.as_message() if messages else refused.as_json(), refused.status, refused.headers)


class EventStream(Response):
    """Server-sent events. The caller takes the first one from `events`, so that a request that fails at once gets an
    error status. A later failure is sent as the last event, as `failed` tells it; else `ends` is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Json, None],
        first: Json,
        gone: Callable[[], None],
        failed: Callable[[Refused], Json],
        ends: bytes,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._first, self._left = events, first, gone
        self._failed, self._ends = failed, ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except GoneError:
            self._left()
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_part(send, _event(self._first))
        try:
            async for event in self._events:
                await _send_part(send, _event(event))
            if self._ends:
                await _send_part(send, self._ends)
        except Exception as error:
            await _send_part(send, _event(self._failed(refusal_of(error))))
            forget_places(error)
        await send({"type": "http.response.body", "body": b""})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(body: Json) -> bytes:
    """One event; those that have a type are named by it."""
    named = f"event: {body['type']}\n" if "type" in body else ""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{named}data: {text}\n\n".encode("utf-8", "replace")


def refusal_of(error: BaseException) -> Refused:
    """The error as a client gets it. An unexpected error is logged, and the client gets only its type."""
    if isinstance(error, BaseExceptionGroup):
        error = root_cause(error)
    match error:
        case Refused():
            return error
        case RecursionError():
            return Refused("the request is nested too deeply")
        case RequestError():
            return Refused(str(error))
        case EngineError():
            return Refused(str(error), 503, code="engine_error")
        case KitaeError():
            return Refused(str(error))
        case HTTPException():
            return Refused(error.detail, error.status_code)
    _log.error("a request failed", exc_info=error)
    return Refused(f"the server failed: {type(error).__name__}", 500)


def endpoint(handler: Handler, counters: Counters) -> Handler:
    """A handler that returns errors as JSON and counts its requests."""

    async def answer(request: Request) -> Response:
        began, path = time.monotonic(), place_of(request)
        try:
            response = await handler(request)
        except GoneError:
            counters.gone(path)
            response = Response(status_code=_GONE)
        except Exception as error:
            response = refusal_response(refusal_of(error), request.scope)
            forget_places(error)
        counters.count(path, response.status_code, time.monotonic() - began, request.scope.get("account"))
        return response

    return answer


def place_of(request: Request) -> str:
    """The path with the names of its parameters, whose values may be secrets: `/episodes/{token}/v1/…`."""
    path = str(request.scope["path"])
    for name, value in request.path_params.items():
        path = path.replace(str(value), f"{{{name}}}")
    return path
