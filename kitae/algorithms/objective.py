"""An algorithm as the eight stages it is made of. The trainer calls `loss` and never learns the algorithm's name.

S1 rewards → S2 filter → S3 advantage        on whole groups, before training
S7 aggregation                               on everything one optimizer step trains on
S4 ratio → S5 gate → S6 correction → S8      on the tokens of a micro-batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kitae.algorithms import aggregation, corrections, losses, rewards
from kitae.algorithms.advantages import ADVANTAGES
from kitae.algorithms.filters import FILTERS
from kitae.algorithms.ratios import RATIOS
from kitae.config import AlgorithmConfig
from kitae.observe.meter import Meter
from kitae.types import Batch, FloatArray, Group, Rollout, Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The loss tokens of a micro-batch. Only `logp_N`, and `entropy_N` if it is rewarded, carry gradients."""

    logp_N: Tensor
    entropy_N: Tensor
    logp_old_N: Tensor
    logp_mu_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor


class Objective:
    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.constant_length = config.constant_length or max_tokens

    # S1 to S3, on groups.

    def drop_reason(self, group: Group) -> str | None:
        """Why a group is not trained on, or None if it is."""
        if len(group.valid) < 2:
            return "errors"
        return None if FILTERS[_set(self.config.filter)](group.rewards_G) else str(self.config.filter)

    def samples(self, group: Group) -> list[Sample]:
        """Training samples of one group with their advantages. Rollouts whose verifier failed are left out."""
        valid = group.valid
        shaped = np.array(
            [_value(r) + rewards.overlong_penalty(r.response_length, self.max_tokens, _set(self.config.overlong_buffer))
             for r in valid],
            dtype=np.float32,
        )  # fmt: skip
        advantages_G = ADVANTAGES[_set(self.config.advantage)](shaped)
        return [_to_sample(r, float(a)) for r, a in zip(valid, advantages_G, strict=True)]

    # S7, on what one optimizer step trains on.

    def batch(self, samples: Sequence[Sample]) -> Batch:
        weights = aggregation.token_weights(samples, _set(self.config.aggregation), self.constant_length)
        return Batch(
            tuple(
                replace(s, weight_T=np.where(s.mask_T, np.float32(w), np.float32(0)))
                for s, w in zip(samples, weights, strict=True)
            )
        )

    # S4 to S6 and S8, on tokens.

    def loss(self, tokens: TokenBatch, meter: Meter) -> Tensor:
        """The weighted sum over the tokens of a micro-batch; adding these over micro-batches gives the step's loss."""
        c = self.config
        low, high, dual = _set(c.clip_low), _set(c.clip_high), _set(c.dual_clip)
        ratio_N = RATIOS[_set(c.ratio)](tokens.logp_N, tokens.logp_old_N)
        if c.gate == "clip":
            loss_N = losses.clip_loss(ratio_N, tokens.advantage_N, low, high, dual)
        else:
            loss_N = losses.ungated_loss(ratio_N, tokens.advantage_N)
        mismatch_N = corrections.mismatch_ratio(tokens.logp_old_N, tokens.logp_mu_N)
        if c.correction == "tis":
            loss_N = loss_N * corrections.truncated(mismatch_N, _set(c.correction_cap))
        loss = (loss_N * tokens.weight_N).sum()
        if c.entropy_coef:
            loss = loss - c.entropy_coef * (tokens.entropy_N * tokens.weight_N).sum()
        with torch.no_grad():
            self._measure(tokens, ratio_N.detach(), mismatch_N, meter)
            meter.total("loss", loss.item())
        return loss

    def _measure(self, tokens: TokenBatch, ratio_N: Tensor, mismatch_N: Tensor, meter: Meter) -> None:
        c = self.config
        count = len(ratio_N)
        meter.mean("entropy", tokens.entropy_N.mean().item(), count)
        meter.mean("ratio", ratio_N.mean().item(), count)
        if c.gate == "clip":
            shares = losses.clip_shares(
                ratio_N, tokens.advantage_N, _set(c.clip_low), _set(c.clip_high), _set(c.dual_clip)
            )
            for name, clipped in shares.items():
                meter.mean(name, clipped.float().mean().item(), count)
        gap_N = (tokens.logp_old_N - tokens.logp_mu_N).abs()
        gap_N = torch.where(gap_N.isfinite(), gap_N, torch.zeros_like(gap_N))  # no log-prob, no gap
        meter.mean("logp_gap", gap_N.mean().item(), count)
        meter.max("logp_gap_max", gap_N.max().item())
        log_w = mismatch_N.log()
        meter.mean("mismatch_k3", (mismatch_N - 1 - log_w).mean().item(), count)
        meter.mean("ess", corrections.effective_sample_size(mismatch_N).item(), count)
        if c.correction == "tis":
            meter.mean("correction_capped", (mismatch_N > _set(c.correction_cap)).float().mean().item(), count)


def _set(value: T | None) -> T:
    """A field of a resolved `AlgorithmConfig` is never None: the preset has filled it."""
    assert value is not None
    return value


def _value(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score.value


def _to_sample(rollout: Rollout, advantage: float) -> Sample:
    prompt = len(rollout.prompt_tokens)
    response = [t for s in rollout.segments for t in s.tokens]
    blank = np.zeros(prompt)
    mask_T = np.concatenate([blank, *(np.full(len(s.tokens), s.source == "model") for s in rollout.segments)]) > 0
    logp_mu_T: FloatArray = np.concatenate([blank, *(s.logprobs for s in rollout.segments)]).astype(np.float32)
    return Sample(
        group=rollout.group,
        index=rollout.index,
        tokens_T=np.array([*rollout.prompt_tokens, *response], dtype=np.int64),
        prompt_length=prompt,
        mask_T=mask_T,
        logp_mu_T=np.where(mask_T, logp_mu_T, np.float32(0)),
        versions_T=np.concatenate([blank - 1, *(s.versions for s in rollout.segments)]).astype(np.int64),
        reward=_value(rollout),
        advantage_T=np.where(mask_T, np.float32(advantage), np.float32(0)),
        weight_T=np.zeros(len(mask_T), dtype=np.float32),
    )
