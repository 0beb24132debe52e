"""A model on an engine: a stream has the tokens that were sampled, and a cancelled request leaves nothing behind."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kitae.data.chat import Chat
from kitae.engines.base import Sampled, SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.native.engine import NativeEngine
from kitae.errors import RequestError
from kitae.models.policy import Policy
from kitae.serving.base import Ask
from kitae.serving.engine_model import EngineModel
from kitae.types import Message

HELLO = (Message("user", "Hello"),)


def with_model(policy: Policy, use: Callable[[EngineModel, NativeEngine], Coroutine[Any, Any, Any]]) -> None:
    async def run() -> None:
        engine = NativeEngine(policy, EngineConfig(memory_gb=0.01))
        try:
            await use(EngineModel(engine, Chat(policy.tokenizer)), engine)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_all_tokens_are_heard_once_and_in_order(tiny_policy: Callable[..., Policy]) -> None:
    async def use(model: EngineModel, engine: NativeEngine) -> None:
        async def one(number: int) -> int:
            on_tokens: list[Sampled] = []
            ask = Ask(f"{number}", messages=HELLO, sampling=SamplingParams(max_tokens=200), seed=number)
            answer = await model.ask(ask, on_tokens.append if number % 3 else None)
            if number % 3:
                for name in ("tokens", "logprobs", "versions"):
                    assert sum((getattr(h, name) for h in on_tokens), ()) == getattr(answer.sampled, name)
                assert all(h.tokens for h in on_tokens)
            return len(on_tokens)

        counts = await asyncio.gather(*map(one, range(12)))
        assert max(counts) > 1 and len({c == 0 for c in counts}) == 2

    with_model(tiny_policy(), use)


def test_a_cancelled_ask_is_aborted(tiny_policy: Callable[..., Policy]) -> None:
    async def use(model: EngineModel, engine: NativeEngine) -> None:
        for on_tokens in (None, lambda news: None):
            ask = Ask("one", messages=HELLO, sampling=SamplingParams(max_tokens=400), seed=1)
            asked = asyncio.create_task(model.ask(ask, on_tokens))
            while engine.stats().running == 0:
                await asyncio.sleep(0.002)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await engine.abort("nobody")  # commands are taken in order
            assert engine.stats().running == 0

    with_model(tiny_policy(), use)


def test_impossible_asks_are_refused(tiny_policy: Callable[..., Policy]) -> None:
    async def use(model: EngineModel, engine: NativeEngine) -> None:
        with pytest.raises(RequestError, match="valid Unicode"):
            await model.ask(Ask("a", messages=(Message("user", "\ud800"),)))
        with pytest.raises(RequestError, match="leaves no room"):
            await model.ask(Ask("b", prompt_tokens=(5,) * 600))
        slow = asyncio.create_task(model.ask(Ask("c", prompt_tokens=(5,), sampling=SamplingParams(max_tokens=300))))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="in flight already"):
            await model.ask(Ask("c", prompt_tokens=(5,)))
        assert len((await slow).sampled.tokens) > 0

    with_model(tiny_policy(), use)
