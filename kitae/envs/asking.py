"""Questions to a model beside what a run asks it: answers that nobody judges."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kitae.engines.base import SamplingParams
from kitae.envs.base import EpisodeLimits, SingleTurn
from kitae.envs.episode_context import Running
from kitae.envs.rollouts import Episodes
from kitae.errors import root_cause
from kitae.types import Group, LazyText, Prompt, Score


class Nobody:
    """Stands where a verifier would."""

    async def score(self, response: str | LazyText, reference: Any, context: Mapping[str, Any]) -> Score:
        return Score.error("nobody judges these answers")


def unjudged(episodes: Episodes) -> Episodes:
    """The same engine, for questions."""
    limits = EpisodeLimits(turns=1, context=episodes.limits.context)
    return replace(
        episodes,
        verifier=Nobody(),
        environment=SingleTurn,
        label="ask",
        limits=limits,
        running=Running(),
        experts=False,
        trains=False,
    )


async def ask(episodes: Episodes, prompts: Sequence[Prompt], n: int, params: SamplingParams, seed: int) -> list[Group]:
    """n answers to each prompt. One call at a time: what they ask has the same ids."""
    stops = replace(params, stop_tokens=episodes.chat.stop_tokens)
    asking = replace(episodes, sampling=stops, seed=seed)
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(asking.group(i, prompt, n)) for i, prompt in enumerate(prompts)]
    except BaseExceptionGroup as problem:
        raise root_cause(problem) from None
    return [_without_score(task.result()) for task in asked]


def _without_score(group: Group) -> Group:
    return replace(group, rollouts=tuple(replace(r, score=None) for r in group.rollouts))
