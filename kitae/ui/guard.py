"""Who may ask: the checks before every answer, and the headers on it.

What a model wrote is hostile text. The page shows it as text alone, and these headers keep a browser from making more
of it: no script but the page's own, no frame, no guessing of types. A page of somebody else cannot read answers
either: the name in the Host header must be one of this machine (DNS rebinding), and where other machines can reach the
server, a token is needed, which is a cookie after the first visit.
"""

import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kitae.clients.addresses import host_name, is_loopback, means

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
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
    """Where the server listens, and what it asks for there: `Door("127.0.0.1")`, `Door("0.0.0.0", token="4f…")`."""

    host: str
    token: str = ""

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ValueError(f"a server that others can reach needs a token, got none for {self.host}")

    def knows(self, name: str) -> bool:
        """Whether a Host header, without its port, means this server. A name that anybody can point here does not."""
        return means(self.host, name)

    def admits(self, token: str) -> bool:
        return not self.token or hmac.compare_digest(self.token.encode(), token.encode())


class Guard:
    """ASGI middleware around everything the server answers."""

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
        """What is answered instead; None: the request is let through."""
        headers = Headers(scope=scope)
        name = host_name(headers.get("host", ""))
        if not self._door.knows(name):
            return PlainTextResponse(f"this server does not answer to the name {name!r}", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this server only reads", 405)
        if not self._door.token:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and self._door.admits(given):
            return self._welcome(scope)
        if self._door.admits(_cookie(headers.get("cookie", ""), cookie_name(scope))):
            return None
        return PlainTextResponse("open the address that kitae ui printed, with its token", 401)

    def _welcome(self, scope: Scope) -> ASGIApp:
        """The token goes from the address, where a history would keep it, into a cookie."""
        answer = RedirectResponse(scope["path"] or "/", 303)
        answer.set_cookie(cookie_name(scope), self._door.token, httponly=True, samesite="lax")
        return answer


def cookie_name(scope: Scope) -> str:
    """One for each port: cookies do not know ports, and there may be several servers on a machine."""
    return f"kitae-ui-{(scope.get('server') or ('', 0))[1]}"


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""
