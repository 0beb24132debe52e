"""An algorithm as the eight stages it is made of. The trainer calls `loss` and never learns the algorithm's name.

S1 shaping → S2 filter → S3 advantage          on whole groups, before training
S7 aggregation                                 on everything one optimizer step trains on
S4 ratio → S5 gate → S6 correction → S8        on the tokens of a micro-batch

What moves from step to step (coefficients under control, running statistics of rewards) is `state`, saved with every
checkpoint. Torch is imported only where tokens are: the stages on groups need none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kitae.algorithms.advantages import TOKEN_ADVANTAGES, GroupRewards, SequenceRewards, whiten
from kitae.algorithms.config import AlgorithmConfig, needs_group, refuse_unread
from kitae.algorithms.covariance import covariance_ranks
from kitae.algorithms.gates import COVARIANCE_GATES
from kitae.algorithms.ratios import ANCHORS, interpolated
from kitae.algorithms.regularisers import adapt_entropy, adapt_kl, k3
from kitae.algorithms.rewards import Moments, StepRewards
from kitae.algorithms.stages import Function, resolve_stages
from kitae.algorithms.tokens import TokenBatch, bounded_exp, log_ratio
from kitae.errors import ConfigError, VerifierError
from kitae.observe.meter import Meter
from kitae.plugins import is_plugin
from kitae.types import Batch, BoolArray, FloatArray, Group, Rollout, Sample

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_LARGEST = float(np.finfo(np.float32).max)


class Objective:
    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        self.config = config
        self.max_tokens = max_tokens
        settings = config.model_dump()
        if config.constant_length == "max_tokens":
            settings["constant_length"] = max_tokens
        self._stages = resolve_stages(settings)
        refuse_unread(config, self._stages)
        self.kl_coef = _set(config.kl_coef)
        self.entropy_coef = _set(config.entropy_coef)
        self.reward_moments = Moments()

    # What an algorithm asks of the rest.

    @property
    def wants_greedy(self) -> bool:
        return self.config.advantage == "greedy"

    @property
    def wants_values(self) -> bool:
        return self.config.advantage == "gae"

    @property
    def wants_reference(self) -> bool:
        return self.config.reference not in (None, "none")

    @property
    def kl_in_reward(self) -> bool:
        return self.wants_reference and bool(self.config.kl_coef) and self.config.kl_in == "reward"

    @property
    def estimates_old(self) -> bool:
        return self.config.anchor == "interpolated"

    @property
    def wants_entropy_gradient(self) -> bool:
        return bool(self.config.entropy_coef or self.config.entropy_target)

    @property
    def wants_covariance(self) -> bool:
        return self.config.gate in COVARIANCE_GATES or is_plugin(_set(self.config.gate))

    # S1 to S3, on groups.

    def drop_reason(self, group: Group) -> str | None:
        """Why a group is not trained on, or None if it is."""
        valid = self._judged(group)
        if not valid or (self.wants_greedy and not _judged(group.greedy)):
            return "errors" if not group.valid or valid else "truncated"
        keep_G, reason = self._filter(valid)
        return None if keep_G.any() else reason

    def samples(self, groups: Sequence[Group], dropped: Sequence[Group] = ()) -> list[Sample]:
        """S1 and S2 on the groups of a step: samples without advantages. Those whose verifier failed are left out.

        The groups that were dropped are part of the statistics that rewards are normalised by, and of nothing else.
        """
        rows = [(group, r) for group in groups for r in self._judged(group)]
        greedy = [(group, group.greedy) for group in groups if group.greedy is not None] if self.wants_greedy else []
        others = [r for group in dropped for r in self._judged(group)]
        rewards_B = self._shape([r for _, r in rows], [r for _, r in greedy], others)
        baselines = {group.id: float(b) for (group, _), b in zip(greedy, rewards_B[len(rows) :], strict=False)}
        kept_B = [keep for group in groups for keep in self._filter(self._judged(group))[0]]
        return [
            _to_sample(rollout, reward=float(reward), baseline=baselines.get(group.id), kept=bool(kept))
            for (group, rollout), reward, kept in zip(rows, rewards_B[: len(rows)], kept_B, strict=True)
        ]

    def advantages(self, samples: Sequence[Sample]) -> list[Sample]:
        """S3: the samples that are kept, with their advantages, and returns where there is a critic.

        Where the KL penalty is part of the reward, or values are wanted, samples must carry π_old, π_ref and values.
        """
        kept = [s for s in samples if s.kept]
        if _set(self.config.advantage) in TOKEN_ADVANTAGES:
            found = {_key(s): self._token_advantages(s) for s in kept}
        else:
            found = self._group_advantages(samples)
        if self.wants_values:
            kept = [replace(s, return_T=_spread(s, found[_key(s)] + _loss(s, s.value_T))) for s in kept]
        white = whiten([found[_key(s)] for s in kept], _set(self.config.whiten), self.config.advantage_ddof or 0)
        return [replace(s, advantage_T=_spread(s, a_N)) for s, a_N in zip(kept, white, strict=True)]

    def group_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Groups of a step whose advantages are 0 because one sample is no baseline."""
        short = sum(len(self._judged(g)) < 2 for g in groups) if needs_group(self.config) else 0
        return {"groups_too_small": float(short)}

    def _judged(self, group: Group) -> list[Rollout]:
        drops = self.config.truncation == "drop"
        return [r for r in group.valid if not (drops and r.finish == "length")]

    def _filter(self, judged: Sequence[Rollout]) -> tuple[BoolArray, str]:
        """S2: which samples of a group are trained on, and what left none of them, where that is so."""
        scores_G = _scores(judged)
        keep_G = np.ones(len(judged), dtype=bool)
        for name, function in self._stages["filter"].items():
            keep_G &= _expect("filter", function(scores_G), len(scores_G)) != 0
            if not keep_G.any():
                return keep_G, name
        if self.config.truncation == "mask":
            keep_G &= np.array([r.finish != "length" for r in judged], dtype=bool)
        return keep_G, "truncated"

    def _shape(self, rollouts: Sequence[Rollout], greedy: Sequence[Rollout], others: Sequence[Rollout]) -> FloatArray:
        """S1. Greedy responses are shaped like the others, but are no part of the statistics."""
        rows = [*rollouts, *greedy, *others]
        if self.config.shaping is None:  # the advantage reads no rewards
            return _scores(rows)
        truncated_B = np.array([r.finish == "length" for r in rows], dtype=bool)
        scores_B = _scores(rows)
        if self.config.truncation == "reward":
            scores_B = np.where(truncated_B, np.float32(_set(self.config.truncation_reward)), scores_B)
        step = StepRewards(
            scores_B=scores_B,
            lengths_B=np.array([r.response_length for r in rows], dtype=np.int64),
            truncated_B=truncated_B,
            groups_B=np.array([r.group for r in rows], dtype=np.int64),
            max_tokens=self.max_tokens,
        )
        rewards_B = _expect("shaping", self._one("shaping")(step), len(rows))
        if self.config.reward_norm == "none":
            return rewards_B
        sampled = np.concatenate([rewards_B[: len(rollouts)], rewards_B[len(rollouts) + len(greedy) :]])
        if self.config.reward_norm == "batch":
            return Moments().add(sampled).normalise(rewards_B)
        self.reward_moments = self.reward_moments.add(sampled)
        return self.reward_moments.normalise(rewards_B)

    def _group_advantages(self, samples: Sequence[Sample]) -> dict[tuple[int, int], FloatArray]:
        groups: dict[int, list[Sample]] = {}
        for s in samples:
            groups.setdefault(s.group, []).append(s)
        found = {}
        for members in groups.values():
            rewards = [s.reward - (float(self._penalty(s).sum()) if self.kl_in_reward else 0.0) for s in members]
            group = GroupRewards(
                rewards_G=np.array(rewards, dtype=np.float32),
                scores_G=np.array([s.score for s in members], dtype=np.float32),
                lengths_G=np.array([s.loss_tokens for s in members], dtype=np.int64),
            )
            advantages_G = _expect("advantage", self._one("advantage")(group), len(members))
            for s, a in zip(members, advantages_G, strict=True):
                found[_key(s)] = np.full(s.loss_tokens, a, dtype=np.float32)
        return found

    def _token_advantages(self, s: Sample) -> FloatArray:
        rewards_N = np.zeros(s.loss_tokens, dtype=np.float32)
        if len(rewards_N):
            rewards_N[-1] = s.reward
        if self.kl_in_reward:
            rewards_N = rewards_N - self._penalty(s)
        values_N = _loss(s, s.value_T) if self.wants_values else None
        sequence = SequenceRewards(rewards_N, values_N, s.baseline)
        return np.asarray(self._one("advantage")(sequence), dtype=np.float32)

    def _penalty(self, s: Sample) -> FloatArray:
        """β k1 of each loss token, with π_old: it is part of the reward, not differentiated."""
        import torch  # here, so that what only looks at settings needs no torch

        old_N, ref_N = (torch.from_numpy(_loss(s, logp_T)) for logp_T in (s.logp_old_T, s.logp_ref_T))
        d_N: FloatArray = log_ratio(old_N, ref_N).numpy()
        return np.float32(self.kl_coef) * d_N

    # S7, on what one optimizer step trains on.

    def batch(self, samples: Sequence[Sample]) -> Batch:
        lengths_B = np.array([s.loss_tokens for s in samples], dtype=np.int64)
        groups_B = np.array([s.group for s in samples], dtype=np.int64)
        weights_B = _expect("aggregation", self._one("aggregation")(lengths_B, groups_B), len(samples))
        if self.wants_covariance:
            ranks = covariance_ranks(
                [_loss(s, s.logp_mu_T) for s in samples], [_loss(s, s.advantage_T) for s in samples]
            )
            samples = [replace(s, cov_rank_T=_spread(s, r_N)) for s, r_N in zip(samples, ranks, strict=True)]
        return Batch(
            tuple(replace(s, weight_T=_spread(s, np.float32(w))) for s, w in zip(samples, weights_B, strict=True))
        )

    # S4 to S6 and S8, on tokens.

    def loss(self, tokens: TokenBatch, meter: Meter) -> "Tensor":
        """The weighted sum over the tokens of a micro-batch; adding these over micro-batches gives the step's loss."""
        measured = tokens  # the gap to the engine is that of the trainer's own log-probs
        if self.estimates_old:
            tokens = replace(tokens, logp_old_N=interpolated(tokens))
        ratio_N = self._ratio(tokens)
        policy_N = _expect_tokens("gate", self._one("gate")(ratio_N, tokens), tokens)
        if tokens.logp_N.requires_grad and not policy_N.requires_grad:
            raise ConfigError("the result of ratio and gate must depend on tokens.logp_N with a gradient, it does not")
        parts = [_expect_tokens("correction", f(tokens), tokens) for f in self._stages["correction"].values()]
        weights_N = reduce(mul, parts).detach()
        loss = (policy_N * weights_N * tokens.weight_N).sum()
        if self.kl_coef and self.config.kl_in == "loss":
            penalty_N = _expect_tokens("kl", self._one("kl")(tokens), tokens)
            loss = loss + self.kl_coef * (penalty_N * tokens.weight_N).sum()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * (tokens.entropy_N * tokens.weight_N).sum()
        if self.config.sft_coef:
            loss = loss + self.config.sft_coef * (self._likelihood(tokens, meter) * tokens.weight_N).sum()
        self._measure(measured, ratio_N, weights_N, meter)
        meter.total("loss", loss.detach())
        return loss

    def _likelihood(self, tokens: TokenBatch, meter: Meter) -> "Tensor":
        """−log π_θ of the tokens of correct responses, 0 elsewhere."""
        assert tokens.score_N is not None
        correct_N = tokens.score_N > _set(self.config.correct_above)
        found_N = -tokens.logp_N.masked_fill(~correct_N, 0.0)
        meter.part("sft_loss", found_N.detach().sum(), correct_N.sum())
        return found_N

    def _ratio(self, tokens: TokenBatch) -> "Tensor":
        if self.config.ratio is None:  # the gate reads none; this one is for the metrics
            return bounded_exp(log_ratio(tokens.logp_N, tokens.logp_old_N).detach())
        anchor_N = tokens.logp_old_N if self.estimates_old else ANCHORS[_set(self.config.anchor)](tokens)
        return _expect_tokens("ratio", self._one("ratio")(log_ratio(tokens.logp_N, anchor_N), tokens), tokens)

    def _gated(self, ratio_N: "Tensor", tokens: TokenBatch) -> "Tensor":
        """The weight that the gate leaves to each token: its gradient over −A, 0 where it was clipped.

        Ratio and log-probs are inputs of their own here, so that a ratio of the whole sequence counts once.
        """
        import torch

        with torch.enable_grad():
            r_N, logp_N = ratio_N.clone().requires_grad_(), tokens.logp_N.detach().clone().requires_grad_()
            loss_N = self._one("gate")(r_N, replace(tokens, logp_N=logp_N))
            by_r_N, by_logp_N = torch.autograd.grad(loss_N.sum(), (r_N, logp_N), allow_unused=True)
        slope_N = torch.zeros_like(ratio_N)
        if by_r_N is not None:
            slope_N = slope_N + by_r_N * ratio_N
        if by_logp_N is not None:
            slope_N = slope_N + by_logp_N
        return -slope_N / tokens.advantage_N

    def _measure(self, tokens: TokenBatch, ratio_N: "Tensor", weights_N: "Tensor", meter: Meter) -> None:
        """What the stages saw, and what they made of it."""
        import torch

        with torch.no_grad():
            count, advantage_N, ratio_N = len(ratio_N), tokens.advantage_N, ratio_N.detach()
            gated_N = self._gated(ratio_N, tokens)
            active_N = advantage_N != 0  # without an advantage there is nothing to gate
            stopped_N = active_N & (gated_N == 0) & (ratio_N > 0)
            meter.mean("entropy", tokens.entropy_N.mean(), count)
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
            meter.mean("mismatch_k3", (mismatch_N - 1 - mismatch_N.log()).mean(), count)
            meter.mean("mismatch", mismatch_N.mean(), count)
            meter.max("mismatch_max", mismatch_N.max())
            meter.sample_size("ess", mismatch_N.sum(), (mismatch_N**2).sum(), count)
            meter.mean("correction", weights_N.mean(), count)
            meter.max("correction_max", weights_N.max())
            meter.sample_size("ess_corrected", weights_N.sum(), (weights_N**2).sum(), count)
            meter.mean("correction_changed", (weights_N != mismatch_N).float().mean(), count)
            if tokens.logp_ref_N is not None:
                d_N = log_ratio(tokens.logp_old_N, tokens.logp_ref_N)  # of the policy that the samples are from
                meter.mean("kl_k1", d_N.mean(), count)
                meter.mean("kl_k3", k3(d_N).mean(), count)
                meter.mean("kl_per_response", d_N.sum() / tokens.sequences, tokens.sequences)

    # From step to step.

    def finish_step(self, metrics: Mapping[str, float], sequences: int) -> dict[str, float]:
        """Move the coefficients that are under control; returns those in use in the step that ends."""
        used: dict[str, float] = {}
        if self.kl_coef:
            used["kl_coef"] = self.kl_coef
            if (target := self.config.kl_target) and "kl_per_response" in metrics:
                horizon = _set(self.config.kl_horizon)
                self.kl_coef = adapt_kl(self.kl_coef, metrics["kl_per_response"], target, sequences, horizon)
        if self.wants_entropy_gradient:
            used["entropy_coef"] = self.entropy_coef
            if (target := self.config.entropy_target) and "entropy" in metrics:
                rate = _set(self.config.entropy_rate)
                self.entropy_coef = adapt_entropy(self.entropy_coef, metrics["entropy"], target, rate)
        return used

    def state(self) -> dict[str, Any]:
        return {
            "kl_coef": self.kl_coef,
            "entropy_coef": self.entropy_coef,
            "reward_moments": asdict(self.reward_moments),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = float(state["kl_coef"])
        self.entropy_coef = float(state["entropy_coef"])
        self.reward_moments = Moments(**state["reward_moments"])

    def _one(self, key: str) -> Function:
        (function,) = self._stages[key].values()
        return function


def _expect(stage: str, values: Any, count: int) -> FloatArray:
    """What a group stage returned, as an array of the right length: a user's own function may return anything."""
    try:
        with np.errstate(over="ignore"):  # what is not finite then is refused below
            found: FloatArray = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with a gradient
        found = np.empty(0, dtype=np.float32)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise ConfigError(f"the {stage} function must return {count} finite numbers, got {_brief(values)}")
    return found


def _expect_tokens(stage: str, values: Any, tokens: TokenBatch) -> "Tensor":
    from torch import Tensor

    if not isinstance(values, Tensor) or values.shape != tokens.logp_N.shape:
        raise ConfigError(
            f"the {stage} function must return a torch tensor with one number for each of {len(tokens.logp_N)} tokens, "
            f"got {_brief(values)}"
        )
    return values


def _brief(values: Any) -> str:
    """What a function returned: shape and type of arrays, numbers only if they are few."""
    shape = getattr(values, "shape", None)
    text = repr(values)
    if len(text) < 200 and not shape:
        return text
    bad = ""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        bad = f", {int((~np.isfinite(values)).sum())} of them not finite"
    return f"{type(values).__module__.partition('.')[0]} {type(values).__name__} of shape {tuple(shape or ())}{bad}"


def _set(value: T | None) -> T:
    """A field that the chosen stages read is never None in a resolved `AlgorithmConfig`."""
    assert value is not None
    return value


def _judged(rollout: Rollout | None) -> bool:
    return rollout is not None and rollout.score is not None and rollout.score.valid


def _value(rollout: Rollout) -> float:
    assert rollout.score is not None
    return rollout.score.value


def _scores(rollouts: Sequence[Rollout]) -> FloatArray:
    scores = [_value(r) for r in rollouts]
    if too_large := [x for x in scores if abs(x) > _LARGEST]:
        raise VerifierError(f"a score must be a number within ± {_LARGEST:.2g}, got {too_large[0]:g}")
    return np.array(scores, dtype=np.float32)


def _key(s: Sample) -> tuple[int, int]:
    return s.group, s.index


def _loss(s: Sample, values_T: FloatArray | None) -> FloatArray:
    """The values of the loss tokens."""
    assert values_T is not None
    return values_T[s.mask_T]


def _spread(s: Sample, values: FloatArray | np.float32) -> FloatArray:
    """Values of the loss tokens, laid out over all tokens; 0 elsewhere."""
    laid_out = np.zeros(s.length, dtype=np.float32)
    laid_out[s.mask_T] = values
    return laid_out


def _to_sample(rollout: Rollout, *, reward: float, baseline: float | None, kept: bool) -> Sample:
    (chain,) = rollout.chains
    prompt = len(chain.prompt_tokens)
    blank = np.zeros(prompt)
    mask_T = np.concatenate([blank, *(np.full(len(s.tokens), s.source == "model") for s in chain.segments)]) > 0
    logp_mu_T: FloatArray = np.concatenate([blank, *(s.logprobs for s in chain.segments)]).astype(np.float32)
    return Sample(
        group=rollout.group,
        index=rollout.index,
        tokens_T=np.array(chain.tokens, dtype=np.int64),
        prompt_length=prompt,
        mask_T=mask_T,
        logp_mu_T=np.where(mask_T, logp_mu_T, np.float32(0)),
        versions_T=np.concatenate([blank - 1, *(s.versions for s in chain.segments)]).astype(np.int64),
        score=_value(rollout),
        reward=reward,
        advantage_T=np.zeros(len(mask_T), dtype=np.float32),
        weight_T=np.zeros(len(mask_T), dtype=np.float32),
        baseline=baseline,
        kept=kept and bool(mask_T.any()),
    )
