"""Rollouts whose context was rewritten on the way: several chains, several sequences, one rollout."""

from typing import Any

import numpy as np
import pytest
from fixture_p import as_group, f32, loss_values, make_objective, make_rollout, with_numbers

from kitae.algorithms.advantages import SequenceRewards, gae
from kitae.types import Chain, Group, Rollout, Score, Segment


def said(tokens: int, first: int = 10, version: int = 0) -> Segment:
    return Segment("model", tuple(range(first, first + tokens)), (-1.0,) * tokens, (version,) * tokens)


def episode(score: float, *lengths: int, group: int = 0, index: int = 0) -> Rollout:
    """A chain for each length, with a prompt of its own and a word of the environment in it."""
    chains = tuple(
        Chain((1, 2 + number), (said(n, version=number), Segment.observed((99,)))) for number, n in enumerate(lengths)
    )
    return Rollout(group, index, chains, "stop", "", Score(score))


def pair() -> Group:
    return as_group([episode(1.0, 2, 1, 3), episode(0.0, 2, index=1)])


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"aggregation": "seq-mean-token-mean"}, [1 / (2 * 6)] * 3 + [1 / (2 * 2)]),
        ({"aggregation": "seq-mean-token-sum"}, [1 / 2] * 4),
        ({"aggregation": "constant-length", "aggregation_length": 5}, [1 / (2 * 5)] * 4),
        ({"aggregation": "token-mean"}, [1 / 8] * 4),
        ({"aggregation": "prompt-mean"}, [1 / 8] * 4),
    ],
    ids=lambda x: x["aggregation"] if isinstance(x, dict) else "",
)
def test_weights_count_rollouts_and_not_chains(choices: dict[str, Any], expected: list[float]) -> None:
    objective = make_objective(**choices)
    samples = objective.weighted(objective.advantages(objective.candidates([pair()])))
    assert [s.key for s in samples] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)]
    for s, weight in zip(samples, expected, strict=True):
        assert s.weight_T.tolist() == pytest.approx(s.spread(np.float32(weight)).tolist())


def test_a_chain_is_a_sequence_of_its_own() -> None:
    """Its prompt is what the model read first in it; its columns are those of its own tokens."""
    objective = make_objective(advantage="group-centred")
    (first, _) = objective.advantages(objective.candidates([pair()]))
    assert [s.tokens_T.tolist() for s in first.samples] == [[1, 2, 10, 11, 99], [1, 3, 10, 99], [1, 4, 10, 11, 12, 99]]
    assert [s.prompt_length for s in first.samples] == [2, 2, 2]
    assert [s.loss_tokens for s in first.samples] == [2, 1, 3]
    assert first.loss_tokens == 6
    assert first.column("version").tolist() == [0, 0, 1, 2, 2, 2]
    assert first.column("score").tolist() == [1] * 6


def test_an_advantage_is_spread_over_all_chains_of_its_rollout() -> None:
    objective = make_objective(advantage="group-centred")
    found = objective.advantages(objective.candidates([pair()]))
    assert loss_values(found) == [[0.5] * 6, [-0.5] * 2]
    for candidate, value in zip(found, (0.5, -0.5), strict=True):
        for s in candidate.samples:
            assert s.columns["advantage"].tolist() == np.where(s.mask_T, value, 0).tolist()


def test_group_statistics_count_a_rollout_once_and_all_of_its_tokens() -> None:
    """One of three answers is right, whatever number of chains it took; its length is that of all of them."""
    group = as_group([episode(1.0, 1, 1, 1, 1), episode(0.0, 2, index=1), episode(0.0, 4, index=2)])
    centred = make_objective(advantage="group-centred")
    found = centred.advantages(centred.candidates([group]))
    assert [c.column("advantage")[0] for c in found] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    weighted = make_objective(advantage="length-weighted")
    found = weighted.advantages(weighted.candidates([group]))
    assert [c.column("advantage")[0] for c in found] == pytest.approx([0.6, -0.4, -0.4])


def test_token_advantages_run_over_the_chains_in_order() -> None:
    """The reward stands at the last token of the last chain, and what follows a chain is the next one."""
    objective = make_objective(preset="ppo", kl_coef=0.0, gamma=0.9, gae_lambda=0.8, whiten="none")
    values = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]]
    candidates = objective.candidates([as_group([episode(1.0, 2, 1, 3)])])
    (found,) = objective.advantages(with_numbers(candidates, value=values))
    whole = gae(SequenceRewards(f32([0, 0, 0, 0, 0, 1]), f32(values[0])), gamma=0.9, gae_lambda=0.8)
    assert loss_values([found]) == [whole.tolist()]
    assert found.samples[0].loss("advantage").tolist() == whole[:2].tolist()
    assert found.samples[2].loss("advantage").tolist() == whole[3:].tolist()
    assert loss_values([found], "return")[0] == pytest.approx((whole + f32(values[0])).tolist())


def test_a_penalty_in_the_reward_is_summed_over_all_chains() -> None:
    objective = make_objective(preset="rloo", kl_coef=0.5, advantage="group-centred")
    candidates = with_numbers(
        objective.candidates([as_group([episode(1.0, 1, 2), episode(0.0, 1, index=1)])]),
        logp_old=[[-1.0, -1.0, -1.0], [-1.0]],
        logp_ref=[[-1.2, -1.4, -1.0], [-1.0]],
    )
    found = objective.advantages(candidates)
    assert [c.column("advantage")[-1] for c in found] == pytest.approx([0.35, -0.35])  # 1 − .5 × .6 = .7 against 0


def test_chains_without_a_word_of_the_model_are_not_trained_on() -> None:
    """Of a rollout that said something elsewhere."""
    objective = make_objective(advantage="reward", aggregation="seq-mean-token-mean")
    silent = Chain((1, 2), (Segment.observed((5, 6)),))
    rollout = Rollout(0, 0, (silent, *episode(1.0, 2).chains), "stop", "", Score(1.0))
    samples = objective.weighted(objective.advantages(objective.candidates([as_group([rollout])])))
    assert [(s.key, s.loss_tokens) for s in samples] == [((0, 0, 1), 2)]
    assert samples[0].weight_T.max() == np.float32(1 / 2)


def test_whitening_and_covariance_count_tokens_of_all_chains() -> None:
    objective = make_objective(preset="clip-cov", advantage="reward", whiten="tokens")
    rollouts = [episode(1.0, 1, 1), make_rollout(0.0, [-1.0, -2.0], index=1)]
    samples = objective.weighted(objective.advantages(objective.candidates([as_group(rollouts)])))
    whitened = np.array([1, 1, -1, -1]) * (3 / 4) ** 0.5
    assert np.concatenate([s.loss("advantage") for s in samples]) == pytest.approx(whitened, abs=1e-6)
    assert [s.loss("cov_rank").tolist() for s in samples] == [[0.25], [0.5], [1.0, 0.0]]
