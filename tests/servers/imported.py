"""The same batch through a peer's loss and through the recipe that Kitae imports from the peer's settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kitae.algorithms.control import Control
from kitae.algorithms.group_stages import Candidate, GroupStages
from kitae.algorithms.loss import PolicyLoss
from kitae.algorithms.loss_tokens import TokenBatch
from kitae.config.recipe import make_config
from kitae.config.root import RLConfig
from kitae.importers.translation import Translation
from kitae.observe.meter import Meter
from kitae.types import Group, Message, Prompt, Rollout, Score, Segment

GROUP, PROMPTS, LIMIT = 4, 3, 9


def make_batch(seed: int, drift: float) -> dict[str, Any]:
    """Three prompts of four answers, two to nine tokens long. drift: how far the four policies are apart."""
    random = np.random.default_rng(seed)
    lengths = [int(n) for n in random.integers(2, LIMIT + 1, GROUP * PROMPTS)]
    logp = [(-random.uniform(0.05, 3.0, n)).tolist() for n in lengths]

    def near(rows: list[list[float]], scale: float) -> list[list[float]]:
        return [[min(-1e-3, x + float(random.normal(0, scale))) for x in row] for row in rows]

    old = near(logp, drift)
    right = random.integers(0, 2, GROUP * PROMPTS).astype(float)
    right[:GROUP] = [1, 0, 0, 1]
    return {
        "group": GROUP, "limit": LIMIT, "logp": logp, "old": old, "mu": near(old, drift / 2),
        "ref": near(logp, 2 * drift),
        "entropy": [random.uniform(0.1, 2, n).tolist() for n in lengths],
        "value": [random.uniform(0, 1, n).tolist() for n in lengths],
        "greedy": [1.0, 0.0, 0.5], "truncated": [n == LIMIT for n in lengths],
        "rewards": {"right": right.tolist(), "style": random.uniform(0, 1, GROUP * PROMPTS).round(3).tolist()},
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    loss: float
    grad: list[list[float]]
    entropy_grad: list[list[float]]


def of_recipe(t: Translation, batch: Mapping[str, Any], rewards: Sequence[str], weights: Sequence[float]) -> Result:
    config = make_config({**t.recipe, "data": {"task": "reverse"}})
    assert isinstance(config, RLConfig)
    algorithm, limit = config.algorithm, batch["limit"]
    stages, loss = GroupStages(algorithm, limit), PolicyLoss(algorithm, limit)
    coefficients = Control(algorithm).coefficients
    candidates = [
        _with_columns(c, batch) for c in stages.candidates(_groups(batch, rewards, weights, stages.wants_greedy))
    ]
    samples = stages.weighted(stages.advantages(candidates, coefficients.kl))
    order = [s.group * batch["group"] + s.index for s in samples]
    chosen = {name: _column(batch[name], order) for name in ("logp", "old", "mu", "ref", "entropy")}
    logp, entropy = chosen["logp"].requires_grad_(), chosen["entropy"].requires_grad_()
    tokens = TokenBatch(
        logp_N=logp, entropy_N=entropy, logp_old_N=chosen["old"], logp_mu_N=chosen["mu"], logp_ref_N=chosen["ref"],
        advantage_N=torch.from_numpy(np.concatenate([s.loss("advantage") for s in samples])),
        weight_N=torch.from_numpy(np.concatenate([s.weight_T[s.mask_T] for s in samples])),
        sample_N=torch.tensor([i for i, k in enumerate(order) for _ in batch["logp"][k]]), sequences=len(order),
        lag_N=None, score_N=None, cov_rank_N=None,
    )  # fmt: skip
    total = loss(tokens, coefficients, Meter())
    grads = torch.autograd.grad(total, (logp, entropy), allow_unused=True)
    return Result(float(total.detach()), *(_rows(g, order, batch["logp"]) for g in grads))


def _groups(batch: Mapping[str, Any], rewards: Sequence[str], weights: Sequence[float], greedy: bool) -> list[Group]:
    groups = []
    for group in range(len(batch["logp"]) // batch["group"]):
        rollouts = []
        for index in range(batch["group"]):
            k = group * batch["group"] + index
            parts = {name: batch["rewards"][name][k] for name in rewards if batch["rewards"][name][k] is not None}
            value = sum(w * parts[name] for name, w in zip(rewards, weights, strict=True) if name in parts)
            rollouts.append(_rollout(batch, group, index, k, Score(float(value), parts)))
        best = _rollout(batch, group, -1, 0, Score(batch["greedy"][group])) if greedy else None
        groups.append(Group(group, Prompt(f"p/{group}", (Message("user", "?"),), ""), tuple(rollouts), best))
    return groups


def _rollout(batch: Mapping[str, Any], group: int, index: int, k: int, score: Score) -> Rollout:
    count = len(batch["logp"][k])
    segment = Segment("model", (5,) * count, tuple(batch["mu"][k]), (0,) * count)
    finish: Any = "length" if batch["truncated"][k] else "stop"
    return Rollout.of(group, index, (1,), (segment,), finish, "", score)


def _with_columns(c: Candidate, batch: Mapping[str, Any]) -> Candidate:
    k = c.group * batch["group"] + c.index
    for column, name in (("logp_old", "old"), ("logp_ref", "ref"), ("value", "value")):
        c = c.with_column(column, np.array(batch[name][k], dtype=np.float32))
    return c


def _column(rows: Sequence[Sequence[float]], order: Sequence[int]) -> torch.Tensor:
    return torch.tensor([x for k in order for x in rows[k]])


def _rows(grad: torch.Tensor | None, order: Sequence[int], like: Sequence[Sequence[float]]) -> list[list[float]]:
    found = [[0.0] * len(row) for row in like]
    at = 0
    for k in order if grad is not None else ():
        found[k] = grad[at : at + len(like[k])].tolist()
        at += len(like[k])
    return found
