"""S6, correction weights for the gap between the engine that sampled (μ) and the trainer (π_old); no gradient."""

import torch
from torch import Tensor

from kitae.algorithms.ratios import token_ratio


def mismatch_ratio(logp_old_N: Tensor, logp_mu_N: Tensor) -> Tensor:
    """w = π_old / μ of each token; 1 where the engine's log-prob is missing (NaN)."""
    ratio = token_ratio(logp_old_N.detach(), logp_mu_N)
    return torch.where(torch.isfinite(logp_mu_N), ratio, torch.ones_like(ratio))


def truncated(ratio_N: Tensor, cap: float) -> Tensor:
    """TIS: min(w, cap)."""
    return ratio_N.clamp(max=cap)


def effective_sample_size(weights_N: Tensor) -> Tensor:
    """(Σ w)² / (n Σ w²): 1 when all weights are equal."""
    return weights_N.sum() ** 2 / (len(weights_N) * (weights_N**2).sum()).clamp(min=1e-20)
