"""Programs that speak the Responses API or Anthropic's Messages: their chains are those of chats, token by token."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_command_world import run

from kitae.types import Rollout

SPOKEN = {
    "chats": """
def told(system, talk):
    first, tool = {"role": "system", "content": system}, {"type": "function", "function": TOOL}
    body = {"messages": [first, *talk], "tools": [tool]}
    return [post(base + "/v1/chat/completions", {"model": "policy", **body})["choices"][0]["message"]]
def results(said):
    return [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in said[-1]["tool_calls"]]
def without_thoughts(said):
    return [{k: v for k, v in said[0].items() if k != "reasoning_content"}]
""",
    "messages": """
def told(system, talk):
    tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
    body = {"model": "policy", "max_tokens": 999, "system": system, "messages": talk, "tools": [tool]}
    content = read(post(base + "/v1/messages", body)) if len(talk) == 1 else streamed(base + "/v1/messages", body)
    return [{"role": "assistant", "content": content}]
def read(message):
    assert message["stop_reason"] == "tool_use", message
    return message["content"]
def streamed(url, body):
    content = []
    for event in events(url, body):
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                content[-1]["input"] = json.loads(delta["partial_json"])
            else:
                field = delta["type"].removesuffix("_delta")
                content[-1][field] += delta[field]
    return content
def results(said):
    calls = [block for block in said[-1]["content"] if block["type"] == "tool_use"]
    told = [{"type": "tool_result", "tool_use_id": call["id"], "content": "7"} for call in calls]
    return [{"role": "user", "content": told}]
def without_thoughts(said):
    return [{"role": "assistant", "content": [b for b in said[0]["content"] if b["type"] != "thinking"]}]
""",
    "responses": """
def told(system, talk):
    tool = {"type": "function", **TOOL}
    body = {"model": "policy", "instructions": system, "input": talk, "tools": [tool]}
    if len(talk) > 1:
        *_, last = events(base + "/v1/responses", {**body, "stream": True})
        return last["response"]["output"]
    return post(base + "/v1/responses", body)["output"]
def results(said):
    calls = [item["call_id"] for item in said if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": id, "output": "7"} for id in calls]
def without_thoughts(said):
    return [item for item in said if item["type"] != "reasoning"]
""",
}
PROGRAM = """
import threading
base = os.environ["KITAE_EPISODE_URL"]
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
def events(url, body):
    body = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    lines = urllib.request.urlopen(request).read().decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
SPOKEN
first = told("Be good.", [user("a")])
talk = [user("a"), *first, *results(first)]
second = told("Be good.", talk)
talk += [*without_thoughts(second), *results(second), user("c")]     # thoughts that are left out are no change
told("Be good.", talk)
told("You help.", [user("sub")])                                       # a sub-agent: another system message
told("Be good.", [user("a"), *first, *results(first), user("d")])     # from an earlier point
told("Be good.", [user("So far: ab"), user("e")])                     # compaction: the history is written anew
"""
SAYS = '<think>Hm.</think>so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SAYS += '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def episode(tmp_path: Path, spoken: str) -> Rollout:
    folder = tmp_path / spoken
    folder.mkdir()
    program = PROGRAM.replace("SPOKEN", SPOKEN[spoken]) + "reward(1)\n"
    (rollout,) = run(folder, program, says=SAYS, tokens=2000).rollouts
    assert rollout.score is not None and rollout.score.value == 1, rollout.score
    return rollout


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    return episode(tmp_path_factory.mktemp("chats"), "chats")


@pytest.mark.parametrize("spoken", ["messages", "responses"])
def test_what_is_rewritten_makes_the_chains_of_a_chat(spoken: str, chats: Rollout, tmp_path: Path) -> None:
    """Parallel calls and dropped thoughts keep the chain; a sub-agent, a branch and a compaction begin one each. Each
    sampled token is in exactly one chain."""
    rollout = episode(tmp_path, spoken)
    assert rollout.chains == chats.chains
    assert [len(c.segments) for c in rollout.chains] == [5, 1, 1, 1]
    turns = Counter(s.source for c in rollout.chains for s in c.segments)
    assert turns["model"] == 6 and len({c.prompt_tokens for c in rollout.chains}) == 4


class _Judge(BaseHTTPRequestHandler):
    heard: list[tuple[str, str | None, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.heard.append((self.path, self.headers["authorization"], body))
        told = json.dumps({"choices": [{"message": {"role": "assistant", "content": "7 of 10"}}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[tuple[str, list[tuple[str, str | None, dict[str, Any]]]]]:
    handler = type("_Heard", (_Judge,), {"heard": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler.heard
    server.shutdown()
    server.server_close()


def test_another_model_is_another_model(tmp_path: Path, judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the recipe names is asked there, with a key of which the program sees nothing; any other is refused."""
    url, heard = judge
    monkeypatch.setenv("JUDGE_KEY", "sk-judge-secret")
    program = """
import urllib.error
def asked(name):
    try:
        return say(user("hello"), model=name)["content"]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["message"]
assert asked("gpt-4o") == "ab"
assert asked("judge") == "7 of 10"
assert "there is no model 'other' here" in asked("other") and "env.params.models" in asked("other")
assert "cannot be reached" in asked("gone")
assert "judge-secret" not in str(os.environ)
reward(1)
"""
    models = {
        "gpt-4o": "policy",
        "judge": {"url": url, "model": "large", "key_env": "JUDGE_KEY"},
        "gone": {"url": "http://127.0.0.1:9/v1"},
    }
    (rollout,) = run(tmp_path, program, models=models).rollouts
    assert rollout.score is not None and rollout.score.value == 1, rollout.score
    ((path, key, body),) = heard
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer sk-judge-secret", "large")
    assert len(rollout.chains) == 1, "what the judge said is no chain"
