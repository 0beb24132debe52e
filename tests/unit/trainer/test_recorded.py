"""What training says of single tokens is what it computed with."""

import asyncio
from collections.abc import Callable

import numpy as np
from short_settings import algorithm_with
from test_gradient import make_samples
from trainer_workers import column_of, make_worker, weighted

from kitae.models.policy import Policy
from kitae.trainer.base import Batch, Conditions, Role
from kitae.trainer.collective_ops import Alone
from kitae.trainer.config import TrainingConfig
from kitae.trainer.forward import pack_rows
from kitae.trainer.local_trainer import LocalTrainer
from kitae.trainer.objectives import Likelihood
from kitae.trainer.trainable_model import TrainableModel

SHAPES = [(0, 5, 3), (0, 5, 9), (1, 12, 1), (1, 12, 7), (2, 30, 20), (3, 1, 4)]
CLIPPED = algorithm_with(preset="grpo", clip_low=0.2, clip_high=0.2)


def test_numbers_of_observed_samples(tiny_policy: Callable[..., Policy]) -> None:
    """Three of six, in rows with the others; log-probs are those of a pass of its own, ratios and gates follow."""
    worker = make_worker(tiny_policy(), TrainingConfig(token_budget=40), CLIPPED)
    samples = weighted(make_samples(SHAPES, gaps=True), CLIPPED)
    expected = column_of(worker, samples)
    rng = np.random.default_rng(0)
    samples = tuple(
        s.with_columns(logp_old=np.where(s.mask_T, logp_T + rng.normal(0, 0.4, s.length), 0).astype(np.float32))
        for s, logp_T in zip(samples, expected, strict=True)
    )
    observed = frozenset(s.key for s in samples[1::2])
    trainer = LocalTrainer(worker)
    totals = asyncio.run(trainer.forward_backward(Batch(samples, Conditions(3), observed=observed)))
    assert totals.tokens.keys() == observed
    clipped = 0
    for s, logp_T in zip(samples, expected, strict=True):
        if s.key not in observed:
            continue
        own = totals.tokens[s.key]
        assert {len(values_N) for values_N in own.values()} == {s.loss_tokens}
        np.testing.assert_allclose(own["logp"], logp_T[s.mask_T], atol=1e-4)
        np.testing.assert_array_equal(own["logp_old"], s.loss("logp_old"))
        np.testing.assert_allclose(own["ratio"], np.exp(own["logp"] - own["logp_old"]), rtol=1e-4)
        beyond_N = np.where(s.loss("advantage") > 0, own["ratio"] > 1.2, own["ratio"] < 0.8)
        np.testing.assert_array_equal(own["gate"] == 0, beyond_N)
        assert (own["entropy"] > 0).all()
        clipped += int(beyond_N.sum())
    assert clipped > 0


def test_nothing_is_kept_of_the_others(tiny_policy: Callable[..., Policy]) -> None:
    worker = make_worker(tiny_policy(), algorithm=CLIPPED)
    rows = pack_rows(
        weighted(make_samples(SHAPES), CLIPPED), worker.training, worker.policy.device, worker.policy.dtype
    )[1]
    assert worker.forward_backward(rows, Conditions(), [Role.POLICY]).tokens == {}


def test_observing_changes_no_gradient(tiny_policy: Callable[..., Policy]) -> None:
    samples = weighted(make_samples(SHAPES), CLIPPED)
    found = []
    for observed in (set(), {s.key for s in samples}):
        worker = make_worker(tiny_policy(), algorithm=CLIPPED)
        rows = pack_rows(samples, worker.training, worker.policy.device, worker.policy.dtype, observed=observed)[1]
        totals = worker.forward_backward(rows, Conditions(), [Role.POLICY])
        found.append((totals.numbers(), [p.grad for p in worker.trained[Role.POLICY].optimizer.masters]))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert a is not None and b is not None and a.equal(b)


def test_likelihood_says_it_too(tiny_policy: Callable[..., Policy]) -> None:
    policy, training = tiny_policy(), TrainingConfig()
    trained = TrainableModel(Likelihood(policy, training, 1.0), training, Alone(), total_updates=1)
    samples = weighted(make_samples(SHAPES), CLIPPED)
    rows = pack_rows(samples, training, policy.device, policy.dtype, observed={samples[0].key})[1]
    (own,) = trained.forward_backward(rows, Conditions()).tokens.values()
    assert set(own) == {"logp", "entropy"} and len(own["logp"]) == samples[0].loss_tokens
