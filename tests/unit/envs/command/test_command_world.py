"""Agent programs as they are: started, answered at an address of their own, ended, and gone."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kitae.data.chat import Chat
from kitae.engines.base import SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import EpisodeLimits
from kitae.envs.command.command_world import CommandWorld
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.rollouts import Episodes
from kitae.errors import ConfigError
from kitae.models.tiny import make_tokenizer
from kitae.types import Group, Message, Prompt, Score
from kitae.workers.process_status import family_of, state_of

PROMPT = Prompt("p/1", (Message("user", "2 + 2"),), "4", {"question": "2 + 2"})

ASK = """
import json, os, sys, urllib.request
def post(url, body={}):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request).read())
def say(*messages, **more):
    body = {"model": "policy", "messages": list(messages), "temperature": 0.2, **more}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
def reward(value, detail=""):
    post(os.environ["KITAE_EPISODE_URL"] + "/reward", {"reward": value, "detail": detail, "token": claimed["token"]})
def user(text):
    return {"role": "user", "content": text}
prompt = json.load(sys.stdin)
"""
CLAIM = 'claimed = post(os.environ["KITAE_EPISODE_URL"] + "/claim")\n'


class Judge:
    def __init__(self) -> None:
        self.heard = list[str]()

    async def score(self, response: str, reference: Any, context: Any) -> Score:
        self.heard.append(response)
        return Score(1.0)


async def nothing() -> None:
    pass


def run(
    tmp_path: Path,
    program: str,
    *,
    size: int = 1,
    judge: Any = None,
    arguments: str = "",
    seconds: float = 20.0,
    says: str = "ab",
    tokens: int = 200,
    beside: Callable[[], Coroutine[Any, Any, None]] = nothing,
    **params: Any,
) -> Group:
    """Episodes of a program, which gives the reward if it calls `reward`, and may write its folder."""
    if "reward(" in program:
        program, params = CLAIM + program, {"reward": "program", **params}
    (tmp_path / "agent.py").write_text(ASK + program)
    params = {"folder": str(tmp_path), "writable": [str(tmp_path)], **params}
    config = EnvConfig(name="command", command=f"{sys.executable} agent.py {arguments}", params=params)
    tokenizer = make_tokenizer()
    chat = Chat(tokenizer)
    answer = [*chat.encode(says), *chat.stop_tokens[:1]]
    engine = FakeEngine(lambda request: answer)
    sampling = SamplingParams(max_tokens=tokens, stop_tokens=chat.stop_tokens)

    async def body() -> Group:
        async with open_world(config) as world:
            limits = EpisodeLimits(turns=8, seconds=seconds)
            episodes = Episodes(engine, chat, judge, world.make, sampling, 0, limits=limits)
            watching = asyncio.create_task(beside())
            try:
                return await episodes.group(7, PROMPT, size)
            finally:
                watching.cancel()

    return asyncio.run(body())


def test_a_program_talks_and_its_last_answer_is_judged(tmp_path: Path) -> None:
    judge = Judge()
    group = run(
        tmp_path,
        """
assert prompt["question"] == "2 + 2" and "reference" not in prompt, prompt
assert sys.argv[1:] == ["2 + 2", "policy"], sys.argv
talk = prompt["messages"]
for word in ("more", "again"):
    talk += [say(*talk), user(word)]
say(*talk)
""",
        size=2,
        judge=judge,
        arguments="{question} {model}",
    )
    for rollout in group.rollouts:
        assert rollout.score == Score(1.0), rollout.score
        (chain,) = rollout.chains
        assert [s.source for s in chain.segments] == ["model", "environment"] * 2 + ["model"]
        assert rollout.status == "complete" and len(rollout.transcript) == 6
    assert judge.heard == ["ab", "ab"]


def test_a_posted_reward_ends_the_episode(tmp_path: Path) -> None:
    program = "say(user('hello'))\nreward(0.25, 'nearly')\nimport time; time.sleep(1000)"
    (rollout,) = run(tmp_path, program).rollouts
    assert rollout.score == Score(0.25, {"environment": 0.25}, detail="nearly")


def test_a_rewritten_history_is_another_chain(tmp_path: Path) -> None:
    program = """
