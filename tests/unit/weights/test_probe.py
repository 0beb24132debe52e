"""The probe is a function of the weights, and sees what is no number."""

import math
from collections.abc import Callable

import torch

from kitae.models.policy import Policy
from kitae.weights.probe import Probe, probe_tolerance, score_probe


def test_the_gap() -> None:
    probe = Probe(3, (-1.0, -2.0))
    assert probe.gap((-1.0, -2.0)) == 0 and probe.gap((-1.5, -1.9)) == 0.5
    assert probe.gap((-1.0, math.nan)) == math.inf and Probe(3, (-math.inf,)).gap((-1.0,)) == math.inf


def test_it_scores_the_weights(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy()
    before = score_probe(policy)
    assert len(before) == 15 and score_probe(policy) == before
    with torch.no_grad():
        next(policy.model.parameters()).add_(0.1)
    assert Probe(0, before).gap(score_probe(policy)) > 1e-4


def test_rounding_explains_more_in_few_bits(tiny_policy: Callable[..., Policy]) -> None:
    assert probe_tolerance(torch.float32) == 1e-2 and probe_tolerance(torch.bfloat16) == 0.5
