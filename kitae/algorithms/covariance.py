"""The covariance of log-prob and advantage, token by token: what drives the entropy down, by the theory of Clip-Cov.

cov_t = (log μ_t − mean) (A_t − mean), both means over all loss tokens of the optimizer step. It is computed once for
the step, of the log-probs that the engine recorded, and travels with the samples: a mean over a micro-batch would make
the gradient depend on how the step is cut.
"""

from collections.abc import Sequence

import numpy as np

from kitae.types import FloatArray


def covariance_ranks(logp: Sequence[FloatArray], advantages: Sequence[FloatArray]) -> list[FloatArray]:
    """For each loss token of each sample, the share of the step's tokens whose covariance is higher.

    1 where it is not above 0, and where the engine gave no log-prob: such a token is never among the highest.
    """
    if not logp:
        return []
    logp_N, advantage_N = (np.concatenate(rows).astype(np.float64) for rows in (logp, advantages))
    known_N = np.isfinite(logp_N)
    covariance_N = np.full(len(logp_N), -np.inf)
    if known_N.any():
        logp_K, advantage_K = logp_N[known_N], advantage_N[known_N]
        covariance_N[known_N] = (logp_K - logp_K.mean()) * (advantage_K - advantage_K.mean())
    ranks_N = np.ones(len(logp_N), dtype=np.float32)
    order = np.argsort(-covariance_N, kind="stable")
    order = order[covariance_N[order] > _NOISE]
    ranks_N[order] = np.arange(len(order)) / len(logp_N)
    return np.split(ranks_N, np.cumsum([len(row) for row in logp])[:-1])


_NOISE = 1e-12  # what the rounding of a mean of equal numbers leaves
