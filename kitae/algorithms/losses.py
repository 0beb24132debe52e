"""S5, gates: (ratio, advantage) → loss per token, before correction weights and aggregation."""

import torch
from torch import Tensor


def clip_loss(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float, dual: float = 0.0) -> Tensor:
    """PPO's pessimistic clip; `dual` > 0 also caps the ratio of tokens with negative advantage.

    The gradient is exactly 0 where A > 0 and r > 1 + high, where A < 0 and r < 1 - low, and where A < 0 and r > dual.
    """
    clipped = ratio_N.clamp(1 - low, 1 + high)
    loss = torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped)
    if dual > 0:
        loss = torch.where(advantage_N < 0, torch.minimum(loss, -advantage_N * dual), loss)
    return loss


def ungated_loss(ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """-A r: the importance-weighted policy gradient without a trust region."""
    return -advantage_N * ratio_N


def clip_shares(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float, dual: float) -> dict[str, Tensor]:
    """Which tokens lost their gradient, by cause."""
    return {
        "clip_low": (advantage_N < 0) & (ratio_N < 1 - low),
        "clip_high": (advantage_N > 0) & (ratio_N > 1 + high),
        "clip_dual": (advantage_N < 0) & (ratio_N > dual) if dual > 0 else torch.zeros_like(ratio_N, dtype=torch.bool),
    }
