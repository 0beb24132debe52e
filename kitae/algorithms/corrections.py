"""S6, correction weights for the gap between the engine that sampled (μ) and the trainer (π_old).

The weights are never differentiated. They multiply the policy loss, not the KL term and not the entropy. A weight of 0
removes a token from the gradient and leaves the denominators of S7 as they are. w_t = π_old / μ; several corrections
are multiplied ("tis+opsm"). Masks of tokens for other reasons than the gap, which are age and entropy, are here too,
because they act in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from kitae.algorithms.loss_tokens import TokenBatch, bounded_exp, log_ratio
from kitae.algorithms.regularisers import k3
from kitae.algorithms.requirements import Rule, Trait, has, refuses

if TYPE_CHECKING:
    from torch import Tensor

Floor = Annotated[float, Field(ge=0, le=1, description="Smallest weight.")]
Cap = Annotated[float, Field(gt=0, description="Largest weight.")]
Bottom = Annotated[float, Field(ge=0, le=1, description="Sequences of a smaller weight are dropped.")]
Low = Annotated[float, Field(ge=0, description="Smaller weights become 0.")]
High = Annotated[float, Field(gt=0, description="Larger weights become 0.")]
GeometricLow = Annotated[float, Field(ge=0, description="Smallest accepted mean weight of a response.")]
GeometricHigh = Annotated[float, Field(gt=0, description="Largest accepted mean weight of a response.")]
VetoLow = Annotated[float, Field(ge=0, description="A smaller weight of one token drops its response.")]
VetoHigh = Annotated[float, Field(gt=0, description="A larger weight of one token drops its response.")]
DriftLimit = Annotated[float, Field(gt=0, description="Largest accepted mean k2 or k3 of a response.")]
EntropyShare = Annotated[
    float, Field(gt=0, le=1, description="Share of each response's tokens that is trained on, by entropy.")
]
DropLimit = Annotated[float, Field(ge=0, description="Drift at which a wrong response is dropped.")]
AgeLimit = Annotated[int, Field(ge=0, description="Versions; older tokens are dropped.")]


def _cap_of_at_least_one(s: Mapping[str, Any]) -> Iterator[str]:
    if s["cap"] < 1:
        yield f"cap must be at least 1, got {s['cap']:g}: the weights lie around 1"


def _band(low: str, high: str) -> Rule:
    """Where engine and trainer agree every weight is 1: a band without 1 would drop the tokens that are right."""

    def rule(s: Mapping[str, Any]) -> Iterator[str]:
        a, b = s[low], s[high]
        if a >= b:
            yield f"{low} must be below {high} = {b:g}, got {a:g}"
        for key, value, outside, limit in ((low, a, a > 1, "at most"), (high, b, b < 1, "at least")):
            if outside:
                yield f"{key} must be {limit} 1, got {value:g}: where engine and trainer agree, the weight is 1"

    return rule


@has(Trait.NEUTRAL)
def none(tokens: TokenBatch) -> Tensor:
    """1."""
    return tokens.advantage_N.new_ones(len(tokens.advantage_N))


@has(Trait.MISMATCH)
@refuses(_cap_of_at_least_one)
def tis(tokens: TokenBatch, *, floor: Floor = 0.0, cap: Cap = 2.0) -> Tensor:
    """clip(w_t, floor, cap): truncated importance sampling."""
    return tokens.mismatch_N.clamp(floor, cap)


@has(Trait.MISMATCH)
@refuses(_band("low", "high"))
def icepop(tokens: TokenBatch, *, low: Low = 0.5, high: High = 5.0) -> Tensor:
    """w_t where low ≤ w_t ≤ high, else 0."""
    w_N = tokens.mismatch_N
    return w_N.where((w_N >= low) & (w_N <= high), w_N.new_zeros(()))


@has(Trait.MISMATCH)
@refuses(_cap_of_at_least_one)
def sequence_tis(tokens: TokenBatch, *, floor: Floor = 0.0, cap: Cap = 2.0) -> Tensor:
    """clip(Π w, floor, cap) of the whole sequence. The product grows with the length."""
    return _product(tokens).clamp(floor, cap)


@has(Trait.MISMATCH)
@refuses(_cap_of_at_least_one)
def geometric_tis(tokens: TokenBatch, *, floor: Floor = 0.0, cap: Cap = 2.0) -> Tensor:
    """clip(geometric mean of w over the sequence, floor, cap)."""
    return _geometric_mean(tokens).clamp(floor, cap)


@has(Trait.MISMATCH)
@refuses(_cap_of_at_least_one)
def sequence_mask(tokens: TokenBatch, *, bottom: Bottom = 0.0, cap: Cap = 2.0) -> Tensor:
    """Π w of the whole sequence where it is at least bottom and at most cap, else 0."""
    product_N = _product(tokens)
    return product_N.where((product_N >= bottom) & (product_N <= cap), product_N.new_zeros(()))


@refuses(_band("geometric_low", "geometric_high"))
def geometric(
    tokens: TokenBatch, *, geometric_low: GeometricLow = 0.99, geometric_high: GeometricHigh = 1.01
) -> Tensor:
    """1 where the geometric mean of w over the sequence lies in [geometric_low, geometric_high], else 0."""
    mean_N = _geometric_mean(tokens)
    return ((mean_N >= geometric_low) & (mean_N <= geometric_high)).to(mean_N.dtype)


@refuses(_band("veto_low", "veto_high"))
def veto(tokens: TokenBatch, *, veto_low: VetoLow = 1e-4, veto_high: VetoHigh = 1e4) -> Tensor:
    """0 for the whole sequence where any of its w_t lies outside of [veto_low, veto_high], else 1."""
    w_N = tokens.mismatch_N
    outliers_N = tokens.sums(((w_N < veto_low) | (w_N > veto_high)).to(w_N.dtype))
    return (outliers_N == 0).to(w_N.dtype)


def k2_mask(tokens: TokenBatch, *, drift_limit: DriftLimit = 0.01) -> Tensor:
    """1 where the mean of (log w)² / 2 over the sequence is at most drift_limit, else 0."""
    mean_N = tokens.means(tokens.log_mismatch_N**2 / 2)
    return (mean_N <= drift_limit).to(mean_N.dtype)


def k3_mask(tokens: TokenBatch, *, drift_limit: DriftLimit = 0.01) -> Tensor:
    """1 where the mean of w − 1 − log w over the sequence, an estimate of KL(μ ‖ π_old), is at most drift_limit."""
    mean_N = tokens.means(k3(-tokens.log_mismatch_N))
    return (mean_N <= drift_limit).to(mean_N.dtype)


def high_entropy(tokens: TokenBatch, *, entropy_share: EntropyShare = 0.2) -> Tensor:
    """1 for the entropy_share of each sequence's tokens at which π_θ has the highest entropy, else 0."""
    entropy_N = tokens.entropy_N.detach()
    lengths_N = tokens.sums(entropy_N.new_ones(len(entropy_N)))
    return (tokens.ranks(entropy_N) < entropy_share * lengths_N).to(entropy_N.dtype)


