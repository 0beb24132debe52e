"""OpenAI's Responses API and Anthropic's Messages: the same orders and answers as in chats, told in other shapes."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from chat_templates import QWEN, tokenizer
from safetensors.torch import save_file
from served import ADD, CALL, Scripted, post, scripted_client, serving

from kitae.data.chat import Chat
from kitae.engines.base import WeightUpdate
from kitae.errors import ModelError
from kitae.models.adapters import adapt, adapted_layers
from kitae.models.policy import Policy
from kitae.serving.api_keys import ApiKey, KeyLimits
from kitae.serving.handlers import AnswerPolicy
from kitae.serving.kept_answers import KeptAnswer, KeptAnswers

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
FUNCTION = {"type": "function", **ADD["function"]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}
THINKING = QWEN + "{# <think> #}"
TWO_CALLS = f"I add.\n{CALL}\n{CALL.replace('2', '3')}"
USER = {"role": "user", "content": "Hello"}
Client = httpx.AsyncClient
Use = Callable[[Client, Scripted], Coroutine[Any, Any, Any]]


def scripted(use: Use, *texts: str, template: str = QWEN, encodes: bool = False, **answer_policy: Any) -> Any:
    made = tokenizer(template)

    async def inside() -> Any:
        model = Scripted(Chat(made), texts)
        async with scripted_client(made, model, AnswerPolicy(**answer_policy), encodes) as client:
            return await use(client, model)

    return asyncio.run(asyncio.wait_for(inside(), 60))


async def stream(client: Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *events, end = response.text.split("\n\n")
    assert end == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's client makes of these events."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message, partial = first["message"], dict[int, str]()
    for event in middle:
        index = event["index"]
        match event["type"]:
            case "content_block_start":
                assert index == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                kind = event["delta"].pop("type")
                ((field, text),) = event["delta"].items()
                assert kind == {"partial_json": "input_json_delta"}.get(field, f"{field}_delta")
                if field == "partial_json":
                    partial[index] = partial.get(index, "") + text
                else:
                    message["content"][index][field] += text
            case "content_block_stop":
                if index in partial:
                    message["content"][index]["input"] = json.loads(partial[index])
    message["usage"] |= delta.pop("usage")
    return message | delta.pop("delta") | {k: v for k, v in delta.items() if k != "type"}


def without_ids(told: Any) -> Any:
    drop = ("id", "item_id", "call_id", "created_at", "completed_at")
    if isinstance(told, Mapping):
        return {k: without_ids(v) for k, v in told.items() if k not in drop}
    return [without_ids(one) for one in told] if isinstance(told, list) else told


@pytest.mark.parametrize("said", ["Hello you.", "", TWO_CALLS, "<think>Hm.</think>I add." + CALL, "<tool_call>{"])
def test_three_dialects_say_the_same(said: str) -> None:
    """The same tokens are asked for and answered, and each dialect tells all of what was said."""

    async def use(client: Client, model: Scripted) -> None:
        chat = await post(client, CHATS, messages=[{"role": "system", "content": "Be good."}, USER], tools=[ADD])
        kept = await post(client, RESPONSES, instructions="Be good.", input="Hello", tools=[FUNCTION])
        told = await post(client, MESSAGES, system="Be good.", messages=[USER], tools=[TOOL], max_tokens=99)
        asked = {(ask.messages, json.dumps(ask.tools, sort_keys=True)) for ask in model.asked}
        assert len(asked) == 1
        message = chat["choices"][0]["message"]
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        output, content = kept["output"], told["content"]
        kinds = ["reasoning"] * ("reasoning_content" in message)
        kinds += ["message"] * (message["content"] is not None) + ["function_call"] * len(calls)
        assert [item["type"] for item in output] == kinds
        names = {"reasoning": "thinking", "message": "text", "function_call": "tool_use"}
        assert [block["type"] for block in content] == [names[kind] for kind in kinds]
        assert [json.loads(i["arguments"]) for i in output if i["type"] == "function_call"] == calls
        assert [block["input"] for block in content if block["type"] == "tool_use"] == calls
        texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
        assert texts == [b["text"] for b in content if b["type"] == "text"] == [message["content"]] * len(texts)
        assert told["stop_reason"] == ("tool_use" if calls else "end_turn")
        assert kept["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
        assert told["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]

    scripted(use, said)


@pytest.mark.parametrize(
    "said", ["Hello you. " * 20, "", TWO_CALLS, "Well.\n<tool_call>{", "<think>Hm.</think>\nI add." + CALL]
)
@pytest.mark.parametrize("template", [QWEN, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize("tools", [True, False])
def test_a_stream_is_the_whole_answer(said: str, template: str, tools: bool) -> None:
    async def use(client: Client, model: Scripted) -> None:
        ways = {
            MESSAGES: {"messages": [USER], "max_tokens": 999} | ({"tools": [TOOL]} if tools else {}),
            RESPONSES: {"input": "Hello"} | ({"tools": [FUNCTION]} if tools else {}),
        }
        for path, body in ways.items():
            whole = await post(client, path, **body, return_token_ids=True)
            events = await stream(client, path, **body, return_token_ids=True)
            if path == MESSAGES:
                assert without_ids(message_of(events)) == without_ids(whole)
            else:
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                assert without_ids(events[-1]["response"]) == without_ids(whole)
                assert items_of(events) == events[-1]["response"]["output"]
                assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        if not tools and template == QWEN:
            assert len(events) > 8 or not said

    scripted(use, said, template=template)


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that events make, checked for what each must follow."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            place = items[-1]["content"][0] if "content" in items[-1] else items[-1]
            place["text" if "text" in place else "arguments"] += event["delta"]
        elif kind == "content_part.done":
            assert event["part"] == items[-1]["content"][0]
        elif kind == "output_item.done":
            items[-1]["status"] = "completed"
            assert event["item"] == items[-1]
    return items


def test_what_was_said_goes_back_as_it_was_said() -> None:
    """Calls, their results and thinking of earlier turns are the same messages, whichever dialect they come by."""

    async def use(client: Client, model: Scripted) -> None:
        told = await post(client, MESSAGES, messages=[USER], tools=[TOOL], max_tokens=99)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": text}]}
            for text, block in zip("35", (b for b in told["content"] if b["type"] == "tool_use"), strict=True)
        ]
        results[1]["is_error"] = True
        blocks = [*results, {"type": "text", "text": "Well?"}]
        talk = [USER, {"role": "assistant", "content": told["content"]}, {"role": "user", "content": blocks}]
        await post(client, MESSAGES, messages=talk, tools=[TOOL], max_tokens=99)
        asked = model.asked[-1].messages

        first = await post(client, RESPONSES, input="Hello", tools=[FUNCTION])
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": output}
            for call, output in zip(calls, ("3", "Error: 5"), strict=True)
        ]
        news = [*outputs, {"role": "user", "content": [{"type": "input_text", "text": "Well?"}]}]
        await post(client, RESPONSES, input=[USER, *first["output"], *news], tools=[FUNCTION])
        whole = model.asked[-1].messages
        await post(client, RESPONSES, input=news, previous_response_id=first["id"], tools=[FUNCTION])
        kept = model.asked[-1].messages

        def matched(messages: Any) -> Any:
            return [(m.role, m.content, [(c.name, c.arguments) for c in m.calls]) for m in messages]

        assert [m.role for m in asked] == ["user", "assistant", "tool", "tool", "user"]
        assert matched(asked) == matched(whole) == matched(kept) and whole == kept
        assert [c.id for c in asked[1].calls] == [m.call_id for m in asked[2:4]]
        assert asked[1].content == "I add." and asked[3].content == "Error: 5"

    scripted(use, "<think>Hm.</think>I add." + CALL + CALL.replace("2", "3"))


def test_responses_are_kept_until_they_are_deleted() -> None:
    async def use(client: Client, model: Scripted) -> None:
        first = await post(client, RESPONSES, input="Hello", instructions="Be good.")
        assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first
        second = await post(client, RESPONSES, input="And?", previous_response_id=first["id"])
        assert [m.content for m in model.asked[-1].messages] == [
            "Hello",
            "One.",
            "And?",
        ]  # instructions are of one turn
        assert (await client.delete(f"{RESPONSES}/{first['id']}")).json()["deleted"]
        for id in (first["id"], "resp_none"):
            refused = await client.post(RESPONSES, json={"input": "x", "previous_response_id": id})
            assert refused.status_code == 404 and refused.json()["error"]["code"] == "previous_response_not_found"
        third = await post(client, RESPONSES, input="So?", previous_response_id=second["id"], store=False)
        assert [m.content for m in model.asked[-1].messages] == ["Hello", "One.", "And?", "Two.", "So?"]
        assert (await client.get(f"{RESPONSES}/{third['id']}")).status_code == 404

    scripted(use, "One.", "Two.", "Three.")


def test_the_oldest_answers_go_first() -> None:
    kept = KeptAnswers(most=3, most_bytes=1000)
    for number in range(5):
        kept.keep(str(number), KeptAnswer({}, ({"content": "x"},)), 1)
    assert [bool(kept.find(str(number))) for number in range(5)] == [False, False, True, True, True]
    kept.keep("large", KeptAnswer({"text": "x" * 990}, ()), 0)
    assert [bool(kept.find(id)) for id in ("4", "large")] == [False, True]
    assert kept.drop("large") and not kept.drop("large")


def test_stop_reasons_and_the_beginning_of_an_answer() -> None:
    async def use(client: Client, model: Scripted) -> None:
        found = await post(client, MESSAGES, messages=[USER], max_tokens=99, stop_sequences=["three", "two"])
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "two")
        assert found["content"] == [{"type": "text", "text": "one ", "citations": None}]
        count = (await post(client, COUNT, messages=[USER], tools=[TOOL], model="tiny"))["input_tokens"]
        talk = [USER, {"role": "assistant", "content": "I say"}]
        begun = await post(client, MESSAGES, messages=talk, max_tokens=9, tools=[TOOL], return_token_ids=True)
        assert begun["usage"]["input_tokens"] == len(begun["prompt_token_ids"])
        assert begun["prompt_token_ids"][count:] == [*model.chat.encode("I say")]
        chat = {"continue_final_message": True, "add_generation_prompt": False}
        await post(client, CHATS, messages=talk, tools=[ADD], **chat)
        assert model.asked[-1].prompt_tokens == tuple(begun["prompt_token_ids"])

    scripted(use, "one two three", encodes=True)


USED = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1, "b": 2}}
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    MESSAGES: [
        ({"max_tokens": None}, "max_tokens is needed"),
        ({"max_tokens": "9"}, "max_tokens must be a whole number"),
        ({"messages": None}, "messages is needed"),
        ({"messages": []}, "messages must be a list of at least one"),
        ({"messages": 3}, "messages must be a list"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role must be one of 'user', 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "got 'image'"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "type is needed"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "must be a text"),
        ({"messages": [{"role": "assistant", "content": [USED | {"input": []}]}]}, "input must be an object"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "type must be 'custom'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice must be one of auto, none"),
        ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, "tool_choice must be one of"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
        ({"output_config": {"effort": "high"}}, "effort is not supported"),
        ({"mcp_servers": []}, "unknown field 'mcp_servers'"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences must be at most 64 texts"),
        ({"temperature": -1}, "temperature must be at least 0"),
    ],
    RESPONSES: [
        ({"input": []}, "input must be a list of at least one"),
        ({"input": 3}, "input must be a list"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "got 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "got 'input_image'"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "arguments of"),
        ({"tools": [{"type": "web_search"}]}, "type must be 'function'"),
        ({"tool_choice": "required"}, "tool_choice must be one of auto, none"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice must be one of"),
        ({"background": True}, "background is not supported"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include is not supported"),
        ({"reasoning": {"effort": "high"}}, "effort is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1"),
        ({"frobnicate": 1}, "unknown field 'frobnicate'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format must be"),
    ],
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {MESSAGES: {"messages": [USER], "max_tokens": 9}, RESPONSES: {"input": "Hello"}}


@pytest.mark.parametrize("path", WRONG)
def test_what_is_wrong_is_refused_by_its_name(path: str) -> None:
    async def use(client: Client, model: Scripted) -> None:
        for change, message in WRONG[path]:
            response = await client.post(path, json=RIGHT[path] | change)
            assert response.status_code in (400, 404), (change, response.text)
            assert message in shaped(path, response)["message"], (change, response.text)
        response = await client.post(path, json=RIGHT[path] | {"model": "other"})
        assert response.status_code == 404 and "there is no model 'other' here" in shaped(path, response)["message"]
        assert not model.asked

    scripted(use, "Hello.")


def shaped(path: str, response: httpx.Response) -> dict[str, Any]:
    """The error of a refusal, which must have the shape that the dialect's clients read."""
    body: dict[str, Any] = response.json()
    if path.startswith(MESSAGES):
        assert body.keys() == {"type", "error"} and body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"} and body["error"].keys() == {"type", "message", "param", "code"}
    assert isinstance(body["error"]["type"], str) and body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


