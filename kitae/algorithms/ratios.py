"""S4, importance ratios: the log-ratio of each token to an anchor policy → the ratio that the gate sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kitae.algorithms.loss_tokens import TokenBatch, bounded_exp, log_ratio
from kitae.algorithms.requirements import Trait, has

if TYPE_CHECKING:
    from torch import Tensor


def token(log_ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """r_t = π_θ / π_anchor of each token."""
    return bounded_exp(log_ratio_N)


@has(Trait.SEQUENCE | Trait.MEAN | Trait.SHARED)
def sequence_mean(log_ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """s_i = exp of the mean log-ratio of the sequence; the gradient goes through the mean."""
    return bounded_exp(tokens.means(log_ratio_N))


@has(Trait.SEQUENCE | Trait.MEAN)
def sequence_mean_token(log_ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """The value of `sequence-mean` with the gradient of each token alone: sg[s_i] π_θ(t) / sg[π_θ(t)]."""
    return sequence_mean(log_ratio_N.detach(), tokens) * (log_ratio_N - log_ratio_N.detach()).exp()


@has(Trait.SEQUENCE | Trait.SHARED)
def sequence_product(log_ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
    """Π_t r_t of the whole sequence. Grows with the length: 1.001 to the power of 8,192 is 3,600."""
    return bounded_exp(tokens.sums(log_ratio_N))


RATIOS: Mapping[str, Callable[..., Tensor]] = {
    "token": token,
    "sequence-mean": sequence_mean,
    "sequence-mean-token": sequence_mean_token,
    "sequence-product": sequence_product,
}


def old(tokens: TokenBatch) -> Tensor:
    """π_old: the trainer's policy before this batch's updates."""
    return tokens.logp_old_N


def behaviour(tokens: TokenBatch) -> Tensor:
    """μ: what really sampled the token. Takes the place of a correction weight."""
    return tokens.behaviour_N


ANCHORS: Mapping[str, Callable[[TokenBatch], Tensor]] = {"old": old, "behaviour": behaviour}


def interpolated(tokens: TokenBatch) -> Tensor:
    """An estimate of log π_old without a forward pass: log μ + α (log π_θ − log μ), α from the age of the token."""
    assert tokens.lag_N is not None
    mu_N = tokens.behaviour_N
    return mu_N + proximal_share(tokens.lag_N) * log_ratio(tokens.logp_N.detach(), mu_N)


def proximal_share(lag_N: Tensor) -> Tensor:
    """α = (lag − 1) / lag, with lag the versions between μ and π_θ: the share of the way that π_old has come."""
    return ((lag_N - 1) / lag_N.clamp(min=1)).clamp(0, 1)
