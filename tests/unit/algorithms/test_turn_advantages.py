"""Advantages by turn against numbers worked out by hand, through `Objective` as the trainer goes."""

from typing import Any

import numpy as np
import pytest
from fixture_p import as_group, f32, loss_values, make_objective, with_numbers
from objective import Objective

from kitae.algorithms.advantages import moving_means
from kitae.algorithms.turn_advantages import shaped
from kitae.types import Chain, Group, Rollout, Score, Segment

T = tuple[Any, ...]


def episode(index: int, *turns: T, score: float | None = None, group: int = 0) -> Rollout:
    """Turns as `(tokens, reward, state, potential)`, of which the last two may be missing."""
    segments = list[Segment]()
    for number, (tokens, reward, *rest) in enumerate(turns):
        state, potential = (*rest, *("", 0.0)[len(rest) :])
        said = (tuple(range(10, 10 + tokens)), (-1.0,) * tokens, (0,) * tokens)
        segments += [Segment("model", *said, reward, state=state, potential=potential)]
        segments += [Segment.observed((50 + number,))]
    total = sum(reward or 0.0 for _, reward, *_ in turns) if score is None else score
    return Rollout(group, index, (Chain((1, 2), tuple(segments)),), "stop", "", Score(total))


def by_turns(objective: Objective, *rollouts: Rollout) -> list[list[float]]:
    """The advantage of each turn; it is that of all of its tokens."""
    rows = loss_values(objective.advantages(objective.candidates([as_group(rollouts)])))
    found = []
    for rollout, row in zip(rollouts, rows, strict=True):
        lengths = [len(s.tokens) for s in rollout.segments if s.source == "model"]
        parts = np.split(np.array(row), np.cumsum(lengths)[:-1])
        assert all(len(set(part)) == 1 for part in parts)
        found.append([float(part[0]) for part in parts])
    return found


def close(expected: Any) -> Any:
    return [pytest.approx(row, abs=1e-5) for row in expected]


WON = episode(0, (2, 0.0, "a"), (1, 1.0, "b"))
LOST = episode(1, (1, 0.0, "a"), (3, 0.0, "b"), (2, 0.0, "a"))
EQUALS = {"advantage": "gigpo", "advantage_gamma": 0.5, "advantage_scaled": False}


def test_gigpo_compares_episodes_and_turns_from_equal_states() -> None:
    """G is [.5, 1] and zeros. From a: .5, 0, 0, whose mean is 1/6; from b: 1 and 0; episodes: 1 and 0."""
    found = by_turns(make_objective(**EQUALS, advantage_omega=2.0), WON, LOST)
    assert found == close([[0.5 + 2 / 3, 0.5 + 1], [-0.5 - 1 / 3, -0.5 - 1, -0.5 - 1 / 3]])
    scaled = by_turns(make_objective(**{**EQUALS, "advantage_scaled": True}), WON, LOST)
    z = 0.5**0.5  # of 1 and 0, over a deviation of √½; of .5, 0, 0 the deviation is √(1/12)
    assert scaled == close([[z + 2 / 3**0.5, z + z], [-z - 1 / 3**0.5, -z - z, -z - 1 / 3**0.5]])


def test_a_state_that_was_met_once_has_no_step_advantage() -> None:
    alone = episode(1, (1, 0.0, "a"), (1, 0.0, "c"))
    assert by_turns(make_objective(**EQUALS), WON, alone) == close([[0.5 + 0.25, 0.5], [-0.5 - 0.25, -0.5]])


def test_what_was_read_is_the_state_where_it_has_no_name() -> None:
    """The prompt before the first turn, and the same word before the second."""
    named = by_turns(
        make_objective(**EQUALS), episode(0, (1, 0.0, "p"), (1, 1.0, "q")), episode(1, (1, 0, "p"), (1, 0, "q"))
    )
    assert by_turns(make_objective(**EQUALS), episode(0, (1, 0.0), (1, 1.0)), episode(1, (1, 0.0), (1, 0.0))) == named


def test_without_turns_gigpo_is_grpo_twice() -> None:
    rollouts = [episode(i, (1 + i, None), score=s) for i, s in enumerate([1.0, 0.0, 0.0, 1.0])]
    grpo = by_turns(make_objective(preset="grpo"), *rollouts)
    assert by_turns(make_objective(preset="gigpo", advantage_omega=0.0), *rollouts) == close(grpo)
    assert by_turns(make_objective(preset="gigpo"), *rollouts) == close([[2 * x for x in row] for row in grpo])


def test_mt_grpo_adds_what_a_turn_was_worth_to_the_outcome() -> None:
    """Outcomes 1 and 0; own rewards of first turns .5 and 1.5: both have z-scores of ∓√½."""
    rollouts = episode(0, (2, 0.5), (1, 1.0)), episode(1, (1, 1.5), (1, 0.0))
    z = 0.5**0.5
    found = by_turns(make_objective(advantage="mt-grpo", advantage_turn_coef=0.5), *rollouts)
    assert found == close([[z - z / 2, z], [-z + z / 2, -z]])


def test_what_a_verifier_adds_stands_at_the_last_turn() -> None:
    """A score of 1.5 of which the first turn had .5: the outcome is 1."""
    judged = episode(0, (2, 0.5), (1, None), score=1.5), episode(1, (1, 1.5), (1, None), score=1.5)
    given = episode(0, (2, 0.5), (1, 1.0)), episode(1, (1, 1.5), (1, 0.0))
    objective = make_objective(advantage="mt-grpo")
    assert by_turns(objective, *judged) == by_turns(objective, *given)


