"""Access control of `kitae ui`: the checks before every answer, and the headers on it.

The text of a model may be hostile. The page shows it as plain text, and these headers keep a browser from running it:
no script but the page's own, no frame, no guessing of types. Pages of other sites cannot read answers, because the name
in the Host header must be one of this machine (against DNS rebinding). Where other machines can reach the server, every
request needs a token, which is a cookie after the first visit.
"""

import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kitae.clients.addresses import host_name, is_loopback, means

NOTES = "/notes"
"""The end of the one kind of address that is written to."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Door:
    """The host on which the server listens, and the token that it requires.

    `Door("127.0.0.1")`, `Door("0.0.0.0", token="4f…")`
    """

    host: str
    token: str = ""

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ValueError(f"a server that others can reach needs a token, got none for {self.host}")

    def knows(self, name: str) -> bool:
        """Whether a name from a Host header, without its port, is a name of this server."""
        return means(self.host, name)

    def admits(self, token: str) -> bool:
        return not self.token or hmac.compare_digest(self.token.encode(), token.encode())


class PageGuard:
    """ASGI middleware that checks every request and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request that is refused; None for a request that is let through."""
        headers = Headers(scope=scope)
        name = host_name(headers.get("host", ""))
        if not self._door.knows(name):
            return PlainTextResponse(f"this server does not answer to the name {name!r}", 421)
        if scope["method"] == "POST" and scope["path"].endswith(NOTES):
            if headers.get("content-type") != "application/json" or not _own(headers):
                return PlainTextResponse("only the page itself may write notes", 403)
        elif scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this server only reads, and keeps notes", 405)
        if not self._door.token:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and self._door.admits(given):
            return self._welcome(scope)
        if self._door.admits(_cookie(headers.get("cookie", ""), cookie_name(scope))):
            return None
        return PlainTextResponse("open the address that kitae ui printed, with its token", 401)

    def _welcome(self, scope: Scope) -> ASGIApp:
        """Move the token from the address, which a browser keeps in its history, into a cookie."""
        answer = RedirectResponse("/" + scope["path"].lstrip("/\\"), 303)  # two slashes would name another server
        answer.set_cookie(cookie_name(scope), self._door.token, httponly=True, samesite="lax")
        return answer


def _own(headers: Headers) -> bool:
    """Whether a browser says that the page itself asks; programs that are no browsers say nothing of it."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def cookie_name(scope: Scope) -> str:
    """The name has the port, because browsers share cookies between the ports of a machine."""
    return f"kitae-ui-{(scope.get('server') or ('', 0))[1]}"


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""
