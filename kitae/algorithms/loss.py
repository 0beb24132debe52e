"""The stages on tokens, which a rank computes: S4 ratio → S5 gate → S6 correction, and S8.

The weights of S7 and the advantages come with the tokens, so what a rank computes is a plain sum.
"""

from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor

from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.control import Coefficients, Signal
from kitae.algorithms.functions import Functions, brief
from kitae.algorithms.loss_tokens import TokenBatch, bounded_exp, log_ratio
from kitae.algorithms.ratios import ANCHORS, interpolated
from kitae.algorithms.regularisers import k3
from kitae.algorithms.requirements import Trait
from kitae.errors import ConfigError
from kitae.observe.meter import Meter


class PolicyLoss:
    """`PolicyLoss(config, max_tokens=64)(tokens, Coefficients(kl=0.05), meter)`."""

    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        self.config = config
        self._functions = Functions(config, max_tokens)

    @property
    def entropy_gradient(self) -> bool:
        return bool(self.config.entropy.coef or self.config.entropy.target)

    @property
    def wants_divergence(self) -> bool:
        """Whether a function reads how far policy and teacher are apart."""
        return Trait.DIVERGENCE in self._functions.traits

    @property
    def estimates_old(self) -> bool:
        return self.config.ratio.anchor == "interpolated"

    def __call__(self, tokens: TokenBatch, coefficients: Coefficients, meter: Meter) -> Tensor:
        """The weighted sum over the tokens of a micro-batch; adding these over micro-batches gives the step's loss."""
        measured = tokens  # the gap to the engine is that of the trainer's own log-probs
        if self.estimates_old:
            tokens = replace(tokens, logp_old_N=interpolated(tokens))
        ratio_N = self._ratio(tokens)
        policy_N = _expect_tokens("gate", self._functions.one("gate")(ratio_N, tokens), tokens)
        if tokens.logp_N.requires_grad and not policy_N.requires_grad:
            raise ConfigError("the result of ratio and gate must depend on tokens.logp_N with a gradient, it does not")
        corrections = self._functions.several("correction").values()
        parts = [_expect_tokens("correction", f(tokens), tokens) for f in corrections]
        weights_N = reduce(mul, parts).detach()
        loss = (policy_N * weights_N * tokens.weight_N).sum()
        if coefficients.kl and self.config.kl.into == "loss":
            penalty_N = _expect_tokens("kl", self._functions.one("kl")(tokens), tokens)
            loss = loss + coefficients.kl * (penalty_N * tokens.weight_N).sum()
        if coefficients.entropy:
            loss = loss - coefficients.entropy * (tokens.entropy_N * tokens.weight_N).sum()
        if self.config.sft.coef:
            loss = loss + self.config.sft.coef * (self._likelihood(tokens, meter) * tokens.weight_N).sum()
        self._measure(measured, ratio_N, weights_N, meter)
        meter.total("loss", loss.detach())
        return loss

    def _likelihood(self, tokens: TokenBatch, meter: Meter) -> Tensor:
        """−log π_θ of the tokens of correct responses, 0 elsewhere."""
        assert tokens.score_N is not None and self.config.sft.correct_above is not None
        correct_N = tokens.score_N > self.config.sft.correct_above
        found_N = -tokens.logp_N.masked_fill(~correct_N, 0.0)
        meter.part("sft_loss", found_N.detach().sum(), correct_N.sum())
        return found_N

    def _ratio(self, tokens: TokenBatch) -> Tensor:
        if self.config.ratio.name is None:  # the gate reads none; this one is for the metrics
            return bounded_exp(log_ratio(tokens.logp_N, tokens.logp_old_N).detach())
        assert self.config.ratio.anchor is not None
        anchor_N = tokens.logp_old_N if self.estimates_old else ANCHORS[self.config.ratio.anchor](tokens)
        ratio_N = self._functions.one("ratio")(log_ratio(tokens.logp_N, anchor_N), tokens)
        return _expect_tokens("ratio", ratio_N, tokens)

    def _gated(self, ratio_N: Tensor, tokens: TokenBatch) -> Tensor:
        """The weight that the gate leaves to each token: its gradient over −A, 0 where it was clipped.

        Ratio and log-probs are inputs of their own here, so that a ratio of the whole sequence counts once.
        """
        with torch.enable_grad():
            r_N, logp_N = ratio_N.clone().requires_grad_(), tokens.logp_N.detach().clone().requires_grad_()
            still_N = None if tokens.divergence_N is None else tokens.divergence_N.detach()
            loss_N = self._functions.one("gate")(r_N, replace(tokens, logp_N=logp_N, divergence_N=still_N))
            if not loss_N.requires_grad:  # it reads neither, so it stops nothing
                return torch.ones_like(ratio_N)
            by_r_N, by_logp_N = torch.autograd.grad(loss_N.sum(), (r_N, logp_N), allow_unused=True)
        slope_N = torch.zeros_like(ratio_N)
        if by_r_N is not None:
            slope_N = slope_N + by_r_N * ratio_N
        if by_logp_N is not None:
            slope_N = slope_N + by_logp_N
        return -slope_N / tokens.advantage_N

    def _measure(self, tokens: TokenBatch, ratio_N: Tensor, weights_N: Tensor, meter: Meter) -> None:
        """What the stages saw, and what they made of it."""
        with torch.no_grad():
            count, advantage_N, ratio_N = len(ratio_N), tokens.advantage_N, ratio_N.detach()
            gated_N = self._gated(ratio_N, tokens)
            active_N = advantage_N != 0  # without an advantage there is nothing to gate
            stopped_N = active_N & (gated_N == 0) & (ratio_N > 0)
            meter.tokens(
                tokens.observed,
                logp=tokens.logp_N,
                logp_old=tokens.logp_old_N,
                entropy=tokens.entropy_N,
                ratio=ratio_N,
                gate=gated_N,
                correction=weights_N,
            )
            entropy = tokens.entropy_N.mean()
            meter.mean("entropy", entropy, count)
            meter.mean(Signal.ENTROPY, entropy, count)
            meter.mean("ratio", ratio_N.mean(), count)
            meter.max("ratio_max", ratio_N.max())
            meter.part("ratio_gated", gated_N.where(active_N, gated_N.new_zeros(())).sum(), active_N.sum())
            meter.max("ratio_gated_max", gated_N.where(active_N, gated_N.new_full((), -torch.inf)).max())
            meter.mean("clip_high", (stopped_N & (advantage_N > 0) & (ratio_N >= 1)).float().mean(), count)
            meter.mean("clip_low", (stopped_N & (ratio_N < 1)).float().mean(), count)
            meter.mean("clip_dual", (stopped_N & (advantage_N < 0) & (ratio_N >= 1)).float().mean(), count)
            gap_N = tokens.log_mismatch_N.abs()  # 0 where the engine gave no log-prob
            mismatch_N = tokens.mismatch_N
            meter.mean("logp_missing", (~tokens.logp_mu_N.isfinite()).float().mean(), count)
            meter.mean("logp_gap", gap_N.mean(), count)
            meter.max("logp_gap_max", gap_N.max())
            meter.mean("mismatch_k3", k3(-tokens.log_mismatch_N).mean(), count)
            meter.mean("mismatch", mismatch_N.mean(), count)
            meter.max("mismatch_max", mismatch_N.max())
            meter.sample_size("ess", mismatch_N.sum(), (mismatch_N**2).sum(), count)
            meter.mean("correction", weights_N.mean(), count)
            meter.max("correction_max", weights_N.max())
            meter.sample_size("ess_corrected", weights_N.sum(), (weights_N**2).sum(), count)
            meter.mean("correction_changed", (weights_N != mismatch_N).float().mean(), count)
            if tokens.logp_teacher_N is not None:
                d_N = log_ratio(tokens.logp_old_N, tokens.logp_teacher_N)
                meter.mean("teacher_kl", d_N.mean(), count)
                meter.mean("teacher_agreement", bounded_exp(-d_N).clamp(max=1).mean(), count)
            if tokens.divergence_N is not None:
                meter.mean("teacher_divergence", tokens.divergence_N.mean(), count)
            if tokens.logp_ref_N is not None:
                d_N = log_ratio(tokens.logp_old_N, tokens.logp_ref_N)  # of the policy that the samples are from
                meter.mean("kl_k1", d_N.mean(), count)
                meter.mean("kl_k3", k3(d_N).mean(), count)
                kl = d_N.sum() / tokens.sequences
                meter.mean("kl_per_response", kl, tokens.sequences)
                meter.mean(Signal.KL, kl, tokens.sequences)


def _expect_tokens(stage: str, values: Any, tokens: TokenBatch) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != tokens.logp_N.shape:
        raise ConfigError(
            f"the {stage} function must return a torch tensor with one number for each of {len(tokens.logp_N)} tokens, "
            f"got {brief(values)}"
        )
    return values