FULL: dict[str, dict[str, Any]] = {
    MESSAGES: {
        **RIGHT[MESSAGES],
        "model": "tiny",
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            USER,
            {"role": "assistant", "content": [USED]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "metadata": {"user_id": "x"},
        "thinking": {"type": "disabled"},
    },
    RESPONSES: {
        "model": "tiny",
        "input": [
            USER,
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
        ],
        "tools": [FUNCTION],
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "tool_choice": "auto",
        "max_output_tokens": 9,
    },
}  # fmt: skip
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e400, 2**70, "", "x", "\ud800", "x" * 10_000, [], {}, [[]], [{}], [None], {"type": "x"}),
    *([0] * 3000, {"type": "text"}, {"type": ["text"]}, {"role": {}}, [{"type": "text", "text": "x", "more": 1}]),
)


def mutated(value: Any, dice: random.Random) -> Any:
    """The same with something odd somewhere in it."""
    if not isinstance(value, dict | list) or not value or dice.random() < 0.2:
        return dice.choice(ODD)
    if isinstance(value, dict):
        key = dice.choice([*value])
        rest = {k: v for k, v in value.items() if k != key or dice.random() < 0.9}
        return {dice.choice([key, key, key, "odd"]): mutated(value[key], dice)} | {
            k: v for k, v in rest.items() if k != key
        }
    place = dice.randrange(len(value))
    return [*value[:place], mutated(value[place], dice), *value[place + dice.choice([0, 1, 1]) :]]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, COUNT])
