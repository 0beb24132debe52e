"""Losses on preferred and rejected responses: rewards on pairs, the DPO family, KTO. One loss per pair or response.

Legend: P pairs, S sequences (single responses). Log-probs are sums over the response tokens, the end of turn included,
the prompt not; lengths are the numbers of these tokens. A is the mean of a response's log-probs, log-prob over length.
With h⁺ = log π_θ(y⁺) − log π_ref(y⁺), h⁻ the same of the rejected response, and h = h⁺ − h⁻. The loss of a batch is the
mean over its pairs or responses. Not here: which pairs to build, and which policy is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitae.plugins import nearest

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST = 1e-12  # of 1 − p in odds


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Only `logp_chosen_P` and `logp_rejected_P` carry gradients. Without a reference its log-probs are None.

    One pair: `logp_* = [-10], [-14]`, `logp_ref_* = [-11], [-13]`, `length_* = [20], [40]`.
    """

    logp_chosen_P: Tensor  # log π_θ(y⁺|x), the policy that is differentiated
    logp_rejected_P: Tensor
    logp_ref_chosen_P: Tensor | None  # log π_ref(y⁺|x), computed without dropout
    logp_ref_rejected_P: Tensor | None
    length_chosen_P: Tensor  # tokens in the sums
    length_rejected_P: Tensor

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """(h⁺_P, h⁻_P)."""
        assert self.logp_ref_chosen_P is not None and self.logp_ref_rejected_P is not None, "this loss has a reference"
        return self.logp_chosen_P - self.logp_ref_chosen_P, self.logp_rejected_P - self.logp_ref_rejected_P

    @property
    def mean_ratios(self) -> tuple[Tensor, Tensor]:
        """(h⁺_P, h⁻_P), each over its own length."""
        chosen_P, rejected_P = self.ratios
        return chosen_P / self.length_chosen_P, rejected_P / self.length_rejected_P

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """(A⁺_P, A⁻_P)."""
        return self.logp_chosen_P / self.length_chosen_P, self.logp_rejected_P / self.length_rejected_P


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """Single responses, each good or bad. Only `logp_S` carries gradients.

    Two of them: `logp_S = [-10, -14]`, `logp_ref_S = [-11, -13]`, `desirable_S = [True, False]`.
    """

    logp_S: Tensor
    logp_ref_S: Tensor
    desirable_S: Tensor


# Reward models.


def bradley_terry(
    score_chosen_P: Tensor, score_rejected_P: Tensor, margin_P: Tensor | float = 0.0, *, centring: float = 0.0
) -> Tensor:
    """−log σ(s⁺ − s⁻ − margin) + centring (s⁺ + s⁻)², with s the reward model's score at the last token of a response.

    A shift of both scores costs nothing without centring: normalise scores before use. Centring pulls the sum of a pair
    to 0, not each score, which would work against the preference. A margin may differ from pair to pair.
    Sources: Bradley and Terry 1952; margin: Llama 2 (2307.09288); centring: Eisenstein et al. (2312.09244).
    """
    loss_P = _surprise(score_chosen_P - score_rejected_P - margin_P)
    if centring > 0:
        loss_P = loss_P + centring * (score_chosen_P + score_rejected_P).square()
    return loss_P


def accuracy(score_chosen_P: Tensor, score_rejected_P: Tensor) -> Tensor:
    """The share of pairs in the right order, by scores or by implicit rewards; a tie is not."""
    return (score_chosen_P > score_rejected_P).float().mean()


# The DPO family.


def sigmoid(pairs: PairBatch, *, beta: float) -> Tensor:
    """−log σ(β h)

    The gradient is ∓β σ(−β h). It depends on the difference only: both log-probs may fall while the loss does.
    """
    chosen_P, rejected_P = pairs.ratios
    return _surprise(beta * (chosen_P - rejected_P))


def sigmoid_token(pairs: PairBatch, *, beta: float) -> Tensor:
    """−log σ(β (h⁺/|y⁺| − h⁻/|y⁻|))

    β weighs a mean, and is larger.
    """
    chosen_P, rejected_P = pairs.mean_ratios
    return _surprise(beta * (chosen_P - rejected_P))


