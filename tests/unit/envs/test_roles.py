"""Episodes with several roles: whose chain is whose, which reward it has, and that Kuhn poker is what it is."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from fixture_p import as_group, loss_values, make_objective
from talk import PROMPT, Engine, talks

from kitae.envs.agent_episode import AgentEpisode
from kitae.envs.base import Outcome
from kitae.envs.games.game_world import Games
from kitae.envs.games.kuhn import CARDS, Kuhn, exploitability, gain
from kitae.envs.games.self_play import SelfPlay
from kitae.serving.base import Ask, Model
from kitae.store.journal import Journal
from kitae.types import Chain, Message, Prompt, Rollout, Score, Segment


def said(role: str, tokens: int) -> Chain:
    segment = Segment("model", tuple(range(10, 10 + tokens)), (-1.0,) * tokens, (0,) * tokens)
    return Chain((1, 2), (segment,), role)


def match(index: int, white: float, black: float | None = None, group: int = 0) -> Rollout:
    """Two chains of white with one of black between them."""
    rewards = {"role/white": white} | ({} if black is None else {"role/black": black})
    chains = (said("white", 1), said("black", 3), said("white", 2))
    return Rollout(group, index, chains, "stop", "", Score(0.0, rewards))


def advantages(objective: Any, *rollouts: Rollout) -> dict[tuple[int, str], list[float]]:
    found = objective.advantages(objective.candidates([as_group(rollouts, rollouts[0].group)]))
    return dict(zip([(c.index, c.role) for c in found], loss_values(found), strict=True))


def test_roles_are_compared_with_their_like() -> None:
    """White won one of two, black the other: 1 and −1 of each, centred apart."""
    objective = make_objective(advantage="group-centred")
    found = advantages(objective, match(0, 1.0, -1.0), match(1, -0.5, 0.5))
    assert found == {
        (0, "white"): [0.75] * 3, (0, "black"): [-0.75] * 3, (1, "white"): [-0.75] * 3, (1, "black"): [0.75] * 3,
    }  # fmt: skip


def test_a_role_without_a_reward_has_that_of_the_episode_and_each_weighs_the_same() -> None:
    objective = make_objective(advantage="reward", aggregation="seq-mean-token-mean")
    candidates = objective.advantages(objective.candidates([as_group([match(0, 1.0)])]))
    assert loss_values(candidates) == [[1.0] * 3, [0.0] * 3]
    samples = objective.weighted(candidates)
    assert sorted((s.chain, round(float(s.weight_T.sum()), 4)) for s in samples) == [(0, 0.1667), (1, 0.5), (2, 0.3333)]


def test_some_roles_are_trained_alone() -> None:
    objective = make_objective(advantage="reward", roles=["black"])
    assert advantages(objective, match(0, 1.0, -1.0)) == {(0, "black"): [-1.0] * 3}
    nobody = make_objective(advantage="reward", roles=["grey"])
    assert nobody.drop_reason(as_group([match(0, 1.0)])) == "no role to train"


def test_a_game_of_equal_sums_is_not_without_signal() -> None:
    """The rewards of both roles add up to 0 in all episodes; those of a role differ."""
    objective = make_objective(filter="zero-variance")
    assert objective.drop_reason(as_group([match(0, 1.0, -1.0), match(1, -1.0, 1.0)])) is None
    assert objective.drop_reason(as_group([match(0, 1.0, -1.0), match(1, 1.0, -1.0)])) == "zero-variance"


def test_moving_means_are_of_roles() -> None:
    """white: 1 and 0 on 0 and .5; black: −1 and 1 on 0 and −.5; then again on .25 and .25."""
    objective = make_objective(advantage="role-mean", advantage_decay=0.5)
    found = advantages(objective, match(0, 1.0, -1.0), match(1, 0.0, 1.0))
    assert {key: row[0] for key, row in found.items()} == {
        (0, "white"): 1.0, (0, "black"): -1.0, (1, "white"): -0.5, (1, "black"): 1.5,
    }  # fmt: skip
    again = make_objective(advantage="role-mean", advantage_decay=0.5)
    again.load_state(objective.state())
    for one in (objective, again):
        later = advantages(one, match(0, 1.0, 1.0, group=1))
        assert {key: row[0] for key, row in later.items()} == {(0, "white"): 0.75, (0, "black"): 0.75}


# Episodes.


class Pair:
    """Two roles that are asked the same, and answer in turns."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    async def enter(self) -> None: ...
    async def close(self) -> None: ...

    async def run(self, model: Model) -> Outcome:
        talks: dict[str, tuple[Message, ...]] = {"a": (Message("user", "go"),), "b": (Message("user", "go"),)}
        for role in ("a", "b", "a"):
            answer = await model.ask(Ask(role, talks[role], role=role))
            talks[role] = (*talks[role], Message("assistant", answer.turn.told), Message("user", "more"))
        return self.outcome


