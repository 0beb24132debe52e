"""S8, regularisers: a KL term against a reference policy, and the controllers of its and the entropy's coefficient.

With d = log π − log π_ref: k1 = d, k2 = d²/2, k3 = e^−d − 1 + d, abs = |d|. As a loss, k1 has an expected gradient of
zero, k2 that of the reverse KL(π ‖ ref), k3 that of the forward KL(ref ‖ π), abs that of Σ |π − ref|; the forms
weighted by the live ratio π_θ / π_old have that of the reverse KL again. In the reward, where it acts through the
policy gradient, k1 gives the gradient of the reverse KL, and the others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kitae.algorithms.loss_tokens import LIMIT, TokenBatch, bounded_exp, log_ratio
from kitae.algorithms.requirements import Trait, has

if TYPE_CHECKING:
    from torch import Tensor

_SMALL = 0.01  # differences below it are raised to powers


def _difference(tokens: TokenBatch) -> Tensor:
    assert tokens.logp_ref_N is not None
    return log_ratio(tokens.logp_N, tokens.logp_ref_N)


def _ratio(tokens: TokenBatch) -> Tensor:
    return bounded_exp(log_ratio(tokens.logp_N, tokens.logp_old_N))


def k3(d_N: Tensor) -> Tensor:
    """e^−d − 1 + d. For d < −20 the exponential goes on as its tangent.

    A clamped one would be constant there, and what is left, d, pushes a token that drifted far further away. Near 0 it
    is a sum of powers: of 1 − d − 1 + d, fp32 would leave nothing but rounding, and so of its gradient.
    """
    near_N, beyond_N = (-d_N).clamp(max=LIMIT), (-d_N - LIMIT).clamp(min=0)
    small_N = d_N.clamp(-_SMALL, _SMALL)
    powers_N = small_N**2 * (1 / 2 - small_N / 6 + small_N**2 / 24)
    return powers_N.where(d_N.abs() < _SMALL, near_N.expm1() * (1 + beyond_N) - near_N)


@has(Trait.REFERENCE | Trait.IN_REWARD)
def k1_loss(tokens: TokenBatch) -> Tensor:
    """d; as a loss it regularises nothing, and is refused there."""
    return _difference(tokens)


@has(Trait.REFERENCE)
def k2_loss(tokens: TokenBatch) -> Tensor:
    """d² / 2: gradient of the reverse KL on samples of the policy itself."""
    return _difference(tokens) ** 2 / 2


@has(Trait.REFERENCE)
def k3_loss(tokens: TokenBatch) -> Tensor:
    """e^−d − 1 + d: gradient of the forward KL."""
    return k3(_difference(tokens))


@has(Trait.REFERENCE)
def absolute(tokens: TokenBatch) -> Tensor:
    """|d|: gradient of Σ |π − π_ref|, twice the total variation; the same pull however far a token drifted."""
    return _difference(tokens).abs()


@has(Trait.REFERENCE)
def k1_ratio(tokens: TokenBatch) -> Tensor:
    """r d, r differentiable: gradient of the reverse KL, on older samples too."""
    return _ratio(tokens) * k1_loss(tokens)


@has(Trait.REFERENCE)
def k2_ratio(tokens: TokenBatch) -> Tensor:
    """sg[r] d² / 2: gradient of the reverse KL, on older samples too."""
    return _ratio(tokens).detach() * k2_loss(tokens)


@has(Trait.REFERENCE)
def k3_ratio(tokens: TokenBatch) -> Tensor:
    """r (e^−d − 1 + d), r differentiable: gradient of the reverse KL, on older samples too."""
    return _ratio(tokens) * k3_loss(tokens)


REGULARISERS: Mapping[str, Callable[..., Tensor]] = {
    "k1": k1_loss,
    "k2": k2_loss,
    "k3": k3_loss,
    "abs": absolute,
    "k1-ratio": k1_ratio,
    "k2-ratio": k2_ratio,
    "k3-ratio": k3_ratio,
}


def adapt_kl(coefficient: float, kl: float, target: float, sequences: int, horizon: float) -> float:
    """β ← β (1 + clip(KL / target − 1, ±0.2) × n / horizon), KL in nats per sequence; never more than 20 % a step."""
    error = max(-0.2, min(0.2, kl / target - 1))
    return coefficient * (1 + error * min(1.0, sequences / horizon))


def adapt_entropy(coefficient: float, entropy: float, target: float, step: float) -> float:
    """Raise the bonus by `step` while the entropy is below its target, lower it while above; never below 0."""
    return max(0.0, coefficient + (step if entropy < target else -step))
