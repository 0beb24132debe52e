"""Other people's agents, run as episodes of a `CommandWorld`; the policy says what a test has written down for it.

The tokenizer and chat template are SmolLM2's. No model is loaded.
"""

import asyncio
import functools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kitae.data.chat import Chat
from kitae.engines.base import Request, SamplingParams
from kitae.engines.fake import FakeEngine
from kitae.envs.base import Agent, EpisodeLimits, Observation, Opening, Outcome, World
from kitae.envs.config import EnvConfig
from kitae.envs.environment_registry import open_world
from kitae.envs.rollouts import Episodes
from kitae.models.load import find_model
from kitae.serving.base import Answer, Ask, Model, OnTokens
from kitae.types import Chain, Message, Prompt, Rollout, Score, Turn

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples" / "agents"
ENVIRONMENTS = HERE.parent.parent / ".venv-servers"


@functools.cache
def chat() -> Chat:
    return Chat(AutoTokenizer.from_pretrained(find_model("smollm2-135m")))


def interpreter(environment: str) -> Path:
    found = ENVIRONMENTS / environment / "bin" / "python"
    if not found.exists():
        pytest.skip(f"there is no {found}: make test-servers makes it")
    return found


@dataclass
class Captured:
    """What became of one episode: the rollout, what the client asked, and how many answers it was given."""

    rollout: Rollout
    asks: list[Ask] = field(default_factory=list)
    spoken: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def chains(self) -> tuple[Chain, ...]:
        return self.rollout.chains

    @property
    def sampled(self) -> list[tuple[int, ...]]:
        """The model's turns, in the order of the chains that have them."""
        return [s.tokens for chain in self.chains for s in chain.segments if s.source == "model"]

    def check(self, chains: int) -> None:
        """Complete, with so many chains, and each sampled token in exactly one of them."""
        assert self.rollout.status == "complete", self.rollout.score
        assert sorted(self.sampled) == sorted(self.spoken)
        assert len(self.chains) == chains, "\n----\n".join(chat().spell(*c.tokens) for c in self.chains)

    def check_as_native(self) -> None:
        """The tokens are those of an environment of our own that says the same."""
        native = asyncio.run(_native(self))
        assert native.chains == self.chains, "\n----\n".join(chat().spell(*c.tokens) for c in native.chains)


class Scripted:
    """An engine's answers, one after the other."""

    def __init__(self, answers: Iterable[str]) -> None:
        self._answers = list(answers)
        self.spoken: list[tuple[int, ...]] = []

    def __call__(self, request: Request) -> Sequence[int]:
        said = self._answers[min(len(self.spoken), len(self._answers) - 1)]
        self.spoken.append((*chat().encode(said), chat().stop_tokens[0]))
        return self.spoken[-1]


class Overheard:
    """An agent whose asks are noted."""

    def __init__(self, agent: Agent, asks: list[Ask]) -> None:
        self._agent, self._asks = agent, asks

    async def enter(self) -> None:
        await self._agent.enter()

    async def run(self, model: Model) -> Outcome:
        self._model = model
        return await self._agent.run(self)

    async def close(self) -> None:
        await self._agent.close()

    @property
    def chat(self) -> Chat:
        return self._model.chat

    async def ask(self, ask: Ask, on_tokens: OnTokens | None = None) -> Answer:
        self._asks.append(ask)
        return await self._model.ask(ask, on_tokens)


class Judge:
    async def score(self, response: str, reference: Any, context: Any) -> Score:
        return Score(1.0)


def _sampling() -> SamplingParams:
    return SamplingParams(max_tokens=4000, stop_tokens=chat().stop_tokens)


LIMITS = EpisodeLimits(turns=12, seconds=120, tokens=8192)


def capture(
    environment: str, script: str, answers: Iterable[str], *, question: str = "What is 2 + 3?", **variables: str
) -> Captured:
    """One episode of a client's script."""
    at = next(place / script for place in (HERE / "clients", EXAMPLES) if (place / script).exists())
    words = [str(interpreter(environment)), str(at)]
    config = EnvConfig(
        name="command", command=shlex.join(words), params={"variables": {**CLEAN, **variables}, "models": NAMES}
    )
    prompt = Prompt("p/1", (Message("user", question),), "5", {"question": question})
    return asyncio.run(episode(open_world(config), prompt, answers))


NAMES = dict.fromkeys(("gpt-4o", "gpt-5"), "policy")
"""What agents call their model where it stands in their code."""

CLEAN = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}
"""Variables that keep a client from what belongs to us, and from the network."""


async def episode(world: World, prompt: Prompt, answers: Iterable[str], judge: Any = None) -> Captured:
    scripted, asks = Scripted(answers), list[Ask]()

    def make(prompt: Prompt) -> Overheard:
        made = world.make(prompt)
        assert isinstance(made, Agent)
        return Overheard(made, asks)

    async with world:
        episodes = Episodes(FakeEngine(scripted), chat(), judge or Judge(), make, _sampling(), 0, limits=LIMITS)
        group = await episodes.group(0, prompt, 1)
    return Captured(group.rollouts[0], asks, scripted.spoken)


class _Script:
    """An environment that says what a client said."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = list(asks)

    async def start(self) -> Opening:
        return Opening(self._asks[0].messages, self._asks[0].tools)

    async def step(self, turn: Turn) -> Observation:
        said = len(self._asks.pop(0).messages)
        return Observation(self._asks[0].messages[said + 1 :]) if self._asks else Observation(done=True)

    async def close(self) -> None:
        pass


async def _native(captured: Captured) -> Rollout:
    spoken = iter(captured.spoken)
    engine = FakeEngine(lambda request: next(spoken))
    prompt = Prompt("p/1", captured.asks[0].messages, "")
    episodes = Episodes(engine, chat(), Judge(), lambda p: _Script(captured.asks), _sampling(), 0, limits=LIMITS)
    return (await episodes.group(0, prompt, 1)).rollouts[0]
