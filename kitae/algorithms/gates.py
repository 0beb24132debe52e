"""S5, gates: (ratio, advantage) → loss per token, before correction weights and aggregation.

Losses are minimised. Gates that end in `A log π` weight the plain policy gradient by a detached number: their value
means nothing, their gradient is that number times −A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kitae.algorithms.loss_tokens import TokenBatch
from kitae.algorithms.requirements import Trait, has

if TYPE_CHECKING:
    from torch import Tensor


@has(Trait.SLOPE | Trait.BAND)
def clip(ratio_N: Tensor, tokens: TokenBatch, *, clip_low: float, clip_high: float, dual_clip: float) -> Tensor:
    """max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high)); dual_clip c > 0: at most −A c where A < 0.

    The gradient is exactly 0 where A > 0 and r > 1 + clip_high, where A < 0 and r < 1 − clip_low, and where A < 0 and
    r > c.
    """
    advantage_N = tokens.advantage_N
    loss_N = (-advantage_N * ratio_N).maximum(-advantage_N * ratio_N.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip > 0:
        loss_N = loss_N.minimum(-advantage_N * dual_clip).where(advantage_N < 0, loss_N)
    return loss_N


@has(Trait.SLOPE)
def ungated(ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """−A r: the importance-weighted policy gradient without a trust region."""
    return -tokens.advantage_N * ratio_N


@has(Trait.RATIOLESS | Trait.UNWEIGHTED)
def likelihood(ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """−A log π_θ: REINFORCE; no ratio at all."""
    return -tokens.advantage_N * tokens.logp_N


def weight_clip(ratio_N: Tensor, tokens: TokenBatch, *, weight_floor: float, weight_cap: float) -> Tensor:
    """−sg[clip(r, weight_floor, weight_cap)] A log π_θ: the weight is bounded, no token loses its gradient."""
    return -ratio_N.detach().clamp(weight_floor, weight_cap) * tokens.advantage_N * tokens.logp_N


@has(Trait.BAND | Trait.UNWEIGHTED)
def mask(ratio_N: Tensor, tokens: TokenBatch, *, clip_low: float, clip_high: float) -> Tensor:
    """−M A log π_θ with M = 0 where PPO's clip would stop the gradient; the ratio only decides, S6 weights."""
    r_N, advantage_N = ratio_N.detach(), tokens.advantage_N
    stopped_N = ((advantage_N > 0) & (r_N > 1 + clip_high)) | ((advantage_N < 0) & (r_N < 1 - clip_low))
    return (-advantage_N * tokens.logp_N).masked_fill(stopped_N, 0.0)


@has(Trait.SINGLE)
def divergence_mask(ratio_N: Tensor, tokens: TokenBatch, *, tv_limit: float) -> Tensor:
    """−M A r with M = 0 where r moves away from 1 with A and |π_θ − π_anchor| of the token exceeds tv_limit."""
    advantage_N, r_N = tokens.advantage_N, ratio_N.detach()
    probability_N = tokens.logp_N.detach().exp()
    far_N = (probability_N - probability_N / r_N).abs() > tv_limit
    away_N = ((advantage_N > 0) & (r_N > 1)) | ((advantage_N < 0) & (r_N < 1))
    return (-advantage_N * ratio_N).masked_fill(far_N & away_N, 0.0)


@has(Trait.SLOPE)
def sigmoid(ratio_N: Tensor, tokens: TokenBatch, *, tau_positive: float, tau_negative: float) -> Tensor:
    """−A (4/τ) σ(τ (r − 1)) with τ by the sign of A; the gradient at r = 1 is −A for every τ."""
    advantage_N = tokens.advantage_N
    tau_N = advantage_N.new_full((), tau_positive).where(advantage_N > 0, advantage_N.new_full((), tau_negative))
    return -advantage_N * (4 / tau_N) * (tau_N * (ratio_N - 1)).sigmoid()


def asymmetric(
    ratio_N: Tensor, tokens: TokenBatch, *, weight_floor: float, weight_cap: float, reject_below: float
) -> Tensor:
    """−sg[W] A log π_θ with W = min(r, weight_cap) where A > 0, clip(r, weight_floor, 1) where A < 0.

    W = 0 where r < reject_below: a floor would lift a token that the policy has all but given up.
    """
    r_N, advantage_N = ratio_N.detach(), tokens.advantage_N
    weight_N = r_N.clamp(max=weight_cap).where(advantage_N > 0, r_N.clamp(weight_floor, 1.0))
    return -weight_N.masked_fill(r_N < reject_below, 0.0) * advantage_N * tokens.logp_N


@has(Trait.SINGLE)
def geometric_clip(ratio_N: Tensor, tokens: TokenBatch, *, clip_low: float, clip_high: float) -> Tensor:
    """−A exp(mean_t of the pessimistic log r_t), each log-ratio clipped to [−clip_low, clip_high] by the sign of A."""
    advantage_N = tokens.advantage_N
    log_N = ratio_N.log()
    pessimistic_N = log_N.clamp(max=clip_high).where(advantage_N > 0, log_N.clamp(min=-clip_low))
    return -advantage_N * tokens.means(pessimistic_N).exp()


@has(Trait.SLOPE | Trait.SINGLE | Trait.COVARIANCE)
def clip_cov(
    ratio_N: Tensor, tokens: TokenBatch, *, clip_low: float, clip_high: float, dual_clip: float, cov_share: float
) -> Tensor:
    """`clip`, but 0 for the cov_share of the step's tokens whose covariance of log μ and A is highest."""
    clipped_N = clip(ratio_N, tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return clipped_N.masked_fill(_highest_covariance(tokens, cov_share), 0.0)


@has(Trait.SLOPE | Trait.SINGLE | Trait.COVARIANCE)
def kl_cov(ratio_N: Tensor, tokens: TokenBatch, *, cov_share: float, cov_coef: float) -> Tensor:
    """−A r, plus cov_coef |log r| for the cov_share of the step's tokens whose covariance of log μ and A is highest."""
    held_N = _highest_covariance(tokens, cov_share)
    return -tokens.advantage_N * ratio_N + cov_coef * ratio_N.log().abs().masked_fill(~held_N, 0.0)


@has(Trait.RATIOLESS | Trait.DIVERGENCE)
def divergence(ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """D(π_teacher, π_θ) over the whole vocabulary at the token: no ratio, no advantage."""
    assert tokens.divergence_N is not None
    return tokens.divergence_N


def _highest_covariance(tokens: TokenBatch, share: float) -> Tensor:
    assert tokens.cov_rank_N is not None, "the objective ranks the tokens of a step for these gates"
    return tokens.cov_rank_N < share


GATES: Mapping[str, Callable[..., Tensor]] = {
    "clip": clip,
    "none": ungated,
    "likelihood": likelihood,
    "weight-clip": weight_clip,
    "mask": mask,
    "divergence-mask": divergence_mask,
    "sigmoid": sigmoid,
    "asymmetric": asymmetric,
    "geometric-clip": geometric_clip,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
    "divergence": divergence,
}
