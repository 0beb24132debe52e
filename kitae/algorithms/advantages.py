"""S3, advantages: rewards → one number for each sample, or for each of its loss tokens.

Group advantages compare the judged samples of one prompt. Token advantages look at one sequence, of which only the loss
tokens are there: what an environment said is skipped, so values and returns pass over it unchanged.

Equal rewards, or fewer than two of them, give advantages of exactly 0 under a group baseline: the float mean of equal
numbers need not be that number, and what is left of it would grow to an advantage when divided by ε.

Statistics are computed in float64, in which sums and squares of what float32 holds neither overflow nor vanish.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from kitae.algorithms.filters import has_variance
from kitae.algorithms.requirements import Trait, has, refuses
from kitae.algorithms.reward_shaping import Wide, narrow
from kitae.types import FloatArray, IntArray

Whitening = Literal["none", "tokens", "samples", "scale", "successes"]
Ddof = Annotated[Literal[0, 1], Field(description="1: deviation of a sample, 0: of the whole.")]
Epsilon = Annotated[float, Field(ge=0, description="Added to the deviation, or to the mean.")]
K = Annotated[int, Field(ge=1, description="The k of pass-at-k.")]
CorrectAbove = Annotated[float, Field(description="Scores above this are correct.")]
Gamma = Annotated[float, Field(gt=0, le=1, description="Discount per token.")]
Lambda = Annotated[float, Field(ge=0, le=1, description="The λ of GAE.")]
Rewards = Annotated[
    tuple[str, ...], Field(description="The components of a score that are rewards of their own; none: all of them.")
]
RewardWeights = Annotated[tuple[float, ...], Field(description="The weight of each of `rewards`; none: 1 each.")]
Decay = Annotated[float, Field(ge=0, lt=1, description="Share of the moving mean that a reward leaves as it is.")]
RewardCoef = Annotated[float, Field(ge=0, description="Weight of the reward beside the reverse KL.")]


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """The judged samples of one prompt: `GroupRewards(rewards_G=[1, 0, 0, 0], scores_G=[1, 0, 0, 0], …)`.

    rewards are shaped (S1) and, where the KL penalty is part of the reward, less the penalty of the whole response;
    scores are raw; lengths count loss tokens. greedy: the reward of the greedy response, where a function needs it.
    components: the parts of each score by name, NaN where a response has none of that name. moving: the moving mean of
    the rewards of this role before these, where a function reads it.
    """

    rewards_G: FloatArray
    scores_G: FloatArray
    lengths_G: IntArray
    greedy: float | None = None
    components: Mapping[str, FloatArray] = field(default_factory=dict)
    moving: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceRewards:
    """The loss tokens of one sample: `SequenceRewards(rewards_T=[0, 0, 1], values_T=[.5, .6, .8])`; or its turns, for a
    function on turns, with their potentials.

    The last token of each turn has the turn's reward; a KL penalty is spread over all. greedy: the reward of the greedy
    response to the same prompt. bootstrap: the value after the last token, 0 where the episode is over. Log-probs of
    π_old are there where a function needs the reference or the teacher, beside those of what it needs.
    """

    rewards_T: FloatArray
    values_T: FloatArray | None = None
    greedy: float | None = None
    bootstrap: float = 0.0
    logp_old_T: FloatArray | None = None
    logp_ref_T: FloatArray | None = None
    logp_teacher_T: FloatArray | None = None
    potentials_T: FloatArray | None = None


def _a_weight_for_each(s: Mapping[str, Any]) -> Iterator[str]:
    if s["weights"] and len(s["weights"]) != len(s["rewards"]):
        yield f"weights must have one for each of the {len(s['rewards'])} rewards, got {len(s['weights'])}"


# On groups.


def reward(group: GroupRewards) -> FloatArray:
    """R: no baseline."""
    return group.rewards_G


@has(Trait.BLIND)
def one(group: GroupRewards) -> FloatArray:
    """1 for every sample that the filter keeps: plain likelihood of good answers."""
    return np.ones_like(group.rewards_G)


@has(Trait.PEERS)
def group_centred(group: GroupRewards) -> FloatArray:
    """R − mean of the group."""
    return narrow(_centred(group))


@has(Trait.PEERS)
def group_zscore(group: GroupRewards, *, ddof: Ddof = 1, epsilon: Epsilon = 1e-6) -> FloatArray:
    """(R − mean) / (std + ε) of the group."""
    if not has_variance(group.rewards_G):
        return np.zeros_like(group.rewards_G)
    return narrow(_centred(group) / _spread(group, ddof, epsilon))


@has(Trait.PEERS)
def group_scaled(group: GroupRewards, *, ddof: Ddof = 1, epsilon: Epsilon = 1e-6) -> FloatArray:
    """R / (std + ε): not centred."""
    if not has_variance(group.rewards_G):
        return np.zeros_like(group.rewards_G)
    return narrow(_wide(group) / _spread(group, ddof, epsilon))


@has(Trait.PEERS)
def leave_one_out(group: GroupRewards) -> FloatArray:
    """R − mean of the other samples = G / (G − 1) × (R − mean)."""
    size = len(group.rewards_G)
    return narrow(_centred(group) * (size / max(1, size - 1)))


@has(Trait.PEERS)
def length_weighted(group: GroupRewards) -> FloatArray:
    """R − Σ l R / Σ l: the baseline of least variance if the gradient's norm grows with the length l."""
    if not has_variance(group.rewards_G):
        return np.zeros_like(group.rewards_G)
    rewards_G, lengths_G = _wide(group), np.maximum(group.lengths_G, 1)
    return narrow(rewards_G - (rewards_G * lengths_G).sum() / lengths_G.sum())


