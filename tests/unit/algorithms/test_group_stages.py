"""From groups to samples (S1 to S3), what moves from step to step, and the metrics of the loss."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fixture_p import (
    EXAMPLES,
    MISMATCH_P,
    PLAIN,
    RATIOS_P,
    TIS,
    advantages,
    as_group,
    as_tokens,
    bare_tokens,
    f32,
    flat,
    group_p,
    loss_of,
    loss_values,
    make_group,
    make_objective,
    make_rollout,
    of_samples,
    some_sequences,
    tokens_p,
    trainable,
    with_kl,
    with_numbers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from objective import GROUP_ADVANTAGES, NO_BASELINE, Objective

from kitae.algorithms.advantages import (
    GroupRewards,
    SequenceRewards,
    gae,
    length_weighted,
    mean_scaled,
    pass_at_k,
    whiten,
)
from kitae.algorithms.config import AlgorithmConfig, needs_group
from kitae.algorithms.control import Signal
from kitae.algorithms.group_stages import Candidate
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.ratios import token as token_ratio
from kitae.algorithms.reward_shaping import Moments, overlong_penalty
from kitae.observe.meter import Meter
from kitae.types import Group, Rollout, Score, Segment

fast = settings(deadline=None, max_examples=40)
CENTRED: dict[str, Any] = {"advantage": "group-centred"}


def by_index(samples: Sequence[Candidate]) -> dict[int, float]:
    """One advantage per sample that is trained on."""
    return dict(zip([s.index for s in samples], of_samples(loss_values(samples)), strict=True))


def trained(objective: Objective, *groups: Group) -> dict[int, float]:
    return by_index(objective.advantages(objective.candidates(groups)))


# Verifiers that failed.


def test_failed_rollouts_leave_the_group_before_its_statistics() -> None:
    objective = make_objective(**CENTRED, filter="zero-variance")
    group = make_group([1, None, 0, None])
    assert objective.drop_reason(group) is None
    assert trained(objective, group) == {0: 0.5, 2: -0.5}
    assert objective.group_metrics([group]) == {"groups_too_small": 0}


@pytest.mark.parametrize("advantage", sorted(set(GROUP_ADVANTAGES) - NO_BASELINE))
def test_one_judged_rollout_is_no_baseline_and_is_counted(advantage: str) -> None:
    objective = make_objective(advantage=advantage)
    alone, pair = make_group([1, None, None]), make_group([1, 0], group=1)
    assert objective.drop_reason(alone) is None
    assert trained(objective, alone) == {0: 0.0}
    assert objective.group_metrics([alone, pair]) == {"groups_too_small": 1}
    assert objective.group_metrics([pair]) == {"groups_too_small": 0}


@pytest.mark.parametrize("advantage", ["reward", "one"])
def test_methods_without_a_baseline_train_on_a_single_rollout(advantage: str) -> None:
    objective = make_objective(advantage=advantage)
    assert trained(objective, make_group([1, None])) == {0: 1.0}
    assert objective.group_metrics([make_group([1, None])]) == {"groups_too_small": 0}


@pytest.mark.parametrize("filter_", ["none", "zero-variance", "keep-best"])
@pytest.mark.parametrize("scores", [[None, None], []], ids=["all failed", "nothing sampled"])
def test_a_group_without_any_verdict_is_dropped_as_errors(filter_: str, scores: list[None]) -> None:
    objective = make_objective(filter=filter_)
    assert objective.drop_reason(make_group(scores)) == "errors"
    assert objective.candidates([make_group(scores)]) == []


def test_an_unscored_rollout_counts_as_failed() -> None:
    unscored = Rollout.of(0, 1, (1,), (Segment("model", (5,), (-1.0,), (0,)),), "stop", "")
    assert make_objective().drop_reason(as_group([unscored])) == "errors"
    assert [s.index for s in make_objective().candidates([as_group([make_rollout(1.0), unscored])])] == [0]


# Groups are known by their id.


def test_samples_of_several_groups_may_stand_in_any_order() -> None:
    objective = make_objective(**CENTRED)
    samples = objective.candidates([make_group([1, 0], group=7), make_group([1, 1, 0], group=3)])
    mixed = [samples[i] for i in (4, 0, 2, 3, 1)]
    found = {(s.group, s.index): s.column("advantage")[-1] for s in objective.advantages(mixed)}
    expected = {(7, 0): 1 / 2, (7, 1): -1 / 2, (3, 0): 1 / 3, (3, 1): 1 / 3, (3, 2): -2 / 3}
    assert found == pytest.approx(expected)


def test_groups_may_be_of_different_sizes() -> None:
    """Nothing is reshaped to (groups, G): a failed rollout does not move those behind it."""
    objective = make_objective(**CENTRED)
    found = objective.advantages(objective.candidates([make_group([1, None, 0]), make_group([0, 0, 1], group=1)]))
    assert of_samples(loss_values(found)) == pytest.approx([0.5, -0.5, -1 / 3, -1 / 3, 2 / 3])


def test_what_the_trainer_gets_of_a_rollout_with_an_environment_turn() -> None:
    def episode(index: int, score: float) -> Rollout:
        turns = (
            Segment("model", (10, 11), (-0.5, -0.25), (3, 4)),
            Segment.observed((20, 21, 22)),
            Segment("model", (12,), (-2.0,), (5,)),
        )
        return Rollout.of(7, index, (1, 2), turns, "stop", "", Score(score))

    objective = make_objective(**CENTRED, shaping_scale=3.0)
    candidates = objective.advantages(objective.candidates([as_group([episode(0, 1.0), episode(1, 0.0)], 7)]))
    rollout = candidates[0]
    assert (rollout.group, rollout.index, rollout.score, rollout.reward) == (7, 0, 1.0, 3.0)
    assert (rollout.loss_tokens, rollout.kept, rollout.baseline) == (3, True, None)
    first, second = objective.weighted(candidates)
    assert (first.group, first.index, first.chain, first.prompt_length) == (7, 0, 0, 2)
    assert first.tokens_T.tolist() == [1, 2, 10, 11, 20, 21, 22, 12]
    assert first.mask_T.tolist() == [False, False, True, True, False, False, False, True]
    assert {name: values.tolist() for name, values in first.columns.items()} == {
        "logp_mu": [0, 0, -0.5, -0.25, 0, 0, 0, -2.0],
        "version": [0, 0, 3, 4, 0, 0, 0, 5],
        "score": [0, 0, 1, 1, 0, 0, 0, 1],
        "advantage": [0, 0, 1.5, 1.5, 0, 0, 0, 1.5],
    }
    assert second.columns["advantage"].tolist() == [0, 0, -1.5, -1.5, 0, 0, 0, -1.5]
    assert (first.weight_T > 0).tolist() == first.mask_T.tolist()
    assert first.loss_tokens == 3


def test_a_response_without_tokens_counts_in_the_baseline_but_is_not_trained_on() -> None:
    objective = make_objective(**CENTRED)
    assert trained(objective, make_group([1, 0], lengths=[0, 2])) == {1: -0.5}


# S1: responses that were cut off.


def test_truncated_responses_keep_their_score_by_default() -> None:
    group = make_group([1, 0, 1], truncated=[2])
    assert trained(make_objective(**CENTRED), group) == pytest.approx({0: 1 / 3, 1: -2 / 3, 2: 1 / 3})


def test_truncated_responses_may_get_a_fixed_reward() -> None:
    objective = make_objective(**CENTRED, truncation=-2.0, shaping_scale=2.0)
    samples = objective.candidates([make_group([1, 0, 1], truncated=[2])])
    assert [s.score for s in samples] == [1, 0, 1], "the score is what the verifier said"
    assert [s.reward for s in samples] == [2, 0, -4], "the rule comes before bias and scale"
    # The filter judges what the verifier said: one of two equal scores does not become different.
    objective = make_objective(filter="zero-variance", truncation=-2.0)
    assert objective.drop_reason(make_group([1, 1], truncated=[1])) == "zero-variance"


def test_truncated_responses_may_count_in_the_baseline_only() -> None:
    objective = make_objective(**CENTRED, truncation="mask", aggregation="token-mean")
    group = make_group([1, 0, 0], lengths=[2, 3, 5], truncated=[2])
    assert trained(objective, group) == pytest.approx({0: 2 / 3, 1: -1 / 3})
    assert trainable(objective, group)[0].weight_T.max() == np.float32(1 / 5), "masked tokens are not in N"
    assert objective.drop_reason(make_group([1, 0], truncated=[1])) is None
    assert objective.drop_reason(make_group([1, 0], truncated=[0, 1])) == "truncated", "nothing is left to train on"


def test_truncated_responses_may_leave_the_group() -> None:
    objective = make_objective(**CENTRED, truncation="drop")
    assert trained(objective, make_group([1, 0, 1, 0], truncated=[2, 3])) == {0: 0.5, 1: -0.5}
    assert objective.drop_reason(make_group([1, 0], truncated=[0, 1])) == "truncated"
    assert objective.drop_reason(make_group([1, None], truncated=[0])) == "truncated"
    assert objective.drop_reason(make_group([None, None], truncated=[0])) == "errors"
    assert objective.group_metrics([make_group([1, 0], truncated=[0])]) == {"groups_too_small": 1}
    # What has left is not judged by the filter either.
    filtered = make_objective(truncation="drop", filter="zero-variance")
    assert filtered.drop_reason(make_group([1, 1, 0], truncated=[2])) == "zero-variance"


# S1: length penalty, bias, scale, clip, normalisation.


@given(st.integers(0, 100_000), st.integers(1, 30_000), st.integers(0, 30_000))
def test_the_length_penalty_lies_between_minus_one_and_zero(length: int, cap: int, buffer: int) -> None:
    penalty = overlong_penalty(length, cap, buffer)
    assert -1 <= penalty <= 0
    if buffer == 0 or length <= cap - buffer:
        assert penalty == 0
    elif length >= cap:
        assert penalty == -1


def test_shaping_reaches_the_reward_and_not_the_score_nor_the_filter() -> None:
    group = make_group([1, 1, 1], lengths=[12, 16, 20])
    objective = make_objective(max_tokens=20, overlong_buffer=8, **CENTRED)
    assert [s.score for s in objective.candidates([group])] == [1, 1, 1]
    assert trained(objective, group) == pytest.approx({0: 0.5, 1: 0.0, 2: -0.5})
    filtered = make_objective(max_tokens=20, overlong_buffer=8, filter="zero-variance")
    assert filtered.drop_reason(group) == "zero-variance"


def test_bias_scale_and_clip_in_this_order() -> None:
    objective = make_objective(shaping_bias=-0.5, shaping_scale=10.0, shaping_clip=4.0)
    samples = objective.candidates([make_group([0, 0.25, 0.5, 0.75, 1])])
    assert [s.reward for s in samples] == [-4, -2.5, 0, 2.5, 4]


def test_batch_normalisation_is_over_all_groups_of_the_step() -> None:
    objective = make_objective(shaping_norm="batch", advantage="reward")
    rewards = [s.reward for s in objective.candidates([make_group([1, 0]), make_group([3, 4], group=1)])]
    assert rewards == pytest.approx(((np.array([1, 0, 3, 4]) - 2) / np.std([1, 0, 3, 4])).tolist())
    assert [s.reward for s in objective.candidates([make_group([7, 7])])] == [0, 0], "nothing varies"


def test_running_normalisation_remembers_and_survives_a_checkpoint() -> None:
    objective = make_objective(shaping_norm="running", advantage="reward")
    first = [s.reward for s in objective.candidates([make_group([1, 0])])]
    assert first == pytest.approx([1, -1])
    saved = json.loads(json.dumps(objective.state()))
    then = [s.reward for s in objective.candidates([make_group([3, 4], group=1)])]
    everything = np.array([1, 0, 3, 4])
    assert then == pytest.approx(((everything - everything.mean()) / everything.std())[2:].tolist())

    resumed = make_objective(shaping_norm="running", advantage="reward")
    resumed.load_state(saved)
    assert resumed.state() == saved
    assert [s.reward for s in resumed.candidates([make_group([3, 4], group=1)])] == then
    assert resumed.state() == objective.state()
    fresh = make_objective(shaping_norm="running", advantage="reward")
    assert [s.reward for s in fresh.candidates([make_group([3, 4], group=1)])] != pytest.approx(then)


@fast
@given(st.lists(st.lists(st.integers(-64, 64).map(lambda i: i / 8), max_size=6), min_size=1, max_size=6))
def test_moments_do_not_depend_on_how_the_numbers_came_in(parts: list[list[float]]) -> None:
    moments = Moments()
    for part in parts:
        moments = moments.add(f32(part))
    everything = [x for part in parts for x in part]
    assert moments.count == len(everything)
    if everything:
        assert moments.mean == pytest.approx(np.mean(everything), abs=1e-6)
        assert moments.std == pytest.approx(np.std(everything), abs=1e-6)


# S2: filters.


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("none", ["A", "B", "C", "D"]),
        ("zero-variance", ["A", "B"]),
        ("all-correct", ["A", "B", "D"]),
        ("all-wrong", ["A", "B", "C"]),
        ("all-correct+all-wrong", ["A", "B"]),
        ("keep-best", ["A", "B", "C"]),
        ("keep-best+all-correct", ["A", "B"]),
    ],
)
def test_filters_on_the_reference_groups(name: str, kept: list[str]) -> None:
    groups = {"A": [1, 0, 0, 0], "B": [1, 1, 1, 0], "C": [1, 1, 1, 1], "D": [0, 0, 0, 0]}
    objective = make_objective(filter=name)
    reasons = {key: objective.drop_reason(make_group(scores)) for key, scores in groups.items()}
    assert [key for key, reason in reasons.items() if reason is None] == kept
    assert {reason for reason in reasons.values() if reason} <= set(name.split("+")), "the filter is the reason"


def test_a_combined_filter_names_the_one_that_emptied_the_group() -> None:
    objective = make_objective(filter="all-correct+all-wrong")
    assert objective.drop_reason(make_group([1, 1])) == "all-correct"
    assert objective.drop_reason(make_group([0, 0])) == "all-wrong"
    # A sample must pass them all: the best of an all-correct group is dropped by the other filter.
    assert make_objective(filter="keep-best+zero-variance").drop_reason(make_group([1, 1])) == "zero-variance"


def test_keep_best_trains_on_the_best_and_compares_with_all() -> None:
    group = make_group([1, 0.8, 0, 1])
    assert trained(make_objective(filter="keep-best", advantage="one"), group) == {0: 1, 3: 1}
    # The others still count in the statistics of the group.
    assert trained(make_objective(filter="keep-best", **CENTRED), group) == pytest.approx({0: 0.3, 3: 0.3})
    assert make_objective(filter="keep-best").drop_reason(make_group([0.4, 0.2])) == "keep-best"
    lower = make_objective(filter="keep-best", filter_correct_above=0.3, advantage="one")
    assert trained(lower, make_group([0.4, 0.2])) == {0: 1}
    # Rejected responses leave the batch: they are not in any denominator.
    objective = make_objective(filter="keep-best", advantage="one", aggregation="token-mean")
    (sample,) = trainable(objective, make_group([1, 0], lengths=[2, 6]))
    assert sample.weight_T.max() == np.float32(1 / 2)


# S3: advantages.


@pytest.mark.parametrize("advantage", sorted(set(GROUP_ADVANTAGES) - NO_BASELINE))
def test_equal_rewards_give_advantages_of_exactly_zero(advantage: str) -> None:
    """The float mean of equal numbers need not be that number; divided by ε the error would be an advantage of 0.1."""
    objective = make_objective(advantage=advantage)
    for size in range(1, 12):
        for score in (0.0, 0.1, 0.3, 1 / 3, 0.7, 0.9, 1.0):
            assert not np.any(advantages(objective, make_group([score] * size))), (size, score)


def test_equal_rewards_give_zero_without_epsilon_too() -> None:
    assert advantages(make_objective(advantage_epsilon=0.0), make_group([1, 1])) == [[0.0], [0.0]]


def test_length_weighted_baseline() -> None:
    group = GroupRewards(f32([1, 0, 0]), f32([1, 0, 0]), np.array([2, 3, 5]))
    assert length_weighted(group).tolist() == pytest.approx([0.8, -0.2, -0.2])
    assert float((length_weighted(group) * group.lengths_G).sum()) == pytest.approx(0, abs=1e-6)


def test_mean_scaled_advantage() -> None:
    def of(rewards: list[float]) -> list[float]:
        group = GroupRewards(f32(rewards), f32(rewards), np.ones(len(rewards), dtype=np.int64))
        return mean_scaled(group, epsilon=1e-6).tolist()  # type: ignore[no-any-return]

    assert of([1, 0, 0, 0]) == pytest.approx([3, -1, -1, -1], abs=2e-5)
    assert of([1, 1, 1, 0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1], abs=1e-5)
    assert of([0, 0]) == [0, 0]


@fast
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 6))
def test_pass_at_k_is_the_normalised_gain_of_drawing_a_sample(correct: int, wrong: int, k: int) -> None:
    """By brute force: the mean over all sets of k that contain the sample, less the mean over all sets."""
    from itertools import combinations

    scores = [1.0] * correct + [0.0] * wrong
    found = pass_at_k(
        GroupRewards(f32(scores), f32(scores), np.ones(len(scores), dtype=np.int64)), k=k, correct_above=0.5
    )
    if k > len(scores):
        assert not found.any()
        return
    draws = [(set(c), max(scores[i] for i in c)) for c in combinations(range(len(scores)), k)]
    outcomes = np.array([best for _, best in draws])
    if outcomes.std() == 0:
        assert not found.any()
        return
    for i in (0, len(scores) - 1):
        containing = [best for members, best in draws if i in members]
        assert found[i] == pytest.approx((np.mean(containing) - outcomes.mean()) / outcomes.std(), abs=1e-5)


# S3: a greedy response as baseline.


def test_the_greedy_response_is_the_baseline_and_never_trained_on() -> None:
    objective = make_objective(preset="remax", kl_coef=0.0)
    group = make_group([1, 0], lengths=[2, 3], greedy=make_rollout(1.0, index=-1))
    samples = objective.advantages(objective.candidates([group]))
    assert loss_values(samples) == [[0, 0], [-1, -1, -1]]
    assert [(s.index, s.baseline) for s in samples] == [(0, 1.0), (1, 1.0)]


def test_the_greedy_response_is_shaped_as_the_others_are_but_counts_in_no_statistics() -> None:
    scaled = make_objective(preset="remax", kl_coef=0.0, shaping_bias=-0.5, shaping_scale=2.0)
    group = make_group([1, 0], greedy=make_rollout(0.0, index=-1))
    assert of_samples(advantages(scaled, group)) == [2, 0]
    normed = make_objective(preset="remax", kl_coef=0.0, shaping_norm="batch")
    (sample, *_) = normed.candidates([make_group([1, 0], greedy=make_rollout(5.0, index=-1))])
    assert (sample.reward, sample.baseline) == pytest.approx((1, 9))  # mean .5, deviation .5 of the sampled ones
    running = make_objective(preset="remax", kl_coef=0.0, shaping_norm="running")
    running.candidates([make_group([1, 0], greedy=make_rollout(5.0, index=-1))])
    assert running.reward_moments.count == 2


def test_each_group_has_its_own_greedy_response_and_without_one_it_is_dropped() -> None:
    objective = make_objective(preset="remax", kl_coef=0.0)
    groups = [make_group([1, 0], group=g, greedy=make_rollout(b, group=g, index=-1)) for g, b in ((5, 1.0), (2, 0.25))]
    assert of_samples(advantages(objective, *groups)) == [0, -1, 0.75, -0.25]
    failed = make_group([1, 0], greedy=make_rollout(None, index=-1))
    for group in (failed, make_group([1, 0])):
        assert objective.drop_reason(group) == "errors"
    assert make_objective().drop_reason(failed) is None, "other methods do not ask for it"


# S3: KL in the reward.


def test_the_kl_penalty_of_a_group_is_summed_over_each_response() -> None:
    objective = make_objective(preset="rloo", kl_coef=0.5, **CENTRED)
    assert objective.kl_in_reward and objective.wants_reference
    samples = with_kl(objective.candidates([make_group([1, 0], lengths=[2, 3])]), [[0.2, 0.4], [0.0, 0.1, -0.3]])
    # 1 − .5 × .6 = .7 and 0 + .5 × .2 = .1
    assert by_index(objective.advantages(samples)) == pytest.approx({0: 0.3, 1: -0.3}, abs=1e-6)
    assert [s.reward for s in samples] == [1, 0], "the reward itself is not changed"


def test_the_kl_penalty_of_token_advantages_is_spread_over_the_response() -> None:
    objective = make_objective(preset="reinforce++", kl_coef=0.5, whiten="none", gamma=0.5)
    samples = with_kl(objective.candidates([make_group([1], lengths=[3])]), [[0.2, 0.4, -0.2]])
    last = 1 + 0.1
    assert flat(loss_values(objective.advantages(samples))) == pytest.approx(
        [-0.1 + 0.5 * (-0.2 + 0.5 * last), -0.2 + 0.5 * last, last], abs=1e-6
    )


def test_dropped_groups_count_in_the_statistics_of_rewards_only() -> None:
    """What rewards are normalised by must not depend on the filter."""
    mixed, right, wrong = make_group([1, 0, 0, 0]), make_group([1] * 4, group=1), make_group([0] * 4, group=2)
    everything = make_objective(shaping_norm="batch").candidates([mixed, right, wrong])
    filtered = make_objective(shaping_norm="batch").candidates([mixed], [right, wrong])
    assert [s.group for s in filtered] == [0] * 4
    assert [s.reward for s in filtered] == pytest.approx([s.reward for s in everything[:4]])


def test_samples_that_are_not_trained_on_pay_the_penalty_in_the_baseline() -> None:
    objective = make_objective(preset="rloo", kl_coef=1.0, filter="keep-best")
    samples = with_kl(objective.candidates([make_group([1, 0])]), [[0.0], [0.5]])
    assert by_index(objective.advantages(samples)) == pytest.approx({0: 1.5})


def test_kl_in_the_reward_leaves_no_term_in_the_loss_but_is_measured() -> None:
    choices = {**PLAIN, "kl_coef": 0.7, "reference": "frozen"}
    rewarded = make_objective(**choices, kl="k1", kl_into="reward")
    in_loss = make_objective(**choices, kl="k3")
    without = make_objective(**PLAIN)
    d = [0.5, -0.5, 0.0, 2.0, -2.0, 0.1]
    tokens = as_tokens(trainable(without, group_p()), RATIOS_P, d_ref=d)
    plain = loss_of(without, tokens)[0]
    loss, _, metrics = loss_of(rewarded, tokens)
    assert loss == pytest.approx(plain)
    k3 = [math.exp(-x) - 1 + x for x in d]
    old = [x - math.log(r) for x, r in zip(d, flat(RATIOS_P), strict=True)]  # measured for π_old, which sampled
    assert metrics["kl_k1"] == pytest.approx(sum(old) / 6, abs=1e-6)
    assert metrics["kl_k3"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in old) / 6, abs=1e-5)
    assert metrics["kl_per_response"] == pytest.approx(sum(old) / 2, abs=1e-6)
    assert loss_of(in_loss, tokens)[0] == pytest.approx(plain + 0.7 * sum(k3) / 6, abs=1e-5)


def test_the_kl_term_is_not_multiplied_by_the_correction() -> None:
    choices = {"kl_coef": 0.5, "kl": "k2", "reference": "frozen"}
    d = [0.5, -0.5, 0.0, 2.0, -2.0, 0.1]
    losses = {}
    for correction in ("none", "tis"):
        with_kl_term = make_objective(**{**PLAIN, "correction": correction}, **choices)
        without = make_objective(**{**PLAIN, "correction": correction})
        tokens = as_tokens(trainable(without, group_p()), RATIOS_P, d_ref=d)
        losses[correction] = loss_of(with_kl_term, tokens)[0] - loss_of(without, tokens)[0]
    assert losses["tis"] == pytest.approx(losses["none"], abs=1e-6)
    assert losses["none"] == pytest.approx(0.5 * sum(x**2 / 2 for x in d) / 6, abs=1e-6)


# S3: values and whitening.


@fast
@given(st.data())
def test_gae_skips_what_the_environment_says(data: st.DataObject) -> None:
    """An episode of several turns has the advantages of its own tokens alone, whatever stands between them."""
    turns = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4))
    segments: list[Segment] = []
    for own, observed in turns:
        segments.append(Segment("model", (10,) * own, (-1.0,) * own, (0,) * own))
        if observed:
            segments.append(Segment.observed((20,) * observed))
    rollout = Rollout.of(0, 0, (1, 2, 3), tuple(segments), "stop", "", Score(1.0))
    objective = make_objective(preset="ppo", kl_coef=0.0, gae_lambda=0.9, gamma=0.95, whiten="none")
    (sample,) = objective.candidates([as_group([rollout])])
    values = data.draw(st.lists(st.floats(-1, 1), min_size=sample.loss_tokens, max_size=sample.loss_tokens))
    (found,) = objective.advantages(with_numbers([sample], value=[values]))
    rewards = [0.0] * (len(values) - 1) + [1.0]
    alone = gae(SequenceRewards(f32(rewards), f32(values)), gamma=0.95, gae_lambda=0.9)
    assert flat(loss_values([found])) == pytest.approx(alone.tolist(), abs=1e-6)
    assert flat(loss_values([found], "return")) == pytest.approx((alone + f32(values)).tolist(), abs=1e-6)


def test_kinds_of_whitening() -> None:
    values = [f32([2, 2]), f32([-1] * 6), f32([0, 0, 0])]
    tokens = np.concatenate(values)
    each = np.array([2, -1, 0])
    for ddof in (0, 1):
        by_token = whiten(values, "tokens", ddof)
        assert np.concatenate(by_token) == pytest.approx((tokens - tokens.mean()) / tokens.std(ddof=ddof), abs=1e-6)
        by_sample = [row[0] for row in whiten(values, "samples", ddof)]
        assert by_sample == pytest.approx((each - each.mean()) / each.std(ddof=ddof), abs=1e-6)
        scaled = [row[0] for row in whiten(values, "scale", ddof)]
        assert scaled == pytest.approx(each / each.std(ddof=ddof), abs=1e-6)
        assert scaled[2] == 0
    assert all(np.array_equal(a, b) for a, b in zip(whiten(values, "none", 1), values, strict=True))
    assert whiten([], "tokens", 1) == []


@pytest.mark.parametrize(("kind", "expected"), [("tokens", 0.0), ("samples", 0.0), ("scale", 0.7), ("none", 0.7)])
def test_whitening_of_equal_advantages_divides_by_nothing(kind: str, expected: float) -> None:
    for rows in ([f32([0.7, 0.7]), f32([0.7])], [f32([0.7])]):
        assert np.concatenate(whiten(rows, kind, 1)) == pytest.approx(expected)


def test_whitening_is_over_the_samples_that_are_trained_on_and_over_all_groups() -> None:
    objective = make_objective(advantage="reward", whiten="samples", filter="keep-best")
    groups = [make_group([1, 0]), make_group([3, 3], group=1)]
    found = of_samples(advantages(objective, *groups))
    kept = np.array([1, 3, 3])
    assert found == pytest.approx(((kept - kept.mean()) / kept.std(ddof=1)).tolist(), abs=1e-6)


# What moves from step to step.


def test_the_kl_coefficient_is_steered_to_its_target() -> None:
    choices = {**PLAIN, "kl": "k2", "kl_coef": 0.1, "kl_target": 2.0, "kl_horizon": 100.0, "reference": "frozen"}
    objective = make_objective(**choices)
    assert objective.finish_step({Signal.KL: 2.2}, 50) == {"kl_coef": 0.1}, "what the step used"
    assert objective.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 50 / 100))
    before = objective.kl_coef
    objective.finish_step({Signal.KL: 0.0}, 50)
    assert objective.kl_coef == pytest.approx(before * (1 - 0.2 * 50 / 100)), "never faster than 20 %"
    saved = json.loads(json.dumps(objective.state()))
    resumed = make_objective(**choices)
    resumed.load_state(saved)
    assert resumed.kl_coef == objective.kl_coef
    # The new coefficient is the one in the loss.
    tokens = as_tokens(trainable(objective, group_p()), RATIOS_P, d_ref=[1.0] * 6)
    policy = loss_of(make_objective(**PLAIN), tokens)[0]
    assert loss_of(objective, tokens)[0] == pytest.approx(policy + objective.kl_coef / 2, abs=1e-6)
    assert objective.finish_step({}, 50) == {"kl_coef": resumed.kl_coef}, "a step without tokens moves nothing"
    assert objective.kl_coef == resumed.kl_coef


def test_a_fixed_coefficient_stays() -> None:
    objective = make_objective(**PLAIN, kl="k2", kl_coef=0.1, reference="frozen", entropy_coef=0.2)
    used = objective.finish_step({Signal.KL: 99.0, Signal.ENTROPY: 0.0}, 50)
    assert used == {"kl_coef": 0.1, "entropy_coef": 0.2}
    assert (objective.kl_coef, objective.entropy_coef) == (0.1, 0.2)
    assert make_objective(**PLAIN).finish_step({Signal.ENTROPY: 1.0}, 50) == {}


def test_the_entropy_bonus_is_raised_below_its_target_and_off_above_it() -> None:
    """Lowered alone, it would go on acting for as many steps as it was raised, and overshoot."""
    choices = {"entropy_coef": 0.0, "entropy_target": 0.5, "entropy_rate": 0.01}
    objective = make_objective(**PLAIN, **choices)
    assert objective.wants_entropy_gradient, "from the first step on, although the bonus starts at 0"
    assert objective.finish_step({Signal.ENTROPY: 0.1}, 8) == {"entropy_coef": 0}
    objective.finish_step({Signal.ENTROPY: 0.1}, 8)
    assert objective.entropy_coef == pytest.approx(0.02)
    objective.finish_step({Signal.ENTROPY: 0.9}, 8)
    assert objective.entropy_coef == 0
    resumed = make_objective(**PLAIN, **choices)
    resumed.load_state(json.loads(json.dumps(objective.state())))
    for control in (objective, resumed):
        control.finish_step({Signal.ENTROPY: 0.1}, 8)
        assert control.entropy_coef == pytest.approx(0.02), "it goes on from 0.01, to which it was lowered meanwhile"
    for _ in range(4):
        objective.finish_step({Signal.ENTROPY: 0.9}, 8)
    objective.finish_step({Signal.ENTROPY: 0.1}, 8)
    assert objective.entropy_coef == pytest.approx(0.01), "never lowered below 0"


def test_what_each_preset_asks_for() -> None:
    """A reference, a critic, a greedy response, a teacher: only where the method reads them."""
    wants: dict[str, set[str]] = {"reference": set(), "values": set(), "greedy": set(), "teacher": set()}
    for name in PRESETS:
        objective = make_objective(preset=name)
        for what, names in wants.items():
            if getattr(objective, f"wants_{what}"):
                names.add(name)
    assert wants == {
        "reference": {"ppo", "turn-ppo", "rloo", "remax", "reinforce++", "reinforce++-baseline"},
        "values": {"ppo", "turn-ppo"},
        "greedy": {"remax"},
        "teacher": {"distil"},
    }
    without = {n for n in PRESETS if not needs_group(AlgorithmConfig(preset=n))}
    assert without == {
        "reinforce", "reinforce-drop-correct", "reinforce-drop-wrong", "reinforce-rej", "raft", "raft++", "ppo",
        "remax", "reinforce++", "turn-ppo", "rae", "distil", "gkd",
    }  # fmt: skip


# Metrics: what the stages saw, and what they made of it.


def test_metrics_before_and_after_the_gate() -> None:
    objective = make_objective(**{**PLAIN, **TIS, "dual_clip": 3.0})
    _, _, metrics = loss_of(objective, tokens_p(objective))
    assert metrics["clip_high"] == pytest.approx(1 / 6)
    assert metrics["clip_low"] == pytest.approx(1 / 6)
    assert metrics["clip_dual"] == pytest.approx(1 / 6)
    assert metrics["ratio"] == pytest.approx(sum(flat(RATIOS_P)) / 6, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(4, abs=1e-5)
    assert metrics["ratio_gated"] == pytest.approx((0.7 + 1.1 + 1.5) / 6, abs=1e-5), "clipped tokens count as 0"
    assert metrics["ratio_gated_max"] == pytest.approx(1.5, abs=1e-5)
    assert metrics["loss"] == pytest.approx((-2.4 - 0.7 + 0.32 + 1.1 + 3 + 2.7) / 6, abs=1e-5)


def test_metrics_before_and_after_the_correction() -> None:
    objective = make_objective(**{**PLAIN, **TIS})
    tokens = tokens_p(objective)
    _, _, metrics = loss_of(objective, tokens)
    weights, capped = flat(MISMATCH_P), flat(EXAMPLES["tis_C2"]["w"])
    assert metrics["mismatch"] == pytest.approx(sum(weights) / 6, abs=1e-5)
    assert metrics["mismatch_max"] == pytest.approx(3, abs=1e-5)
    assert metrics["correction"] == pytest.approx(sum(capped) / 6, abs=1e-5)
    assert metrics["correction_max"] == pytest.approx(2)
    assert metrics["correction_changed"] == pytest.approx(2 / 6)
    assert metrics["ess"] == pytest.approx(EXAMPLES["ess"], abs=1e-5)
    assert metrics["ess_corrected"] == pytest.approx(sum(capped) ** 2 / (6 * sum(w**2 for w in capped)), abs=1e-5)
    assert metrics["mismatch_k3"] == pytest.approx(sum(w - 1 - math.log(w) for w in weights) / 6, abs=1e-5)
    assert metrics["logp_gap"] == pytest.approx(sum(abs(math.log(w)) for w in weights) / 6, abs=1e-5)
    assert metrics["logp_gap_max"] == pytest.approx(math.log(3), abs=1e-5)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"gate": "none"}, flat(RATIOS_P)),
        ({"gate": "likelihood"}, [1] * 6),
        ({"gate": "weight-clip", "weight_cap": 1.28}, flat(EXAMPLES["cispo_upper1.28_no_lower"]["w"])),
        ({"gate": "mask"}, [0, 1, 0, 1, 1, 1]),
        ({"gate": "sigmoid"}, [1.410022, 0.684483, 0.46707, 1.096974, 1.40121, 0.630445]),
        ({"ratio": "sequence-mean", "gate": "none"}, [1.024695] * 2 + [1.347809] * 4),
        ({"ratio": "sequence-mean-token", "gate": "none"}, [1.024695] * 2 + [1.347809] * 4),
    ],
)
def test_the_gated_ratio_is_the_weight_that_a_token_keeps(choices: dict[str, Any], expected: list[float]) -> None:
    objective = make_objective(**{**PLAIN, **choices})
    _, _, metrics = loss_of(objective, tokens_p(objective))
    assert metrics["ratio_gated"] == pytest.approx(sum(expected) / 6, abs=1e-5)
    assert metrics["ratio_gated_max"] == pytest.approx(max(expected), abs=1e-5)
    stopped = [x == 0 for x in expected]
    assert metrics["clip_high"] == pytest.approx(sum(stopped[:2]) / 6)
    assert metrics["clip_low"] + metrics["clip_dual"] == pytest.approx(sum(stopped[2:]) / 6)


def test_the_gated_ratio_of_a_product_is_the_product() -> None:
    choices = {"ratio": "sequence-product", "gate": "none", "aggregation": "seq-mean-token-mean"}
    objective = make_objective(**{**PLAIN, **choices})
    _, _, metrics = loss_of(objective, tokens_p(objective))
    assert metrics["ratio_gated"] == pytest.approx(metrics["ratio"])


def test_tokens_without_advantage_are_not_counted_as_clipped() -> None:
    objective = make_objective(**PLAIN)
    samples = trainable(objective, make_group([1, 1], lengths=[2, 4]))
    _, gradient, metrics = loss_of(objective, as_tokens(samples, RATIOS_P))
    assert not gradient.any()
    assert (metrics["clip_low"], metrics["clip_high"], metrics["clip_dual"]) == (0, 0, 0)
    assert "ratio_gated" not in metrics, "there is nothing to gate"


def test_effective_sample_size_is_exact_over_micro_batches() -> None:
    """The mean of the sizes of the parts would be another number."""
    objective = make_objective(**{**PLAIN, **TIS})
    weights = [[1.0, 1.0], [0.1, 6.0, 1.0, 2.0]]
    rollouts = [make_rollout(1.0 - i, [-1 - math.log(w) for w in row], index=i) for i, row in enumerate(weights)]
    tokens = as_tokens(trainable(objective, as_group(rollouts)), RATIOS_P, logp_old=-1.0)
    meter = Meter()
    parts = []
    for i in range(2):
        objective.loss(some_sequences(tokens, [i]), meter)
        parts.append(loss_of(objective, some_sequences(tokens, [i]))[2]["ess"])
    found, all_ = meter.totals().numbers(), flat(weights)
    assert found["ess"] == pytest.approx(sum(all_) ** 2 / (6 * sum(w**2 for w in all_)), abs=1e-5)
    capped = [min(w, 2.0) for w in all_]
    assert found["ess_corrected"] == pytest.approx(sum(capped) ** 2 / (6 * sum(w**2 for w in capped)), abs=1e-5)
    assert abs((2 * parts[0] + 4 * parts[1]) / 6 - found["ess"]) > 0.01


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_effective_sample_size_lies_between_one_of_n_and_one(weights: list[float]) -> None:
    meter = Meter()
    meter.sample_size("ess", sum(weights), sum(w**2 for w in weights), len(weights))
    meter.sample_size("equal", weights[0] * len(weights), weights[0] ** 2 * len(weights), len(weights))
    assert 1 / len(weights) - 1e-9 <= meter.totals().numbers()["ess"] <= 1 + 1e-9
    assert meter.totals().numbers()["equal"] == pytest.approx(1)


@pytest.mark.parametrize("correction", ["tis", "icepop", "sequence-tis", "geometric", "opsm", "total"])
def test_a_missing_engine_logprob_weighs_one_and_spoils_no_metric(correction: str) -> None:
    gate = "mask" if correction == "total" else "clip"
    objective = make_objective(**{**PLAIN, "correction": correction, "gate": gate})
    tokens = tokens_p(objective)
    tokens.logp_mu_N[0] = float("nan")
    tokens.logp_mu_N[4] = float("-inf")
    assert tokens.log_mismatch_N.exp().tolist() == pytest.approx([1, 1, 0.4, 1, 1, 0.9], abs=1e-5)
    loss, gradient, metrics = loss_of(objective, tokens)
    assert math.isfinite(loss) and gradient.isfinite().all()
    assert {name: x for name, x in metrics.items() if not math.isfinite(x)} == {}
    if correction == "tis":
        assert loss * 6 == pytest.approx(-1.2 - 0.7 + 0.32 + 1.1 + 1.5 + 3.6, abs=2e-5)


def test_log_ratios_are_clamped_before_the_exponential() -> None:
    log_ratio = torch.tensor([500.0, -500.0, 1.0])
    tokens = bare_tokens(log_ratio, [1.0] * 3)
    assert token_ratio(log_ratio, tokens).tolist() == pytest.approx([math.exp(20), math.exp(-20), math.e])
    for preset in PRESETS:
        objective = make_objective(preset=preset)
        far = as_tokens(
            objective.weighted(
                with_numbers(objective.candidates([make_group([1], lengths=[3])]), advantage=[[1.0] * 3])
            ),
            [[math.exp(200), math.exp(-200), 1.0]],
            d_ref=[300.0, -300.0, 0.0] if objective.wants_reference else None,
        )
        loss, gradient, metrics = loss_of(objective, far)
        assert math.isfinite(loss) and gradient.isfinite().all(), preset
        assert {name: x for name, x in metrics.items() if not math.isfinite(x)} == {}, preset
