"""`kitae ui` from the shell: what it needs, what it refuses, and that it loads no torch."""

import importlib.util
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from written_runs import WrittenRun

from kitae.cli import serve
from kitae.errors import ConfigError, StoreError

PROGRAM = "import sys; from kitae.cli.main import app; app(); "


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs starlette and uvicorn: pip install 'kitae\[ui\]'"):
        serve.ui([], "127.0.0.1", 0, False)


def test_a_folder_that_is_not_there_and_a_port_that_is_taken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"got .*none: no such folder"):
        serve.ui([tmp_path / "none"], "127.0.0.1", 0, False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            serve.ui([tmp_path], "127.0.0.1", port, False)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_it_prints_an_address_that_answers_and_ends_with_a_signal(tmp_path: Path, host: str) -> None:
    WrittenRun(tmp_path).step([[0.0, 1.0]]).finish()
    program = [sys.executable, "-c", PROGRAM, "ui", str(tmp_path), "--port", "0", "--host", host]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        assert ("token=" in found[0]) == (host == "0.0.0.0")
        try:
            with httpx.Client(base_url=re.sub(r"\?.*", "", found[0]), follow_redirects=True, timeout=60) as client:
                if host == "0.0.0.0":
                    assert client.get("/api/runs").status_code == 401
                assert "<title>Kitae</title>" in client.get(found[0]).text
                assert [run["name"] for run in client.get("/api/runs").json()] == ["toy-001"]
                assert client.get("/api/runs/toy-001/groups/0/tokens/1").json()["chains"]
            loaded = Path(f"/proc/{process.pid}/maps").read_text()
            assert "libtorch" not in loaded
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
