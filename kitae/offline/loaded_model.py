"""A model that answers: loaded once, asked as often as you like, from scripts and notebooks alike."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kitae.data.chat import Chat
from kitae.data.messages import read_messages
from kitae.engines.base import SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.constraint import Constraint
from kitae.engines.native.engine import NativeEngine
from kitae.envs.asking import Nobody, ask
from kitae.envs.base import EpisodeLimits, SingleTurn
from kitae.envs.rollouts import Episodes
from kitae.errors import ConfigError
from kitae.loop_thread import LoopThread
from kitae.models.config import ModelConfig
from kitae.models.load import check_model, load_policy
from kitae.types import Group, Message, Prompt

Asked = str | Sequence[Mapping[str, Any]]
"""A question as text, or chat messages: `[{"role": "user", "content": "Reverse 1, 2, 3"}]`."""


class LoadedModel:
    """`with load("smollm2-135m") as model: model.generate("Reverse 12, 34, 56", n=4)`.

    The engine runs in a thread of its own with an event loop of its own, so any thread may ask, also one whose event
    loop is running. policy: the torch module, with `policy.tokenizer` and `policy.base`, the transformers model.
    """

    def __init__(self, config: ModelConfig, engine: EngineConfig, seed: int = 0) -> None:
        check_model(config)
        self.policy = load_policy(config, seed)
        self.path = config.path
        self._chat = Chat(self.policy.tokenizer, self.policy.base.generation_config)
        self._turn = asyncio.Lock()  # of threads that ask together: what they ask has the same ids
        self._thread = LoopThread("kitae-model")
        self._engine: NativeEngine = self._thread.wait(self._start(engine))

    def generate(
        self,
        prompt: Asked,
        n: int = 1,
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        constraint: Constraint | None = None,
    ) -> list[str]:
        """n answers to one prompt. Temperature 0 takes the likeliest token; the same seed gives the same answers.

        constraint: what each answer must match. One that max_tokens cuts is only the beginning of a match.
        """
        params = SamplingParams(
            temperature, max_tokens, top_p, top_k, min_p, stop_strings=tuple(stop), constraint=constraint
        )
        (group,) = self.sample([prompt], n, params, seed=seed)
        return [str(rollout.text) for rollout in group.rollouts]

    def sample(self, prompts: Sequence[Asked], n: int, params: SamplingParams, *, seed: int = 0) -> list[Group]:
        """n answers to each prompt, with their tokens and log-probs; nobody judges them."""
        if n < 1:
            raise ConfigError(f"n must be at least 1, got {n}")
        check_sampling(params)
        asked = [Prompt(f"prompt/{i}", as_messages(p), None) for i, p in enumerate(prompts)]
        return self._thread.wait(self._sample(asked, n, params, seed))

    async def _start(self, config: EngineConfig) -> NativeEngine:
        return NativeEngine(self.policy, config)

    async def _sample(self, prompts: Sequence[Prompt], n: int, params: SamplingParams, seed: int) -> list[Group]:
        limits = EpisodeLimits(turns=1, context=self.policy.max_context)
        episodes = Episodes(self._engine, self._chat, Nobody(), SingleTurn, params, seed, label="ask", limits=limits)
        async with self._turn:
            return await ask(episodes, prompts, n, params, seed)

    def close(self) -> None:
        if self._thread.is_open:
            self._thread.wait(self._engine.close())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_sampling(params: SamplingParams) -> None:
    """What recipes refuse by their types, callers may say all the same."""
    for name, good, rule in (
        ("temperature", 0 <= params.temperature < math.inf, "at least 0, and finite"),
        ("max_tokens", params.max_tokens >= 1, "at least 1"),
        ("top_p", 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k >= 0, "at least 0"),
        ("min_p", 0 <= params.min_p < 1, "at least 0 and below 1"),
        ("stop", all(params.stop_strings), "texts that are not empty"),
    ):
        if not good:
            got = params.stop_strings if name == "stop" else getattr(params, name)
            raise ConfigError(f"{name} must be {rule}, got {got!r}")


def as_messages(prompt: Asked) -> tuple[Message, ...]:
    return (Message("user", prompt),) if isinstance(prompt, str) else read_messages(list(prompt))
