"""Losses on pairs of responses to one prompt, of which one is preferred: DPO, IPO, Bradley-Terry. One loss per pair.

Legend: P pairs. Log-probs are sums over the response tokens, the end of turn included, the prompt not. The loss of a
batch is the mean over its pairs. Not here: which pairs to build, and which policy is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Only `logp_chosen_P` and `logp_rejected_P` carry gradients.

    One pair: `logp_* = [-10], [-14]`, `logp_ref_* = [-11], [-13]`, `length_* = [20], [40]`.
    """

    logp_chosen_P: Tensor  # log π_θ(y⁺|x), the policy that is differentiated
    logp_rejected_P: Tensor
    logp_ref_chosen_P: Tensor  # log π_ref(y⁺|x), computed without dropout
    logp_ref_rejected_P: Tensor
    length_chosen_P: Tensor  # tokens in the sums
    length_rejected_P: Tensor


def implicit_rewards(pairs: PairBatch, *, beta: float, length_normalised: bool = False) -> tuple[Tensor, Tensor]:
    """(chosen_P, rejected_P): β log(π_θ/π_ref) of each response, the reward for which DPO's policy is optimal.

    length_normalised divides each log-ratio by its own length: β then weighs a mean and is larger (usual 5, not 0.1).
    """
    chosen_P = pairs.logp_chosen_P - pairs.logp_ref_chosen_P
    rejected_P = pairs.logp_rejected_P - pairs.logp_ref_rejected_P
    if length_normalised:
        chosen_P, rejected_P = chosen_P / pairs.length_chosen_P, rejected_P / pairs.length_rejected_P
    return beta * chosen_P, beta * rejected_P


def dpo_loss(pairs: PairBatch, *, beta: float, label_smoothing: float = 0.0, length_normalised: bool = False) -> Tensor:
    """−(1 − ε) log σ(m) − ε log σ(−m), m the difference of the implicit rewards, ε the label smoothing.

    The gradient is ∓β σ(−m) at ε = 0. It depends on the difference only: both log-probs may fall while the loss does.
    """
    chosen_P, rejected_P = implicit_rewards(pairs, beta=beta, length_normalised=length_normalised)
    margin_P = chosen_P - rejected_P
    return (1 - label_smoothing) * _surprise(margin_P) + label_smoothing * _surprise(-margin_P)


def ipo_loss(pairs: PairBatch, *, beta: float) -> Tensor:
    """(h − 1/(2β))², h the difference of the log-ratios log(π_θ/π_ref): a target, where DPO pushes without end.

    h is of sums. Averaging the log-ratios per token, as some do with the same 1/(2β), is another scale: a β tuned for
    one form is wrong for the other by a factor of about the response length.
    """
    chosen_P, rejected_P = implicit_rewards(pairs, beta=1.0)
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def bradley_terry_loss(
    score_chosen_P: Tensor, score_rejected_P: Tensor, *, margin: Tensor | float = 0.0, centring: float = 0.0
) -> Tensor:
    """−log σ(s⁺ − s⁻ − margin) + centring (s⁺ + s⁻)², with s the reward model's score at the last token of a response.

    A shift of both scores costs nothing without centring: normalise scores before use. Centring pulls the sum of a pair
    to 0, not each score, which would work against the preference. A margin may differ from pair to pair.
    """
    loss_P = _surprise(score_chosen_P - score_rejected_P - margin)
    if centring > 0:
        loss_P = loss_P + centring * (score_chosen_P + score_rejected_P).square()
    return loss_P


def accuracy(score_chosen_P: Tensor, score_rejected_P: Tensor) -> Tensor:
    """The share of pairs in the right order, by scores or by implicit rewards; a tie is not."""
    return (score_chosen_P > score_rejected_P).float().mean()


def _surprise(margin_P: Tensor) -> Tensor:
    """−log σ(m) = log(1 + e^(−m)), finite with a finite gradient for every m."""
    return margin_P.new_zeros(()).logaddexp(-margin_P)