def test_odd_bodies_are_answered_or_refused(path: str) -> None:
    """Never a status of 5xx, never silence, and each refusal has the shape of the dialect."""
    dice = random.Random(7)

    async def use(client: Client, model: Scripted) -> None:
        statuses = set()
        whole = FULL[MESSAGES if path == COUNT else path]
        if path == COUNT:
            whole = {k: whole[k] for k in ("model", "messages", "system", "tools", "tool_choice", "thinking")}
        assert (await client.post(path, json=whole)).status_code == 200
        for _ in range(400):
            body = json.dumps(mutated(whole, dice))
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            statuses.add(response.status_code)
            if response.status_code != 200:
                assert 400 <= response.status_code < 500, (body[:500], response.text)
                shaped(path, response)
        assert {200, 400} <= statuses

    scripted(use, "Hello.")


def test_a_stream_that_breaks_off_says_so_in_its_dialect() -> None:
    class Broken(Scripted):
        async def ask(self, ask: Any, on_tokens: Any = None) -> Any:
            await super().ask(ask, on_tokens)
            raise RuntimeError("lost")

    async def run() -> None:
        made = tokenizer(QWEN)
        async with scripted_client(made, Broken(Chat(made), ["Hello you."])) as client:
            error = (await stream(client, MESSAGES, **RIGHT[MESSAGES]))[-1]
            assert error["type"] == "error" and error["error"]["type"] == "api_error"
            failed = (await stream(client, RESPONSES, **RIGHT[RESPONSES]))[-1]
            assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
            assert "RuntimeError" in failed["response"]["error"]["message"]

    asyncio.run(run())


