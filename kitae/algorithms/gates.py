"""S5, gates: (ratio, advantage) → loss of each token, before correction weights and aggregation.

Losses are minimised. A gate that ends in `A log π` weights the plain policy gradient by a detached number: the value of
such a loss means nothing, its gradient is that number times −A.

A gate is added here alone: a function, its settings as keyword arguments with limits and defaults, and its name in
`GATES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from kitae.algorithms.loss_tokens import TokenBatch
from kitae.algorithms.requirements import Trait, has, refuses

if TYPE_CHECKING:
    from torch import Tensor

ClipLow = Annotated[float, Field(gt=0, lt=1, description="Ratios below 1 - clip_low are clipped.")]
ClipHigh = Annotated[float, Field(gt=0, description="Ratios above 1 + clip_high are clipped.")]
DualClip = Annotated[float, Field(ge=0, description="Cap of the ratio for negative advantages; 0: off.")]
WeightFloor = Annotated[float, Field(ge=0, le=1, description="Smallest weight.")]
WeightCap = Annotated[float, Field(gt=0, description="Largest weight, as a ratio (not as 1 + ε).")]
TVLimit = Annotated[float, Field(gt=0, lt=1, description="Largest change of a token's probability.")]
TauPositive = Annotated[float, Field(gt=0, description="Sharpness of the sigmoid where A > 0.")]
TauNegative = Annotated[float, Field(gt=0, description="Sharpness of the sigmoid where A < 0.")]
RejectBelow = Annotated[float, Field(ge=0, lt=1, description="Ratios below this get weight 0.")]
CovShare = Annotated[
    float, Field(gt=0, le=1, description="Share of the step's tokens, those of highest covariance, that is held.")
]
KLLimit = Annotated[float, Field(gt=0, description="Largest KL of the two-way choice between a token and all others.")]
BothSides = Annotated[bool, Field(description="Mask a token that is too far off also where its ratio moves back to 1.")]
RatioCap = Annotated[float, Field(ge=0, description="Largest ratio that the gradient carries; 0: any.")]
Power = Annotated[float, Field(gt=0, description="How fast the weight grows with a small ratio.")]
Decay = Annotated[float, Field(gt=0, description="How fast the weight falls with a large ratio.")]
Pull = Annotated[float, Field(gt=0, description="Weight of the squared log-ratio.")]
CovCoef = Annotated[float, Field(ge=0, description="Weight of |log r| where kl-cov holds a token.")]


def _dual_clip_beyond_the_band(s: Mapping[str, Any]) -> Iterator[str]:
    if s["dual_clip"] and s["dual_clip"] <= 1 + s["clip_high"]:
        yield f"dual_clip must exceed 1 + clip_high = {1 + s['clip_high']:g}, got {s['dual_clip']:g}"


def _weights_around_one(s: Mapping[str, Any]) -> Iterator[str]:
    if s["weight_cap"] < 1:
        yield (
            f"weight_cap must be at least 1, got {s['weight_cap']:g}: it is a ratio, and a smaller cap would shrink "
            "every update"
        )
    if s.get("reject_below") and s["weight_floor"] and s["reject_below"] >= s["weight_floor"]:
        yield (
            f"reject_below must be below weight_floor = {s['weight_floor']:g}, got {s['reject_below']:g}: the floor "
            "would never act"
        )


@has(Trait.SLOPE | Trait.BAND)
@refuses(_dual_clip_beyond_the_band)
def clip(
    ratio_N: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip = 0.0,
) -> Tensor:
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


@refuses(_weights_around_one)
def weight_clip(
    ratio_N: Tensor, tokens: TokenBatch, *, weight_floor: WeightFloor = 0.0, weight_cap: WeightCap = 5.0
) -> Tensor:
    """−sg[clip(r, weight_floor, weight_cap)] A log π_θ: the weight is bounded, no token loses its gradient."""
    return -ratio_N.detach().clamp(weight_floor, weight_cap) * tokens.advantage_N * tokens.logp_N


@has(Trait.BAND | Trait.UNWEIGHTED)
def mask(ratio_N: Tensor, tokens: TokenBatch, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2) -> Tensor:
    """−M A log π_θ with M = 0 where PPO's clip would stop the gradient; the ratio only decides, S6 weights."""
    r_N, advantage_N = ratio_N.detach(), tokens.advantage_N
    stopped_N = ((advantage_N > 0) & (r_N > 1 + clip_high)) | ((advantage_N < 0) & (r_N < 1 - clip_low))
    return (-advantage_N * tokens.logp_N).masked_fill(stopped_N, 0.0)


