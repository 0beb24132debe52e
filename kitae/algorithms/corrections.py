"""S6, correction weights for the gap between the engine that sampled (μ) and the trainer (π_old).

Never differentiated. They multiply the policy loss, not the KL term and not the entropy. A weight of 0 removes a token
from the gradient and leaves the denominators of S7 as they are. w_t = π_old / μ; several weights multiply ("tis+opsm").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kitae.algorithms.tokens import TokenBatch, bounded_exp, log_ratio

if TYPE_CHECKING:
    from torch import Tensor


def none(tokens: TokenBatch) -> Tensor:
    """1."""
    return tokens.advantage_N.new_ones(len(tokens.advantage_N))


def tis(tokens: TokenBatch, *, correction_cap: float) -> Tensor:
    """min(w_t, correction_cap): truncated importance sampling."""
    return tokens.mismatch_N.clamp(max=correction_cap)


def icepop(tokens: TokenBatch, *, correction_low: float, correction_high: float) -> Tensor:
    """w_t where correction_low ≤ w_t ≤ correction_high, else 0."""
    w_N = tokens.mismatch_N
    return w_N.where((w_N >= correction_low) & (w_N <= correction_high), w_N.new_zeros(()))


def sequence_tis(tokens: TokenBatch, *, correction_cap: float) -> Tensor:
    """min(Π w, correction_cap) of the whole sequence. The product grows with the length."""
    return _product(tokens).clamp(max=correction_cap)


def sequence_mask(tokens: TokenBatch, *, correction_cap: float) -> Tensor:
    """Π w of the whole sequence where it is at most correction_cap, else 0."""
    product_N = _product(tokens)
    return product_N.where(product_N <= correction_cap, product_N.new_zeros(()))


def geometric(tokens: TokenBatch, *, geometric_low: float, geometric_high: float) -> Tensor:
    """1 where the geometric mean of w over the sequence lies in [geometric_low, geometric_high], else 0."""
    mean_N = bounded_exp(tokens.means(tokens.log_mismatch_N))
    return ((mean_N >= geometric_low) & (mean_N <= geometric_high)).to(mean_N.dtype)


def opsm(tokens: TokenBatch, *, opsm_limit: float) -> Tensor:
    """0 where A < 0 and the mean of log μ − log π_θ over the sequence exceeds opsm_limit, else 1."""
    drift_N = sequence_drift(tokens, tokens.behaviour_N)
    return (~((tokens.advantage_N < 0) & (drift_N > opsm_limit))).to(drift_N.dtype)


def age(tokens: TokenBatch, *, age_limit: int) -> Tensor:
    """1 where the token was sampled at most age_limit versions before the policy being trained, else 0."""
    assert tokens.lag_N is not None, "the trainer knows the versions"
    return (tokens.lag_N - 1 <= age_limit).to(tokens.advantage_N.dtype)


def total(tokens: TokenBatch, *, correction_cap: float) -> Tensor:
    """min(ρ_t, correction_cap) with ρ = π_θ / μ; for gates that carry no ratio of their own."""
    return bounded_exp(log_ratio(tokens.logp_N.detach(), tokens.behaviour_N)).clamp(max=correction_cap)


CORRECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "sequence-tis": sequence_tis,
    "sequence-mask": sequence_mask,
    "geometric": geometric,
    "opsm": opsm,
    "age": age,
    "total": total,
}


def sequence_drift(tokens: TokenBatch, anchor_N: Tensor) -> Tensor:
    """Mean over each sequence of log π_anchor − log π_θ: an estimate of KL(anchor ‖ θ) that may be negative."""
    return tokens.means(log_ratio(anchor_N, tokens.logp_N.detach()))


def _product(tokens: TokenBatch) -> Tensor:
    return bounded_exp(tokens.sums(tokens.log_mismatch_N))
