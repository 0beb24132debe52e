"""What models are trained for: an objective has a model, and turns a micro-batch into a loss that is a plain sum."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kitae.algorithms.loss import PolicyLoss
from kitae.algorithms.loss_tokens import TokenBatch
from kitae.engines import proof
from kitae.models.logprobs import Head
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.observe.meter import Meter
from kitae.trainer.base import Conditions
from kitae.trainer.config import LearningConfig
from kitae.trainer.forward import MicroBatch, Pass, logit_chunk, scalars

OfStates = Callable[[Head, Tensor], Tensor]
"""Computes a number for each hidden state, or several (`[C, N]`), from the states and the head that turns them into
logits."""

Divergence = Callable[[MicroBatch], OfStates]
"""Prepares, for a micro-batch, how far a policy is from a teacher at each loss token."""


class TokenScorer(Protocol):
    """Gives one number for each loss token, such as a log-prob or a value. policy: the decoder that it runs."""

    policy: Policy

    def outputs(self, micro: MicroBatch) -> Tensor: ...


class Objective(TokenScorer, Protocol):
    """A scorer that is trained. model: the module whose parameters learn."""

    @property
    def model(self) -> torch.nn.Module: ...

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor: ...


class PolicyScorer:
    """Log-probs of a policy; the base of every objective on tokens."""

    def __init__(self, policy: Policy, config: LearningConfig, temperature: float) -> None:
        self.policy = policy
        self.model: torch.nn.Module = policy.model
        self._chunk = logit_chunk(config, policy.device)
        self._temperature = temperature

    def score(
        self, micro: MicroBatch, entropy_grad: bool = False, divergence: Divergence | None = None
    ) -> tuple[Tensor, ...]:
        """`(logp_N, entropy_N)`, and the divergence as a third if one is given, or each of its numbers."""
        read = Pass(self.policy, micro)
        found: tuple[Tensor, ...] = self.policy(
            read.tokens_T,
            read.positions_T,
            read.context,
            read.source_N,
            read.own.target_N,
            temperature=self._temperature,
            chunk=self._chunk,
            entropy_grad=entropy_grad,
            kept=read.own.kept,
            also=None if divergence is None else divergence(read.own),
        )
        return read.whole(*(row for each in found for row in (each if each.dim() > 1 else [each])))

    def outputs(self, micro: MicroBatch) -> Tensor:
        return self.score(micro)[0]

    def recompute(self, micro: MicroBatch) -> Tensor:
        """What engines' proofs are compared with, `[N, 2 + SKETCH]`: log-prob, how far the draw is off, sketch."""

        def of_states(own: MicroBatch) -> OfStates:
            return lambda head, hidden_NH: proof.of_states(
                head, hidden_NH, own.target_N, own.columns[proof.UNIFORM], 1.0 / self._temperature
            )

        logp_N, _, *rest = self.score(micro, divergence=of_states)
        return torch.stack((logp_N, *rest), 1)


class Recomputed:
    """A policy as a scorer of proofs."""

    def __init__(self, scorer: PolicyScorer) -> None:
        self.policy = scorer.policy
        self.outputs = scorer.recompute


class PolicyGradient(PolicyScorer):
    """The token stages of an algorithm. divergence: the distance from a teacher, where the stages read it."""

    def __init__(
        self,
        policy: Policy,
        config: LearningConfig,
        temperature: float,
        loss: PolicyLoss,
        divergence: Divergence | None = None,
    ) -> None:
        super().__init__(policy, config, temperature)
        self._loss = loss
        self._divergence = divergence

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor:
        logp_N, entropy_N, *divergence_N = self.score(micro, self._loss.entropy_gradient, self._divergence)
        tokens = tokens_of(micro, logp_N, entropy_N, conditions.version)
        if divergence_N:
            tokens = replace(tokens, divergence_N=divergence_N[0])
        return self._loss(tokens, conditions.coefficients, meter)


class Likelihood(PolicyScorer):
    """−Σ weight · log π, without any column. by_probability: each token is also weighted by its probability (DFT)."""

    def __init__(
        self, policy: Policy, config: LearningConfig, temperature: float, *, by_probability: bool = False
    ) -> None:
        super().__init__(policy, config, temperature)
        self._by_probability = by_probability

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor:
        logp_N, entropy_N = self.score(micro)
        weight_N = micro.weight_N
        if self._by_probability:
            weight_N = weight_N * logp_N.detach().exp()
        loss = -(logp_N * weight_N).sum()
        meter.total("loss", loss.detach())
        meter.part("entropy", entropy_N.detach().sum(), len(entropy_N))
        meter.tokens(micro.observed, logp=logp_N, entropy=entropy_N)
        return loss


class Values:
    """A critic's objective: predict the column `return`, moving no further than `clip` from the column `value`.

    The column `value_weight` makes the loss a mean over all loss tokens of the batch, on whatever rank they are.
    """

    def __init__(self, model: ScalarModel, clip: float) -> None:
        self.model = model
        self.policy = model.policy
        self._clip = clip

    def outputs(self, micro: MicroBatch) -> Tensor:
        return scalars(self.model, micro)

    def loss(self, micro: MicroBatch, conditions: Conditions, meter: Meter) -> Tensor:
        value_N, old_N, return_N = self.outputs(micro), micro.columns["value"], micro.columns["return"]
        loss_N = value_loss(value_N, old_N, return_N, self._clip)
        with torch.no_grad():
            count = len(value_N)
            meter.mean("value_loss", loss_N.mean(), count)
            meter.mean("value", value_N.mean(), count)
            meter.mean("return", return_N.mean(), count)
            meter.mean("value_error", (value_N - return_N).abs().mean(), count)
            if self._clip:
                meter.mean("value_clipped", ((value_N - old_N).abs() > self._clip).float().mean(), count)
        return (loss_N * micro.columns["value_weight"]).sum()


def value_loss(value_N: Tensor, old_N: Tensor, return_N: Tensor, clip: float) -> Tensor:
    """½ max((V − G)², (clip(V, V_old ± clip) − G)²) of each token; clip 0 means no clipping."""
    loss_N = (value_N - return_N) ** 2
    if clip > 0:
        near_N = old_N + (value_N - old_N).clamp(-clip, clip)
        loss_N = loss_N.maximum((near_N - return_N) ** 2)
    return loss_N / 2


def tokens_of(micro: MicroBatch, logp_N: Tensor, entropy_N: Tensor, version: int) -> TokenBatch:
    """The loss tokens of a micro-batch, as the token stages read them."""
    columns = micro.columns
    return TokenBatch(
        logp_N=logp_N,
        entropy_N=entropy_N,
        # With one update per batch the old policy is the current one.
        logp_old_N=columns.get("logp_old", logp_N.detach()),
        logp_mu_N=columns["logp_mu"],
        advantage_N=columns["advantage"],
        weight_N=micro.weight_N,
        sample_N=micro.sample_N,
        sequences=micro.sequences,
        logp_ref_N=columns.get("logp_ref"),
        logp_teacher_N=columns.get("logp_teacher"),
        lag_N=version - columns["version"],
        score_N=columns["score"],
        cov_rank_N=columns.get("cov_rank"),
        observed=micro.observed,
    )