@has(Trait.PEERS | Trait.POSITIVE)
def mean_scaled(group: GroupRewards, *, epsilon: Epsilon = 1e-6) -> FloatArray:
    """(R − mean) / (mean + ε) for rewards that are not negative: hard prompts count more."""
    mean = float(_wide(group).mean()) if len(group.rewards_G) else 0.0
    if mean <= 0:
        return np.zeros_like(group.rewards_G)
    return narrow(_centred(group) / (mean + epsilon))


@has(Trait.PEERS)
def best_margin(group: GroupRewards, *, ddof: Ddof = 1, epsilon: Epsilon = 1e-6) -> FloatArray:
    """(R − the second best R) / (std + ε) for the best of the group, 0 for the others: what the best one adds."""
    found = np.zeros_like(group.rewards_G)
    if has_variance(group.rewards_G):
        second, best = np.sort(_wide(group))[-2:]
        found[int(group.rewards_G.argmax())] = (best - second) / _spread(group, ddof, epsilon)
    return found


@has(Trait.PEERS | Trait.BLIND)
@refuses(_a_weight_for_each)
def each_zscore(
    group: GroupRewards,
    *,
    ddof: Ddof = 1,
    epsilon: Epsilon = 1e-6,
    rewards: Rewards = (),
    weights: RewardWeights = (),
) -> FloatArray:
    """Σ_k weight_k (R_k − mean_k) / (std_k + ε): each component of the score in the group by itself, then added."""
    found = np.zeros(len(group.rewards_G), dtype=np.float64)
    names = rewards or tuple(sorted(group.components))
    for name, weight in zip(names, weights or (1.0,) * len(names), strict=True):
        values_G = group.components.get(name, np.full_like(group.rewards_G, np.nan))
        given_G = np.isfinite(values_G)
        part = replace(group, rewards_G=values_G[given_G])
        found[given_G] += weight * group_zscore(part, ddof=ddof, epsilon=epsilon).astype(np.float64)
    return narrow(found)


@has(Trait.PEERS | Trait.BLIND)
def pass_at_k(group: GroupRewards, *, k: K = 4, correct_above: CorrectAbove = 0.5) -> FloatArray:
    """How much a sample adds to the chance that one of k is correct, over the deviation of that chance."""
    correct_G = group.scores_G > correct_above
    size, wrong = len(correct_G), int((~correct_G).sum())
    if not 0 < wrong < size or k > size:
        return np.zeros_like(group.rewards_G)
    mean = 1 - comb(wrong, k) / comb(size, k)
    deviation = (mean * (1 - mean)) ** 0.5
    if deviation == 0:  # fewer wrong ones than k: every draw of k has a correct one
        return np.zeros_like(group.rewards_G)
    with_wrong = 1 - comb(wrong - 1, k - 1) / comb(size - 1, k - 1)  # the other k − 1 save a wrong one
    return np.where(correct_G, (1 - mean) / deviation, (with_wrong - mean) / deviation).astype(np.float32)  # type: ignore[no-any-return]


@has(Trait.MOVING)
def role_mean(group: GroupRewards, *, decay: Decay = 0.95) -> FloatArray:
    """R − moving mean of the rewards of the same role, taken before R itself moves it."""
    return narrow(group.rewards_G - moving_means(group.moving, group.rewards_G, decay)[:-1])


def moving_means(mean: float, rewards_G: FloatArray, decay: float) -> Wide:
    """The mean before each reward, and after the last: b ← decay × b + (1 − decay) × R."""
    found = [mean]
    for value in rewards_G.tolist():
        found.append(decay * found[-1] + (1 - decay) * value)
    return np.array(found)


# On the tokens of one sequence.


