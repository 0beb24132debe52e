"""The loss tokens of a micro-batch, as the stages S4, S5, S6 and S8 see them.

Legend: N loss tokens, S sequences. Nothing in this package but `loss.py` imports torch: stages use methods of the
tensors that they are given, so that reading a recipe or listing the algorithms costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kitae.data.packing import Observed

LIMIT = 20.0
"""Log-ratios are clamped to ± this before the exponential, and nowhere else."""


def log_ratio(logp_N: Tensor, anchor_N: Tensor) -> Tensor:
    """log π − log π_anchor; 0 where both probabilities are exactly 0, so that no NaN is made of two infinities."""
    return (logp_N - anchor_N).masked_fill((logp_N == anchor_N) & logp_N.isinf(), 0.0)


def bounded_exp(log_N: Tensor) -> Tensor:
    """e^x with x clamped to ± LIMIT."""
    return log_N.clamp(-LIMIT, LIMIT).exp()


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Only `logp_N`, `divergence_N`, and `entropy_N` if it is rewarded, carry gradients.

    Every sequence is here as a whole.
    Two sequences of 2 and 4 loss tokens: N = 6, `sample_N = [0, 0, 1, 1, 1, 1]`, `sequences = 2`.
    """

    logp_N: Tensor  # π_θ, the policy that is differentiated
    entropy_N: Tensor
    logp_old_N: Tensor  # π_old, the trainer's policy before this batch's updates
    logp_mu_N: Tensor  # μ, what really sampled the token; NaN where the engine gave none
    advantage_N: Tensor
    weight_N: Tensor  # S7
    sample_N: Tensor
    sequences: int
    logp_ref_N: Tensor | None = None  # π_ref, where there is a KL term
    logp_teacher_N: Tensor | None = None  # of a teacher, where a function asks for it
    divergence_N: Tensor | None = None  # from a teacher, over the whole vocabulary; carries a gradient
    lag_N: Tensor | None = None  # versions from the one that sampled the token to the one being trained, at least 1
    score_N: Tensor | None = None  # the raw score of the token's response
    observed: tuple[Observed, ...] = ()  # samples whose single tokens somebody wants to see
    cov_rank_N: Tensor | None = None  # share of the step's tokens with a higher covariance, where the gate asks for it

    def sums(self, values_N: Tensor) -> Tensor:
        """The sum over each sequence, at every token of it."""
        totals_S = values_N.new_zeros(self.sequences).index_add(0, self.sample_N, values_N)
        return totals_S[self.sample_N]

    def means(self, values_N: Tensor) -> Tensor:
        """The mean over each sequence, at every token of it."""
        return self.sums(values_N) / self.sums(values_N.new_ones(len(values_N)))

    def ranks(self, values_N: Tensor) -> Tensor:
        """The place of each token in its sequence by falling value, from 0; equal ones in the order of the tokens."""
        by_value_N = values_N.argsort(descending=True, stable=True)
        order_N = by_value_N[self.sample_N[by_value_N].argsort(stable=True)]  # sequence after sequence
        places_N = order_N.new_ones(len(order_N)).cumsum(0) - 1
        lengths_S = order_N.new_zeros(self.sequences).index_add(0, self.sample_N, order_N.new_ones(len(order_N)))
        starts_S = lengths_S.cumsum(0) - lengths_S
        ranks_N = order_N.new_empty(len(order_N))
        ranks_N[order_N] = places_N - starts_S[self.sample_N[order_N]]
        return ranks_N

    @property
    def behaviour_N(self) -> Tensor:
        """log μ; where the engine gave none, log π_old, so that the mismatch there is 1."""
        return self.logp_mu_N.where(self.logp_mu_N.isfinite(), self.logp_old_N)

    @property
    def log_mismatch_N(self) -> Tensor:
        """log w = log π_old − log μ."""
        return log_ratio(self.logp_old_N, self.behaviour_N)

    @property
    def mismatch_N(self) -> Tensor:
        """w = π_old / μ."""
        return bounded_exp(self.log_mismatch_N)