def smoothed(pairs: PairBatch, *, beta: float, label_smoothing: float) -> Tensor:
    """−(1 − ε) log σ(β h) − ε log σ(−β h), ε = label_smoothing

    ε is the share of pairs that are thought to be labelled the wrong way.
    """
    chosen_P, rejected_P = pairs.ratios
    margin_P = beta * (chosen_P - rejected_P)
    return (1 - label_smoothing) * _surprise(margin_P) + label_smoothing * _surprise(-margin_P)


def robust(pairs: PairBatch, *, beta: float, label_smoothing: float) -> Tensor:
    """(−(1 − ε) log σ(β h) + ε log σ(−β h)) / (1 − 2 ε), ε = label_smoothing below ½

    Its mean over labels that are wrong with probability ε is the loss of the right labels. It has no lower bound.
    """
    chosen_P, rejected_P = pairs.ratios
    margin_P = beta * (chosen_P - rejected_P)
    wrong = label_smoothing
    return ((1 - wrong) * _surprise(margin_P) - wrong * _surprise(-margin_P)) / (1 - 2 * wrong)


def hinge(pairs: PairBatch, *, beta: float) -> Tensor:
    """max(0, 1 − β h)"""
    chosen_P, rejected_P = pairs.ratios
    return (1 - beta * (chosen_P - rejected_P)).relu()


def ipo(pairs: PairBatch, *, beta: float) -> Tensor:
    """(h − 1/(2β))²

    A target, where 'sigmoid' pushes without end. h is of sums. The form of means, 'ipo-token', has the same 1/(2β) on
    another scale: a β tuned for one is wrong for the other by a factor of about the response length.
    """
    chosen_P, rejected_P = pairs.ratios
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def ipo_token(pairs: PairBatch, *, beta: float) -> Tensor:
    """(h⁺/|y⁺| − h⁻/|y⁻| − 1/(2β))²"""
    chosen_P, rejected_P = pairs.mean_ratios
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def simpo(pairs: PairBatch, *, beta: float, target_margin: float) -> Tensor:
    """−log σ(β (A⁺ − A⁻) − γ), γ = target_margin"""
    chosen_P, rejected_P = pairs.means
    return _surprise(beta * (chosen_P - rejected_P) - target_margin)


def orpo(pairs: PairBatch, *, beta: float) -> Tensor:
    """−A⁺ − β log σ(log odds⁺ − log odds⁻), odds = p / (1 − p), p = e^A

    The likelihood of the chosen, and an odds ratio; both are of response tokens. The paper writes λ for β.
    """
    chosen_P, rejected_P = pairs.means
    return beta * _surprise(_log_odds(chosen_P) - _log_odds(rejected_P)) - chosen_P


def chosen_nll(pairs: PairBatch) -> Tensor:
    """−A⁺: the SFT term, a mean over the tokens of each chosen response, so that long ones weigh no more."""
    return -pairs.logp_chosen_P / pairs.length_chosen_P


# KTO.


def kto(batch: RatedBatch, kl: Tensor | float, *, beta: float, desirable: float, undesirable: float) -> Tensor:
    """desirable (1 − σ(β (h − kl))) for good responses, undesirable (1 − σ(β (kl − h))) for bad ones.

    kl is `mismatch_kl` of the whole batch: one number, whatever part of it these responses are.
    """
    ratio_S = batch.logp_S - batch.logp_ref_S
    good_S = desirable * (beta * (kl - ratio_S)).sigmoid()
    bad_S = undesirable * (beta * (ratio_S - kl)).sigmoid()
    return good_S.where(batch.desirable_S, bad_S)


def mismatch_kl(logp_S: Tensor, logp_ref_S: Tensor) -> Tensor:
    """max(0, mean(log π_θ(y') − log π_ref(y'))) of responses y' to other prompts: no gradient goes through it.

    A biased estimate of KL(π_θ ‖ π_ref), which is what KTO measures gains and losses from.
    """
    return (logp_S - logp_ref_S).mean().clamp(min=0).detach()


