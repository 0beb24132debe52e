"""Whatever a request holds: it is refused by name before it costs much, and others are answered meanwhile."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from chat_templates import LLAMA3, QWEN, tokenizer
from served import post, refusal, serving
from tokenizers import AddedToken, normalizers

from kitae.data.chat import Chat, longest_token
from kitae.errors import DataError
from kitae.models.policy import Policy
from kitae.serving.prompt_reader import PromptReader
from kitae.serving.refusals import Refused
from kitae.serving.request_bodies import ReadingLimits, read_json
from kitae.types import Message, ToolCall

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MB = 2**20
WORDS = "hello world this is a test. " * (7 * MB // 28)
MARKS = ("<|im_start|>", "<|im_end|>", "<s>")


def said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}], **more}


HOSTILE: dict[str, tuple[str, dict[str, Any] | bytes, str]] = {
    "a prompt": (TEXT, {"prompt": WORDS}, "a prompt must have at most"),
    "a chat": (CHAT, said(WORDS), "a prompt must have at most"),
    "a system": (CHAT, said(WORDS, "system"), "a prompt must have at most"),
    "to tokenize": ("/tokenize", {"prompt": WORDS}, "a prompt must have at most"),
    "spaces": (TEXT, {"prompt": " " * MB}, "a prompt must have at most"),
    "prompts": (TEXT, {"prompt": ["a"] * 100_000}, "at most 64 answers, got 100000 prompts"),
    "prompts times n": (TEXT, {"prompt": ["a"] * 9, "n": 9}, "at most 64 answers, got 9 prompts times n = 9"),
    "n": (CHAT, said("a", n=65), "at most 64 answers, got 65"),
    "ids": (TEXT, {"prompt": [5] * 600_000}, "the context of 512 tokens, got 600000"),
    "tokens": ("/detokenize", {"tokens": [5] * 600_000}, "at most 262144 entries, got 600000"),
    "messages": (CHAT, {"messages": said("a")["messages"] * 20_000}, "the context of 512 tokens, got 20000"),
    "parts": (CHAT, said([{"type": "text", "text": "a" * 99}] * 40_000), "a prompt must have at most"),
    "tools": (CHAT, said("a", tools=[{"name": "f"}] * 300), "at most 256 tools, got 300"),
    "a schema": (CHAT, said("a", tools=[{"name": "f", "x": "y" * MB}]), "at most 524288 bytes of JSON"),
    "stops": (CHAT, said("a", stop=["x"] * 65), "stop must be at most 64 texts"),
    "a stop": (CHAT, said("a", stop="x" * 257), "of at most 256 characters, got 1, the longest with 257"),
    "stop ids": (CHAT, said("a", stop_token_ids=[1] * 1025), "stop_token_ids must have at most 1024 entries"),
    "a stop id": (CHAT, said("a", stop_token_ids=[2**40]), "must be at most"),
    "bias": (CHAT, said("a", logit_bias={str(i): 1 for i in range(99_999)}), "got 99999 entries"),
    "fields": (CHAT, {f"f{i}": 1 for i in range(99_999)}, "at most 100 fields, got 99999"),
    "a field": (CHAT, {"f" * MB: 1}, "unknown field 'fff"),
    "a name": (CHAT, said("a", model="m" * MB), "there is no model 'mmm"),
    "a role": (CHAT, said("a", "r" * MB), "the role of a message"),
    "brackets": (TEXT, b'{"prompt": [' + b"[]," * 250_000 + b"0]}", "at most 200000 opening brackets, got 250002"),
    "depth": (TEXT, b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too deeply"),
    "a deep schema": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "x": '
        + b'{"a":' * 800
        + b"1"
        + b"}" * 801
        + b"]}",
        "nested too deeply",
    ),
    "a body": (CHAT, said("x" * 9 * MB), "a body must have at most 8388608 bytes"),
    "a number": (CHAT, said("a", top_k=10**3000), "top_k must be at most"),
    "a seed": (CHAT, said("a", seed=10**3000), "seed must be below"),
    "a temperature": (CHAT, said("a", temperature=1e-300), "temperature must be 0 or at least"),
    "a digit too many": (CHAT, b'{"n": ' + b"9" * 9000 + b"}", "the body must be JSON"),
    "half a character": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "valid Unicode"),
    "no text": (CHAT, b'{"messages": "\xff\xfe"}', "the body must be JSON"),
}


def test_what_is_too_much_is_refused_by_name_and_stops_nobody_else(tiny_policy: Callable[..., Policy]) -> None:
    async def run() -> None:
        async with serving(tiny_policy(), queue=64) as (client, _):
            for name, (path, body, rule) in HOSTILE.items():
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                sent = client.post(path, content=content, headers={"content-type": "application/json"})
                asked, longest = asyncio.create_task(sent), 0.0
                while not asked.done():
                    began = time.process_time()
                    assert (await client.get("/health")).status_code == 200
                    longest = max(longest, time.process_time() - began)  # of this process, whatever else runs
                    await asyncio.sleep(0.001)
                answer = await asked
                assert answer.status_code in (400, 404, 413), (name, answer.text[:300])
                error = answer.json()["error"]
                assert rule in error["message"] and len(answer.text) < 4000, (name, answer.text[:500])
                assert longest < 0.5, (name, longest)
            found = await post(client, CHAT, **said("Hello", max_tokens=2))
            assert found["usage"]["completion_tokens"] <= 2

    asyncio.run(asyncio.wait_for(run(), 400))


NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "max_completion_tokens", "stop_token_ids",
    "top_logprobs", "logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "best_of",
)  # fmt: skip
ODD = (0, -1, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 1e-308, 1e308, -0.0, 0.5, True,
       "1", [], [0], [-1], [2**31 - 1], [2**70], {}, None, "x" * 9999)  # fmt: skip


def test_no_number_harms_the_engine(tiny_policy: Callable[..., Policy]) -> None:
    async def run() -> None:
        async with serving(tiny_policy(), queue=2048) as (client, engine):
            statuses = set()
            for path, body in ((CHAT, said("Hello")), (TEXT, {"prompt": "Hello"})):
                for name in NUMBERS:
                    sent = (client.post(path, json={**body, "max_tokens": 1, name: value}) for value in ODD)
                    for value, answer in zip(ODD, await asyncio.gather(*sent), strict=True):
                        assert answer.status_code in (200, 400), (name, value, answer.text)
                        statuses.add(answer.status_code)
            assert statuses == {200, 400} and engine.stats().running == 0
            await post(client, CHAT, **said("Hello", max_tokens=1))

    asyncio.run(asyncio.wait_for(run(), 400))


def test_only_so_much_is_read_at_once(tiny_policy: Callable[..., Policy]) -> None:
    async def run() -> None:
        limits = ReadingLimits(all_bytes=200_000, seconds=0.3)
        async with serving(tiny_policy(), reading=limits) as (client, _):
            gate = asyncio.Event()

            async def halting() -> Any:
                yield b'{"prompt": "' + b"a" * 150_000
                await gate.wait()
                yield b'"}'

            headers = {"content-type": "application/json"}
            half = asyncio.create_task(client.post(TEXT, content=halting(), headers=headers))
            await asyncio.sleep(0.1)
            refused = await client.post(TEXT, json={"prompt": "a" * 100_000})
            assert refused.status_code == 429 and "200000 bytes may be read at once" in refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert (await client.post(TEXT, json={"prompt": "a", "max_tokens": 1})).status_code == 200
            slow = await half
            assert slow.status_code == 408 and "must have come after 0.3 s, got 150012 bytes" in slow.text
            assert slow.headers["connection"] == "close"
            assert "must have at most" in (await refusal(client, TEXT, 400, prompt="a" * 100_000))["message"]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_large_bodies_are_read_as_small_ones_are() -> None:
    body = {"a": ['é\n"\\', 1, -2.5, None, True, {"b": {}}], "c": "x" * 3 * MB, "d": list(range(1000))}
    assert read_json(json.dumps(body).encode()) == body == read_json(json.dumps(body, ensure_ascii=False).encode())
    for wrong in ('{"a": 1,}', '{"a" 1}', "[1]", '{"a": 1} x', '{"a": "\n"}'):
        for size in (0, 3 * MB):
            with pytest.raises(Refused, match="the body must be"):
                read_json((wrong + " " * size).encode())


# Special tokens that are spelled out.


def served_tokens(client: httpx.AsyncClient, **body: Any) -> Any:
    return post(client, "/tokenize", **body)


@pytest.mark.parametrize("control_tokens", ["never", "completions", "always"])
def test_who_may_say_special_tokens(tiny_policy: Callable[..., Policy], control_tokens: Any) -> None:
    async def run() -> None:
        policy = tiny_policy()
        chat = Chat(policy.tokenizer)
        async with serving(policy, control_tokens=control_tokens) as (client, _):
            (mark,) = chat.encode(MARKS[0])
            usual = (await served_tokens(client, messages=said("Hi")["messages"]))["tokens"].count(mark)

            async def marks(**body: Any) -> int:
                tokens = (await served_tokens(client, **body))["tokens"]
                assert MARKS[0] in chat.spell(*tokens)
                return int(tokens.count(mark)) - (usual if "messages" in body else 0)

            talk, text = {"messages": said(MARKS[0])["messages"]}, {"prompt": MARKS[0]}
            assert await marks(**talk) == (control_tokens == "always")
            assert await marks(**text) == (control_tokens != "never")
            assert await marks(**talk, control_tokens=False) == await marks(**text, control_tokens=False) == 0
            if control_tokens == "never":
                error = await refusal(client, "/tokenize", 400, **text, control_tokens=True)
                assert error["param"] == "control_tokens" and "must be false here" in error["message"]
            else:
                assert await marks(**talk, control_tokens=True) == await marks(**text, control_tokens=True) == 1
            # What is told is what is asked of the model.
            for path, body in ((CHAT, talk), (TEXT, text)):
                answer = await post(client, path, **body, max_tokens=1, return_token_ids=True)
                told = answer["prompt_token_ids"] if path == CHAT else answer["choices"][0]["prompt_token_ids"]
                assert told == (await served_tokens(client, **body))["tokens"]

    asyncio.run(asyncio.wait_for(run(), 60))


def readers(template: str | None, **options: Any) -> tuple[Chat, PromptReader]:
    made = tokenizer(template, **options)
    return Chat(made), PromptReader.of(made, None, context=100_000, most_answers=8)


@pytest.mark.parametrize("template", [QWEN, LLAMA3, None])
def test_no_part_of_a_conversation_says_special_tokens(template: str | None) -> None:
    """Wherever they stand: in contents, parts of them, names, ids, calls and what describes tools."""
    chat, reader = readers(template)
    specials = sorted({chat.spell(i) for i in chat.special_tokens})
    for mark in [*specials, "".join(specials), specials[0] * 3, f"{specials[0]}\U00100000{specials[-1]}"]:
        call = ToolCall("f", {f"k{mark}": f"v{mark}", "deep": [{"x": mark}]}, "c")
        tool = {"type": "function", "function": {"name": "f", "description": mark, "parameters": {mark: [mark]}}}
        talk = (
            Message("system", f"a{mark}b"),
            Message("user", mark),
            Message("assistant", "" if template == LLAMA3 else f"{mark} yes", calls=(call,) if template else ()),
            Message("tool", mark, call_id="c", name="f"),
            Message("user", f"\n{mark}"),
        )
        tools = (tool,) if template else ()
        plain = replace(call, arguments={"x": "x"})
        blank = tuple(replace(m, content="x", calls=(plain,) * len(m.calls)) for m in talk)
        blank_tools = ({"type": "function", "function": {"name": "f"}},) if template else ()
        found, usual = reader.encode_chat(talk, tools), reader.encode_chat(blank, blank_tools)
        counts = [sum(token in chat.special_tokens for token in tokens) for tokens in (found, usual)]
        assert counts[0] == counts[1], mark
        assert chat.spell(*found).count(specials[0]) > chat.spell(*usual).count(specials[0]) or specials[0] not in mark
        assert "\U00100001" not in chat.spell(*found)


def test_text_without_special_tokens_is_as_ever() -> None:
    chat, reader = readers(QWEN)
    for content in ("Hello", "", " a  b ", "é€\U00100000", "<|im_star", "<|IM_START|>", "\n\n"):
        talk = (Message("system", content), Message("user", content))
        assert reader.encode_chat(talk) == chat.encode_prompt(talk)
        assert reader.encode_text(content) == chat.begin() + chat.encode(content)


def test_other_letters_that_a_tokenizer_takes_for_special_tokens_are_refused() -> None:
    made = tokenizer(QWEN)
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    made.add_special_tokens({"additional_special_tokens": [AddedToken("<|evil|>", special=True, normalized=True)]})
    reader = PromptReader.of(made, None, context=1000, most_answers=1)
    for content in ("\uff1c|evil|\uff1e", "<|ｅvil|>"):
        with pytest.raises(Refused, match="in other letters"):
            reader.encode_chat((Message("user", content),))
    assert reader.encode_chat((Message("user", "ｅvil"),))


def test_no_token_is_longer_than_its_bound() -> None:
    chat, _ = readers(QWEN)
    longest = longest_token(chat.tokenizer)
    assert all(len(chat.spell(i).encode()) <= longest for i in range(len(chat.tokenizer)))
    bounded = Chat(chat.tokenizer, most_bytes=10)
    for encode in (bounded.encode, bounded.encode_text, lambda text: bounded.encode_prompt((Message("user", text),))):
        with pytest.raises(DataError, match="at most 10 bytes, as many as the context can hold, got "):
            encode("é" * 6)