def opsm(tokens: TokenBatch, *, opsm_limit: DropLimit = 1e-4) -> Tensor:
    """0 where A < 0 and the mean of log μ − log π_θ over the sequence exceeds opsm_limit, else 1."""
    drift_N = sequence_drift(tokens, tokens.behaviour_N)
    return (~((tokens.advantage_N < 0) & (drift_N > opsm_limit))).to(drift_N.dtype)


def age(tokens: TokenBatch, *, age_limit: AgeLimit = 4) -> Tensor:
    """1 where the token was sampled at most age_limit versions before the policy being trained, else 0."""
    assert tokens.lag_N is not None, "the trainer knows the versions"
    return (tokens.lag_N - 1 <= age_limit).to(tokens.advantage_N.dtype)


@has(Trait.MISMATCH | Trait.LIVE)
@refuses(_cap_of_at_least_one)
def total(tokens: TokenBatch, *, cap: Cap = 2.0) -> Tensor:
    """min(ρ_t, cap) with ρ = π_θ / μ; for gates that carry no ratio of their own."""
    return bounded_exp(log_ratio(tokens.logp_N.detach(), tokens.behaviour_N)).clamp(max=cap)


CORRECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "sequence-tis": sequence_tis,
    "sequence-mask": sequence_mask,
    "geometric-tis": geometric_tis,
    "geometric": geometric,
    "veto": veto,
    "k2-mask": k2_mask,
    "k3-mask": k3_mask,
    "opsm": opsm,
    "age": age,
    "high-entropy": high_entropy,
    "total": total,
}


def sequence_drift(tokens: TokenBatch, anchor_N: Tensor) -> Tensor:
    """Mean over each sequence of log π_anchor − log π_θ: an estimate of KL(anchor ‖ θ) that may be negative."""
    return tokens.means(log_ratio(anchor_N, tokens.logp_N.detach()))


def _geometric_mean(tokens: TokenBatch) -> Tensor:
    return bounded_exp(tokens.means(tokens.log_mismatch_N))


def _product(tokens: TokenBatch) -> Tensor:
    return bounded_exp(tokens.sums(tokens.log_mismatch_N))
