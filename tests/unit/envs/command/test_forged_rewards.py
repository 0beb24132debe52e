"""What the model writes runs as a child of the program, and tries to reach its reward or the reference.

The program is honest but careless: it hands the model's text to a shell or to Python as it is. Each attack leaves what it
found in the answer that it asks of the policy, or takes the reward; none may succeed. Beside each attack that fails by
a rule runs what shows that the rule is what stopped it: the same program with its own token is rewarded.
"""

# ruff: noqa: E501 - programs of one line each
import asyncio
import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_command_world import ASK, CLAIM, Judge

from kitae.data.chat import Chat
from kitae.engines.base import SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import EpisodeLimits
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.rollouts import Episodes
from kitae.models.tiny import make_tokenizer
from kitae.types import Message, Prompt, Rollout

REFERENCE = "the-reference-31415926"
SECRET = "hf_key_of_the_user_2718"
PROMPT = Prompt(
    "p/1", (Message("user", "2 + 2"),), REFERENCE, {"question": "2 + 2", "worked": REFERENCE, "repo": "kitae"}
)

HARNESS = """
import subprocess, tempfile, time
said = say(user("write a script"))["content"]
script = os.path.join(tempfile.mkdtemp(), "model.py")
open(script, "w").write(ATTACK)
done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=20)
open(os.path.join(LOOT, "loot"), "w").write(done.stdout + done.stderr)
"""
"""A program that runs what the model writes (`ATTACK` in its stead, so that a test can choose it), and keeps what the
child printed where the test finds it."""

HELPERS = """
import glob, json, os, re, socket, subprocess, sys, urllib.error, urllib.request
def tell(*found):
    print(*found, flush=True)
def call(path, body=None, base=None):
    url = (base or os.environ["KITAE_EPISODE_URL"]) + path
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=5).read().decode()
    except Exception as error:
        return repr(error)
def slurp(path):
    try:
        return open(path, "rb").read(2**20).decode("utf-8", "replace")
    except OSError as error:
        return repr(error)
"""

ATTACKS = {
    "posts a reward": "tell(call('/reward', {'reward': 1.0}))",
    "posts with an empty token": "tell(call('/reward', {'reward': 1.0, 'token': ''}))",
    "posts with the key": "tell(call('/reward', {'reward': 1.0, 'token': os.environ['OPENAI_API_KEY']}))",
    "posts with guessed tokens": "for t in ('None', 'null', 'token', 'A' * 32): tell(call('/reward', {'reward': 1.0, 'token': t}))",
    "posts tokens that are no text": "for t in (None, True, 0, [], {}, ['']): tell(call('/reward', {'reward': 1.0, 'token': t}))",
    "claims late": "found = call('/claim', {}); tell(found)\ntry: tell(call('/reward', {'reward': 1.0, 'token': json.loads(found)['token']}))\nexcept ValueError: pass",
    "claims many times at once": (
        "import threading\nts = [threading.Thread(target=lambda: tell(call('/claim', {}))) for _ in range(20)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]"
    ),
    "reads the prompt": "tell(call('/prompt'))",
    "other paths": "for p in ('//prompt', '/prompt/', '/../prompt', '/claim/', '/reward/', '/v1/../claim'): tell(call(p), call(p, {}))",
    "the prompt of stdin": "tell(sys.stdin.read())",
    "its own environment": "tell(dict(os.environ))",
    "every environment": "for p in glob.glob('/proc/[0-9]*/environ') + ['/proc/self/environ', f'/proc/{os.getppid()}/environ']: tell(slurp(p))",
    "every command line": "for p in glob.glob('/proc/[0-9]*/cmdline'): tell(slurp(p))",
    "ps": "tell(subprocess.run('ps auxeww; ps -ef', shell=True, capture_output=True, text=True).stdout)",
    "the memory of its parent": (
        "pid = os.getppid()\nfor line in slurp(f'/proc/{pid}/maps').splitlines():\n"
        "    m = re.match(r'([0-9a-f]+)-([0-9a-f]+) rw', line)\n    if not m: continue\n"
        "    a, b = (int(x, 16) for x in m.groups())\n    try:\n        f = open(f'/proc/{pid}/mem', 'rb'); f.seek(a)\n"
        "        tell(f.read(min(b - a, 2**26)).decode('latin-1'))\n    except OSError as e: tell(repr(e))"
    ),
    "ptrace": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in (16, 0x4206):\n"
        "    ok = libc.ptrace(n, os.getppid(), 0, 0) == 0\n    tell('ptrace', 'ATTACHED' if ok else ctypes.get_errno())"
    ),
    "process_vm_readv": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nclass V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "here = ctypes.create_string_buffer(8); mine = V(ctypes.addressof(here), 8); theirs = V(id(None), 8)\n"
        "done = libc.process_vm_readv(os.getppid(), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)\n"
        "tell('ATTACHED' if done > 0 else ctypes.get_errno())"
    ),
    "pidfd_getfd": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\np = os.pidfd_open(os.getppid())\n"
        "found = [fd for fd in range(64) if libc.syscall(438, p, fd, 0) >= 0]\ntell('ATTACHED' if found else 'none')"
    ),
    "open files of its parent": (
        "for p in glob.glob(f'/proc/{os.getppid()}/fd/*'):\n"
        "    try: tell(p, os.read(os.open(p, os.O_RDONLY | os.O_NONBLOCK), 5000))\n    except OSError as e: tell(e)"
    ),
    "descriptors that it inherited": (
        "for n in range(3, 256):\n    try: tell('OPEN', n, os.readlink(f'/dev/fd/{n}') if os.path.exists('/dev/fd') else os.fstat(n))\n"
        "    except OSError: pass"
    ),
    "in a user namespace of its own": (
        "r = subprocess.run(['unshare', '-Urpf', '--mount-proc', 'sh', '-c', 'cat /proc/*/environ; ls /proc'], capture_output=True, text=True)\n"
        "tell(r.stdout, r.stderr)"
    ),
    "mounts a folder of processes": (
        "r = subprocess.run(['unshare', '-Urm', 'sh', '-c', 'mount -t proc p /tmp && cat /tmp/*/environ'], capture_output=True, text=True)\n"
        "tell(r.stdout, r.stderr)"
    ),
    "the data, the run and other files": (
        "tell(os.listdir('/'))\n"
        "for root in ('/tmp', '/run', '/home', os.path.dirname(os.getcwd()), os.path.expanduser('~')):\n    for top, folders, names in os.walk(root):\n"
        "        folders[:] = [f for f in folders if f not in ('site-packages', 'node_modules', '.cache', '.pyenv')]\n"
        "        for n in names:\n            p = os.path.join(top, n)\n            if n.endswith(('.jsonl', '.sqlite', '.json', '.env')): tell(p, slurp(p))"
    ),
    "python's history and caches": "for p in glob.glob('/tmp/**', recursive=True): tell(p, slurp(p)[:2000] if os.path.isfile(p) and not p.endswith('model.py') else '')",
    "shared memory": "tell(os.listdir('/dev/shm'), slurp('/proc/sysvipc/shm'))",
    "the server's other doors": "base = os.environ['KITAE_EPISODE_URL'].split('/episodes')[0]\nfor p in ('/', '/episodes', '/metrics', '/health', '/v1/models', '/docs'): tell(call(p, base=base))",
    "raw sockets": (
        "try:\n    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); tell('ATTACHED')\nexcept OSError as e: tell(repr(e))"
    ),
}