def test_a_key_and_its_limits_are_those_of_the_dialect(tiny_policy: Callable[..., Policy]) -> None:
    async def use() -> None:
        keys = (ApiKey("a", "sk-a", KeyLimits(requests_per_minute=4)), ApiKey("b", "sk-b"))
        async with serving(tiny_policy(), keys=keys) as (client, _):
            for path in (MESSAGES, COUNT, "/v1/messages/nowhere"):
                refused = await client.post(path, json=RIGHT[MESSAGES])
                assert refused.status_code == 401 and shaped(path, refused)["type"] == "authentication_error"
            body = {**RIGHT[RESPONSES], "max_output_tokens": 2}
            mine = {"x-api-key": "sk-a", "content-type": "application/json"}
            told = (await client.post(RESPONSES, json=body, headers=mine)).json()
            goes_on = {**body, "previous_response_id": told["id"]}
            assert (await client.post(RESPONSES, json=goes_on, headers=mine)).status_code == 200
            others = await client.post(RESPONSES, json=goes_on, headers={"authorization": "Bearer sk-b"})
            assert others.status_code == 404, "what one key has asked is no other's"
            for _ in range(2):
                assert (await client.post(MESSAGES, json=RIGHT[MESSAGES], headers=mine)).status_code == 200
            refused = await client.post(MESSAGES, json=RIGHT[MESSAGES], headers=mine)
            assert refused.status_code == 429 and shaped(MESSAGES, refused)["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) > 0
            lost = await client.post("/v1/nowhere", headers={**mine, "anthropic-version": "2023-06-01"}, json={})
            assert shaped(MESSAGES, lost)["type"] == "rate_limit_error"

    asyncio.run(asyncio.wait_for(use(), 60))


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_streams_on_an_engine(tiny_policy: Callable[..., Policy], path: str) -> None:
    """The same seed gives the tokens of a chat, whatever the policy's version does meanwhile is told, and a client that
    leaves takes its request back."""
    limit = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}[path]

    async def use() -> None:
        async with serving(tiny_policy()) as (client, engine):
            asked = {**RIGHT[path], limit: 40, "seed": 3, "return_token_ids": True}
            chat = await post(client, CHATS, messages=[USER], max_tokens=40, seed=3, return_token_ids=True)
            whole, choice = await post(client, path, **asked), chat["choices"][0]
            assert (whole["token_ids"], whole["prompt_token_ids"]) == (choice["token_ids"], chat["prompt_token_ids"])
            events = await stream(client, path, **asked)
            ended = message_of(events) if path == MESSAGES else events[-1]["response"]
            assert without_ids(ended) == without_ids(whole)

            long = asyncio.create_task(stream(client, path, **{**asked, limit: 400}))
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            await engine.update_weights(WeightUpdate(1))
            events = await long
            versions = (message_of(events) if path == MESSAGES else events[-1]["response"])["versions"]
            assert versions == sorted(versions) and versions[-1] == 1

            left = asyncio.create_task(stream(client, path, **{**asked, limit: 400}))
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            while engine.stats().running or engine.stats().waiting:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(use(), 60))


