"""S7: the weights alone, on any mix of lengths and prompts."""

import numpy as np
import pytest
from fixture_p import EXAMPLES, flat, make_objective, make_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.algorithms.aggregation import token_weights
from kitae.types import Group, Message, Prompt, Rollout, Sample

KINDS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length", "prompt-mean")
fast = settings(deadline=None, max_examples=60)
shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8)


def samples_of(shape: list[tuple[int, int]]) -> list[Sample]:
    """Samples of (group, loss tokens); group ids come in any order, as in a batch."""
    objective = make_objective()
    made = []
    for index, (group, n) in enumerate(shape):
        rollout = make_rollout(1.0, [-1.0] * n, group=group, index=index)
        # A group of two, because one alone has no advantage; only the first is used.
        made.append(objective.samples(_group(group, rollout))[0])
    return made


def _group(group: int, rollout: Rollout) -> Group:
    other = make_rollout(0.0, group=group, index=99)
    return Group(group, Prompt("p", (Message("user", "?"),), "x"), (rollout, other))


def test_fixture_p_by_hand() -> None:
    samples = samples_of([(0, 2), (0, 4)])
    losses = EXAMPLES["loss_ppo"]["tok_loss"]
    keys = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "seq_mean_token_mean",
        "seq-mean-token-sum": "seq_mean_token_sum",
        "constant-length": "const_L8",
    }
    for kind, key in keys.items():
        weights = token_weights(samples, kind, constant_length=8)
        total = sum(w * x for w, row in zip(weights, losses, strict=True) for x in row)
        assert total == pytest.approx(EXAMPLES["loss_ppo"][key], abs=1e-6), kind
    assert len(flat(losses)) == 6


@fast
@given(shapes)
def test_each_mean_gives_equal_shares_to_what_it_averages_over(shape: list[tuple[int, int]]) -> None:
    samples = samples_of(shape)
    counts = np.array([n for _, n in shape])
    mass = {kind: np.array(token_weights(samples, kind, constant_length=7)) * counts for kind in KINDS}
    assert mass["token-mean"] == pytest.approx(counts / counts.sum())
    assert mass["seq-mean-token-mean"] == pytest.approx([1 / len(shape)] * len(shape))
    assert mass["seq-mean-token-sum"] == pytest.approx(counts / len(shape))
    assert mass["constant-length"] == pytest.approx(counts / (7 * len(shape)))
    groups = np.array([g for g, _ in shape])
    prompts = sorted(set(groups.tolist()))
    for g in prompts:
        assert mass["prompt-mean"][groups == g].sum() == pytest.approx(1 / len(prompts))


@fast
@given(st.sampled_from(KINDS), st.data())
def test_weights_follow_their_samples(kind: str, data: st.DataObject) -> None:
    samples = samples_of(data.draw(shapes))
    order = data.draw(st.permutations(range(len(samples))))
    straight = token_weights(samples, kind, constant_length=7)
    assert token_weights([samples[i] for i in order], kind, constant_length=7) == [straight[i] for i in order]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [[(0, 2), (0, 0)], [(0, 2), (1, 0)], [(0, 0), (1, 0)]])
def test_responses_without_tokens_count_as_sequences_but_divide_by_nothing(
    kind: str, shape: list[tuple[int, int]]
) -> None:
    weights = token_weights(samples_of(shape), kind, constant_length=8)
    assert all(np.isfinite(weights))
    if kind == "seq-mean-token-mean" and shape[0][1]:
        assert weights[0] == 1 / (2 * 2)


def test_weights_land_on_loss_tokens_only() -> None:
    objective = make_objective(aggregation="token-mean")
    batch = objective.batch(samples_of([(0, 2), (1, 4)]))
    for s in batch.samples:
        assert (s.weight_T[~s.mask_T] == 0).all()
        assert s.weight_T[s.mask_T] == pytest.approx(np.float32(1 / 6))
    assert batch.loss_tokens == 6