class Server:
    """A listener of the test, as it may run on the user's machine; it shows that the network is there."""

    def __enter__(self) -> "Server":
        self.server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_OWN_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("https_proxy", f"http://me:{SECRET}@proxy.example:3128")
    yield


def episode(tmp_path: Path, attack: str, harness: str = HARNESS, **params: Any) -> tuple[Rollout, str]:
    """One episode of a program that runs the attack. Returns the rollout and what the attack printed."""
    folder, loot, runs = (tmp_path / name for name in ("agent", "loot", "agent/runs"))
    for place in (folder, loot, runs):
        place.mkdir()
    (runs / "journal.json").write_text(REFERENCE)
    (folder / "train.jsonl").write_text(json.dumps({"question": "2 + 2", "answer": REFERENCE}))
    (folder / "link.jsonl").symlink_to(folder / "train.jsonl")
    program = harness.replace("ATTACK", repr(HELPERS + attack)).replace("LOOT", repr(str(loot)))
    claims = CLAIM if params.get("reward") == "program" or params.get("reference") else ""
    (folder / "agent.py").write_text(ASK + claims + program)
    params = {"folder": str(folder), "writable": [str(loot)], "context": ["repo"], **params}
    config = EnvConfig(name="command", command=f"{sys.executable} agent.py", params=params)
    chat = Chat(make_tokenizer())
    answer = [*chat.encode("ab"), *chat.stop_tokens[:1]]

    async def body() -> Rollout:
        hidden = [runs, folder / "train.jsonl"]
        async with open_world(config, hidden) as world:
            sampling = SamplingParams(max_tokens=200, stop_tokens=chat.stop_tokens)
            engine = FakeEngine(lambda request: answer)
            limits = EpisodeLimits(turns=8, seconds=30)
            episodes = Episodes(engine, chat, Judge(), world.make, sampling, 0, limits=limits)
            return (await episodes.group(7, PROMPT, 1)).rollouts[0]

    rollout = asyncio.run(body())
    printed = (loot / "loot").read_text() if (loot / "loot").exists() else ""
    return rollout, printed