def test_adapters_have_names(tiny_policy: Callable[..., Policy], tmp_path: Path) -> None:
    """In one batch each name gives what its own adapter samples; what does not fit is refused at once."""

    def save(seed: int, narrow: int) -> Path:
        folder = tmp_path / str(seed)
        folder.mkdir()
        layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        draw = torch.Generator().manual_seed(seed)
        wide = adapted_layers(policy)["model.layers.0.self_attn.q_proj"].base_layer.weight.shape[0]
        shapes = {"A": (2, narrow), "B": (wide, 2)}
        save_file(
            {layer.format(k): torch.randn(*s, generator=draw) for k, s in shapes.items()},
            folder / "adapter_model.safetensors",
        )
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8}))
        return folder

    policy = tiny_policy()
    adapt(policy)
    width = adapted_layers(policy)["model.layers.0.self_attn.q_proj"].base_layer.weight.shape[1]
    adapters = {"one": save(1, width), "two": save(2, width)}

    async def use() -> None:
        async with serving(policy, adapters=adapters) as (client, _):
            listed = (await client.get("/v1/models")).json()
            assert [model["id"] for model in listed["data"]] == ["tiny", "one", "two"]
            asked = {**RIGHT[MESSAGES], "max_tokens": 12, "seed": 5, "return_token_ids": True}
            alone = [await post(client, MESSAGES, model=name, **asked) for name in ("tiny", "one", "two")]
            beside = await asyncio.gather(*(post(client, MESSAGES, model=told["model"], **asked) for told in alone))
            assert [told["token_ids"] for told in alone] == [told["token_ids"] for told in beside]
            assert len({tuple(told["token_ids"]) for told in alone}) == 3
            refused = await client.post(MESSAGES, json={**asked, "model": "three"})
            assert refused.status_code == 404 and "'three'" in shaped(MESSAGES, refused)["message"]

    asyncio.run(asyncio.wait_for(use(), 60))
    with pytest.raises(ModelError, match="has no layer"):
        asyncio.run(_refused(policy, {"bad": save(3, width + 1)}))


async def _refused(policy: Policy, adapters: dict[str, Path]) -> None:
    async with serving(policy, adapters=adapters):
        pass
