"""The executor client, against a real server on loopback that really runs what it gets, or fails in some way."""

# ruff: noqa: E501 - programs of one line each
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Handler, Reply, Request, run, script

from kitae.errors import VerifierError
from kitae.sandbox.session import Report
from kitae.types import Score
from kitae.verifiers.code.executor import read_answer, read_reports, remote_code

ASSERTS = {"kind": "asserts", "asserts": ["assert f(1) == 2", "assert f(2) == 3"]}
STDIO = {"kind": "stdio", "cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5", "stdout": "9"}]}
CHECK = {
    "kind": "check",
    "prompt": "def f(x):\n",
    "check": "def check(candidate):\n    assert candidate(1) == 2\n",
    "entry_point": "f",
}
RIGHT = "def f(x): return x + 1"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def execute(request: Request) -> Reply:
    """What a server does: run a Python program with its stdin, under its time limit."""
    return await asyncio.to_thread(_execute, request.body)


def _execute(body: dict[str, Any]) -> Reply:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.py").write_text(body["code"])
        command = [sys.executable, "main.py"]
        try:
            done = subprocess.run(
                command,
                input=body["stdin"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=body["run_timeout"],
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode()
            return Reply(answer("TimeLimitExceeded", None, output))
    return Reply(answer("Finished", done.returncode, done.stdout, done.stderr))


def answer(status: str, code: int | None, stdout: str = "", stderr: str = "") -> dict[str, Any]:
    ran = {"status": status, "return_code": code, "stdout": stdout, "stderr": stderr, "execution_time": 0.1}
    whole = "Success" if status == "Finished" and code == 0 else "Failed"
    return {"status": whole, "message": "", "compile_result": None, "run_result": ran, "files": {}}


def ask(handler: Handler, response: str, reference: Any, **options: Any) -> tuple[Score, list[Request]]:
    async def body() -> tuple[Score, list[Request]]:
        async with FakeServer(handler) as server:
            call = {"url": server.url, "backoff": 0.01, "time_limit": 20.0, "total_limit": 60.0, **options}
            return await remote_code(response, reference, {}, **call), server.requests

    found: tuple[Score, list[Request]] = run(body())
    return found


@pytest.mark.parametrize("reference", [ASSERTS, CHECK], ids=["asserts", "check"])
@pytest.mark.parametrize(
    ("source", "value"),
    [
        (RIGHT, 1),
        ("def f(x): return x", 0),
        ("def f(x) return", 0),
        ("import os\nos._exit(0)", 0),
        ("print('all tests passed')\nraise SystemExit(0)", 0),
        ("class A:\n    def __eq__(s, o): return True\ndef f(x): return A()", 0),
        ("import os\nfor fd in range(9):\n    try: os.write(fd, b'report AAAA\\n')\n    except OSError: pass", 0),
    ],
)
def test_tests_run_on_the_server(reference: Any, source: str, value: int) -> None:
    score, requests = ask(execute, f"```python\n{source}\n```", reference)
    assert (score.outcome, score.value) == ("scored", value), score.detail
    assert requests[0].path.endswith("/run_code")
    assert requests[0].body["language"] == "python"


def test_the_program_does_not_hold_the_tests() -> None:
    """They travel on stdin: the candidate can read its own source file, but not that."""
    reference = {"kind": "asserts", "asserts": ["assert f(1) == 778899"]}
    _, requests = ask(execute, RIGHT, reference)
    assert "778899" not in requests[0].body["code"]
    source = "import __main__\ntext = open(__main__.__file__).read()\ndef f(x): return 778899 if '7788' + '99' in text else 0"
    assert ask(execute, source, reference)[0].value == 0


def test_rate_and_a_test_that_hangs() -> None:
    source = "def f(x):\n    while x == 1: pass\n    return x + 1"
    score, requests = ask(execute, source, ASSERTS, reward="rate", time_limit=3.0)
    assert (score.value, len(requests)) == (0.5, 2)


def test_stdio_runs_each_case_and_keeps_the_expected_output() -> None:
    source = "print(sum(map(int, input().split())))"
    score, requests = ask(execute, source, STDIO)
    assert score.value == 1
    assert sorted(request.body["stdin"] for request in requests) == ["1 2\n", "4 5"]
    assert all(
        set(r.body) == {"code", "language", "stdin", "compile_timeout", "run_timeout", "memory_limit_MB"}
        for r in requests
    )
    assert ask(execute, "print(3)", STDIO, reward="rate")[0].value == 0.5
    score, _ = ask(execute, "import time; time.sleep(60)", STDIO, time_limit=0.5)
    assert score.value == 0 and "out of time" in score.detail
    assert "exit status 1" in ask(execute, "1 / 0", STDIO)[0].detail


def test_other_languages_are_called_by_the_servers_names() -> None:
    handler = script(Reply(answer("Finished", 0, "3")), Reply(answer("Finished", 0, "9")))
    score, requests = ask(handler, "```js\nconsole.log(3)\n```", STDIO, language="javascript", concurrency=1)
    assert score.value == 1
    assert {request.body["language"] for request in requests} == {"nodejs"}


def test_a_program_that_does_not_compile_is_wrong() -> None:
    reply = answer("Finished", 0) | {
        "status": "Failed",
        "compile_result": {"status": "Finished", "return_code": 1, "stderr": "expected ';'"},
        "run_result": None,
    }
    score, _ = ask(script(Reply(reply)), "```cpp\nint main(\n```", STDIO, language="cpp")
    assert (score.outcome, score.value) == ("scored", 0)
    assert "expected ';'" in score.detail


@pytest.mark.parametrize(
    "reply",
    [
        Reply({"status": "SandboxError", "message": "no worker", "run_result": None}),
        Reply({}),
        Reply([]),
        Reply(b"<html>"),
        Reply({"status": "Success", "run_result": None}),
        Reply({"status": "Failed", "run_result": {"status": "Error", "return_code": None}}),
        Reply({"status": "Success", "run_result": {"status": "Finished", "return_code": "0"}}),
        Reply(status=500),
        Reply(status=404),
        Reply(reset=True),
        Reply(answer("Finished", 0), half=True),
    ],
)
@pytest.mark.parametrize("reference", [ASSERTS, STDIO], ids=["asserts", "stdio"])
def test_a_server_that_fails_is_an_error(reply: Reply, reference: Any) -> None:
    score, _ = ask(lambda _: reply, RIGHT, reference, retries=1)
    assert score.outcome == "error"
    assert score.detail.startswith("executor: ")


@pytest.mark.parametrize("stdout", ["", "garbage", "report !!", "report AAAA", "all tests passed"])
def test_a_server_that_does_not_run_the_checker_is_an_error(stdout: str) -> None:
    score, _ = ask(script(Reply(answer("Finished", 0, stdout))), RIGHT, ASSERTS)
    assert score.outcome == "error" and "checker must start" in score.detail


def test_a_busy_server_is_asked_again() -> None:
    replies = [Reply(status=429), Reply(status=503)]

    async def handler(request: Request) -> Reply:
        return replies.pop() if replies else await execute(request)

    score, requests = ask(handler, RIGHT, ASSERTS)
    assert (score.value, len(requests)) == (1, 3)


def test_a_server_that_is_down_is_an_error() -> None:
    score = asyncio.run(remote_code(RIGHT, ASSERTS, {}, url="http://127.0.0.1:9", retries=0))
    assert score.outcome == "error"


def test_references_and_options_are_checked_before_anything_is_sent() -> None:
    for options in ({"language": "cobol"}, {"reward": "some"}):
        score, requests = ask(execute, RIGHT, ASSERTS, **options)
        assert (score.outcome, requests) == ("error", [])
    score, requests = ask(execute, RIGHT, {"kind": "unit"})
    assert (score.outcome, requests) == ("error", [])
    score, requests = ask(execute, "```python\n```", ASSERTS)
    assert (score.outcome, score.value, requests) == ("scored", 0, [])


def test_read_answer() -> None:
    assert read_answer(answer("Finished", 0, "x")) == Report("ended", "", b"x")
    assert read_answer(answer("Finished", 3, "x", "oh")) == Report("crashed", "exit status 3: oh", b"x")
    assert read_answer(answer("TimeLimitExceeded", None)).status == "timeout"
    with pytest.raises(VerifierError, match="must be Finished"):
        read_answer({"status": "Failed", "run_result": {"status": "Error"}})


@pytest.mark.parametrize("stdout", ["", "report ", "report AAAAAAAAAAA=", "report /////////////w==", "\ud800report x"])
def test_read_reports_leaves_out_what_is_none(stdout: str) -> None:
    assert read_reports(stdout) == []
