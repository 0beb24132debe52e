"""Forms of answers and calls of tools that are asked for, of a random model: it could not make one by chance."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from chat_templates import QWEN, tokenizer
from served import ADD, events, joined, post, refusal, serving

from kitae.data import call_grammars
from kitae.models.policy import Policy

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "unit": {"enum": ["cm", "inch"]}},
    "required": ["sure", "unit"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "length", "schema": SCHEMA, "strict": True}}
SMALL = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SHORT = (  # calls in the way of Hermes; a token is a byte, and the context has 512
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ '<tool_call>' if false }}"
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SMALL}},
    {"type": "function", "function": {"name": "hex\"'", "parameters": SMALL}},
]


def ask(policy: Policy, use: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        async with serving(policy) as (client, _):
            await use(client)

    asyncio.run(asyncio.wait_for(inside(), 120))


def check(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"sure", "unit"} and found["unit"] in ("cm", "inch") and isinstance(found["sure"], bool)


def test_each_field_is_enforced(tiny_policy: Callable[..., Policy]) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        said = {"messages": HELLO, "seed": 3, "max_tokens": 300}
        whole, streamed = await asyncio.gather(
            post(client, CHAT, **said, n=4, response_format=FORMAT),
            events(client, CHAT, **said, response_format=FORMAT),
        )
        ends = [choice["finish_reason"] for choice in whole["choices"]]
        assert "stop" in ends
        for choice in whole["choices"]:
            if choice["finish_reason"] == "stop":
                check(choice["message"]["content"])
        assert joined(streamed)["message"]["content"] == whole["choices"][0]["message"]["content"]
        cut = await post(client, CHAT, **{**said, "max_tokens": 3}, response_format=FORMAT)
        assert cut["choices"][0]["finish_reason"] == "length", "what is cut says so"
        chosen = await post(client, CHAT, **said, guided_choice=["left", "right"], top_p=0.5)
        assert chosen["choices"][0]["message"]["content"] in ("left", "right")
        line = await post(client, TEXT, prompt="x", seed=1, max_tokens=60, guided_regex="[0-9]{2,3}( cm|;)")
        assert re.fullmatch("[0-9]{2,3}( cm|;)", line["choices"][0]["text"])
        stopped = await post(client, CHAT, **said, response_format=FORMAT, stop=["sure"])
        assert stopped["choices"][0]["message"]["content"].strip(' \n\r\t{"') == ""
        anything = await post(client, CHAT, **said, n=4, response_format={"type": "json_object"})
        assert all(c["message"]["content"].lstrip()[:1] == "{" for c in anything["choices"])

    ask(tiny_policy(), use)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_asked_for_is_made(
    choice: Any, tiny_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy()
    monkeypatch.setattr(policy.tokenizer, "chat_template", SHORT)  # all tests share the tokenizer

    async def use(client: httpx.AsyncClient) -> None:
        said = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        found = await post(client, CHAT, **said, seed=5, n=3, max_tokens=400)
        for answer in found["choices"]:
            (call,) = answer["message"]["tool_calls"]
            assert call["function"]["name"] in ("add", "hex\"'")[: 1 if choice != "required" else 2]
            assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})
            assert "unmet" not in answer
        both = {**said, "response_format": FORMAT}
        assert "a call or has a form" in (await refusal(client, CHAT, 400, **both))["message"]

    ask(policy, use)


def test_penalties_and_biases_change_answers(tiny_policy: Callable[..., Policy]) -> None:
    async def use(client: httpx.AsyncClient) -> None:
        said = {"messages": HELLO, "seed": 3, "max_tokens": 12, "return_token_ids": True}
        biased = await post(client, CHAT, **said, logit_bias={"77": 100}, ignore_eos=True)
        assert biased["choices"][0]["token_ids"] == [77] * 12
        varied = await post(client, CHAT, **said, temperature=0, presence_penalty=2, logit_bias={"77": 1.9, "78": 1.9})
        same = await post(client, CHAT, **said, temperature=0)
        assert varied["choices"][0]["token_ids"] != same["choices"][0]["token_ids"]

    ask(tiny_policy(), use)


def test_thoughts_that_the_template_begins_come_first() -> None:
    made = tokenizer(QWEN)
    assert call_grammars.of_json(made, SCHEMA) is None
    assert (call_grammars.of_calls(made, [ADD], single=True) or "").startswith("start: ")
    made.chat_template = made.chat_template + "{% if add_generation_prompt %}<think>{% endif %}"
    found = call_grammars.of_json(made, SCHEMA)
    assert found is not None and found.startswith("start: thoughts ")
    made.chat_template = "{% if tools %}<tool_call><function=x>{% endif %}{{ messages[0].content }}"
    assert call_grammars.of_calls(made, [ADD], single=True) is None, "this family writes calls as XML"
