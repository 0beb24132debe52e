"""Rewards, states and potentials of turns: who may give them, and that the journal keeps them."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from talk import PROMPT, Engine, Recorder, talks

from kitae.envs.agent_episode import AgentEpisode
from kitae.envs.base import Observation, Opening, Outcome
from kitae.envs.episode import Episode
from kitae.envs.episode_context import Suspended
from kitae.envs.tools.base import ToolAnswer, ToolEpisode, describe
from kitae.serving.base import Ask, Model
from kitae.store.journal import Journal
from kitae.types import Message, Prompt, Rollout, Score, ToolCall, Turn

MORE = (Message("user", "go on"),)


class Rooms:
    """Three turns in rooms, with a reward for each but the second."""

    judged = False

    def __init__(self, prompt: Prompt) -> None:
        self.number = 0

    async def start(self) -> Opening:
        return Opening(PROMPT.messages, state="door", potential=0.5)

    async def step(self, turn: Turn) -> Observation:
        self.number += 1
        reward = None if self.number == 2 else float(self.number)
        return Observation(MORE, done=self.number == 3, reward=reward, state=f"room {self.number}", potential=0.25)

    async def close(self) -> None: ...


class JudgedRooms(Rooms):
    judged = True


def told(rollout: Rollout) -> list[tuple[float | None, str, float]]:
    return [(s.reward, s.state, s.potential) for s in rollout.segments if s.source == "model"]


TOLD = [(1.0, "door", 0.5), (None, "room 1", 0.25), (3.0, "room 2", 0.25)]


def test_a_turn_has_its_reward_and_the_state_that_it_was_taken_in(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")

    async def go() -> Rollout:
        await journal.add_prompt(7, PROMPT, 0, 0)
        return (await talks(Engine(), Rooms).group(7, PROMPT, 1, journal)).rollouts[0]

    rollout = asyncio.run(go())
    assert told(rollout) == TOLD and rollout.score == Score(4.0, {"environment": 4.0})
    assert journal.rollouts(7) == [rollout]
    journal.close()


def interrupt(journal: Journal, stop: int) -> None:
    """Stop an episode at its token number `stop`."""
    engine, ticks = Engine(), count(1)
    episodes = talks(engine, Rooms)

    def tick() -> None:
        engine.suspending = episodes.running.suspending = next(ticks) >= stop

    async def go() -> None:
        await journal.add_prompt(7, PROMPT, 0, 0)
        with pytest.raises(Suspended):
            await episodes.group(7, PROMPT, 1, journal)

    engine.tick = tick
    asyncio.run(go())


def test_an_interrupted_episode_keeps_what_its_turns_had(tmp_path: Path) -> None:
    """It is stopped at any token, and goes on in another process: as if nothing had happened."""
    whole = asyncio.run(Episode(talks(Engine(), Rooms), Rooms(PROMPT), 7, 0, PROMPT).run())
    for stop in range(1, 12):
        journal = Journal(tmp_path / f"{stop}.sqlite")
        interrupt(journal, stop)
        again = asyncio.run(talks(Engine(), Rooms).group(7, PROMPT, 1, journal)).rollouts[0]
        assert (again.segments, told(again)) == (whole.segments, TOLD)
        journal.close()


def test_a_verdict_is_added_where_the_environment_says_that_it_is_judged_too() -> None:
    judge = Recorder()
    (rollout,) = asyncio.run(talks(Engine(), JudgedRooms, judge).group(7, PROMPT, 1)).rollouts
    assert rollout.score == Score(5.0, {"environment": 4.0}) and len(judge.asked) == 1
    (rollout,) = asyncio.run(talks(Engine(), Rooms, judge).group(7, PROMPT, 1)).rollouts
    assert rollout.score == Score(4.0, {"environment": 4.0}) and len(judge.asked) == 1


@pytest.mark.parametrize("wrong", [Observation(MORE, state=7), Observation(MORE, potential=float("nan"))])  # type: ignore[arg-type]
def test_states_that_cannot_be_kept_fail_their_episode(wrong: Observation) -> None:
    class Wrong(Rooms):
        async def step(self, turn: Turn) -> Observation:
            return wrong

    rollout = asyncio.run(Episode(talks(Engine(), Wrong), Wrong(PROMPT), 7, 0, PROMPT).run())
    assert rollout.status == "failed" and rollout.score is not None
    assert "a state must be text" in rollout.score.detail or "a reward must be a finite number" in rollout.score.detail


class Talker:
    """An agent that asks twice, in two conversations, and rewards the turns that it is told to."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    async def enter(self) -> None: ...
    async def close(self) -> None: ...

    async def run(self, model: Model) -> Outcome:
        for word in ("one", "two"):
            await model.ask(Ask(word, (Message("user", word),)))
        return self.outcome


def rewarded(outcome: Outcome) -> Rollout:
    return asyncio.run(AgentEpisode(talks(Engine(), None), Talker(outcome), 7, 0, PROMPT).run())


def test_an_agent_rewards_answers_by_their_number() -> None:
    rollout = rewarded(Outcome(turns={1: 0.5}))
    assert [told(Rollout(7, 0, (chain,), "stop", "")) for chain in rollout.chains] == [
        [(None, "", 0.0)],
        [(0.5, "", 0.0)],
    ]
    assert rollout.score == Score(0.5, {"environment": 0.5})
    assert rewarded(Outcome(1.0, turns={0: 0.5, 1: -1.0})).score == Score(0.5, {"environment": 0.5})
    wrong = rewarded(Outcome(turns={2: 1.0})).score
    assert wrong is not None and "a reward must be of one of the 2 turns, counted from 0, got turn 2" in wrong.detail


class Looking:
    """A tool that rewards its calls."""

    tool = describe("look", "Look.", where="Where.")

    async def call(self, call: ToolCall) -> Any:
        where = call.arguments["where"]
        return "nothing" if where == "here" else ToolAnswer(f"saw {where}", 0.5, where)

    async def close(self) -> None: ...


def test_calls_of_a_turn_are_rewarded_together() -> None:
    calls = tuple(ToolCall("look", {"where": where}) for where in ("up", "here", "down"))

    async def seen(*calls: ToolCall) -> Observation:
        return await ToolEpisode(PROMPT, [Looking()], 100).step(Turn("", calls=calls))

    found = asyncio.run(seen(*calls))
    assert [m.content for m in found.messages] == ["saw up", "nothing", "saw down"]
    assert (found.reward, found.state) == (1.0, "up, down")
    assert asyncio.run(seen(calls[1])).reward is None
