"""What an environment or an agent asks a turn to be is enforced, and its tokens say what they could have been."""

import asyncio
from collections.abc import Callable
from typing import Any

from kitae.data.chat import Chat
from kitae.engines.base import SamplingParams
from kitae.engines.config import EngineConfig
from kitae.engines.constraint import Constraint
from kitae.engines.native.engine import NativeEngine
from kitae.envs.base import EpisodeLimits, Observation, Opening, Outcome
from kitae.envs.rollouts import Episodes
from kitae.models.policy import Policy
from kitae.serving.base import Ask, Model
from kitae.types import Message, Prompt, Rollout, Turn

FIRST, SECOND = Constraint.choice(["left", "right"]), Constraint("regex", "[0-9]{2}")
QUESTION = Prompt("q", (Message("user", "Where?"),), None)


class Game:
    """Asks where, then how far, then for anything."""

    def __init__(self, prompt: Prompt) -> None:
        self.turns = 0

    async def start(self) -> Opening:
        return Opening(QUESTION.messages, constraint=FIRST)

    async def step(self, turn: Turn) -> Observation:
        self.turns += 1
        asked = (Message("user", "And?"),)
        return Observation(asked, done=self.turns == 3, reward=0.5, constraint=SECOND if self.turns == 1 else None)

    async def close(self) -> None: ...


class Asker:
    def __init__(self, prompt: Prompt) -> None: ...

    async def enter(self) -> None: ...

    async def run(self, model: Model) -> Outcome:
        for constraint in (FIRST, SECOND):
            await model.ask(Ask("x", QUESTION.messages, sampling=SamplingParams(max_tokens=40, constraint=constraint)))
        return Outcome(1.0)

    async def close(self) -> None: ...


def play(policy: Policy, made: Callable[[Prompt], Any]) -> Rollout:
    async def run() -> Rollout:
        engine, chat = NativeEngine(policy, EngineConfig(memory_gb=0.01)), Chat(policy.tokenizer)
        sampling = SamplingParams(1.0, 200, stop_tokens=chat.stop_tokens, stop_strings=("e",))
        limits = EpisodeLimits(context=policy.max_context)
        try:
            episodes = Episodes(engine, chat, None, made, sampling, 7, limits=limits, trains=True)
            (rollout,) = (await episodes.group(0, QUESTION, 1)).rollouts
            return rollout
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_turns_of_an_environment(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy("llama", exact=True)
    rollout = play(policy, Game)
    turns = [s for s in rollout.segments if s.source == "model"]
    texts = [policy.tokenizer.decode(s.tokens, skip_special_tokens=True) for s in turns]
    assert texts[0] in ("le", "right") and len(texts[1]) == 2 and texts[1].isdigit(), "cut by a stop string, or whole"
    assert [s.kept is not None for s in turns] == [True, True, False], "the last turn could say anything"
    assert rollout.score is not None and rollout.score.valid


def test_answers_to_an_agent(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy("llama")
    rollout = play(policy, Asker)
    assert all(s.kept is not None for s in rollout.segments if s.source == "model")
    assert rollout.text.startswith(("l", "right")) and rollout.text[-2:].isdigit()
