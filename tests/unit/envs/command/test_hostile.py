"""Programs that mean no good, or do not care: the run goes on, other episodes too, and nothing of them is left."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_command_world import ASK, CLAIM, PROMPT, Judge, _until, run

import kitae
from kitae.data.chat import Chat
from kitae.engines.base import SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import EpisodeLimits
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.rollouts import Episodes
from kitae.models.tiny import make_tokenizer
from kitae.types import Group
from kitae.workers.process_status import state_of

RAW = """
import socket, time, urllib.parse
place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
def connect():
    found = socket.create_connection((place.hostname, place.port), timeout=20)
    return found
def status(call):
    try:
        call()
        return 200
    except urllib.error.HTTPError as error:
        return error.code
import urllib.error
def head(path, length):
    lines = f"POST {path} HTTP/1.1", f"Host: {place.netloc}", "Content-Type: application/json"
    return "\\r\\n".join((*lines, f"Content-Length: {length}", "", "")).encode()
"""

DAEMON = """
def daemon(*more):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("pid", "w").write(str(os.getpid()))
            import signal
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            import time; time.sleep(1000)
        os._exit(0)
    os.wait()
    while not os.path.exists("pid") or not open("pid").read(): pass
daemon()
"""


def gone(folder: Path) -> bool:
    return state_of(int((folder / "pid").read_text())) in ("", "Z")


@pytest.mark.filterwarnings("ignore:env.params.sandbox")
def test_a_daemon_ends_with_its_episode(tmp_path: Path) -> None:
    (rollout,) = run(tmp_path, DAEMON + "say(user('a'))", judge=Judge(), sandbox="none").rollouts
    assert rollout.status == "complete"
    _until(lambda: gone(tmp_path))


@pytest.mark.filterwarnings("ignore:env.params.sandbox")
def test_a_daemon_ends_with_its_episode_though_its_keeper_was_killed(tmp_path: Path) -> None:
    program = DAEMON + "say(user('a'))\nos.kill(os.getppid(), 9)\nimport time; time.sleep(1000)"
    (rollout,) = run(tmp_path, program, judge=Judge(), sandbox="none").rollouts
    assert rollout.status == "failed"
    _until(lambda: gone(tmp_path))


@pytest.mark.thorough
def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    boot = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(kitae.__file__).parent.parent)]!r}
from pathlib import Path
from test_command_world import run
run(Path({str(tmp_path)!r}), {DAEMON + "import time; time.sleep(1000)"!r}, seconds=1000, sandbox="none")
"""
    process = subprocess.Popen([sys.executable, "-c", boot])
    try:
        _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        assert not gone(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _until(lambda: gone(tmp_path))


@pytest.mark.slow
def test_connections_without_end(tmp_path: Path) -> None:
    """More than this process may have open; an honest episode beside it is answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    program = (
        RAW
        + """
held, refused = [], 0
for _ in range(10_000):
    try:
        held.append(connect())
    except OSError:  # this process may have no more itself
        held = held[len(held) // 2:]
assert say(user("a"))["content"] == "ab"
for one in held[-5:]:
    one.sendall(b"GET / HTTP/1.1\\r\\n")
assert say(user("b"))["content"] == "ab"
reward(1)
"""
    )
    most = list[int]()

    async def watch() -> None:
        while True:
            most.append(len(os.listdir("/proc/self/fd")))
            await asyncio.sleep(0.01)

    group = run(tmp_path, program, size=2, beside=watch, seconds=120)
    for rollout in group.rollouts:
        assert rollout.score is not None and rollout.score.value == 1, rollout.score
    assert max(most) < before + 3 * resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    assert (
        hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1] and soft <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )


def test_garbage_and_bodies_without_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        RAW
        + """
for sent in (b"\\x16\\x03\\x01" + os.urandom(5000), b"GET /" + b"a" * 200_000, head("/", -1)):
    one = connect()
    one.sendall(sent)
    assert b" 400 " in one.recv(1000), sent[:40]
one = connect()
one.sendall(head(place.path + "/chat/completions", 100 * 2**20))
try:
    for _ in range(100):
        one.sendall(b"[" * 2**20)
except OSError:
    pass
answer = one.recv(1000)
assert b" 413 " in answer, answer
wrong = [1], {"messages": [[]]}, {"messages": [user("\\ud800")]}, {"messages": [user("a")], "top_p": 10**400}
for body in wrong:
    assert status(lambda: post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)) == 400, body
say(user("a"), max_tokens=10**400)
reward(1)
"""
    )
    (rollout,) = run(tmp_path, program).rollouts
    assert rollout.score is not None and rollout.score.value == 1, rollout.score
    assert "Invalid HTTP" not in "".join(capfd.readouterr())


def test_a_stream_that_nobody_reads(tmp_path: Path) -> None:
    """Its answer counts, and the program's time begins when that is there."""
    program = (
        RAW
        + """
body = json.dumps({"messages": [user("a")], "stream": True, "max_tokens": 10**6}).encode()
one = socket.socket()
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
one.connect((place.hostname, place.port))
one.sendall(head(place.path + "/chat/completions", len(body)) + body)
time.sleep(1000)
"""
    )
    began = time.monotonic()
    (rollout,) = run(tmp_path, program, judge=Judge(), seconds=2.0, says="ab" * 20_000, tokens=10**6).rollouts
    assert rollout.status == "failed" and rollout.score is not None and "asked nothing for 2 s" in rollout.score.detail
    assert sum(len(s.tokens) for s in rollout.segments) > 20_000
    assert time.monotonic() - began < 60


def test_rewards_that_are_none_and_a_second_one(tmp_path: Path) -> None:
    program = (
        CLAIM
        + RAW
        + """
say(user("a"))
url = os.environ["KITAE_EPISODE_URL"] + "/reward"
def send(text):
    request = urllib.request.Request(url, text.encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request).read()
for bad in ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, '"1"', "true", "null", "[1]"):
    assert status(lambda: send('{"reward": %s}' % bad)) == 400, bad
assert status(lambda: send('{"reward": 1, "rewards": 2}')) == 400
token = b', "token": ' + json.dumps(claimed["token"]).encode()
one = connect()
for value in (b"0.25", b"1"):
    body = b'{"reward": ' + value + token + b'}'
    one.sendall(head(urllib.parse.urlsplit(url).path, len(body)) + body)
time.sleep(1000)
"""
    )
    (rollout,) = run(tmp_path, program, reward="program").rollouts
    assert rollout.score is not None and rollout.score.value == 0.25, rollout.score


def test_the_address_of_an_episode_that_is_over_leads_nowhere(tmp_path: Path) -> None:
    """That of another one under way is a secret."""

    async def body() -> list[Group]:
        chat = Chat(make_tokenizer())
        (tmp_path / "agent.py").write_text(
            ASK
            + CLAIM
            + RAW
            + """
if os.path.exists("other"):
    mine = os.environ["KITAE_EPISODE_URL"]
    os.environ["OPENAI_BASE_URL"] = (other := open("other").read()) + "/v1"
    assert other != mine and status(lambda: say(user("a"))) == 404
    assert status(lambda: post(other + "/reward", {"reward": 1, "token": claimed["token"]})) == 404
    os.environ["OPENAI_BASE_URL"] = mine + "/v1"
open("other", "w").write(os.environ["KITAE_EPISODE_URL"])
say(user("a"))
reward(0.5)
"""
        )
        params = {"folder": str(tmp_path), "writable": [str(tmp_path)], "reward": "program"}
        config = EnvConfig(name="command", command=f"{sys.executable} agent.py", params=params)
        engine = FakeEngine(lambda request: [*chat.encode("ab"), *chat.stop_tokens[:1]])
        async with open_world(config) as world:
            sampling = SamplingParams(max_tokens=200, stop_tokens=chat.stop_tokens)
            episodes = Episodes(engine, chat, None, world.make, sampling, 0, limits=EpisodeLimits(seconds=20))
            return [await episodes.group(number, PROMPT, 1) for number in range(2)]

    for group in asyncio.run(body()):
        (rollout,) = group.rollouts
        assert rollout.score is not None and rollout.score.value == 0.5, rollout.score