@has(Trait.TOKENS)
def returns(sequence: SequenceRewards, *, gamma: Gamma = 1.0) -> FloatArray:
    """G_t = Σ_{u ≥ t} γ^{u − t} reward_u."""
    rewards_T = sequence.rewards_T
    return gae(SequenceRewards(rewards_T, np.zeros_like(rewards_T)), gamma=gamma, gae_lambda=1.0)


@has(Trait.TOKENS | Trait.GREEDY)
def greedy(sequence: SequenceRewards, *, gamma: Gamma = 1.0) -> FloatArray:
    """G_t − reward of the greedy response to the same prompt, of the same policy version."""
    assert sequence.greedy is not None
    return returns(sequence, gamma=gamma) - np.float32(sequence.greedy)


@has(Trait.TOKENS | Trait.VALUES)
def gae(sequence: SequenceRewards, *, gamma: Gamma = 1.0, gae_lambda: Lambda = 1.0) -> FloatArray:
    """A_t = δ_t + γ λ A_{t+1}, δ_t = reward_t + γ V_{t+1} − V_t."""
    assert sequence.values_T is not None
    found = np.zeros(len(sequence.rewards_T), dtype=np.float64)
    following, value_after = 0.0, sequence.bootstrap
    for t in reversed(range(len(found))):
        value = float(sequence.values_T[t])
        following = float(sequence.rewards_T[t]) + gamma * value_after - value + gamma * gae_lambda * following
        found[t], value_after = following, value
    return found.astype(np.float32)


@has(Trait.TOKENS | Trait.TEACHER)
def reverse_kl(sequence: SequenceRewards, *, reward_coef: RewardCoef = 0.0) -> FloatArray:
    """log π_teacher − log π_old of the token itself, plus reward_coef × what is left of the reward.

    The expected policy gradient of the first part is that of −KL(π ‖ π_teacher) at each token, given those before. What
    a token does to the divergence of later ones is left out: less variance, and each token has a signal of its own.
    """
    assert sequence.logp_old_T is not None and sequence.logp_teacher_T is not None
    found_T = narrow(sequence.logp_teacher_T.astype(np.float64) - sequence.logp_old_T)
    return found_T + np.float32(reward_coef) * returns(sequence, gamma=1.0) if reward_coef else found_T


ADVANTAGES: Mapping[str, Callable[..., FloatArray]] = {
    "reward": reward,
    "one": one,
    "group-centred": group_centred,
    "group-zscore": group_zscore,
    "group-scaled": group_scaled,
    "leave-one-out": leave_one_out,
    "length-weighted": length_weighted,
    "mean-scaled": mean_scaled,
    "best-margin": best_margin,
    "each-zscore": each_zscore,
    "pass-at-k": pass_at_k,
    "role-mean": role_mean,
    "returns": returns,
    "greedy": greedy,
    "gae": gae,
    "reverse-kl": reverse_kl,
}


def whiten(
    advantages: Sequence[FloatArray],
    kind: Whitening,
    ddof: int = 1,
    *,
    epsilon: float = 0.0,
    rewards: Sequence[float] = (),
) -> list[FloatArray]:
    """Normalise the advantages of a step, one array of tokens for each sample.

    tokens: by mean and deviation of all tokens. samples: by those of the samples, each counted once. scale: divide by
    the deviation of the samples and do not centre, so that groups without signal keep exactly 0. successes: divide by
    the share of samples whose reward is not 0, so that a step in which few succeed moves the policy as far. epsilon is
    added to a deviation.
    """
    if kind == "none" or not advantages:
        return list(advantages)
    if kind == "successes":
        factor = len(rewards) / max(1, int(np.count_nonzero(rewards)))
        return [narrow(a.astype(np.float64) * factor) for a in advantages]
    if kind == "tokens":
        each = np.concatenate(advantages).astype(np.float64)
    else:
        each = np.array([a.mean(dtype=np.float64) if len(a) else 0.0 for a in advantages])
    if not has_variance(each):
        return [np.zeros_like(a) if kind != "scale" else a for a in advantages]
    shift = 0.0 if kind == "scale" else float(each.mean())
    deviation = float(np.sqrt(each.var(ddof=ddof) + 1e-8)) + epsilon
    return [narrow((a.astype(np.float64) - shift) / deviation) for a in advantages]


def _wide(group: GroupRewards) -> Wide:
    return group.rewards_G.astype(np.float64)


def _centred(group: GroupRewards) -> Wide:
    rewards_G = _wide(group)
    return rewards_G - rewards_G.mean() if has_variance(group.rewards_G) else np.zeros_like(rewards_G)


def _spread(group: GroupRewards, ddof: int, epsilon: float) -> float:
    """std + ε; ε is added to the deviation, not to the variance."""
    return float(_wide(group).std(ddof=ddof)) + epsilon
