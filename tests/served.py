"""A served model in this process: a tiny one on the native engine, or one that says what a test wants."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette

from kitae.data.chat import Chat
from kitae.engines.base import Sampled
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.models.policy import Policy
from kitae.serving.answers import AnswerRenderer
from kitae.serving.app import make_app, model_routes
from kitae.serving.base import Answer, Ask, OnTokens, with_ids
from kitae.serving.handlers import AnswerPolicy, ChatHandlers
from kitae.serving.model_app import app_of
from kitae.serving.prompt_reader import PromptReader, RequestReader
from kitae.serving.refusals import AdmissionControl
from kitae.serving.server_metrics import Counters
from kitae.serving.server_settings import ServerSettings
from kitae.serving.streamed_text import streams_early
from kitae.serving.text_scoring import TextScorer
from kitae.serving.token_text import TokenText

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@asynccontextmanager
async def serving(policy: Policy, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, NativeEngine]]:
    """`async with serving(policy, queue=4) as (client, engine): …`"""
    engine, scorer = NativeEngine(policy, EngineConfig(memory_gb=0.01)), TextScorer(policy)
    app = app_of(policy, engine, scorer, ServerSettings("tiny", **settings))
    try:
        async with client_of(app) as client:
            yield client, engine
    finally:
        await scorer.close()
        await engine.close()


def client_of(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30)


@dataclass
class Scripted:
    """A `Model` that says these texts, one after the other, and the last for ever; its tokens come in random pieces."""

    chat: Chat
    texts: Sequence[str]
    asked: list[Ask] = field(default_factory=list)
    seed: int = 0

    async def ask(self, ask: Ask, on_tokens: OnTokens | None = None) -> Answer:
        self.asked.append(ask)
        text = self.texts[min(len(self.asked), len(self.texts)) - 1]
        tokens = stopped(self.chat, self.chat.encode(text), ask)
        sampled = Sampled(tokens, tuple(-0.5 - 0.001 * i for i in range(len(tokens))), (7,) * len(tokens))
        if on_tokens:
            for piece in pieces(sampled, random.Random(self.seed)):
                on_tokens(piece)
                await asyncio.sleep(0)
        prompt = ask.prompt_tokens or self.chat.encode_prompt(ask.messages, ask.tools)
        turn = self.chat.read(tokens, ask.sampling.stop_strings, ask.tools, ask.thoughts)
        return Answer(prompt, sampled, "stop", with_ids(turn, ask.id))


def stopped(chat: Chat, tokens: tuple[int, ...], ask: Ask) -> tuple[int, ...]:
    """As an engine ends an answer: with the token that completes a stop string, or a stop token."""
    for end in range(1, len(tokens) + 1):
        said = chat.spell(*tokens[:end])
        if tokens[end - 1] in ask.sampling.stop_tokens or any(stop in said for stop in ask.sampling.stop_strings):
            return tokens[:end]
    return (*tokens, *ask.sampling.stop_tokens[:1])


def pieces(sampled: Sampled, random: random.Random) -> list[Sampled]:
    found, start = [], 0
    while start < len(sampled.tokens):
        end = start + random.choice([1, 1, 2, 3, 7])
        part = slice(start, end)
        found.append(Sampled(sampled.tokens[part], sampled.logprobs[part], sampled.versions[part]))
        start = end
    return found


def renderer_of(tokenizer: Any, chat: Chat) -> AnswerRenderer:
    return AnswerRenderer("tiny", chat, TokenText(tokenizer), streams_early(tokenizer))


def scripted_client(
    tokenizer: Any, model: Scripted, answer_policy: AnswerPolicy | None = None, encodes: bool = False
) -> httpx.AsyncClient:
    """encodes: the server makes tokens of messages, as one with an engine does; otherwise the model does."""
    admission = AdmissionControl(64)
    counters = Counters(admission)
    prompts = PromptReader.of(tokenizer, None, context=512, most_answers=64)
    handlers = ChatHandlers(
        lambda request: model,
        renderer_of(tokenizer, model.chat),
        admission,
        None,
        answer_policy,
        reader=RequestReader([prompts]) if encodes else None,
    )
    return client_of(make_app(model_routes(handlers, counters), counters, name="tiny", context=512, host="127.0.0.1"))


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """The JSON of an answer, which must be one."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: httpx.AsyncClient, path: str, status: int, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """Those of a stream, which must end as it should."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last, nothing = response.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(found: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice that pieces make together, in the shape of a whole one."""
    whole: dict[str, Any] = {"message": {"content": ""}, "text": "", "token_ids": [], "versions": []}
    logprobs: dict[str, Any] = {}
    for event in found:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice.get("delta", {})
            whole["message"] |= {k: v for k, v in delta.items() if k not in ("content", "tool_calls")}
            whole["message"]["content"] += delta.get("content") or ""
            if "tool_calls" in delta:
                calls = whole["message"].setdefault("tool_calls", [])
                for call in delta["tool_calls"]:
                    assert call["index"] == len(calls)
                    calls.append({k: v for k, v in call.items() if k != "index"})
            whole["text"] += choice.get("text", "")
            for name in ("token_ids", "versions"):
                whole[name] += choice.get(name, [])
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[name] = (logprobs.get(name) or []) + values if values is not None else None
            whole |= {k: choice[k] for k in ("finish_reason", "version", "problem") if k in choice}
    return whole | {"logprobs": logprobs or None}


Run = Callable[..., Any]