first = say(user("a"))
say(user("a"), first, user("b"))
say(user("a"), {"role": "assistant", "content": "summary"}, user("c"))
reward(1)
"""
    (rollout,) = run(tmp_path, program).rollouts
    assert [len(c.segments) for c in rollout.chains] == [3, 1]


def test_a_call_that_cannot_be_read_is_told_as_it_is_and_goes_on(tmp_path: Path) -> None:
    program = """
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
first = say(user("a"), tools=[tool])
assert first["content"] == "so: <tool_call>{'name'</tool_call>", first
say(user("a"), first, user("b"), tools=[tool])
reward(1)
"""
    (rollout,) = run(tmp_path, program, says="so: <tool_call>{'name'</tool_call>").rollouts
    assert rollout.score is not None and rollout.score.valid, rollout.score
    assert [len(c.segments) for c in rollout.chains] == [3]


def test_what_clients_ask_before_they_begin_and_how_they_want_to_be_answered(tmp_path: Path) -> None:
    program = """
base = os.environ["OPENAI_BASE_URL"]
listed = json.load(urllib.request.urlopen(base + "/models"))
assert [one["id"] for one in listed["data"]] == [os.environ["OPENAI_MODEL"]], listed
parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
first = say(user(parts), reasoning_effort="high", verbosity="low", service_tier="auto")
first["provider_specific_fields"] = {"refusal": None}
say(user("ab"), first, user("c"))
reward(1)
"""
    (rollout,) = run(tmp_path, program).rollouts
    assert rollout.score is not None and rollout.score.valid, rollout.score
    assert len(rollout.chains) == 1


def test_streams_and_branches_at_once(tmp_path: Path) -> None:
    program = """