def test_chains_of_roles_are_apart_and_journalled(tmp_path: Path) -> None:
    episodes = talks(Engine(), lambda prompt: Pair(Outcome(roles={"a": 0.5, "b": -1.0})))
    journal = Journal(tmp_path / "journal.sqlite")

    async def go() -> Rollout:
        await journal.add_prompt(7, PROMPT, 0, 0)
        return (await episodes.group(7, PROMPT, 1, journal)).rollouts[0]

    rollout = asyncio.run(go())
    assert [(c.role, [s.source for s in c.segments]) for c in rollout.chains] == [
        ("a", ["model", "environment", "model"]), ("b", ["model"]),
    ]  # fmt: skip
    assert rollout.score == Score(0.0, {"environment": 0.0, "role/a": 0.5, "role/b": -1.0})
    assert journal.rollouts(7) == [rollout]
    journal.close()


def test_a_role_that_has_not_spoken_has_no_reward() -> None:
    agent = Pair(Outcome(roles={"c": 1.0}))
    rollout = asyncio.run(AgentEpisode(talks(Engine(), None), agent, 7, 0, PROMPT).run())
    assert rollout.status == "failed" and rollout.score is not None
    assert "a reward must be of a role that has spoken, got 'c'" in rollout.score.detail


# Kuhn poker.

EQUILIBRIUM = {
    "J": 1 / 3, "Q": 0, "K": 1, "J pb": 0, "Q pb": 2 / 3, "K pb": 1,
    "J p": 1 / 3, "Q p": 0, "K p": 1, "J b": 0, "Q b": 1 / 3, "K b": 1,
}  # fmt: skip


def test_exploitability_is_nothing_for_the_known_equilibrium_and_something_for_others() -> None:
    assert exploitability(EQUILIBRIUM) == pytest.approx(0, abs=1e-12)
    assert exploitability({}) == pytest.approx(11 / 12), "of chance: what best replies win from both seats"
    for worse in ({"K b": 0.0}, {"J b": 1.0}, {"Q": 1.0}, {"K p": 0.0}):
        assert exploitability({**EQUILIBRIUM, **worse}) > 0.01, worse


@pytest.mark.parametrize(("line", "won"), [("pp", 1), ("bp", 1), ("bb", 2), ("pbp", -1), ("pbb", 2)])
def test_stakes(line: str, won: int) -> None:
    assert gain(line, "K", "J") == won
    assert gain(line, "J", "Q") == (won if line in ("bp", "pbp") else -won)


def test_kuhn_is_played_to_its_end_whatever_is_said() -> None:
    for seed in range(60):
        game, draw = Kuhn(seed, {}), random.Random(seed)
        while (role := game.to_move) is not None:
            assert game.told(role)[0] in CARDS
            game.move(draw.choice(["bet", "b", "I pass", "nonsense"]))
        assert sum(game.rewards.values()) == 0 and max(game.rewards.values()) in (0.5, 1.0)


def test_the_model_plays_both_roles() -> None:
    world = Games({"game": "kuhn", "system": "Play."})
    agent = world.make(Prompt("episodes/train/3", (), "3"))
    assert isinstance(agent, SelfPlay)
    rollout = asyncio.run(AgentEpisode(talks(Engine(), None), agent, 7, 0, PROMPT).run())
    assert [c.role for c in rollout.chains] == ["first", "second"], "what it says is a pass, so both speak once"
    assert rollout.score is not None and rollout.score.components["role/first"] in (0.5, -0.5)
    assert rollout.score.detail[3:] == "pp" and rollout.score.detail[0] != rollout.score.detail[1]
