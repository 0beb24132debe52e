"""Whatever stands in an address: an answer, never a failure, and never a file from outside the run."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from written_runs import WrittenRun

from kitae.ui.guard import Door
from kitae.ui.library import Library
from kitae.ui.ui_server import make_app

SECRET = "the-secret-outside"
ODD = (
    "0", "-0", "1", "-1", "00", "+1", "1_0", "1e3", "0x1", "2147483648", str(2**53), str(2**63 - 1), str(2**63),
    str(-(2**63)), str(-(2**63) - 1), str(2**64), "9" * 400, "9" * 5000, "nan", "NaN", "inf", "-inf", "1e308", "1e999",
    "0.5", "", " ", "null", "true", "[]", "{}", "\x00", "a\x00b", "\n", "\r\nx: y", "é", "\u0661", "日本", "\U0001f600",
    "\u202e", "\ufffd", "\ud800", "..", ".", "../secret", "../../secret/console.log", "..\\secret", "/etc/passwd",
    "%2e%2e", "%00", "toy-001", "toy-001/../secret", "toy-001~2", "~", "a" * 3000, "'", '"', "' OR 1=1 --", "%", "_",
    "\\", ";", "newest", "longest", "trained", "1.0_0_0_50", f"nan_{2**70}_0_0", "inf_0_0_0", "-inf_-1_-1_-1",
    "1_2_3_4_5",     "x,y", "," * 500, "toy-001,toy-001", "toy-001," * 9, "reward", "<script>",
)  # fmt: skip
NAMES = (
    "step", "reward_min", "reward_max", "length_min", "length_max", "finish", "verdict", "status", "fate", "prompt",
    "text", "order", "after", "names", "runs", "kind", "at", "steps", "last", "token", "unknown",
)  # fmt: skip


@pytest.fixture
def app(tmp_path: Path) -> Starlette:
    made = WrittenRun(tmp_path / "runs")
    for _ in range(3):
        made.step([[0.0, 1.0], [None, 0.5]], text="say")
    made.evaluate(0.5).finish()
    (tmp_path / "secret").mkdir()
    for name in ("console.log", "config.json", "index.html"):
        (tmp_path / "secret" / name).write_text(SECRET)
    return make_app(Library([tmp_path / "runs"]), Door("127.0.0.1"))


async def ask(app: Starlette, path: str, query: str = "", **headers: str) -> tuple[int, bytes]:
    """Spoken to below HTTP, where no client makes an address better than it is."""
    raw = quote(path, safe="/", errors="surrogatepass").encode()
    given = [(b"host", b"127.0.0.1"), *((k.encode(), v.encode("latin-1")) for k, v in headers.items())]
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": raw, "query_string": query.encode(),
        "headers": given, "server": ("127.0.0.1", 7007), "scheme": "http", "root_path": "", "http_version": "1.1",
    }  # fmt: skip
    status, body = 0, b""

    incoming = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else await asyncio.Future()

    async def send(message: Any) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app(scope, receive, send)
    return status, body


def paths(app: Starlette) -> list[str]:
    found = [route.path for route in app.routes if isinstance(route, Route) and route.path != "/api/live"]
    assert len(found) >= 13
    return [*found, "/assets/{path}", "/{path}"]


def filled(path: str, value: str) -> list[str]:
    """The path with the value at each of its places; the others lead somewhere."""
    usual = {"run": "toy-001", "group": "0", "sample": "0", "path": "none"}
    names = [name for name in usual if f"{{{name}}}" in path]
    made = []
    for odd in names:
        one = path
        for name in names:
            one = one.replace(f"{{{name}}}", value if name == odd else usual[name])
        made.append(one)
    return made


def test_no_address_is_a_failure_or_leads_outside(app: Starlette) -> None:
    async def run() -> None:
        draw = random.Random(7)
        tried, statuses = 0, set()
        asked = [
            (one, "")
            for path in paths(app)
            for value in (ODD if "{group}" in path else draw.sample(ODD, 12))
            for one in filled(path, value)
        ]
        for path in paths(app):
            usual = (filled(path, "") and path.format(run="toy-001", group=0, sample=0, path="none")) or path
            asked += [
                (usual, f"{name}={quote(value, errors='surrogatepass')}")
                for name, value in draw.sample(list(itertools.product(NAMES, ODD)), 60 if "rollouts" in path else 6)
            ]
            for _ in range(25 if "rollouts" in path else 2):
                some = [(draw.choice(NAMES), draw.choice(ODD)) for _ in range(draw.randrange(2, 9))]
                asked.append((usual, "&".join(f"{k}={quote(v, errors='surrogatepass')}" for k, v in some)))
        for path, query in asked:
            status, body = await ask(app, path, query)
            assert 200 <= status < 500, (path, query, status, body[:300])
            assert SECRET.encode() not in body and b"root:" not in body, (path, query)
            tried += 1
            statuses.add(status)
        assert tried > 500 and {200, 404} <= statuses

    asyncio.run(run())


def test_odd_parameters_mean_something_where_they_are_known(app: Starlette) -> None:
    """The list above would prove little if no value reached a query."""

    async def run() -> None:
        for name, value, says in (
            ("step", str(2**63), b"a number is needed"),
            ("step", "9" * 5000, b"a number is needed"),
            ("step", str(2**63 - 1), b'"total":0'),
            ("length_min", "-5", b'"total":12'),
            ("reward_min", "nan", b'"total":0'),
            ("reward_max", "inf", b'"total":'),
            ("after", f"0.0_{2**63}_0_0", b"what the page before gave"),
            ("text", "%", b'"rows":[]'),
        ):
            status, body = await ask(app, "/api/runs/toy-001/rollouts", f"{name}={quote(value)}")
            assert says in body.replace(b" ", b"") or says in body, (name, value, status, body[:200])
        for group in (str(2**64), "9" * 5000, "-1", "x"):
            status, body = await ask(app, f"/api/runs/toy-001/groups/{group}")
            assert status == 404 and (b"a number is needed" in body or b"has no group" in body), (group, body)

    asyncio.run(run())


@pytest.mark.parametrize("header", ["", "=", "kitae-ui-7007", "kitae-ui-7007=\xff", "a" * 9000, "\x00=;;=", '="'])
def test_odd_cookies_and_tokens_open_nothing(tmp_path: Path, header: str) -> None:
    WrittenRun(tmp_path).step([[1.0]]).finish()
    app = make_app(Library([tmp_path]), Door("0.0.0.0", "s3cret"))

    async def run() -> None:
        assert (await ask(app, "/api/runs", cookie=header))[0] == 401
        for query in ("token", "token=", "token=%ff", "token=s3cre", "token=%00", "&" * 999, "token=a&token=s3cret"):
            assert (await ask(app, "/api/runs", query))[0] == 401, query
        assert (await ask(app, "//evil.example/", "token=s3cret"))[0] == 303

    asyncio.run(run())
