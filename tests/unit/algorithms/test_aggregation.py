"""S7: the weights alone, on any mix of lengths and prompts."""

from typing import Any

import numpy as np
import pytest
from fixture_p import AGGREGATIONS as EXAMPLE_KEYS
from fixture_p import EXAMPLES, make_group, make_objective, trainable
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.algorithms.aggregation import AGGREGATIONS
from kitae.trainer.base import Batch

fast = settings(deadline=None, max_examples=60)
shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8)
Shape = list[tuple[int, int]]


def weights(kind: str, shape: Shape, length: int = 7) -> Any:
    """The weight of a token of each (group, loss tokens); group ids come in any order, as in a batch."""
    settings_ = {"length": length} if kind == "constant-length" else {}
    lengths = np.array([n for _, n in shape], dtype=np.int64)
    groups = np.array([g for g, _ in shape], dtype=np.int64)
    return AGGREGATIONS[kind](lengths, groups, **settings_)


def test_fixture_p_by_hand() -> None:
    losses = EXAMPLES["loss_ppo"]["tok_loss"]
    for key, choices in EXAMPLE_KEYS.items():
        found = weights(choices["aggregation"], [(0, 2), (0, 4)], length=8)
        total = sum(w * x for w, row in zip(found, losses, strict=True) for x in row)
        assert total == pytest.approx(EXAMPLES["loss_ppo"][key], abs=1e-6), key


@fast
@given(shapes)
def test_each_mean_gives_equal_shares_to_what_it_averages_over(shape: Shape) -> None:
    counts = np.array([n for _, n in shape])
    mass = {kind: weights(kind, shape) * counts for kind in AGGREGATIONS}
    assert mass["token-mean"] == pytest.approx(counts / counts.sum())
    assert mass["seq-mean-token-mean"] == pytest.approx([1 / len(shape)] * len(shape))
    assert mass["seq-mean-token-sum"] == pytest.approx(counts / len(shape))
    assert mass["constant-length"] == pytest.approx(counts / (7 * len(shape)))
    groups = np.array([g for g, _ in shape])
    prompts = sorted(set(groups.tolist()))
    for g in prompts:
        assert mass["prompt-mean"][groups == g].sum() == pytest.approx(1 / len(prompts))


@fast
@given(st.sampled_from(sorted(AGGREGATIONS)), st.data())
def test_weights_follow_their_samples(kind: str, data: st.DataObject) -> None:
    shape = data.draw(shapes)
    order = data.draw(st.permutations(range(len(shape))))
    straight = weights(kind, shape)
    assert weights(kind, [shape[i] for i in order]).tolist() == [straight[i] for i in order]


@fast
@given(st.sampled_from(sorted(AGGREGATIONS)), shapes, st.data())
def test_responses_without_loss_tokens_change_nothing(kind: str, shape: Shape, data: st.DataObject) -> None:
    """They are no sequences and their prompts no prompts, and nothing is divided by 0."""
    empty = data.draw(st.lists(st.integers(0, 5), max_size=3))
    more = weights(kind, [*shape, *((g, 0) for g in empty)])
    assert np.isfinite(more).all()
    assert more[: len(shape)].tolist() == weights(kind, shape).tolist()


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_batch_without_any_token_is_finite(kind: str) -> None:
    assert np.isfinite(weights(kind, [(0, 0), (1, 0)])).all()


def test_weights_land_on_loss_tokens_only() -> None:
    objective = make_objective(aggregation="token-mean")
    samples = trainable(objective, make_group([1, 0], lengths=[2, 4]))
    for s in samples:
        assert (s.weight_T[~s.mask_T] == 0).all()
        assert s.weight_T[s.mask_T] == pytest.approx(np.float32(1 / 6))
    assert Batch(samples).loss_tokens == 6


def test_constant_length_is_a_setting_and_not_the_width_of_the_batch() -> None:
    group = make_group([1, 0], lengths=[2, 4])
    for max_tokens, length, used in ((8, "max_tokens", 8), (100, 8, 8), (100, "max_tokens", 100)):
        objective = make_objective(max_tokens, aggregation="constant-length", aggregation_length=length)
        assert trainable(objective, group)[0].weight_T.max() == np.float32(1 / (2 * used))
