"""The addresses of a language model, asked as clients ask them: a tiny model on the native engine, in this process."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
import torch
from chat_templates import QWEN, tokenizer
from served import ADD, CALL, Scripted, client_of, events, joined, post, refusal, renderer_of, scripted_client, serving
from starlette.requests import Request
from starlette.routing import Mount

from kitae.data.chat import Chat
from kitae.engines.base import SamplingParams
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.serving.app import chat_routes, make_app
from kitae.serving.handlers import AnswerPolicy, ChatHandlers
from kitae.serving.refusals import AdmissionControl, Refused
from kitae.serving.server_metrics import Counters

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
Client = httpx.AsyncClient


@pytest.fixture
def ask(tiny_policy: Callable[..., Policy]) -> Callable[..., Any]:
    """`ask(use)`: what `use(client, engine)` returns."""

    def run(use: Callable[[Client, NativeEngine], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
        async def inside() -> Any:
            async with serving(tiny_policy(), **settings) as (client, engine):
                return await use(client, engine)

        return asyncio.run(asyncio.wait_for(inside(), 60))

    return run


def scripted(use: Callable[[Client, Scripted], Coroutine[Any, Any, Any]], *texts: str, **answer_policy: Any) -> Any:
    made = tokenizer(QWEN)

    async def inside() -> Any:
        model = Scripted(Chat(made), texts)
        async with scripted_client(made, model, AnswerPolicy(**answer_policy)) as client:
            return await use(client, model)

    return asyncio.run(inside())


# What is answered.


def test_a_chat_is_answered_in_the_shape_of_openai(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        found = await post(client, CHAT, model="tiny", messages=HELLO, max_tokens=8, seed=1, return_token_ids=True)
        (choice,) = found["choices"]
        assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
        assert found["system_fingerprint"] == "kitae-0" and choice["version"] == 0
        assert choice["message"]["role"] == "assistant" and choice["index"] == 0
        assert choice["versions"] == [0] * len(choice["token_ids"])
        chat = Chat(engine.policy.tokenizer)
        assert found["prompt_token_ids"] == list(
            chat.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
        )
        assert choice["message"]["content"] == chat.decode(choice["token_ids"])
        sizes = len(found["prompt_token_ids"]), len(choice["token_ids"])
        assert list(found["usage"].values()) == [*sizes, sum(sizes)]
        assert choice["finish_reason"] == ("length" if len(choice["token_ids"]) == 8 else "stop")

    ask(use)


def test_seeds_and_choices(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        async def texts(**body: Any) -> list[str]:
            found = await post(client, CHAT, messages=HELLO, max_tokens=12, **body)
            assert [choice["index"] for choice in found["choices"]] == list(range(body.get("n", 1)))
            return [choice["message"]["content"] for choice in found["choices"]]

        first = await texts(n=4, seed=5)
        assert first == await texts(n=4, seed=5) and len(set(first)) == 4
        assert first[0] == (await texts(seed=5))[0] != (await texts(seed=6))[0]
        assert await texts() != await texts()
        assert len(set(await texts(n=3, temperature=0))) == 1
        assert engine.stats().prompt_tokens_shared > 0  # choices of one prompt compute it once

    ask(use)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_joined_is_the_answer(ask: Callable[..., Any], path: str) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": ["Hello", "You"], "echo": True}
        wanted = {True: {"logprobs": True}, False: {}}[path == CHAT]
        body = {**prompt, **wanted, "n": 2, "seed": 3, "max_tokens": 300, "ignore_eos": True, "stop": ["qq"]}
        whole = await post(client, path, **body, return_token_ids=True)
        found = await events(client, path, **body, return_token_ids=True, stream_options={"include_usage": True})
        *pieces, last = found
        assert last["choices"] == [] and last["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in pieces) and len(pieces) > 2 * len(whole["choices"])
        for choice in whole["choices"]:
            told = joined(pieces, choice["index"])
            for name in choice.keys() & {"text", "token_ids", "finish_reason", "version"}:
                assert told[name] == choice[name], name
            if path == CHAT:
                assert told["message"] == choice["message"]
                assert told["logprobs"] == choice["logprobs"]
        assert {event["id"] for event in found} == {found[0]["id"]}

    ask(use)


def test_a_stop_string_is_left_out_and_ends_the_answer(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        body = {"prompt": "Hello", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        (free,) = (await post(client, TEXT, **body))["choices"]
        stop = free["text"][5:7]
        (cut,) = (await post(client, TEXT, **body, stop=stop))["choices"]
        assert free["finish_reason"] == "length" and cut["finish_reason"] == "stop"
        assert cut["text"] == free["text"][: free["text"].index(stop)]
        fourth = Chat(engine.policy.tokenizer).encode(free["text"])[3]
        (ended,) = (await post(client, TEXT, **body, stop_token_ids=[fourth], return_token_ids=True))["choices"]
        assert ended["finish_reason"] == "stop" and len(ended["token_ids"]) <= 4

    ask(use)


# Log-probs.


def test_log_probs_are_the_engines_and_those_of_the_likeliest_the_policys(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        body = {"messages": HELLO, "max_tokens": 6, "seed": 2, "logprobs": True, "return_token_ids": True}
        plain = await post(client, CHAT, **body)
        more = await post(client, CHAT, **body, top_logprobs=3)
        (one,), (other,) = plain["choices"], more["choices"]
        assert one["token_ids"] == other["token_ids"] and len(one["logprobs"]["content"]) == len(one["token_ids"])
        tokens = torch.tensor(plain["prompt_token_ids"] + one["token_ids"])
        expected = engine.policy.score(tokens)[-len(one["token_ids"]) :].tolist()
        for choice in (one, other):
            assert [e["logprob"] for e in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-3)
        for entry in other["logprobs"]["content"]:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] >= entry["logprob"]
            assert bytes(entry["bytes"]).decode("utf-8", "replace") or entry["token"]
        told = await events(client, CHAT, **body, top_logprobs=3)
        assert joined(told)["logprobs"] == other["logprobs"] and joined(told)["message"] == other["message"]

    ask(use)


@pytest.mark.parametrize("limit", [0, 1])
def test_prompts_are_scored_as_lm_eval_asks_for_it(ask: Callable[..., Any], limit: int) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        prompts = [list(range(10, 40)), [7, 8, 9], [50]]
        body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": limit, "temperature": 0, "seed": 1234}
        found = await post(client, TEXT, **body)
        assert found["usage"]["completion_tokens"] == limit * 3
        for tokens, choice in zip(prompts, found["choices"], strict=True):
            told = choice["logprobs"]
            lengths = {len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
            assert lengths == {len(tokens) + limit}
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            expected = engine.policy.score(torch.tensor(tokens)).tolist() if len(tokens) > 1 else []
            assert told["token_logprobs"][1 : len(tokens)] == pytest.approx(expected, abs=1e-4)
            for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
                assert max(top.values()) >= logprob and logprob in top.values()
            if limit:
                assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())  # greedy

    ask(use)


def test_offsets_point_into_the_text(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        found = await post(client, TEXT, prompt="a€b🙂c", echo=True, logprobs=0, max_tokens=0)
        (choice,) = found["choices"]
        assert choice["text"] == "a€b🙂c" and choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 3, 3, 3, 3, 4]
        assert choice["logprobs"]["top_logprobs"] is None and choice["finish_reason"] == "length"

    ask(use)


# Tools.


def test_calls_of_tools_are_told_whole_and_in_pieces() -> None:
    async def use(client: Client, model: Scripted) -> None:
        body = {"messages": HELLO, "tools": [ADD], "seed": 1}
        whole = await post(client, CHAT, **body)
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add. "
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        pieces = await events(client, CHAT, **body)
        assert len(pieces) > 2
        told = joined(pieces)
        assert told["message"]["content"] == "I add. " and told["finish_reason"] == "tool_calls"
        assert told["message"]["tool_calls"][0]["function"] == call["function"]
        assert told["message"]["tool_calls"][0]["id"] != call["id"]  # another answer, another id
        assert all("tool_call" not in (e["choices"][0]["delta"].get("content") or "") for e in pieces)
        (ask, *_) = model.asked
        assert ask.tools == ({"type": "function", "function": ADD["function"]},)

    scripted(use, "I add. " + CALL)


def test_a_conversation_with_calls_goes_on() -> None:
    async def use(client: Client, model: Scripted) -> None:
        (first,) = (await post(client, CHAT, messages=HELLO, tools=[ADD]))["choices"]
        said = {**first["message"], "refusal": None, "annotations": [], "audio": None, "function_call": None}
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        await post(client, CHAT, messages=[*HELLO, said, result], tools=[ADD])
        messages = model.asked[-1].messages
        assert [m.role for m in messages] == ["user", "assistant", "tool"]
        assert messages[1].calls[0].arguments == {"a": 1, "b": 2} and messages[2].call_id == messages[1].calls[0].id
        await post(client, CHAT, messages=[*HELLO, {"role": "assistant", "content": None}, *HELLO])

    scripted(use, CALL, "Three.")


def test_none_hides_the_tools_and_a_name_shows_one() -> None:
    async def use(client: Client, model: Scripted) -> None:
        other = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
        (plain,) = (await post(client, CHAT, messages=HELLO, tools=[ADD, other], tool_choice="none"))["choices"]
        assert model.asked[-1].tools == () and plain["message"]["content"] == CALL  # nothing is a call then
        named = {"type": "function", "function": {"name": "add"}}
        (choice,) = (await post(client, CHAT, messages=HELLO, tools=[ADD, other], tool_choice=named))["choices"]
        assert [t["function"]["name"] for t in model.asked[-1].tools] == ["add"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"

    scripted(use, CALL)


def test_required_is_insisted_on_and_refused_if_it_does_not_help() -> None:
    async def use(client: Client, model: Scripted) -> None:
        body = {"messages": HELLO, "tools": [ADD], "tool_choice": "required"}
        (choice,) = (await post(client, CHAT, **body, seed=4))["choices"]
        assert choice["finish_reason"] == "tool_calls" and len(model.asked) == 3
        assert len({(ask.id, ask.seed) for ask in model.asked}) == 3
        model.texts = ["No.", '<tool_call>{"name": "nobody"}</tool_call>']
        model.asked.clear()
        error = await refusal(client, CHAT, 422, **body)
        assert "cannot be read" in error["message"] and "asked 3 times" in error["message"] and error["code"] == "unmet"
        model.texts, model.asked[:] = ["No."], []
        error = await refusal(client, CHAT, 422, **body, temperature=0)
        assert "called no tool; asked once" in error["message"] and len(model.asked) == 1  # the same would come again
        error = await refusal(client, CHAT, 422, **body, stream=True)
        assert "it said last: 'No.'" in error["message"]

    scripted(use, "No.", "Still no.", CALL, tries=3)


def test_where_answers_are_told_anyway_it_is_said_that_they_are_not_what_was_asked_for() -> None:
    async def use(client: Client, model: Scripted) -> None:
        body = {"messages": HELLO, "tools": [ADD]}
        (choice,) = (await post(client, CHAT, **body, tool_choice="required"))["choices"]
        assert choice["finish_reason"] == "stop" and choice["unmet"].endswith("called no tool")
        (event,) = await events(client, CHAT, **body, tool_choice="required")
        assert event["choices"][0]["unmet"] == choice["unmet"]
        model.texts = [CALL + CALL]
        (choice,) = (await post(client, CHAT, **body, parallel_tool_calls=False))["choices"]
        assert "the model called 2 tools" in choice["unmet"]

    scripted(use, "No.", tries=1, answer_anyway=True)


def test_a_call_that_cannot_be_read_is_told_as_text_with_the_reason() -> None:
    async def use(client: Client, model: Scripted) -> None:
        (choice,) = (await post(client, CHAT, messages=HELLO, tools=[ADD]))["choices"]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == model.texts[0]
        assert "must be JSON" in choice["problem"]
        assert joined(await events(client, CHAT, messages=HELLO, tools=[ADD]))["problem"] == choice["problem"]

    scripted(use, "So: <tool_call>{add}</tool_call>")


# What is refused.


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {}, "messages", "messages must be a list of at least one message, got None"),
    (CHAT, {"messages": [{"role": "me", "content": "x"}]}, "messages[0]", "must be one of system"),
    (CHAT, {"messages": HELLO, "frobnicate": 1}, "frobnicate", "unknown field 'frobnicate'"),
    (CHAT, {"messages": HELLO, "temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (CHAT, {"messages": HELLO, "n": 0}, "n", "n must be at least 1, got 0"),
    (CHAT, {"messages": HELLO, "n": True}, "n", "n must be a whole number, got True"),
    (CHAT, {"messages": HELLO, "temperature": -1}, "temperature", "temperature must be at least 0, got -1"),
    (CHAT, {"messages": HELLO, "top_p": 0}, "top_p", "top_p must be above 0"),
    (CHAT, {"messages": HELLO, "temperature": 1e-300}, "temperature", "temperature must be 0 or at least 1e-09"),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "must agree, got 1 and 2"),
    (CHAT, {"messages": HELLO, "stop": [""]}, "stop", "none of them empty"),
    (CHAT, {"messages": HELLO, "seed": "x"}, "seed", "seed must be a whole number"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs = true"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "yaml"}}, "response_format", "of type 'text'"),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        None,
        "constraint json_schema: ",
    ),
    (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "an answer has one form"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, None, "tokens of logit_bias must be in 0…"),
    (CHAT, {"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias", "logit_bias must be token ids, each with"),
    (CHAT, {"messages": HELLO, "presence_penalty": 5}, "presence_penalty", "must be at most 2"),
    (CHAT, {"messages": HELLO, "store": True}, "store", "answers are not kept"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "needs stream = true"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "must be one of auto, none, got 'required'"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "web_search"}]}, "tools", "of type 'function', got 'web_search'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]", "must be text"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "audio": "y"}]}, "messages[0].audio", "unknown field"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, None, "leaves no room in the context of 512"),
    (
        CHAT,
        {"messages": HELLO, "stream": True, "tools": [ADD], "tool_choice": "sub"},
        "tool_choice",
        "none, required, add",
    ),
    (TEXT, {}, "prompt", "prompt must be a text, a list of texts, token ids or a list of them, got None"),
    (TEXT, {"prompt": ""}, "prompt", "at least one token"),
    (TEXT, {"prompt": [5, "x"]}, "prompt", "prompt must be a text"),
    (TEXT, {"prompt": [-1]}, "prompt", "token ids must be from 0"),
    (TEXT, {"prompt": [100_000]}, None, "token ids must be in 0…258, got 100000"),
    (TEXT, {"prompt": [100_000], "echo": True, "max_tokens": 0, "logprobs": 1}, None, "token ids must be in 0…258"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "from left to right"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of", "set n alone"),
    (TEXT, {"prompt": "x", "logprobs": 99}, "logprobs", "logprobs must be at most 20, got 99"),
    (TEXT, {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": True}, "logprobs", "whole number, got True"),
]


def test_what_cannot_be_honoured_is_refused_by_name(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        for path, body, param, message in REFUSED:
            error = await refusal(client, path, 400, **body)
            assert error["type"] == "invalid_request_error" and error["param"] == param, (body, error)
            assert message in error["message"], (body, error)
        assert engine.stats().running == engine.stats().generated_tokens == 0

    ask(use)


def test_fields_that_change_nothing_are_taken(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        harmless = {
            "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
            "prompt_cache_key": "x", "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": None, "n": None,
            "response_format": {"type": "text"}, "stop": None, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "stream_options": None, "tools": None, "tool_choice": "auto", "parallel_tool_calls": True,
        }  # fmt: skip
        await post(client, CHAT, messages=HELLO, max_tokens=1, **harmless)

    ask(use)


def test_bodies_names_and_paths_that_are_wrong(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        assert (await refusal(client, CHAT, 404, model="gpt", messages=HELLO))["code"] == "model_not_found"
        js = "application/json"
        for content, kind, status in ((b"{", js, 400), (b"[]", js, 400), (b"[" * 9**5, js, 400), (b"{}", "x/y", 415)):
            found = await client.post(CHAT, content=content, headers={"content-type": kind})
            assert found.status_code == status and found.json()["error"]["message"], found.text
        for path, status in (("/nowhere", 404), (CHAT, 405)):
            found = await client.get(path)
            assert found.status_code == status and found.json()["error"]["type"]
        for path in ("/v1/score", "/v1/embeddings"):
            assert "serves a language model" in (await refusal(client, path, 404, input="x"))["message"]

    ask(use)


# Other addresses.


def test_models_tokens_health_and_metrics(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["id"] == "tiny" and model["max_model_len"] == 512
        assert (await client.get("/v1/models/tiny")).json() == model
        assert (await client.get("/v1/models/other")).status_code == 404
        chat = Chat(engine.policy.tokenizer)
        assert (await post(client, "/tokenize", prompt="a€"))["tokens"] == list(chat.encode("a€"))
        told = await post(client, "/tokenize", messages=HELLO)
        assert (await post(client, "/detokenize", tokens=told["tokens"]))["prompt"].endswith("assistant\n")
        assert told["count"] == len(told["tokens"])
        await post(client, TEXT, prompt="Hello", max_tokens=5, ignore_eos=True)
        await refusal(client, CHAT, 400)
        page = (await client.get("/metrics")).text
        assert "kitae_engine_generated_tokens_total 5\n" in page and "kitae_answers_under_way 0\n" in page
        assert 'kitae_requests_total{path="/v1/completions",status="200"} 1\n' in page
        assert 'kitae_requests_total{path="/v1/chat/completions",status="400"} 1\n' in page
        assert (await client.get("/health")).json() == {"status": "ok"}
        await engine.close()
        assert (await client.get("/health")).status_code == 503
        error = await refusal(client, TEXT, 503, prompt="Hello")
        assert error["code"] == "engine_error" and "closed" in error["message"]

    ask(use)


# Too many, and gone.


def test_who_comes_when_all_places_are_taken_is_told_when_to_try_again(ask: Callable[..., Any]) -> None:
    async def use(client: Client, engine: NativeEngine) -> None:
        await engine.pause()
        body = {"prompt": "Hello", "max_tokens": 4}
        under_way = [asyncio.create_task(client.post(TEXT, json={**body, "n": 2})) for _ in range(2)]
        while engine.stats().waiting < 4:
            await asyncio.sleep(0.01)
        for stream in (False, True):
            refused = await client.post(TEXT, json={**body, "stream": stream})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        assert "at most 4 answers" in (await refusal(client, TEXT, 400, **body, n=5))["message"]
        await engine.resume()
        assert [(await task).status_code for task in under_way] == [200, 200]
        assert (await client.post(TEXT, json=body)).status_code == 200
        assert "kitae_queue_refused_total 2\n" in (await client.get("/metrics")).text

    ask(use, queue=4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_request_back(tiny_policy: Callable[..., Policy], stream: bool) -> None:
    """Spoken to below HTTP, where a client can leave in the middle."""

    async def run() -> None:
        async with serving(tiny_policy()) as (client, engine):
            app = client._transport.app  # type: ignore[attr-defined]
            body = {"messages": HELLO, "max_tokens": 400, "n": 3, "stream": stream, "ignore_eos": True}
            left, sent = asyncio.Event(), list[dict[str, Any]]()
            incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

            async def receive() -> dict[str, Any]:
                if incoming:
                    return incoming.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                sent.append(message)

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
            asked = asyncio.create_task(app(scope, receive, send))
            while engine.stats().generated_tokens < 30 or (stream and len(sent) < 4):
                await asyncio.sleep(0.005)
            left.set()
            await asked
            for _ in range(200):
                if engine.stats().running == 0:
                    break
                await asyncio.sleep(0.005)
            stats = engine.stats()
            assert stats.running == stats.waiting == 0 and stats.generated_tokens < 3 * 400
            page = (await client.get("/metrics")).text
            assert 'kitae_disconnects_total{path="/v1/chat/completions"} 1\n' in page
            assert "kitae_answers_under_way 0\n" in page

    asyncio.run(asyncio.wait_for(run(), 60))


def test_sampling_is_what_was_asked_for() -> None:
    async def use(client: Client, model: Scripted) -> None:
        body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": ["a", "b"], "stop_token_ids": [9]}
        await post(client, CHAT, messages=HELLO, max_completion_tokens=11, seed=-3, **body)
        ask = model.asked[-1]
        assert ask.sampling == SamplingParams(0.5, 11, 0.9, 7, 0.1, (*model.chat.stop_tokens, 9), ("a", "b"))
        assert ask.seed is not None and not ask.retry
        await client.post(CHAT, json={"messages": HELLO}, headers={"x-stainless-retry-count": "2"})
        assert model.asked[-1].retry and model.asked[-1].seed is None

    scripted(use, "Yes.")


def test_one_set_of_addresses_serves_many_models() -> None:
    """Who answers is looked up by what stands in the path, which no metric tells."""
    made = tokenizer(QWEN)
    models = {name: Scripted(Chat(made), [text]) for name, text in (("secret-a", "I am A."), ("secret-b", "I am B."))}

    def find(request: Request) -> Scripted:
        if (name := request.path_params["token"]) not in models:
            raise Refused("there is no such episode", 404)
        return models[name]

    async def run() -> None:
        admission = AdmissionControl(8)
        counters = Counters(admission)
        handlers = ChatHandlers(
            find,
            renderer_of(made, Chat(made)),
            admission,
            answer_policy=AnswerPolicy(),
            gone=counters.gone,
        )
        routes = [Mount("/episodes/{token}", routes=chat_routes(handlers, counters))]
        async with client_of(make_app(routes, counters, name="m", context=1, host="127.0.0.1")) as client:
            for name, text in (("secret-a", "I am A."), ("secret-b", "I am B.")):
                found = await post(client, f"/episodes/{name}{CHAT}", model="tiny", messages=HELLO)
                assert found["choices"][0]["message"]["content"] == text
            assert (
                "no such episode" in (await refusal(client, f"/episodes/other{CHAT}", 404, messages=HELLO))["message"]
            )
            error = await refusal(
                client, f"/episodes/secret-a{CHAT}", 400, messages=HELLO, logprobs=True, top_logprobs=2
            )
            assert error["param"] == "logprobs"  # nobody here gives them
            page = (await client.get("/metrics")).text
            assert 'path="/episodes/{token}/v1/chat/completions",status="200"} 2\n' in page and "secret" not in page

    asyncio.run(run())
