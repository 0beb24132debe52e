"""Who may ask: names in the Host header, tokens, methods; and the headers on every answer."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from written_runs import WrittenRun

from kitae.clients.addresses import host_name
from kitae.ui.guard import HEADERS, Door
from kitae.ui.library import Library
from kitae.ui.ui_server import make_app

LOCAL = "http://127.0.0.1:7007"


@pytest.fixture
def library(tmp_path: Path) -> Library:
    WrittenRun(tmp_path).step([[0.0, 1.0]]).finish()
    return Library([tmp_path])


def client(library: Library, door: Door, address: str = LOCAL) -> TestClient:
    return TestClient(make_app(library, door), base_url=address, follow_redirects=False)


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/none", "/assets/none", "/nowhere"])
def test_every_answer_has_the_headers(library: Library, path: str) -> None:
    answer = client(library, Door("127.0.0.1")).get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for" in policy


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7007", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:7007", 200),
        ("127.8.8.8", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:7007", 421),
        ("192.168.1.5:7007", 421),
        ("", 421),
    ],
)
def test_a_local_server_answers_to_local_names_alone(library: Library, host: str, status: int) -> None:
    assert client(library, Door("127.0.0.1")).get("/api/runs", headers={"host": host}).status_code == status


def test_a_server_that_others_reach_needs_a_token(library: Library) -> None:
    with pytest.raises(ValueError, match=r"needs a token, got none for 0\.0\.0\.0"):
        Door("0.0.0.0")
    with client(library, Door("0.0.0.0", "s3cret"), "http://10.1.2.3:7007") as visitor:
        assert visitor.get("/api/runs").status_code == 401
        assert visitor.get("/api/runs?token=wrong").status_code == 401
        assert visitor.get("/api/runs", headers={"cookie": "kitae-ui-7007=wrong"}).status_code == 401
        assert visitor.get("/", headers={"host": "evil.example"}).status_code == 421
        welcome = visitor.get("/?token=s3cret")
        assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
        cookie = welcome.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=lax" in cookie
        assert visitor.get("/api/runs").status_code == 200
        assert visitor.get("/api/runs", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_understood(library: Library, method: str) -> None:
    assert client(library, Door("127.0.0.1")).request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    ("header", "name"), [("a:80", "a"), ("A", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("", "")]
)
def test_names_are_without_ports(header: str, name: str) -> None:
    assert host_name(header) == name
