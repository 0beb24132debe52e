"""S1 to S3 on groups: shaping, filter, advantage. Numbers from the worked examples, laws as properties."""

import numpy as np
import pytest
from fixture_p import EXAMPLES, make_group, make_objective, make_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.algorithms.advantages import ADVANTAGES, group_centred, group_zscore
from kitae.algorithms.filters import has_variance
from kitae.algorithms.rewards import overlong_penalty
from kitae.types import FloatArray, Group, Message, Prompt, Rollout, Score, Segment

REWARDS = {"A": [1, 0, 0, 0], "B": [1, 1, 1, 0], "C": [1, 1, 1, 1], "D": [0, 0, 0, 0]}
fast = settings(deadline=None, max_examples=60)
# Rewards on a grid of 1/8: equal or clearly different, never so near that the tolerance decides.
rewards_lists = st.lists(st.integers(-16, 16).map(lambda i: i / 8), min_size=2, max_size=12)


def f32(values: object) -> FloatArray:
    return np.array(values, dtype=np.float32)


def advantages(group: Group, **choices: object) -> list[float]:
    """One advantage per sample, as the trainer would see it."""
    samples = make_objective(**choices).samples(group)
    for s in samples:
        assert (s.advantage_T[~s.mask_T] == 0).all()
        assert len(set(s.advantage_T[s.mask_T].tolist())) == 1, "one advantage for all tokens of a response"
    return [float(s.advantage_T[s.mask_T][0]) for s in samples]


@pytest.mark.parametrize("name", "ABCD")
def test_reference_groups(name: str) -> None:
    group, expected = make_group(REWARDS[name]), EXAMPLES["adv_groups"][name]
    assert advantages(group, preset="grpo") == pytest.approx(expected["grpo_ddof1_eps1e6"], abs=2e-6)
    assert advantages(group, preset="dr-grpo") == pytest.approx(expected["centered"], abs=1e-7)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    near = EXAMPLES["adv_near_equal"]
    # float32 rewards are 3e-8 apart at best, of a spread of 1e-4; another epsilon or place for it is off by 1e-2.
    assert group_zscore(f32(near["rewards"])) == pytest.approx(near["e1e6"], abs=2e-3)


@pytest.mark.parametrize(
    "row", EXAMPLES["difficulty_bias_G8(k,std1,1/std1,A_correct,A_wrong)"], ids=lambda row: f"{row[0]}-of-8"
)
def test_difficulty_bias_of_the_zscore(row: list[float]) -> None:
    k, _, weight, correct, wrong = row
    right = int(k)
    rewards = f32([1] * right + [0] * (8 - right))
    # The examples are without epsilon, which takes off at most 3e-6 of 1 here.
    assert group_zscore(rewards) == pytest.approx([correct] * right + [wrong] * (8 - right), rel=4e-6)
    assert group_zscore(rewards) / group_centred(rewards) == pytest.approx([weight] * 8, rel=4e-6)


