"""The way to one server: calls with a deadline, and answers that come as events.

A server is given up at the first sign that it is not well: a connection that breaks, an error of its own (5xx), no
answer in time. Nothing is tried again on the same server, because one that has failed half-way may serve anything. What
it refuses (4xx) is the caller's affair.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kitae.workers.background_tasks import within

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Json = dict[str, Any]

_EXCERPT = 500  # characters of an answer that are quoted
_DATA, _DONE = "data:", "[DONE]"
_OK, _SERVER_ERROR = 200, 500


class LineLost(Exception):
    """The server is of no use any more; the message says why."""


class Refusal(Exception):
    """The server does not want this request; others are unharmed."""


class Line:
    """`line = Line("http://127.0.0.1:8001", limit=120)`; `close` it when done. limit: seconds for an answer."""

    def __init__(self, url: str, limit: float) -> None:
        import httpx

        self.url = url.rstrip("/")
        self.limit = limit
        # An idle connection must be given up here first: servers do so after 5 s, perhaps as it is used again. A proxy
        # for the outer world has no business between servers and a trainer.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, follow_redirects=False)

    async def get(self, path: str, limit: float | None = None) -> Json:
        return await self._ask("GET", path, limit)

    async def post(self, path: str, body: Json | None = None, **query: str) -> Json:
        return await self._ask("POST", path, None, json=body, params=query)

    async def _ask(self, method: str, path: str, limit: float | None, **what: Any) -> Json:
        """The JSON of an answer; {} where it has none."""
        limit = limit or self.limit
        try:
            answer = await within(limit, asyncio.create_task(self._send(method, path, what)))
        except TimeoutError:
            raise LineLost(f"it did not answer {path} within {limit:g} s") from None
        _check(answer.status_code, path, answer.text)
        found = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else {}
        return found if isinstance(found, dict) else {"results": found}

    async def _send(self, method: str, path: str, what: Mapping[str, Any]) -> "httpx.Response":
        return await _or_lost(path, self._client.request(method, self.url + path, **what))

    async def events(self, path: str, body: Json) -> AsyncIterator[Json]:
        """What a server sends in answer to one request, until it has sent everything."""
        import httpx

        try:
            async with self._client.stream("POST", self.url + path, json=body) as answer:
                if answer.status_code != _OK:
                    _check(answer.status_code, path, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA):
                        text = line[len(_DATA) :].strip()
                        if text == _DONE:
                            return
                        yield _event(path, text)
        except httpx.HTTPError as error:
            raise LineLost(f"{path} broke off: {type(error).__name__}: {error}") from None
        raise LineLost(f"{path} broke off without an end")

    async def close(self) -> None:
        await self._client.aclose()


async def _or_lost(path: str, work: Awaitable[T]) -> T:
    import httpx

    try:
        return await work
    except httpx.HTTPError as error:
        raise LineLost(f"{path} failed: {type(error).__name__}: {error}") from None


def _event(path: str, text: str) -> Json:
    try:
        event = json.loads(text)
    except ValueError:
        raise LineLost(f"{path} must tell JSON, got {text[:_EXCERPT]!r}") from None
    if not isinstance(event, dict):
        raise LineLost(f"{path} must tell objects, got {text[:_EXCERPT]!r}")
    if error := event.get("error"):
        _check(int(error.get("code") or _SERVER_ERROR), path, str(error.get("message")))
    return event


def _check(status: int, path: str, said: str) -> None:
    said = " ".join(said.split())[:_EXCERPT]
    if status >= _SERVER_ERROR:
        raise LineLost(f"{path} failed with HTTP {status}: {said}")
    if status != _OK:
        raise Refusal(f"{path} was refused with HTTP {status}: {said}")
