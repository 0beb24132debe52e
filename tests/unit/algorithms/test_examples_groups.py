"""Worked examples of S1 to S3: rewards, filters and advantages, through `Objective` wherever it allows them."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fixture_p import (
    EXAMPLES,
    advantages,
    as_group,
    covers,
    f32,
    flat,
    loss_values,
    make_group,
    make_objective,
    make_rollout,
    of_samples,
    with_kl,
    with_numbers,
)

from kitae.algorithms.advantages import SequenceRewards, gae, whiten
from kitae.algorithms.filters import has_variance
from kitae.algorithms.reward_shaping import Moments, overlong_penalty
from kitae.rl.buffer import Buffer, SlotResult
from kitae.trainer.objectives import value_loss
from kitae.types import Group, Rollout, Score, Segment

SCORES = {"A": [1, 0, 0, 0], "B": [1, 1, 1, 0], "C": [1, 1, 1, 1], "D": [0, 0, 0, 0]}


def close(expected: Any, tolerance: float = 2e-6) -> Any:
    return pytest.approx(expected, abs=tolerance)


def group_advantages(scores: Any, **choices: Any) -> list[float]:
    return of_samples(advantages(make_objective(**choices), make_group(scores)))


def zscores(scores: Any, ddof: int = 1, epsilon: float = 1e-6) -> list[float]:
    return group_advantages(scores, advantage_ddof=ddof, advantage_epsilon=epsilon)


# Groups.


@covers("adv_groups")
def test_reference_groups() -> None:
    for name, example in EXAMPLES["adv_groups"].items():
        scores = SCORES[name]
        moments = Moments().add(f32(scores))
        assert (moments.mean, moments.std) == close((example["mean"], example["std0"]))
        centred = group_advantages(scores, advantage="group-centred")
        assert centred == close(example["centered"])
        assert group_advantages(scores, advantage="leave-one-out") == close(example["rloo"])
        for ddof, epsilon, key in (
            (1, 1e-6, "grpo_ddof1_eps1e6"),
            (1, 1e-4, "grpo_ddof1_eps1e4"),
            (0, 1e-6, "grpo_ddof0_eps1e6"),
        ):
            found = zscores(scores, ddof, epsilon)
            assert found == close(example[key]), (name, key)
            spread = example["std1" if ddof else "std0"]
            if spread:
                assert centred[0] / found[0] == close(spread + epsilon), "ε is added to the deviation"
            else:
                assert set(found) == {0.0}, "exactly"


@covers("adv_near_equal")
def test_epsilon_is_added_to_the_standard_deviation() -> None:
    near = EXAMPLES["adv_near_equal"]
    assert np.std(near["rewards"], ddof=1) == close(near["std1"])
    # float32 rewards are 3e-8 apart at best, of a spread of 1e-4; another epsilon or place for it is off by 1e-2.
    for epsilon, key in ((1e-4, "e1e4"), (1e-6, "e1e6"), (0.0, "e0")):
        assert zscores(near["rewards"], epsilon=epsilon) == close(near[key], 2e-3), key


@covers("difficulty_bias_G8(k,std1,1/std1,A_correct,A_wrong)")
def test_difficulty_bias_of_the_zscore() -> None:
    rows = EXAMPLES["difficulty_bias_G8(k,std1,1/std1,A_correct,A_wrong)"]
    assert [row[0] for row in rows] == list(range(1, 8))
    for k, std, weight, correct, wrong in rows:
        scores = [1] * k + [0] * (8 - k)
        found, centred = zscores(scores, epsilon=1e-9), group_advantages(scores, advantage="group-centred")
        assert found == close([correct] * k + [wrong] * (8 - k))
        assert [z / c for z, c in zip(found, centred, strict=True)] == close([weight] * 8, 1e-5)
        assert [c / z for z, c in zip(found, centred, strict=True)] == close([std] * 8, 1e-5)


@covers("float_noise_std", "float32_equal_std", "float_std_exact")
def test_equal_rewards_are_equal_whatever_their_float_deviation_is() -> None:
    """The deviation of equal numbers need not be 0: only max − min tells."""
    noise = EXAMPLES["float_noise_std"]
    assert np.std([0.7] * 3) == close(noise["std0"])
    assert (np.std([0.7] * 3) == 0) == bool(noise["is_zero"])
    narrow = EXAMPLES["float32_equal_std"]
    for size in range(2, 12):
        rewards = np.full(size, 0.7, dtype=np.float32)
        assert rewards.std(ddof=1) == close(narrow["std1"])
        assert rewards.mean() - rewards[0] == close(narrow["mean_minus"])
        for advantage in ("group-zscore", "group-centred", "leave-one-out", "group-scaled"):
            assert set(group_advantages(rewards.tolist(), advantage=advantage)) == {0.0}, "exactly"
    for case, is_zero in EXAMPLES["float_std_exact"].items():
        value, size = case.split("x")
        scores = np.full(int(size), float(value))
        assert (scores.std() == 0) == bool(is_zero), "the case no longer shows what it is here for"
        assert not has_variance(scores)  # float64, where the noise is
        dropped = make_objective(filter="zero-variance").drop_reason(make_group(scores.tolist()))
        assert dropped == "zero-variance"


@covers("01_vs_pm1")
def test_zero_one_and_plus_minus_one_rewards() -> None:
    example = EXAMPLES["01_vs_pm1"]
    raw = {"preset": "reinforce", "shaping_bias": 0.0, "shaping_scale": 1.0}
    assert group_advantages(SCORES["A"], **raw)[1] == example["reinforce_01_wrong"], "no signal from a wrong answer"
    assert group_advantages(SCORES["A"], preset="reinforce")[1] == example["reinforce_pm1_wrong"]
    assert zscores(SCORES["A"]) == close(example["grpo01"], 4e-6)
    assert zscores([1, -1, -1, -1]) == close(example["grpopm"], 4e-6)


@covers("reinforce_ablations")
def test_reinforce_and_its_ablations() -> None:
    """Scores in {0, 1}, which the presets map to {−1, 1}; None is a group that is dropped."""
    choices: dict[str, dict[str, Any]] = {
        "reinforce": {"preset": "reinforce"},
        "mean_zero": {"preset": "reinforce-mean-zero"},
        "drop_all_correct": {"preset": "reinforce-drop-correct"},
        "drop_all_wrong": {"preset": "reinforce-drop-wrong"},
        "reinforce_rej": {"preset": "reinforce-rej"},
        "rej_plus_std_ddof1": {"preset": "reinforce-rej-std"},
        "rej_plus_std_ddof0": {"preset": "reinforce-rej-std", "advantage_ddof": 0},
        "grpo_ddof1": {"preset": "reinforce", "advantage": "group-zscore"},
    }
    for name, scores in {"easy": [1] * 4, "hard": [0] * 4, "mix": [1, 0, 0, 0]}.items():
        group = make_group(scores)
        for key, expected in EXAMPLES["reinforce_ablations"][name].items():
            objective = make_objective(**choices[key])
            found = advantages(objective, group)
            if expected is None:
                assert found == []
                assert objective.drop_reason(group) == ("all-correct" if name == "easy" else "all-wrong"), key
            else:
                assert objective.drop_reason(group) is None, key
                assert of_samples(found) == close(expected), (name, key)


@covers("areal_adv_norm_leave_one_token_out_groupA_3tok")
def test_leave_one_out_leaves_out_a_sample_and_never_a_token() -> None:
    correct, wrong = EXAMPLES["areal_adv_norm_leave_one_token_out_groupA_3tok"]
    tokens = np.repeat(SCORES["A"], 3)
    by_token = tokens - (tokens.sum() - tokens) / (len(tokens) - 1)
    assert by_token[[0, -1]].tolist() == close([correct, wrong])
    found = advantages(make_objective(advantage="leave-one-out"), make_group(SCORES["A"], lengths=[3] * 4))
    assert of_samples(found) == close(EXAMPLES["adv_groups"]["A"]["rloo"])


@covers("rloo_kl")
def test_leave_one_out_with_the_penalty_in_the_reward() -> None:
    example = EXAMPLES["rloo_kl"]
    d = [[0.1, 0.2], [-0.3, 0.1, 0.1]]  # sums .3 and -.1
    for choices, expected in (({"advantage": "reward"}, example["shaped"]), ({}, example["adv"])):
        objective = make_objective(preset="rloo", kl_coef=0.05, **choices)
        samples = with_kl(objective.candidates([make_group([1, 0], lengths=[2, 3])]), d)
        assert of_samples(loss_values(objective.advantages(samples))) == close(expected)


# Tokens of one sequence.


def with_greedy(score: float, length: int, greedy: float) -> Group:
    """One sampled response, and the greedy one with another score."""
    return make_group([score], lengths=[length], greedy=make_rollout(greedy, index=-1))


@covers("remax_tokens")
def test_return_less_the_reward_of_the_greedy_response() -> None:
    example = EXAMPLES["remax_tokens"]
    k1 = [[0.1, 0.2, -0.1]]
    remax = make_objective(preset="remax", kl_coef=0.1)
    assert remax.wants_greedy
    samples = with_kl(remax.candidates([with_greedy(1.0, 3, 0.4)]), k1)
    assert flat(loss_values(remax.advantages(samples))) == close(example["adv"])
    returns = make_objective(preset="reinforce++", kl_coef=0.1, whiten="none")
    assert flat(loss_values(returns.advantages(samples))) == close(example["returns"])


@covers("reinforce_pp")
def test_returns_whitened_over_all_tokens() -> None:
    example = EXAMPLES["reinforce_pp"]
    groups = [make_group([1], group=0, lengths=[2]), make_group([0], group=1, lengths=[3])]
    d = [[0.1, 0.2], [0.0, 0.3, -0.1]]

    def found(**choices: Any) -> list[list[float]]:
        objective = make_objective(preset="reinforce++", kl_coef=0.1, **choices)
        return loss_values(objective.advantages(with_kl(objective.candidates(groups), d)))

    returns = found(whiten="none")
    for mine, theirs in zip(returns, example["returns"], strict=True):
        assert mine == close(theirs)
    moments = Moments().add(f32(flat(returns)))
    assert (moments.mean, moments.std) == close((example["mean"], example["std0"]))
    assert np.std(flat(returns), ddof=1) == close(example["std1"])
    assert flat(found()) == close(flat(example["adv_ddof1"]), 4e-6)
    for ddof in (0, 1):
        white = whiten([f32(row) for row in returns], "tokens", ddof)
        assert flat(row.tolist() for row in white) == close(flat(example[f"adv_ddof{ddof}"]), 4e-6)


@covers("reinforce_pp_baseline")
def test_whitening_by_sample_leaves_groups_without_signal_at_zero() -> None:
    example = EXAMPLES["reinforce_pp_baseline"]
    groups = [make_group([1, 0], lengths=[2, 6]), make_group([1, 1], group=1, lengths=[3, 3])]

    def found(**choices: Any) -> list[list[float]]:
        return advantages(make_objective(preset="reinforce++-baseline", kl_coef=0.0, **choices), *groups)

    centred = found(whiten="none", advantage="group-centred")
    assert of_samples(centred) == close(example["centered"])
    moments = Moments().add(f32(flat(centred)))
    assert (moments.mean, moments.std**2) == close((example["tok_mean"], example["tok_var0"]))
    rows = [f32(row) for row in centred]
    by_sample = of_samples([row.tolist() for row in whiten(rows, "samples", 0)])
    assert by_sample == close(example["seq_level_ddof0"])
    assert by_sample[2:] == [0, 0]
    for ddof in (0, 1):
        by_token = of_samples([row.tolist() for row in whiten(rows, "tokens", ddof)])
        assert by_token == close(example[f"tok_level_ddof{ddof}"])
        assert min(by_token[2:]) > 0.3, "what is wrong with it: a group without signal is rewarded"


def gae_of(values: list[float], score: float = 1.0, **choices: Any) -> tuple[list[float], list[float]]:
    """Advantages and returns of one response, with these values of the critic."""
    objective = make_objective(preset="ppo", kl_coef=0.0, **{"whiten": "none", **choices})
    assert objective.wants_values
    samples = objective.candidates([make_group([score], lengths=[len(values)])])
    (sample,) = objective.advantages(with_numbers(samples, value=[values]))
    return flat(loss_values([sample])), flat(loss_values([sample], "return"))


@covers("gae")
def test_generalised_advantages() -> None:
    example = EXAMPLES["gae"]
    values = [0.5, 0.6, 0.8]
    for gamma, lam, key in ((1.0, 0.95, "lam095"), (1.0, 1.0, "lam1"), (0.99, 0.95, "gamma99_lam95")):
        found, returns = gae_of(values, gamma=gamma, gae_lambda=lam)
        assert found == close(example[key]), key
        by_hand = {"lam095": example["ret095"], "lam1": example["ret1"]}
        assert returns == close(by_hand.get(key, [a + v for a, v in zip(found, values, strict=True)])), key
    white, returns_T = gae_of(values, gae_lambda=0.95, whiten="tokens")
    assert white == close(example["white_ddof1"], 4e-6)
    assert returns_T == close(example["ret095"]), "returns are taken before whitening"
    (white_T,) = whiten([f32(gae_of(values, gae_lambda=0.95)[0])], "tokens", 0)
    assert white_T.tolist() == close(example["white_ddof0"], 4e-6)


@covers("gae_masked")
def test_tokens_of_an_environment_are_skipped() -> None:
    example = EXAMPLES["gae_masked"]
    turns = (
        Segment("model", (10,), (-1.0,), (0,)),
        Segment.observed((20, 21)),
        Segment("model", (11,), (-1.0,), (0,)),
    )
    episode = Rollout.of(0, 0, (1, 2), turns, "stop", "", Score(1.0))
    objective = make_objective(preset="ppo", kl_coef=0.0, gae_lambda=0.95, whiten="none")
    (sample,) = objective.candidates([as_group([episode])])
    values = f32([0, 0, 0.5, 9, 9, 0.8])  # a critic says something of the environment's tokens too
    (sample,) = objective.advantages([replace(sample, samples=(sample.samples[0].with_columns(value=values),))])
    columns = sample.samples[0].columns
    assert columns["advantage"][2:].tolist() == close(example["masked"])
    assert columns["return"][2:].tolist() == close([0.99, 0, 0, 1.0])
    seen = SequenceRewards(f32([0, 0, 0, 1]), values[2:])
    assert gae(seen, gamma=1.0, gae_lambda=0.95).tolist() == close(example["unmasked_wrong"])


@covers("gae_truncated")
def test_a_response_that_was_cut_off_ends_its_episode() -> None:
    example = EXAMPLES["gae_truncated"]
    values = [0.5, 0.6, 0.8]
    cut = make_group([0], lengths=[3], truncated=[0])
    objective = make_objective(preset="ppo", kl_coef=0.0, gae_lambda=0.95, whiten="none")
    (sample,) = objective.advantages(with_numbers(objective.candidates([cut]), value=[values]))
    assert flat(loss_values([sample])) == close(example["terminal0"])
    going_on = SequenceRewards(f32([0, 0, 0]), f32(values), bootstrap=0.9)
    assert gae(going_on, gamma=1.0, gae_lambda=0.95).tolist() == close(example["bootstrap09"])


@covers("value_loss")
def test_value_loss() -> None:
    example = EXAMPLES["value_loss"]
    value = torch.tensor([0.9, 0.2, 0.5], requires_grad=True)
    old, returns = torch.full((3,), 0.5), torch.tensor([1.0, 1.0, 0.0])
    near = old + (value.detach() - old).clamp(-0.2, 0.2)
    assert (2 * value_loss(value, old, returns, clip=0.0)).tolist() == close(example["unclipped"])
    assert (2 * value_loss(near, old, returns, clip=0.0)).tolist() == close(example["clipped"])
    loss = value_loss(value, old, returns, clip=0.2)
    assert (2 * loss).tolist() == close(example["max"])
    assert loss.mean().item() == close(example["half_mean"])
    assert 2 * loss.mean().item() == close(example["nohalf_mean"])
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    assert gradient.tolist() == close(example["grad_of_0p5_mse_per_tok"])


# Rewards.


@covers("reward_norm")
def test_rewards_are_clipped_before_they_are_normalised() -> None:
    example = EXAMPLES["reward_norm"]
    scores = [0.0, 1.0, 2.0, 37.0]

    def rewards(**choices: Any) -> list[float]:
        return [s.reward for s in make_objective(**choices).candidates([make_group(scores)])]

    assert rewards(shaping_norm="batch") == close(example["z"])
    assert rewards(shaping_norm="batch", shaping_clip=10.0) == close(example["clip_then_z"])
    other_order = np.clip(rewards(shaping_norm="batch"), -1, 1).tolist()
    assert other_order == close(example["z_then_clip"])
    assert rewards(shaping_norm="batch", shaping_clip=1.0) != close(example["z_then_clip"])


@covers("overlong_20480_4096", "overlong_uncapped_formula")
def test_soft_length_penalty() -> None:
    for length, penalty in EXAMPLES["overlong_20480_4096"].items():
        assert overlong_penalty(int(length), 20480, 4096) == close(penalty)
    for length, wrong in EXAMPLES["overlong_uncapped_formula"].items():
        assert min(0.0, -(int(length) - (20480 - 4096)) / 4096) == close(wrong)
        assert overlong_penalty(int(length), 20480, 4096) == close(max(-1.0, wrong)), "it never exceeds 1"
    # Through the pipeline: cap 20, buffer 8, in tokens.
    objective = make_objective(max_tokens=20, overlong_buffer=8)
    samples = objective.candidates([make_group([1, 1, 1, 1], lengths=[2, 12, 16, 20])])
    assert [s.reward for s in samples] == [1, 1, 0.5, 0]


# Room for new rollouts.


@covers("staleness_capacity")
def test_slots_of_the_buffer() -> None:
    """η = 4, 32 prompts a step: after v versions, what is accepted or running leaves so many free slots."""

    async def free(version: int, issued: int) -> int:
        buffer = Buffer(prompts_per_step=32, max_staleness=4)

        async def train() -> None:
            for slot in buffer.open[:32]:
                buffer.put(slot, SlotResult(None, ()))
            await buffer.take()
            buffer.train(buffer.version + 1)
            buffer.release(buffer.version)

        for number in range(issued):
            if len(buffer.open) == buffer.slots and buffer.version < version:
                await train()
            async with asyncio.timeout(1):  # one that is issued too early would block
                await buffer.reserve(number)
        while buffer.version < version:
            await train()
        return buffer.slots - len(buffer.open)

    for state, slots in EXAMPLES["staleness_capacity"].items():
        version, accepted, running = (int(part.lstrip("vacrun")) for part in state.split("_"))
        assert asyncio.run(free(version, accepted + running)) == slots, state
