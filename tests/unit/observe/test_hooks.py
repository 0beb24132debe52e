"""Commands and webhooks that hear of a run: what they get, and that they can do it no harm."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kitae.errors import KitaeError, RemoteError
from kitae.observe.config import ObserveConfig
from kitae.observe.hooks import Hooks, call
from kitae.workers.process_status import state_of

CONTENT = {"event": "crash", "run": "runs/toy-001", "message": "EngineError: it's gone", "step": 7}


class Server(HTTPServer):
    """Keeps what was posted; /slow never answers in time, /no refuses."""

    posted: list[dict[str, Any]]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/slow":
            time.sleep(1)
        self.server.posted.append({"type": self.headers["Content-Type"], **json.loads(body)})
        self.send_response(500 if self.path == "/no" else 204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), _Handler)
    found.posted = []
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    thread.join(5)
    found.server_close()


def url(server: Server, path: str = "") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}{path}"


def test_a_command_gets_it_all(tmp_path: Path) -> None:
    call(f'cat > {tmp_path}/in; echo "$KITAE_EVENT $KITAE_RUN $KITAE_MESSAGE" > {tmp_path}/names', CONTENT, 10)
    assert json.loads((tmp_path / "in").read_text()) == CONTENT
    assert (tmp_path / "names").read_text() == "crash runs/toy-001 EngineError: it's gone\n"


def test_a_command_that_reads_nothing() -> None:
    call("true", {**CONTENT, "message": "x" * 60_000}, 10)


def test_a_command_that_fails() -> None:
    with pytest.raises(KitaeError, match="'echo why >&2; exit 3' ended with 3: why"):
        call("echo why >&2; exit 3", CONTENT, 10)


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(KitaeError, match=r"was killed after 1 s"):
        call(f"sleep 600 & echo $! > {tmp_path}/child; sleep 600", CONTENT, 1)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while state_of(child) not in ("Z", "") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(child) in ("Z", "")


def test_a_webhook(server: Server) -> None:
    call(url(server, "/hook"), CONTENT, 10)
    assert server.posted == [{"type": "application/json", **CONTENT}]


def test_webhooks_that_do_not_take_it(server: Server) -> None:
    with pytest.raises(RemoteError, match=r"/no did not take crash: .*500"):
        call(url(server, "/no"), CONTENT, 10)
    with pytest.raises(RemoteError, match=r"did not take crash: .*timed out"):
        call(url(server, "/slow"), CONTENT, 0.2)
    with pytest.raises(RemoteError, match="did not take crash"):
        call("http://127.0.0.1:1/", CONTENT, 10)


def test_only_what_is_wanted_is_told(server: Server) -> None:
    said: list[str] = []
    hooks = Hooks(ObserveConfig(on_finish=url(server), on_crash="exit 7"), Path("runs/toy-001"), said.append)
    hooks.notify("diagnosis", "nobody listens")
    hooks.notify("finish", "finished after step 3", step=3)
    hooks.notify("crash", "gone")
    hooks.close()
    assert server.posted == [
        {
            "type": "application/json",
            "event": "finish",
            "run": "runs/toy-001",
            "message": "finished after step 3",
            "step": 3,
        }
    ]
    assert said == ["hooks failed: KitaeError: the command 'exit 7' ended with 7"]