@has(Trait.SINGLE)
def divergence_mask(
    ratio_N: Tensor,
    tokens: TokenBatch,
    *,
    tv_limit: TVLimit = 0.15,
    both_sides: BothSides = False,
    ratio_cap: RatioCap = 0.0,
) -> Tensor:
    """−M A r with M = 0 where r moves away from 1 with A and |π_θ − π_anchor| of the token exceeds tv_limit."""
    p_N, anchor_N = _probabilities(ratio_N, tokens)
    far_N = (p_N - anchor_N).abs() > tv_limit
    return _unless_far(ratio_N, tokens, far_N if both_sides else far_N & _away(ratio_N, tokens), ratio_cap)


@has(Trait.SINGLE)
def kl_mask(ratio_N: Tensor, tokens: TokenBatch, *, kl_limit: KLLimit = 0.05, ratio_cap: RatioCap = 0.0) -> Tensor:
    """−M A r with M = 0 where r moves away from 1 with A and p log(p/π) + (1−p) log((1−p)/(1−π)) exceeds kl_limit.

    p is the token's probability under the anchor: the divergence is that of the choice between it and all others.
    """
    p_N, anchor_N = _probabilities(ratio_N, tokens)
    rest_N, anchor_rest_N = (1 - p_N).clamp(min=1e-8), (1 - anchor_N).clamp(min=1e-8)
    kl_N = -anchor_N * ratio_N.detach().log() + (1 - anchor_N) * (anchor_rest_N / rest_N).log()
    return _unless_far(ratio_N, tokens, (kl_N > kl_limit) & _away(ratio_N, tokens), ratio_cap)


