"""S6, correction weights for the gap between the engine that sampled (μ) and the trainer (π_old).

Never differentiated. They multiply the policy loss, not the KL term and not the entropy. A weight of 0 removes a token
from the gradient and leaves the denominators of S7 as they are. w_t = π_old / μ; several weights multiply ("tis+opsm").
Masks of tokens for other reasons than the gap, age and entropy, are here too: they act in the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kitae.algorithms.loss_tokens import TokenBatch, bounded_exp, log_ratio
from kitae.algorithms.regularisers import k3
from kitae.algorithms.requirements import Trait, has

if TYPE_CHECKING:
    from torch import Tensor


@has(Trait.NEUTRAL)
def none(tokens: TokenBatch) -> Tensor:
    """1."""
    return tokens.advantage_N.new_ones(len(tokens.advantage_N))


@has(Trait.MISMATCH)
def tis(tokens: TokenBatch, *, correction_floor: float, correction_cap: float) -> Tensor:
    """clip(w_t, correction_floor, correction_cap): truncated importance sampling."""
    return tokens.mismatch_N.clamp(correction_floor, correction_cap)


@has(Trait.MISMATCH)
def icepop(tokens: TokenBatch, *, correction_low: float, correction_high: float) -> Tensor:
    """w_t where correction_low ≤ w_t ≤ correction_high, else 0."""
    w_N = tokens.mismatch_N
    return w_N.where((w_N >= correction_low) & (w_N <= correction_high), w_N.new_zeros(()))


@has(Trait.MISMATCH)
def sequence_tis(tokens: TokenBatch, *, correction_floor: float, correction_cap: float) -> Tensor:
    """clip(Π w, correction_floor, correction_cap) of the whole sequence. The product grows with the length."""
    return _product(tokens).clamp(correction_floor, correction_cap)


@has(Trait.MISMATCH)
def geometric_tis(tokens: TokenBatch, *, correction_floor: float, correction_cap: float) -> Tensor:
    """clip(geometric mean of w over the sequence, correction_floor, correction_cap)."""
    return _geometric_mean(tokens).clamp(correction_floor, correction_cap)


@has(Trait.MISMATCH)
def sequence_mask(tokens: TokenBatch, *, correction_cap: float) -> Tensor:
    """Π w of the whole sequence where it is at most correction_cap, else 0."""
    product_N = _product(tokens)
    return product_N.where(product_N <= correction_cap, product_N.new_zeros(()))


def geometric(tokens: TokenBatch, *, geometric_low: float, geometric_high: float) -> Tensor:
    """1 where the geometric mean of w over the sequence lies in [geometric_low, geometric_high], else 0."""
    mean_N = _geometric_mean(tokens)
    return ((mean_N >= geometric_low) & (mean_N <= geometric_high)).to(mean_N.dtype)


def veto(tokens: TokenBatch, *, veto_low: float, veto_high: float) -> Tensor:
    """0 for the whole sequence where any of its w_t lies outside of [veto_low, veto_high], else 1."""
    w_N = tokens.mismatch_N
    outliers_N = tokens.sums(((w_N < veto_low) | (w_N > veto_high)).to(w_N.dtype))
    return (outliers_N == 0).to(w_N.dtype)


def k2_mask(tokens: TokenBatch, *, drift_limit: float) -> Tensor:
    """1 where the mean of (log w)² / 2 over the sequence is at most drift_limit, else 0."""
    mean_N = tokens.means(tokens.log_mismatch_N**2 / 2)
    return (mean_N <= drift_limit).to(mean_N.dtype)


def k3_mask(tokens: TokenBatch, *, drift_limit: float) -> Tensor:
    """1 where the mean of w − 1 − log w over the sequence, an estimate of KL(μ ‖ π_old), is at most drift_limit."""
    mean_N = tokens.means(k3(-tokens.log_mismatch_N))
    return (mean_N <= drift_limit).to(mean_N.dtype)


def high_entropy(tokens: TokenBatch, *, entropy_share: float) -> Tensor:
    """1 for the entropy_share of each sequence's tokens at which π_θ has the highest entropy, else 0."""
    entropy_N = tokens.entropy_N.detach()
    lengths_N = tokens.sums(entropy_N.new_ones(len(entropy_N)))
    return (tokens.ranks(entropy_N) < entropy_share * lengths_N).to(entropy_N.dtype)


def opsm(tokens: TokenBatch, *, opsm_limit: float) -> Tensor:
    """0 where A < 0 and the mean of log μ − log π_θ over the sequence exceeds opsm_limit, else 1."""
    drift_N = sequence_drift(tokens, tokens.behaviour_N)
    return (~((tokens.advantage_N < 0) & (drift_N > opsm_limit))).to(drift_N.dtype)


def age(tokens: TokenBatch, *, age_limit: int) -> Tensor:
    """1 where the token was sampled at most age_limit versions before the policy being trained, else 0."""
    assert tokens.lag_N is not None, "the trainer knows the versions"
    return (tokens.lag_N - 1 <= age_limit).to(tokens.advantage_N.dtype)


@has(Trait.MISMATCH | Trait.LIVE)
def total(tokens: TokenBatch, *, correction_cap: float) -> Tensor:
    """min(ρ_t, correction_cap) with ρ = π_θ / μ; for gates that carry no ratio of their own."""
    return bounded_exp(log_ratio(tokens.logp_N.detach(), tokens.behaviour_N)).clamp(max=correction_cap)


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
