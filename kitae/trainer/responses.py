"""Objectives on whole responses: pairs of which one is preferred, single responses with a verdict, scores of pairs.

Legend: S sequences of a micro-batch, P pairs. A value of a whole sequence is a column that has this value at each of
the sequence's loss tokens. Both responses of a pair belong to one unit, so a micro-batch holds both or neither.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kitae.algorithms.preferences import (
    PairBatch,
    PreferenceLoss,
    RatedBatch,
    accuracy,
    bradley_terry,
    chosen_nll,
    kto,
)
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.observe.meter import Meter
from kitae.trainer.base import Conditions
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import MicroBatch, scalars
from kitae.trainer.objectives import PolicyScorer

PLACE = "place"
"""Column: 2 p for the chosen response of the batch's pair p, 2 p + 1 for the rejected one."""


class Preference(PolicyScorer):
    """A loss of the DPO family. It reads the column `place`, and `logp_ref` if the loss has a reference.

    The weight of a sample is that of its pair. sft_coef: factor of an added negative log-likelihood of the chosen
    response.
    """

    def __init__(
        self,
        policy: Policy,
        config: LearningConfig,
        loss: PreferenceLoss,
        settings: Mapping[str, float],
        *,
        sft_coef: float = 0.0,
    ) -> None:
        super().__init__(policy, config, temperature=1.0)
        self._loss = loss
        self._settings = settings
        self._sft_coef = sft_coef

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor:
        logp_N, entropy_N = self.score(micro)
        pairs, weight_P = self._pairs(micro, logp_N)
        loss_P = self._loss.function(pairs, **self._settings)
        if self._sft_coef:
            loss_P = loss_P + self._sft_coef * chosen_nll(pairs)
        loss = (loss_P * weight_P).sum()
        with torch.no_grad():
            meter.total("loss", loss.detach())
            meter.part("entropy", entropy_N.sum(), len(entropy_N))
            _measure(meter, *self._loss.implicit_rewards(pairs, self._settings["beta"]))
            meter.mean("logp_chosen", pairs.logp_chosen_P.mean(), len(weight_P))
            meter.mean("logp_rejected", pairs.logp_rejected_P.mean(), len(weight_P))
        return loss

    def _pairs(self, micro: MicroBatch, logp_N: Tensor) -> tuple[PairBatch, Tensor]:
        """The pairs of a micro-batch, and the weight of each."""
        chosen, rejected = sides(micro)
        logp_S, length_S = sums(micro, logp_N), sums(micro, torch.ones_like(logp_N))
        ref_S = sums(micro, micro.columns["logp_ref"]) if self._loss.reference else None
        pairs = PairBatch(
            logp_S[chosen],
            logp_S[rejected],
            None if ref_S is None else ref_S[chosen],
            None if ref_S is None else ref_S[rejected],
            length_S[chosen],
            length_S[rejected],
        )
        return pairs, of_sequences(micro, micro.weight_N)[chosen]


class Rated(PolicyScorer):
    """KTO. It reads the columns `logp_ref`, `desirable` (1 or 0), and `kl`, which is one number for the whole batch.

    Its accuracy is the share of responses on the right side of `kl`, the point from which KTO measures gain and loss.
    """

    def __init__(
        self, policy: Policy, config: LearningConfig, *, beta: float, desirable: float, undesirable: float
    ) -> None:
        super().__init__(policy, config, temperature=1.0)
        self._beta, self._desirable, self._undesirable = beta, desirable, undesirable

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor:
        logp_N, entropy_N = self.score(micro)
        good_S = of_sequences(micro, micro.columns["desirable"]) > 0
        batch = RatedBatch(sums(micro, logp_N), sums(micro, micro.columns["logp_ref"]), good_S)
        loss_S = kto(
            batch,
            micro.columns["kl"][0],
            beta=self._beta,
            desirable=self._desirable,
            undesirable=self._undesirable,
        )
        loss = (loss_S * of_sequences(micro, micro.weight_N)).sum()
        with torch.no_grad():
            meter.total("loss", loss.detach())
            meter.part("entropy", entropy_N.sum(), len(entropy_N))
            meter.max("kl", micro.columns["kl"][0])
            ratio_S = batch.logp_S - batch.logp_ref_S
            reward_S = self._beta * ratio_S
            meter.mean("accuracy", ((ratio_S > micro.columns["kl"][0]) == good_S).float().mean(), len(good_S))
            for name, side_S in (("chosen", good_S), ("rejected", ~good_S)):
                count = side_S.sum()
                meter.part(f"reward_{name}", (reward_S * side_S).sum(), count)
                meter.part(f"logp_{name}", (batch.logp_S * side_S).sum(), count)
        return loss


class ScoredPairs:
    """A reward model's objective. A sample's score is the number of its only loss token. Reads `place` and `margin`."""

    def __init__(self, model: ScalarModel, *, centring: float = 0.0) -> None:
        self.model = model
        self.policy = model.policy
        self._centring = centring

    def outputs(self, micro: MicroBatch) -> Tensor:
        return scalars(self.model, micro)

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor:
        chosen, rejected = sides(micro)
        score_S = sums(micro, self.outputs(micro))
        margin_P = of_sequences(micro, micro.columns["margin"])[chosen]
        loss_P = bradley_terry(score_S[chosen], score_S[rejected], margin_P, centring=self._centring)
        loss = (loss_P * of_sequences(micro, micro.weight_N)[chosen]).sum()
        with torch.no_grad():
            meter.total("loss", loss.detach())
            _measure(meter, score_S[chosen], score_S[rejected])
        return loss


def sides(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """(chosen_P, rejected_P): the indices of the sequences of each pair."""
    order_S = of_sequences(micro, micro.columns[PLACE]).argsort()
    return order_S[0::2], order_S[1::2]


def sums(micro: MicroBatch, values_N: Tensor) -> Tensor:
    """The sum over the loss tokens of each sequence."""
    return values_N.new_zeros(micro.sequences).index_add(0, micro.sample_N, values_N)


def of_sequences(micro: MicroBatch, values_N: Tensor) -> Tensor:
    """For each sequence, the value that all its loss tokens share."""
    return values_N.new_zeros(micro.sequences).index_put((micro.sample_N,), values_N)


def _measure(meter: Meter, chosen_P: Tensor, rejected_P: Tensor) -> None:
    """Add the metrics that compare the rewards or scores of pairs."""
    count = len(chosen_P)
    meter.mean("accuracy", accuracy(chosen_P, rejected_P), count)
    meter.mean("margin", (chosen_P - rejected_P).mean(), count)
    meter.mean("reward_chosen", chosen_P.mean(), count)
    meter.mean("reward_rejected", rejected_P.mean(), count)
