"""Stand-ins for a conversation: characters as tokens, an engine whose tokens and log-probs depend on all that it reads,
and environments that never answer the same twice."""

import asyncio
import random
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar

from kitae.data.chat import Chat
from kitae.engines.base import Completion, Request, Sampled, SamplingParams
from kitae.envs.base import Observation, Opening
from kitae.envs.rollouts import Episodes
from kitae.errors import RequestError
from kitae.types import Message, Prompt, Rollout, Score, Turn

PROMPT = Prompt("p", (Message("user", "2 + 2"),), "4", {"question": "2 + 2"})
STOP = 0
SAMPLING = SamplingParams(max_tokens=200, stop_tokens=(STOP,))


class Tokenizer:
    eos_token_id = STOP
    bos_token_id = None
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(t) for t in tokens if t != STOP)


def next_token(seed: int, context: tuple[int, ...], spoken: int) -> tuple[int, float]:
    """What the model says after a context, and its log-prob; a turn has three to five tokens, as its seed says."""
    found = zlib.crc32(repr((seed, context)).encode())
    return STOP if spoken == 2 + seed % 3 else 97 + found % 26, -(found % 997) / 1024


class Engine:
    """Samples a token whenever the event loop comes by. `tick` is called before each of them."""

    shares_weights = True

    def __init__(self, tick: Callable[[], None] = lambda: None, context: int = 10**6) -> None:
        self.tick = tick
        self.context = context
        self.requests = list[Request]()
        self.answers = dict[str, Completion]()
        self.flights = dict[str, Sampled]()
        self.suspending = False

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        if len(request.prompt_tokens) >= self.context:
            raise RequestError(f"a prompt of {len(request.prompt_tokens)} tokens in a context of {self.context}")
        assert len(request.prior.tokens) < request.sampling.max_tokens and STOP not in request.prior.tokens
        s = request.prior
        try:
            while True:
                self.flights[request.id] = s
                self.tick()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if self.suspending:
                    return self._end(request, s, "suspended")
                token, logprob = next_token(request.seed, request.prompt_tokens + s.tokens, len(s.tokens))
                s = Sampled((*s.tokens, token), (*s.logprobs, logprob), (*s.versions, 3))
                if token in request.sampling.stop_tokens:
                    return self._end(request, s, "stop")
                if len(s.tokens) == min(request.sampling.max_tokens, self.context - len(request.prompt_tokens)):
                    return self._end(request, s, "length")
        finally:
            del self.flights[request.id]

    def _end(self, request: Request, s: Sampled, finish: Any) -> Completion:
        done = self.answers[request.id] = Completion(request.id, s.tokens, s.logprobs, s.versions, finish)
        return done

    async def suspend(self) -> None:
        self.suspending = True

    def progress(self, known: Mapping[str, int]) -> dict[str, Sampled]:
        return {id: s.after(known.get(id, 0)) for id, s in self.flights.items()}


class Fickle:
    """Asks back a random thing after each turn but the last of `turns`; each instance remembers what it heard."""

    turns = 3
    made: ClassVar[list["Fickle"]] = []

    def __init__(self, prompt: Prompt, tick: Callable[[], None] = lambda: None) -> None:
        self.prompt, self.tick = prompt, tick
        self.heard = list[str]()
        self.closed = 0
        Fickle.made.append(self)

    async def start(self) -> Opening:
        await self.pause()
        return Opening((*self.prompt.messages, Message("user", noise())))

    async def step(self, turn: Turn) -> Observation:
        self.heard.append(turn.text)
        await self.pause()
        return Observation((Message("tool", noise()),)) if len(self.heard) < self.turns else Observation(done=True)

    async def pause(self) -> None:
        self.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def close(self) -> None:
        self.closed += 1


def noise() -> str:
    return "".join(random.choices("ABCDEFGH", k=random.randint(1, 5)))


class Recorder:
    """A verifier that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked = list[tuple[str, Mapping[str, Any]]]()

    async def score(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score:
        self.asked.append((response, context))
        return Score(1.0)


def talks(engine: Any, environment: Any, judge: Any = None, **settings: Any) -> Episodes:
    sampling = settings.pop("sampling", SAMPLING)
    return Episodes(engine, Chat(Tokenizer()), judge, environment, sampling, 0, **settings)


def check_tokens(rollout: Rollout, seed_of: Callable[[int], int]) -> None:
    """Each token of the model, and its log-prob, are what the model says after exactly the tokens before it."""
    (chain,) = rollout.chains
    context = chain.prompt_tokens
    for number, segment in enumerate(chain.segments):
        assert segment.source == ("environment" if number % 2 else "model")
        for spoken, (token, logprob) in enumerate(zip(segment.tokens, segment.logprobs, strict=True)):
            if segment.source == "model":
                assert (token, logprob) == next_token(seed_of(number), context, spoken)
            context += (token,)


def check_requests(requests: list[Request], answers: Mapping[str, Completion]) -> None:
    """Every prompt begins with the prompt before it and what was answered to that."""
    for before, after in pairwise(requests):
        if before.id.rsplit("/", 1)[0] == after.id.rsplit("/", 1)[0]:
            said = before.prompt_tokens + answers[before.id].tokens
            assert after.prompt_tokens[: len(said)] == said