def test_returns_are_discounted_over_turns_and_not_over_tokens() -> None:
    found = by_turns(
        make_objective(advantage="turn-returns", advantage_gamma=0.5), episode(0, (4, 1.0), (1, 0.0), (2, 8.0))
    )
    assert found == close([[1 + 0.5 * (0 + 0.5 * 8), 4.0, 8.0]])


def test_centred_returns_compare_turns_of_one_number() -> None:
    """G: [1, 1], [0, 0, 0] and [2, 1]; the third turn of one has nothing to be compared with."""
    rollouts = episode(0, (1, 0.0), (1, 1.0)), episode(1, (1, 0), (1, 0), (1, 0)), episode(2, (1, 1.0), (1, 1.0))
    found = by_turns(make_objective(advantage="turn-centred"), *rollouts)
    assert found == close([[0.0, 1 / 3], [-1.0, -2 / 3, 0.0], [1.0, 1 / 3]])


def test_gae_over_turns_reads_the_value_before_each_turn() -> None:
    """V = .2 and .6 before the turns; γ = .5, λ = .5: δ = [0 + .3 − .2, 1 − .6] = [.1, .4]; A = [.1 + .25 × .4, .4]."""
    objective = make_objective(preset="turn-ppo", kl_coef=0.0, whiten="none", gamma=0.5, gae_lambda=0.5)
    candidates = objective.candidates([as_group([episode(0, (2, 0.0), (2, 1.0))])])
    (found,) = objective.advantages(with_numbers(candidates, value=[[0.2, 9.0, 0.6, 9.0]]))
    assert loss_values([found])[0] == pytest.approx([0.2, 0.2, 0.4, 0.4])
    assert loss_values([found], "return")[0] == pytest.approx([0.4, 0.4, 1.0, 1.0])


def test_a_potential_is_a_baseline_of_the_state() -> None:
    """Shaped rewards telescope: the return of a turn is less the potential of its state, whatever comes after."""
    assert shaped(f32([0, 1]), f32([0.25, 0.5]), 0.5).tolist() == [0.5 * 0.5 - 0.25, 1 - 0.5]
    rollout = episode(0, (1, 0.0, "a", 0.25), (1, 1.0, "b", 0.5))
    found = by_turns(make_objective(advantage="turn-returns", advantage_gamma=0.5), rollout)
    assert found == close([[0.5 - 0.25, 1 - 0.5]])
    other = episode(1, (1, 0.0, "a", 0.25), (1, 0.0, "b", 0.5))
    plain = [episode(i, (1, 0.0, "a"), (1, 1.0 - i, "b")) for i in range(2)]
    assert by_turns(make_objective(**EQUALS), rollout, other) == close(by_turns(make_objective(**EQUALS), *plain))


def test_token_returns_and_gae_see_the_reward_of_a_turn_at_its_last_token() -> None:
    rollout = episode(0, (2, 1.0), (1, 3.0))
    objective = make_objective(advantage="returns", advantage_gamma=0.5)
    assert loss_values(objective.advantages(objective.candidates([as_group([rollout])])))[0] == [
        0.5 * (1 + 1.5),
        1 + 1.5,
        3,
    ]


def test_the_length_of_an_episode_does_not_weigh_it() -> None:
    """Turns and tokens more of the same: each episode has half of the weight of the step."""
    objective = make_objective(preset="gigpo")
    long = episode(1, *[(3, 0.0, "a")] * 20)
    samples = objective.weighted(objective.advantages(objective.candidates([as_group([WON, long])])))
    assert [float(s.weight_T.sum()) for s in samples] == pytest.approx([0.5, 0.5])


def test_a_penalty_in_the_reward_is_taken_from_the_turn_that_it_is_of() -> None:
    objective = make_objective(advantage="turn-returns", kl="k1", kl_coef=1.0, kl_into="reward", reference="frozen")
    candidates = objective.candidates([as_group([episode(0, (2, 1.0), (1, 2.0))])])
    (found,) = objective.advantages(
        with_numbers(candidates, logp_old=[[-1.0, -1.0, -1.0]], logp_ref=[[-1.1, -1.2, -1.5]])
    )
    assert loss_values([found])[0] == pytest.approx([3 - 0.3 - 0.5, 3 - 0.3 - 0.5, 2 - 0.5])


def role(*scores: float, group: int = 0) -> Group:
    return as_group([episode(i, (1, None), score=s, group=group) for i, s in enumerate(scores)], group)


def test_the_moving_mean_of_a_role_is_taken_before_the_reward_moves_it() -> None:
    """b: 0, then .5 of the way to each reward: 0 → .5 → .25 | .25 → .625."""
    assert moving_means(0.0, f32([1, 0]), 0.5).tolist() == [0, 0.5, 0.25]
    objective = make_objective(advantage="role-mean", advantage_decay=0.5)
    assert loss_values(objective.advantages(objective.candidates([role(1, 0)]))) == [[1.0], [-0.5]]
    again = make_objective(advantage="role-mean", advantage_decay=0.5)
    again.load_state(objective.state())
    for one in (objective, again):
        assert loss_values(one.advantages(one.candidates([role(1, group=1)]))) == [[0.75]]


def test_rewards_of_turns_that_a_verifier_gives_are_components_of_its_score() -> None:
    """turn/0 and turn/1, which are counted over the turns of the model; what is left stands at the last."""
    rollout = episode(0, (2, None), (1, None))
    judged = Rollout(0, 0, rollout.chains, "stop", "", Score(1.5, {"turn/0": 0.5, "judge": 1.5}))
    assert by_turns(make_objective(advantage="turn-returns"), judged) == close([[1.5, 1.0]])
