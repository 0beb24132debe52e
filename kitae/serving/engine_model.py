"""A model on an engine: it answers chats and texts, and passes on tokens as they come where a client streams."""

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable

from kitae.data.chat import Chat
from kitae.engines.base import Completion, Engine, Request, Sampled
from kitae.errors import DataError, RequestError
from kitae.serving.base import Answer, Ask, OnTokens, Timing, with_ids

_EVERY = 0.02  # seconds between two polls of the engine, while an answer is streamed
_MOST_TOLD = 500  # pieces in a second, of all streams together: sending one costs as much as sampling a token
_MOST_LOOKED = 5000  # requests in a second whose progress is looked up
_SHARE = "served"  # equal prompts of all clients are computed once
_ALL = sys.maxsize

Generate = Callable[[Request], Awaitable[Completion]]


class EngineModel:
    """Implements `kitae.serving.base.Model`. The caller closes the engine. generate: in place of the engine's own,
    where an adapter is to be used: `partial(engine.generate, adapter=adapter)`."""

    def __init__(self, engine: Engine, chat: Chat, generate: Generate | None = None) -> None:
        self._engine, self.chat = engine, chat
        self._streams = TokenStreams(engine, generate=generate)

    async def ask(self, ask: Ask, on_tokens: OnTokens | None = None) -> Answer:
        prompt = self._prompt(ask)
        if ask.sampling.stop_strings and not self._engine.capabilities.stop_strings:
            raise RequestError("this engine knows no stop strings, got some")
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        request = Request(ask.id, prompt, ask.sampling, seed, share=_SHARE)
        done, timing = await self._streams.generate(request, on_tokens)
        turn = self.chat.read(done.tokens, ask.sampling.stop_strings, ask.tools, ask.thoughts)
        return Answer(prompt, done.sampled, done.finish, with_ids(turn, f"{secrets.randbits(96):024x}"), timing)

    def _prompt(self, ask: Ask) -> tuple[int, ...]:
        if ask.prompt_tokens is not None:
            return ask.prompt_tokens
        try:
            return self.chat.encode_prompt(ask.messages, ask.tools)
        except DataError as error:
            raise RequestError(str(error)) from error


class TokenStreams:
    """Requests whose tokens are passed on as they come; of others, the time of the first token is noted. One task polls
    the engine for all of them, less often the more there are, and only while somebody waits for tokens."""

    def __init__(self, engine: Engine, every: float = _EVERY, generate: Generate | None = None) -> None:
        self._engine, self._every, self._generate = engine, every, generate or engine.generate
        self._known: dict[str, int] = {}  # the number of tokens that were passed on, by request in flight
        self._listeners: dict[str, OnTokens] = {}
        self._first: dict[str, float] = {}  # when the first token was seen, of requests in flight
        self._looking: asyncio.Task[None] | None = None

    async def generate(self, request: Request, on_tokens: OnTokens | None) -> tuple[Completion, Timing]:
        if request.id in self._known:
            raise RequestError(f"request id {request.id!r} is in flight already")
        began = time.monotonic()
        self._known[request.id] = 0
        if on_tokens:
            self._listeners[request.id] = on_tokens
        self._look()
        try:
            done = await self._generate(request)
            self._tell(request.id, done.sampled.after(self._known[request.id]))
            now = time.monotonic()
            return done, Timing(self._first.get(request.id, now) - began, now - began)
        finally:
            self._first.pop(request.id, None)
            del self._known[request.id]
            self._listeners.pop(request.id, None)

    def _look(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while self._listeners or len(self._first) < len(self._known):
            told, looked = len(self._listeners) / _MOST_TOLD, len(self._known) / _MOST_LOOKED
            await asyncio.sleep(max(self._every, told, looked))
            for id, news in self._engine.progress(self._known).items():
                self._tell(id, news)

    def _tell(self, id: str, news: Sampled) -> None:
        if not news.tokens or id not in self._known:
            return
        self._first.setdefault(id, time.monotonic())
        if id in self._listeners:
            self._known[id] += len(news.tokens)
            self._listeners[id](news)
        else:
            self._known[id] = _ALL