def _probabilities(ratio_N: Tensor, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """Of each token, under π_θ and under the anchor of the ratio."""
    p_N = tokens.logp_N.detach().exp()
    return p_N, p_N / ratio_N.detach()


def _away(ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """Where the update would move the ratio further from 1."""
    advantage_N = tokens.advantage_N
    return ((advantage_N > 0) & (ratio_N.detach() > 1)) | ((advantage_N < 0) & (ratio_N.detach() < 1))


def _unless_far(ratio_N: Tensor, tokens: TokenBatch, far_N: Tensor, cap: float) -> Tensor:
    bounded_N = ratio_N * (cap / ratio_N.detach()).clamp(max=1) if cap else ratio_N
    return (-tokens.advantage_N * bounded_N).masked_fill(far_N, 0.0)


@has(Trait.SLOPE)
def sigmoid(
    ratio_N: Tensor, tokens: TokenBatch, *, tau_positive: TauPositive = 1.0, tau_negative: TauNegative = 1.05
) -> Tensor:
    """−A (4/τ) σ(τ (r − 1)) with τ by the sign of A; the gradient at r = 1 is −A for every τ."""
    advantage_N = tokens.advantage_N
    tau_N = advantage_N.new_full((), tau_positive).where(advantage_N > 0, advantage_N.new_full((), tau_negative))
    return -advantage_N * (4 / tau_N) * (tau_N * (ratio_N - 1)).sigmoid()


@refuses(_weights_around_one)
def asymmetric(
    ratio_N: Tensor,
    tokens: TokenBatch,
    *,
    weight_floor: WeightFloor = 0.0,
    weight_cap: WeightCap = 5.0,
    reject_below: RejectBelow = 0.0,
) -> Tensor:
    """−sg[W] A log π_θ with W = min(r, weight_cap) where A > 0, clip(r, weight_floor, 1) where A < 0.

    W = 0 where r < reject_below: a floor would lift a token that the policy has all but given up.
    """
    r_N, advantage_N = ratio_N.detach(), tokens.advantage_N
    weight_N = r_N.clamp(max=weight_cap).where(advantage_N > 0, r_N.clamp(weight_floor, 1.0))
    return -weight_N.masked_fill(r_N < reject_below, 0.0) * advantage_N * tokens.logp_N


@has(Trait.SINGLE | Trait.SHARED)
def geometric_clip(
    ratio_N: Tensor, tokens: TokenBatch, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2
) -> Tensor:
    """−A exp(mean_t of the pessimistic log r_t), each log-ratio clipped to [−clip_low, clip_high] by the sign of A."""
    advantage_N = tokens.advantage_N
    log_N = ratio_N.log()
    pessimistic_N = log_N.clamp(max=clip_high).where(advantage_N > 0, log_N.clamp(min=-clip_low))
    return -advantage_N * tokens.means(pessimistic_N).exp()


@has(Trait.SLOPE | Trait.SINGLE | Trait.COVARIANCE)
@refuses(_dual_clip_beyond_the_band)
def clip_cov(
    ratio_N: Tensor,
    tokens: TokenBatch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip = 0.0,
    cov_share: CovShare = 2e-4,
) -> Tensor:
    """`clip`, but 0 for the cov_share of the step's tokens whose covariance of log μ and A is highest."""
    clipped_N = clip(ratio_N, tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return clipped_N.masked_fill(_highest_covariance(tokens, cov_share), 0.0)


@has(Trait.SLOPE | Trait.SINGLE | Trait.COVARIANCE)
def kl_cov(ratio_N: Tensor, tokens: TokenBatch, *, cov_share: CovShare = 2e-4, cov_coef: CovCoef = 1.0) -> Tensor:
    """−A r, plus cov_coef |log r| for the cov_share of the step's tokens whose covariance of log μ and A is highest."""
    held_N = _highest_covariance(tokens, cov_share)
    return -tokens.advantage_N * ratio_N + cov_coef * ratio_N.log().abs().masked_fill(~held_N, 0.0)


def gamma(
    ratio_N: Tensor,
    tokens: TokenBatch,
    *,
    power_positive: Power = 2.0,
    decay_positive: Decay = 3.0,
    power_negative: Power = 3.0,
    decay_negative: Decay = 2.0,
) -> Tensor:
    """−sg[r^k e^(λ (1 − r))] A log π_θ, k and λ by the sign of A: a weight of 1 at r = 1 that falls on both sides."""
    r_N, advantage_N = ratio_N.detach(), tokens.advantage_N
    good_N = advantage_N >= 0
    power_N = r_N.new_full((), power_positive).where(good_N, r_N.new_full((), power_negative))
    decay_N = r_N.new_full((), decay_positive).where(good_N, r_N.new_full((), decay_negative))
    return -(power_N * r_N.clamp(min=1e-8).log() + decay_N * (1 - r_N)).exp() * advantage_N * tokens.logp_N


@has(Trait.UNWEIGHTED | Trait.SINGLE)
def squared(ratio_N: Tensor, tokens: TokenBatch, *, pull: Pull = 0.1) -> Tensor:
    """−A log π_θ + pull (log r)² / 2: direct reward optimisation, which pulls to the anchor and clips nothing."""
    return -tokens.advantage_N * tokens.logp_N + pull / 2 * ratio_N.log().square()


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
    "kl-mask": kl_mask,
    "sigmoid": sigmoid,
    "asymmetric": asymmetric,
    "geometric-clip": geometric_clip,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
    "gamma": gamma,
    "squared": squared,
    "divergence": divergence,
}
