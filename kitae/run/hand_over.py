"""What a run that trains gives to whoever holds it: to ask its model, to evaluate it, to stop it, to take its steps one
at a time (`kitae.start`).

The loops wait for `between` before each step but the first, and a run before it ends. They may sample meanwhile, and
train nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kitae.engines.base import SamplingParams
from kitae.envs.asking import ask, unjudged
from kitae.envs.rollouts import Episodes
from kitae.types import Group, Prompt

Ask = Callable[[Sequence[Prompt], int, SamplingParams, int], Awaitable[list[Group]]]
"""Answers to prompts, so many to each, with a seed."""


@dataclass(frozen=True, slots=True)
class Live:
    """A run while it trains. Its functions are called in its own event loop.

    evaluate: on what is held out, with the weights of the last step; None where nothing is. ask: None where the run
    samples nothing.
    """

    folder: Path
    stop: Callable[[], None]
    evaluate: Callable[[], Awaitable[dict[str, Any] | None]]
    ask: Ask | None


class HandOver(Protocol):
    """Whoever holds a run."""

    def begun(self, live: Live) -> None:
        """An attempt is about to train. Another one follows where a trainer is lost."""

    async def between(self) -> None:
        """Between two steps: return when the next step may be trained; after the last, when the run may end."""


class _Nobody:
    def begun(self, live: Live) -> None:
        pass

    async def between(self) -> None:
        pass


NOBODY: HandOver = _Nobody()


def asker(episodes: Episodes) -> Ask:
    """Questions to the engine of a run, beside what it samples."""
    asking, turn = unjudged(episodes), asyncio.Lock()

    async def answers(prompts: Sequence[Prompt], n: int, params: SamplingParams, seed: int) -> list[Group]:
        async with turn:
            return await ask(asking, prompts, n, params, seed)

    return answers
