"""Worked examples, and the way from rewards to a loss that the trainer goes too: Group → Sample → Batch → tokens.

Fixture P: two responses to one prompt, with advantages +1 and -1, every token at π_old = 0.2. The rewards 1 and -1
give those advantages under group-centred.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitae.algorithms.objective import Objective, TokenBatch
from kitae.config import AlgorithmConfig
from kitae.data.packing import collate
from kitae.observe.meter import Meter
from kitae.types import Group, Message, Prompt, Rollout, Sample, Score, Segment

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "algorithm_examples.json").read_text())
P: dict[str, Any] = EXAMPLES["fixtureP"]

PLAIN = {"advantage": "group-centred", "correction": "none", "aggregation": "token-mean"}
"""PPO's clip at .2 without a correction; what a test is about goes on top."""


def make_objective(max_tokens: int = 8, **choices: Any) -> Objective:
    return Objective(AlgorithmConfig.model_validate(choices), max_tokens)


def make_rollout(
    reward: float | None,
    logp_mu: Sequence[float] = (-1.0,),
    *,
    group: int = 0,
    index: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
) -> Rollout:
    """One response of as many tokens as there are log-probs; reward None is a verifier that failed."""
    n = len(logp_mu)
    segment = Segment("model", tuple(range(10, 10 + n)), tuple(logp_mu), (0,) * n)
    score = Score.error("no verdict") if reward is None else Score(reward)
    return Rollout(group, index, tuple(prompt), (segment,), "stop", "", score)


def make_group(rewards: Sequence[float | None], *, group: int = 0, lengths: Sequence[int] | None = None) -> Group:
    sizes = lengths or [1] * len(rewards)
    rollouts = [
        make_rollout(r, [-1.0] * n, group=group, index=i) for i, (r, n) in enumerate(zip(rewards, sizes, strict=True))
    ]
    return Group(group, Prompt(f"p/{group}", (Message("user", "?"),), "x"), tuple(rollouts))


def group_p() -> Group:
    rollouts = tuple(
        make_rollout(reward, logp_mu, index=i)
        for i, (reward, logp_mu) in enumerate(zip(P["adv"], P["logp_mu"], strict=True))
    )
    return Group(0, Prompt("p/0", (Message("user", "?"),), "x"), rollouts)


RATIOS_P: list[list[float]] = P["ratio"]


def as_tokens(
    samples: Sequence[Sample], ratios: Sequence[Sequence[float]], logp_old: float = P["logp_old"]
) -> TokenBatch:
    """The loss tokens of a batch, laid out by the packer, with log-probs that give these ratios to π_old."""
    with_old = [replace(s, logp_old_T=np.where(s.mask_T, np.float32(logp_old), np.float32(0))) for s in samples]
    micro = collate(with_old, torch.device("cpu"))
    assert micro.logp_old_N is not None
    logp_N = torch.tensor([logp_old + math.log(r) for row in ratios for r in row]).requires_grad_()
    return TokenBatch(
        logp_N=logp_N,
        entropy_N=torch.zeros_like(logp_N),
        logp_old_N=micro.logp_old_N,
        logp_mu_N=micro.logp_mu_N,
        advantage_N=micro.advantage_N,
        weight_N=micro.weight_N,
    )


def tokens_p(objective: Objective) -> TokenBatch:
    return as_tokens(objective.batch(objective.samples(group_p())).samples, RATIOS_P)


def part(tokens: TokenBatch, index: slice | list[int]) -> TokenBatch:
    """Some of the tokens, as a micro-batch of their own; gradients still reach the whole."""
    return TokenBatch(
        tokens.logp_N[index],
        tokens.entropy_N[index],
        tokens.logp_old_N[index],
        tokens.logp_mu_N[index],
        tokens.advantage_N[index],
        tokens.weight_N[index],
    )


def loss_of(objective: Objective, tokens: TokenBatch) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, d loss / d logp and metrics."""
    meter = Meter()
    loss = objective.loss(tokens, meter)
    (gradient_N,) = torch.autograd.grad(loss, tokens.logp_N, retain_graph=True)
    return loss.item(), gradient_N, meter.result()


def flat(nested: Sequence[Sequence[float]]) -> list[float]:
    return [x for row in nested for x in row]