JUDGED = 1.0  # by `Judge`, which stands for the verifier; a program's reward is another number


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("gives", ["verifier", "program"])
def test_a_child_finds_neither_reference_nor_reward(name: str, gives: str, tmp_path: Path) -> None:
    """Where the verifier judges, nobody has them; a program that gives the reward knows both, and its own counts."""
    secret = gives == "program"
    harness = HARNESS + ("\nreward(0.25)\n" if secret else "")
    rollout, printed = episode(tmp_path, ATTACKS[name], harness, reward=gives, reference=secret)
    assert rollout.score is not None, printed
    assert REFERENCE not in printed and SECRET not in printed, printed[:3000]
    if secret:
        assert rollout.score.value == 0.25, (rollout.score, printed[:3000])
        assert "ATTACHED" not in printed and "OPEN" not in printed.replace("OPENAI", ""), printed[:3000]
    else:  # there is nothing in the parent, which "ptrace" stops
        assert rollout.score.value == JUDGED or name == "ptrace", (rollout.score, printed[:3000])
        assert "environment" not in rollout.score.components, rollout.score


def test_a_program_claims_what_the_recipe_shows_it(tmp_path: Path) -> None:
    program = """
assert claimed["reference"] == "the-reference-31415926" and claimed["context"]["worked"], claimed
assert prompt["context"] == {"repo": "kitae"} and "reference" not in prompt, prompt
say(user("a"))
"""
    rollout, _ = episode(tmp_path, "", program, reference=True)
    assert rollout.score is not None and rollout.score.value == JUDGED, rollout.score


def test_a_claim_without_a_reference_shows_none(tmp_path: Path) -> None:
    program = 'assert list(claimed) == ["token"], claimed\nsay(user("a"))\nreward(0.5)'
    rollout, _ = episode(tmp_path, "", program, reward="program")
    assert rollout.score is not None and rollout.score.value == 0.5, rollout.score


def test_a_child_that_leaves_something_for_the_next_episode(tmp_path: Path) -> None:
    """Modules in the program's folder, in its home and in /tmp: what one child writes, no later program finds."""
    attack = """
for place in (os.getcwd(), os.path.expanduser('~'), '/tmp', os.path.expanduser('~/.local/lib/python3.11/site-packages')):
    for name in ('json.py', 'tempfile.py', 'sitecustomize.py', 'usercustomize.py', 'agent.py', '.bashrc'):
        try:
            os.makedirs(place, exist_ok=True)
            open(os.path.join(place, name), 'w').write('raise SystemExit(7)')
            tell('wrote', place, name)
        except OSError as error:
            tell(error)
"""
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        rollout, printed = episode(folder, attack, HARNESS + "\nreward(0.25)\n", reward="program")
        assert rollout.score is not None and rollout.score.value == 0.25, rollout.score
        assert f"wrote {folder / 'agent'}" not in printed
        assert not (folder / "agent" / "json.py").exists() and not Path("/tmp/sitecustomize.py").exists()
    assert "wrote /tmp json.py" in printed, "or the test shows nothing"


def test_variables_that_the_recipe_names_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SETTING", "seven")
    rollout, printed = episode(tmp_path, "tell(dict(os.environ))", pass_on=["MY_SETTING"], variables={"OWN": "given"})
    assert rollout.score is not None and rollout.score.valid, rollout.score
    assert "'MY_SETTING': 'seven'" in printed and "'OWN': 'given'" in printed and SECRET not in printed


def test_a_program_reaches_its_endpoint_alone(tmp_path: Path) -> None:
    with Server() as server:
        port = server.server.server_port
        looks = (
            f"tell(call('/x', base='http://127.0.0.1:{port}'))\n"
            "import socket\ntell([name for _, name in socket.if_nameindex()])\n"
            "try: socket.create_connection(('192.0.2.1', 80), 5)\nexcept OSError as e: tell(e.strerror)"
        )
        rollout, printed = episode(tmp_path, looks)
        assert rollout.score is not None and rollout.score.valid, rollout.score
        assert "Connection refused" in printed and "['lo']" in printed and "Network is unreachable" in printed
        other = tmp_path / "other"
        other.mkdir()
        _, printed = episode(other, looks.partition("\n")[0], network="machine")
        assert "501" in printed


def test_what_the_sandbox_hides_is_there_without_it(tmp_path: Path) -> None:
    """So the attacks would find it."""
    with pytest.warns(UserWarning, match="can read the data, the run folder and the memory"):
        attack = ATTACKS["the data, the run and other files"].replace("'/tmp', '/run', '/home', ", "")
        _, printed = episode(tmp_path, attack, sandbox="none")
    assert REFERENCE in printed
    assert os.path.exists(tmp_path / "agent" / "train.jsonl")
