"""Asking a model server over HTTP: one client, one limit on requests at once and one pace for each model of a server.

    ask() ─► in the cache? ─► wait for a slot and for the pace ─► POST ─► read ─► into the cache
                                                                   │ 429, 5xx, timeout, lost connection
                                                                   └─► wait (longer each time, or as told), POST again

A call that is still waiting for its slot has no deadline; from its first request on, it has. It keeps its slot while it
waits to try again, so a server in trouble gets fewer requests, not more.

Covered: the key is read from the environment for each call, and everything a server says has the key taken out before
it is looked at, so that no score, message or cache file can hold it. Redirects are not followed: the key goes to one
server only. Answers are cut off at 8 MiB. Not covered: a key shorter than 8 characters is taken for a dummy and not
looked for; a server that sends the key back in disguise (base64); limits across processes, as each counts for itself.

The cache is a folder with a database, for any number of processes.
"""

import asyncio
import hashlib
import json
import logging
import random
import sqlite3
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from kitae.clients.service import Service
from kitae.errors import RemoteError

if TYPE_CHECKING:
    import httpx

_LOG = logging.getLogger(__name__)
_FILE = "replies.sqlite3"
_PATIENCE = 10.0  # seconds to wait for another process that writes


def recall(folder: Path, key: str) -> str | None:
    """The cached text. A folder that cannot be made is a mistake; a cache that fails later is only a miss."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RemoteError(f"the cache must be a folder, got {str(folder)!r}: {error.strerror}") from None
    try:
        with closing(_connect(folder)) as database:
            row = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
    except sqlite3.Error as error:
        _LOG.warning("the cache in %s cannot be read and is passed over: %s", folder, error)
        return None
    return str(row[0]) if row else None


def remember(folder: Path, key: str, reply: str) -> None:
    try:
        with closing(_connect(folder)) as database, database:
            database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
    except sqlite3.Error as error:
        _LOG.warning("the cache in %s cannot be written: %s", folder, error)


def _connect(folder: Path) -> sqlite3.Connection:
    """A connection per use: safe in any thread and after a fork. No WAL: it fails on network drives."""
    database = sqlite3.connect(folder / _FILE, timeout=_PATIENCE)
    try:
        database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID")
    except sqlite3.Error:
        database.close()
        raise
    return database


T = TypeVar("T")

_MAX_BODY = 2**23  # bytes of an answer
_MAX_WAIT = 30.0  # seconds between two tries, where the server does not ask for more
_EXCERPT = 200  # characters of an answer that are quoted in a message
_REAL_KEY = 8  # characters; what is shorter ("EMPTY") is a dummy that any text may contain


async def ask(service: Service, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
    """POST `body` and return what `read` makes of the JSON answer; `RemoteError` with the reason where that fails.

    `read` returns a JSON value, which is what the cache keeps; what it raises for an answer that is no use is the
    caller's to catch, and nothing is kept. With a cache, equal requests at the same time are sent once.
    """
    channel = await _open(service)
    url = service.url(path)
    if not service.cache:
        return read(await channel.post(service, url, body))
    key = hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()
    folder = Path(service.cache).expanduser()
    async with channel.turn(key):
        found = await asyncio.to_thread(recall, folder, key)
        if found is not None:
            kept: T = json.loads(found)
            return kept
        result = read(await channel.post(service, url, body))
        await asyncio.to_thread(remember, folder, key, json.dumps(result))
        return result


async def close_clients() -> None:
    """Close the connections of the running event loop; the next call opens new ones.

    Calls under way end with an error. `asyncio.run` does this at its end.
    """
    loop = asyncio.get_running_loop()
    for key in [key for key in _LIFETIMES if key[0] is loop]:
        await _LIFETIMES[key][1].aclose()


class _TryAgainError(Exception):
    """A failure that may pass; `wait` is what the server asks for, in seconds."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _Pace:
    """Requests evenly spaced in time, in the order in which they ask."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        now = asyncio.get_running_loop().time()
        start = max(now, self._next)
        self._next = start + self._gap
        if start > now:
            await asyncio.sleep(start - now)


class _Channel:
    """What the calls to one model share."""

    def __init__(self, service: Service, client: "httpx.AsyncClient") -> None:
        self.limits = (service.concurrency, service.requests_per_minute)
        self._client = client
        self._slots = asyncio.Semaphore(service.concurrency)
        self._pace = _Pace(service.requests_per_minute)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, key: str) -> asyncio.Lock:
        """Equal requests wait for the first of them; the lock is gone when the last has let go of it."""
        return self._turns.setdefault(key, asyncio.Lock())

    async def post(self, service: Service, url: str, body: Mapping[str, Any]) -> Any:
        key = service.key
        async with self._slots:
            await self._pace.wait()
            problem = "no answer came"
            try:
                async with asyncio.timeout(service.deadline) as deadline:
                    for tries in range(1, service.retries + 2):
                        try:
                            return await self._post_once(service, url, body, key)
                        except _TryAgainError as failure:
                            problem = f"{failure} (try {tries})"
                            wait = max(failure.wait, _pause(service.backoff, tries))
                        if tries <= service.retries:
                            _refuse_wait_past(deadline, wait)
                            await asyncio.sleep(wait)
                            await self._pace.wait()
                raise RemoteError(f"{url} must answer within {service.retries} retries: {problem}")
            except TimeoutError as late:
                reason = f"; {late}" if str(late) else ""
                limit = f"{url} must answer within the deadline of {service.deadline:g} s"
                raise RemoteError(f"{limit}: {problem}{reason}") from None

    async def _post_once(self, service: Service, url: str, body: Mapping[str, Any], key: str) -> Any:
        import httpx

        if self._client.is_closed:
            raise RemoteError(f"the client of {url} was closed during the call")
        try:
            async with asyncio.timeout(service.request_timeout):
                status, headers, answer = await self._send(url, body, key)
        except TimeoutError:
            raise _TryAgainError(f"no answer within {service.request_timeout:g} s") from None
        except httpx.TransportError as error:
            raise _TryAgainError(_without(key, f"{type(error).__name__}: {error}")[:_EXCERPT]) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RemoteError(f"{url} failed: {_without(key, repr(error))[:_EXCERPT]}") from None
        said = " ".join(_without(key, answer.decode(errors="replace")).split())[:_EXCERPT]
        if status in (408, 429) or status >= 500:
            raise _TryAgainError(f"HTTP {status}: {said}", _retry_after(headers.get("retry-after", "")))
        if status != 200:
            raise RemoteError(f"{url} refused the request{_about_key(service, key, status)}: HTTP {status}: {said}")
        try:
            return _without(key, json.loads(answer))
        except (ValueError, RecursionError):
            raise RemoteError(f"{url} must answer with JSON, got {said!r}") from None

    async def _send(self, url: str, body: Mapping[str, Any], key: str) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        content = json.dumps(body).encode()
        answer = bytearray()
        async with self._client.stream("POST", url, content=content, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > _MAX_BODY:
                    raise RemoteError(f"an answer must be at most {_MAX_BODY} bytes, got more from {url}")
            return response.status_code, response.headers, bytes(answer)


_LIFETIMES: dict[tuple[asyncio.AbstractEventLoop, str, str], tuple[_Channel, AsyncGenerator[_Channel, None]]] = {}


async def _open(service: Service) -> _Channel:
    """The channel of this model in the running event loop."""
    key = (asyncio.get_running_loop(), service.base_url, service.model)
    if key not in _LIFETIMES:
        lifetime = _lifetime(key, service)
        _LIFETIMES[key] = (await anext(lifetime), lifetime)  # it yields without a pause: no other task comes between
    channel = _LIFETIMES[key][0]
    limits = (service.concurrency, service.requests_per_minute)
    if channel.limits != limits:
        raise RemoteError(
            f"concurrency and requests_per_minute of {service.model!r} at {service.base_url} must be the same "
            f"everywhere, got {limits} beside {channel.limits}"
        )
    return channel


async def _lifetime(
    key: tuple[asyncio.AbstractEventLoop, str, str], service: Service
) -> AsyncGenerator[_Channel, None]:
    """A generator, because an event loop that is shut down closes those: nobody has to remember this one."""
    import httpx

    for name in ("httpx", "httpcore"):  # they log what a server sent, in which the key may be
        logging.getLogger(name).setLevel(logging.WARNING)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=service.concurrency)
    client = httpx.AsyncClient(timeout=None, limits=limits, follow_redirects=False, verify=_tls())
    try:
        yield _Channel(service, client)
    finally:
        _LIFETIMES.pop(key, None)
        await client.aclose()


@cache
def _tls() -> ssl.SSLContext:
    """The certificates to trust; reading them takes a quarter of a second, so it is done once."""
    import httpx

    return httpx.create_ssl_context()


def _about_key(service: Service, key: str, status: int) -> str:
    if status not in (401, 403):
        return ""
    if key:
        return f" (with the key in ${service.key_env})"
    return f" (no key was sent: ${service.key_env} is empty)" if service.key_env else " (no key was sent: set key_env)"


def _refuse_wait_past(deadline: asyncio.Timeout, wait: float) -> None:
    """Give up now, rather than after a wait that ends too late."""
    end = deadline.when()
    if end is not None and asyncio.get_running_loop().time() + wait >= end:
        raise TimeoutError(f"the next try is due only in {wait:.3g} s")


def _pause(backoff: float, tries: int) -> float:
    """Twice as long after each try, with chance, so that many callers do not come back together."""
    return float(min(backoff * 2 ** min(tries - 1, 16), _MAX_WAIT) * random.uniform(0.5, 1.0))


def _retry_after(header: str) -> float:
    """Seconds to wait: of `"3"` or of a date; 0 where the header says nothing that makes sense."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except (ValueError, TypeError, OverflowError):
            return 0.0
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        seconds = (when - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if isfinite(seconds) else 0.0


def _without(key: str, value: Any) -> Any:
    """A JSON value with the key taken out of all its texts."""
    if len(key) < _REAL_KEY:
        return value
    match value:
        case str():
            return value.replace(key, "[key]").replace(json.dumps(key)[1:-1], "[key]")
        case list():
            return [_without(key, item) for item in value]
        case dict():
            return {_without(key, name): _without(key, item) for name, item in value.items()}
        case _:
            return value