# What there is.


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """A loss on pairs and what it needs: `PreferenceLoss(sigmoid, "DPO", "Rafailov et al.…", {"beta": 0.1})`.

    defaults: of its settings, which the function takes by keyword. reference: whether it reads log-probs of one.
    per_token: whether it divides by lengths. has_sft: whether the likelihood of the chosen is a part of it already.
    """

    function: Callable[..., Tensor]
    title: str
    source: str
    defaults: Mapping[str, float]
    reference: bool = True
    per_token: bool = False
    has_sft: bool = False

    @property
    def formula(self) -> str:
        """The first line that the function says of itself."""
        return (self.function.__doc__ or "").split("\n")[0]

    def settings(self, given: Mapping[str, float | None]) -> dict[str, float]:
        """All that the function takes; what is None or absent has its default."""
        return {key: default if (value := given.get(key)) is None else value for key, default in self.defaults.items()}

    def implicit_rewards(self, pairs: PairBatch, beta: float) -> tuple[Tensor, Tensor]:
        """(chosen_P, rejected_P): β h, or β A without a reference; of means where the loss is."""
        if not self.reference:
            chosen_P, rejected_P = pairs.means
        else:
            chosen_P, rejected_P = pairs.mean_ratios if self.per_token else pairs.ratios
        return beta * chosen_P, beta * rejected_P


_SMOOTHED = {"beta": 0.1, "label_smoothing": 0.1}

PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(sigmoid, "DPO", "Rafailov et al., 2305.18290", {"beta": 0.1}),
    "sigmoid-token": PreferenceLoss(
        sigmoid_token, "DPO, length-normalised", "Tülu 3, 2411.15124", {"beta": 5.0}, per_token=True
    ),
    "smoothed": PreferenceLoss(smoothed, "cDPO", "Mitchell 2023, a note on DPO with noisy preferences", _SMOOTHED),
    "robust": PreferenceLoss(robust, "robust DPO", "Chowdhury et al., 2403.00409", _SMOOTHED),
    "hinge": PreferenceLoss(hinge, "hinge, as in SLiC", "Zhao et al., 2305.10425", {"beta": 0.1}),
    "ipo": PreferenceLoss(ipo, "IPO on sums", "Azar et al., 2310.12036, eq. 17", {"beta": 0.1}),
    "ipo-token": PreferenceLoss(
        ipo_token, "IPO per token", "Azar et al., 2310.12036, with means", {"beta": 0.1}, per_token=True
    ),
    "simpo": PreferenceLoss(
        simpo, "SimPO", "Meng et al., 2405.14734, eq. 6", {"beta": 2.0, "target_margin": 1.0},
        reference=False, per_token=True,
    ),
    "orpo": PreferenceLoss(
        orpo, "ORPO", "Hong et al., 2403.07691, eq. 6", {"beta": 0.1}, reference=False, per_token=True, has_sft=True
    ),
}  # fmt: skip
"""By the name that a recipe gives."""


def preference_complaints(name: str, given: Mapping[str, float | None], section: str) -> Iterable[str]:
    """What is wrong with a loss and the settings that a user gave (None: not given); `section` is where they stand."""
    loss = PREFERENCE_LOSSES.get(name)
    if loss is None:
        known = ", ".join(PREFERENCE_LOSSES)
        yield f"{section}.loss must be one of {known}, got {name!r}{nearest(name, PREFERENCE_LOSSES)}"
        return
    for key, value in given.items():
        if value is None:
            continue
        if key == "sft_coef" and loss.has_sft and value:
            yield f"{section}.sft_coef must be 0 with loss {name!r}, which has that term already, got {value:g}"
        elif key != "sft_coef" and key not in loss.defaults:
            readers = [n for n, other in PREFERENCE_LOSSES.items() if key in other.defaults]
            belongs = ", ".join(map(repr, readers))
            yield f"{section}.{key} is set to {value:g}, but loss {name!r} does not read it; it belongs to {belongs}"
    smoothing = given.get("label_smoothing")
    if name == "robust" and smoothing is not None and smoothing >= 0.5:
        yield f"{section}.label_smoothing must be below 0.5 with loss 'robust', got {smoothing:g}"


def _log_odds(mean_logp_P: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = e^A; a response that is certain has large odds, not infinite ones."""
    return mean_logp_P - (-mean_logp_P.expm1()).clamp(min=_SMALLEST).log()


def _surprise(margin_P: Tensor) -> Tensor:
    """−log σ(m) = log(1 + e^(−m)), finite with a finite gradient for every m."""
    return margin_P.new_zeros(()).logaddexp(-margin_P)