@fast
@given(rewards_lists, st.integers(-8, 8), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_zscore_ignores_shift_and_scale(rewards: list[float], shift: int, scale: float) -> None:
    moved = group_zscore(f32(rewards) * np.float32(scale) + np.float32(shift))
    np.testing.assert_allclose(moved, group_zscore(f32(rewards)), atol=1e-4)


def test_plus_minus_one_rewards_give_the_same_zscores_as_zero_one() -> None:
    example = EXAMPLES["01_vs_pm1"]
    assert group_zscore(f32([1, 0, 0, 0])) == pytest.approx(example["grpo01"], abs=4e-6)
    assert group_zscore(f32([1, -1, -1, -1])) == pytest.approx(example["grpopm"], abs=4e-6)


@fast
@given(st.sampled_from(sorted(ADVANTAGES)), rewards_lists)
def test_advantages_of_a_group_sum_to_zero(kind: str, rewards: list[float]) -> None:
    assert abs(ADVANTAGES[kind](f32(rewards)).sum()) < 1e-4


@fast
@given(st.sampled_from(sorted(ADVANTAGES)), st.data())
def test_permuting_a_group_permutes_its_advantages(kind: str, data: st.DataObject) -> None:
    rewards = data.draw(rewards_lists)
    order = data.draw(st.permutations(range(len(rewards))))
    straight = ADVANTAGES[kind](f32(rewards))
    np.testing.assert_allclose(ADVANTAGES[kind](f32(rewards)[order]), straight[order], atol=1e-5)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_equal_rewards_give_advantages_of_exactly_zero(kind: str) -> None:
    """The float mean of equal numbers need not be that number; divided by ε the error would be an advantage of 0.1."""
    equal = [np.full(n, r, dtype=np.float32) for n in range(1, 12) for r in (0.0, 0.1, 0.3, 1 / 3, 0.7, 0.9, 1.0)]
    assert [rewards.tolist() for rewards in equal if ADVANTAGES[kind](rewards).any()] == []


@pytest.mark.parametrize(("case", "std_is_zero"), EXAMPLES["float_std_exact"].items())
def test_zero_variance_is_judged_by_max_minus_min(case: str, std_is_zero: int) -> None:
    value, size = case.split("x")
    scores = np.full(int(size), float(value))
    assert (scores.std() == 0) == bool(std_is_zero), "the case no longer shows what it is here for"
    assert not has_variance(scores)  # type: ignore[arg-type]  # float64, where the std of equal numbers is not 0
    assert not has_variance(scores.astype(np.float32))


def test_zero_variance_filter_names_itself_and_none_keeps_all() -> None:
    for name, dropped in {"A": False, "B": False, "C": True, "D": True}.items():
        group = make_group(REWARDS[name])
        assert make_objective(filter="zero-variance").drop_reason(group) == ("zero-variance" if dropped else None)
        assert make_objective(filter="none").drop_reason(group) is None


def test_the_filter_sees_scores_before_the_length_penalty() -> None:
    group = make_group([1, 1, 1], lengths=[2, 16, 20])
    objective = make_objective(max_tokens=20, filter="zero-variance", overlong_buffer=8)
    assert objective.drop_reason(group) == "zero-variance"


@pytest.mark.parametrize(("length", "penalty"), EXAMPLES["overlong_20480_4096"].items())
def test_overlong_penalty(length: str, penalty: float) -> None:
    assert overlong_penalty(int(length), 20480, 4096) == pytest.approx(penalty, abs=1e-6)


@given(st.integers(0, 100_000), st.integers(1, 30_000), st.integers(0, 30_000))
def test_overlong_penalty_lies_between_minus_one_and_zero(length: int, cap: int, buffer: int) -> None:
    penalty = overlong_penalty(length, cap, buffer)
    assert -1 <= penalty <= 0
    if buffer == 0 or length <= cap - buffer:
        assert penalty == 0
    elif length >= cap:
        assert penalty == -1


def test_length_penalty_reaches_the_advantage_but_not_the_reported_reward() -> None:
    group = make_group([1, 1, 1], lengths=[12, 16, 20])
    objective = make_objective(max_tokens=20, overlong_buffer=8, advantage="group-centred")
    samples = objective.samples(group)
    assert [s.advantage_T[-1] for s in samples] == pytest.approx([0.5, 0.0, -0.5])
    assert [s.reward for s in samples] == [1, 1, 1]


def test_failed_rollouts_leave_the_group_before_its_statistics() -> None:
    group = make_group([1, None, 0, None])
    objective = make_objective(advantage="group-centred", filter="zero-variance")
    assert objective.drop_reason(group) is None
    samples = objective.samples(group)
    assert [(s.index, s.advantage_T[-1]) for s in samples] == [(0, 0.5), (2, -0.5)]


@pytest.mark.parametrize("filter", ["none", "zero-variance"])
@pytest.mark.parametrize("rewards", [[1, None, None], [None, None], []])
def test_fewer_than_two_judged_rollouts_are_dropped_as_errors(filter: str, rewards: list[float | None]) -> None:
    assert make_objective(filter=filter).drop_reason(make_group(rewards)) == "errors"


def test_an_unscored_rollout_counts_as_failed() -> None:
    unscored = Rollout(0, 1, (1,), (Segment("model", (5,), (-1.0,), (0,)),), "stop", "")
    group = Group(0, Prompt("p", (Message("user", "?"),), "x"), (make_rollout(1.0), unscored))
    assert make_objective(filter="none").drop_reason(group) == "errors"


def test_what_the_trainer_gets_of_a_rollout_with_an_environment_turn() -> None:
    def episode(index: int, reward: float) -> Rollout:
        turns = (
            Segment("model", (10, 11), (-0.5, -0.25), (3, 4)),
            Segment.observed((20, 21, 22)),
            Segment("model", (12,), (-2.0,), (5,)),
        )
        return Rollout(7, index, (1, 2), turns, "stop", "", Score(reward))

    group = Group(7, Prompt("p", (Message("user", "?"),), "x"), (episode(0, 1.0), episode(1, 0.0)))
    first, second = make_objective(advantage="group-centred").samples(group)
    assert (first.group, first.index, first.prompt_length, first.reward) == (7, 0, 2, 1.0)
    assert first.tokens_T.tolist() == [1, 2, 10, 11, 20, 21, 22, 12]
    assert first.mask_T.tolist() == [False, False, True, True, False, False, False, True]
    assert first.logp_mu_T.tolist() == [0, 0, -0.5, -0.25, 0, 0, 0, -2.0]
    assert first.versions_T.tolist() == [-1, -1, 3, 4, -1, -1, -1, 5]
    assert first.advantage_T.tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, 0.5]
    assert second.advantage_T.tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -0.5]
    assert first.loss_tokens == 3