import threading
threads = [threading.Thread(target=say, args=(user(word),)) for word in "abcd"]
[t.start() for t in threads]; [t.join() for t in threads]
body = {"model": "policy", "messages": [user("e")], "stream": True}
headers = {"content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
lines = urllib.request.urlopen(request).read().decode().splitlines()
events = [json.loads(l[6:]) for l in lines if l.startswith("data: {")]
text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
assert text == "ab", events
reward(1)
"""
    (rollout,) = run(tmp_path, program).rollouts
    assert rollout.score is not None and rollout.score.valid, rollout.score
    assert len(rollout.chains) == 5


def test_a_proxy_is_not_asked_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    program = "assert os.environ['NO_PROXY'] == 'example.org,127.0.0.1'\nsay(user('a'))\nreward(1)"
    (rollout,) = run(tmp_path, program).rollouts
    assert rollout.score is not None and rollout.score.value == 1, rollout.score


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("say(user('a'))\nprint('so long')\nsys.exit(3)", "ended with status 3: so long"),
        ("say(user('a'))\nraise ValueError('boom')", "ValueError: boom"),
        ("pass", "without asking the model anything"),
        ("say(user('a'))\nimport time; time.sleep(1000)", "asked nothing for 2 s"),
        ("say(user('a'))\nos.kill(os.getpid(), 9)", "status 137"),
        ("say(user('a'))\nwhile True: print('x' * 10**6)", "asked nothing for 2 s"),
    ],
)
def test_a_failure_costs_one_sample(tmp_path: Path, program: str, reason: str) -> None:
    (rollout,) = run(tmp_path, program, judge=Judge(), seconds=2.0).rollouts
    assert rollout.status == "failed" and rollout.score is not None
    assert reason in rollout.score.detail, rollout.score.detail


@pytest.mark.filterwarnings("ignore:env.params.sandbox")
def test_without_a_sandbox_it_may_kill_what_keeps_it(tmp_path: Path) -> None:
    program = "say(user('a'))\nos.kill(os.getppid(), 9)"
    (rollout,) = run(tmp_path, program, judge=Judge(), seconds=2.0, sandbox="none").rollouts
    assert rollout.status == "failed" and rollout.score is not None
    assert "the program was lost" in rollout.score.detail, rollout.score.detail


def test_what_the_server_refuses(tmp_path: Path) -> None:
    program = """
import urllib.error
def status(call):
    try:
        call()
    except urllib.error.HTTPError as error:
        return error.code
base = os.environ["OPENAI_BASE_URL"]
assert status(lambda: post(base.replace("/v1", "x/v1") + "/chat/completions", {"messages": [user("a")]})) == 404
assert status(lambda: say(user("a"), frequency_penalty=1)) == 400
assert status(lambda: post(os.environ["KITAE_EPISODE_URL"] + "/reward", {"reward": "much"})) == 400
assert status(lambda: post(os.environ["KITAE_EPISODE_URL"] + "/reward", {"reward": 1})) == 403
assert status(lambda: post(os.environ["KITAE_EPISODE_URL"] + "/claim")) == 403
for _ in range(8): say(user("a"))
assert status(lambda: say(user("a"))) == 400
sys.exit(1)
"""
    (rollout,) = run(tmp_path, program, judge=Judge()).rollouts
    assert (rollout.status, rollout.finish) == ("complete", "length"), rollout.score


@pytest.mark.filterwarnings("ignore:env.params.sandbox")
@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
def test_nothing_is_left_behind(tmp_path: Path, sandbox: str) -> None:
    program = """
import subprocess
for new in (False, True):
    subprocess.Popen(["sleep", "1000"], start_new_session=new)
say(user("a"))
"""
    before = set(family_of(os.getpid()))  # other tests may have left something of their own
    (rollout,) = run(tmp_path, program, judge=Judge(), sandbox=sandbox).rollouts
    assert rollout.status == "complete"
    _until(lambda: not [pid for pid in set(family_of(os.getpid())) - before if state_of(pid) not in ("", "Z")])


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"command": "python 'agent.py"}, "cannot be split"),
        ({"command": "  "}, "must name a program"),
        ({"command": "no-such-program x"}, "a program that exists, got 'no-such-program'"),
        ({"command": "./no-such-file"}, "a program that exists, got './no-such-file'"),
        ({"command": "python x.py", "folder": "/nowhere"}, "must be a folder, got '/nowhere'"),
        ({"command": "python x.py", "keeps": 3}, "no such parameter"),
        ({}, "needs it"),
    ],
)
def test_bad_params(params: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        CommandWorld(params)


def test_rewards_of_turns_do_not_end_the_episode(tmp_path: Path) -> None:
    program = """
def of_turn(turn, value):
    body = {"reward": value, "turn": turn, "token": claimed["token"]}
    return post(os.environ["KITAE_EPISODE_URL"] + "/reward", body)

say(user("a"))
assert of_turn(0, 0.5) == {"ended": False, "reward": 0.5}
say(user("b"))
of_turn(1, 0.25)
reward(1)
"""
    (rollout,) = run(tmp_path, program).rollouts
    assert rollout.score == Score(1.75, {"environment": 1.75})
    assert [s.reward for s in rollout.segments if s.source == "model"] == [0.5, 0.25]


def test_roles_are_names_of_the_policy_and_have_rewards_of_their_own(tmp_path: Path) -> None:
    program = """
def of_role(role, value):
    post(os.environ["KITAE_EPISODE_URL"] + "/reward", {"reward": value, "role": role, "token": claimed["token"]})

for role in ("white", "black"):
    say(user("play"), model="policy/" + role)
of_role("white", 0.5)
of_role("black", -0.5)
reward(0)
"""
    (rollout,) = run(tmp_path, program).rollouts
    assert [chain.role for chain in rollout.chains] == ["white", "black"]
    assert rollout.score == Score(0.0, {"environment": 0.0, "role/white": 0.5, "role/black": -0.5})
