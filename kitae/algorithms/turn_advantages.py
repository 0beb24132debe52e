"""S3 by turns: rewards of turns → one number for each turn of the model, which all of its tokens get.

A turn's reward is what the environment gave for it; what is left of the reward of the episode (S1), such as the score
of a verifier, stands at the last turn. The environment may name the state that a turn begins in; otherwise what the
model has read since its last turn is the state. Potentials are added as γ Φ(next) − Φ(this), 0 after the last turn.

How much a rollout weighs is left to S7: no advantage here grows with the number of turns, but an aggregation that
counts tokens gives more weight to long episodes.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated

import numpy as np
from pydantic import Field

from kitae.algorithms.advantages import Epsilon, GroupRewards, Lambda, SequenceRewards, gae, group_zscore, returns
from kitae.algorithms.filters import has_variance
from kitae.algorithms.requirements import Trait, has
from kitae.algorithms.reward_shaping import Wide, narrow
from kitae.types import TURN, BoolArray, Chain, FloatArray, IntArray

TurnGamma = Annotated[float, Field(gt=0, le=1, description="Discount per turn.")]
Omega = Annotated[float, Field(ge=0, description="Weight of the advantage among equal states.")]
TurnCoef = Annotated[float, Field(ge=0, description="Weight of a turn's own advantage beside that of the outcome.")]
Scaled = Annotated[bool, Field(description="Divide by the deviation, as well as centre.")]


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one rollout: `Turns(lengths=(3, 5), rewards=(0.0, 1.0), states=("a", "b"), potentials=(0.0, 0.0))`.

    lengths count loss tokens. rewards are the environment's, 0 where it gave none. Equal states have equal entries.
    """

    lengths: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    states: tuple[Hashable, ...] = ()
    potentials: tuple[float, ...] = ()

    @staticmethod
    def of(chains: Sequence[Chain], components: Mapping[str, float] = MappingProxyType({})) -> "Turns":
        """components: of a score; those that are rewards of turns (`TURN`) are added."""
        found = [(n, r + components.get(f"{TURN}{i}", 0.0), *rest) for i, (n, r, *rest) in enumerate(_turns(chains))]
        if not found:
            return Turns()
        return Turns(*(tuple(column) for column in zip(*found, strict=True)))

    def rewards_for(self, total: float) -> Wide:
        """The rewards of all turns, which add up to `total`: the last has what is left of it."""
        rewards = np.array(self.rewards, dtype=np.float64)
        if len(rewards):
            rewards[-1] += total - rewards.sum()
        return rewards


def _turns(chains: Sequence[Chain]) -> Iterator[tuple[int, float, Hashable, float]]:
    for chain in chains:
        read: Hashable = tuple(chain.prompt_tokens)
        for s in chain.segments:
            if s.source == "model" and len(s.tokens):
                yield len(s.tokens), s.reward or 0.0, s.state or read, s.potential
            elif s.source == "environment":
                read = tuple(s.tokens)


@dataclass(frozen=True, slots=True)
class GroupTurns:
    """The turns of the judged samples of one prompt, sample after sample:
    `GroupTurns(rewards_M=[0, 1, 0], potentials_M=[0, 0, 0], sample_M=[0, 0, 1], number_M=[0, 1, 0], state_M=[0, 1, 0],
    group=GroupRewards(rewards_G=[1, 0], …))`.

    number_M: which turn of its sample each is. state_M: equal numbers are equal states.
    """

    rewards_M: FloatArray
    potentials_M: FloatArray
    sample_M: IntArray
    number_M: IntArray
    state_M: IntArray
    group: GroupRewards

    @staticmethod
    def of(turns: Sequence[Turns], group: GroupRewards) -> "GroupTurns":
        states: dict[Hashable, int] = {}
        rewards = [t.rewards_for(float(r)) for t, r in zip(turns, group.rewards_G, strict=True)]
        return GroupTurns(
            rewards_M=narrow(np.concatenate([np.zeros(0), *rewards])),
            potentials_M=np.array([p for t in turns for p in t.potentials], dtype=np.float32),
            sample_M=np.repeat(np.arange(len(turns)), [len(t.lengths) for t in turns]),
            number_M=np.array([n for t in turns for n in range(len(t.lengths))], dtype=np.int64),
            state_M=np.array([states.setdefault(s, len(states)) for t in turns for s in t.states], dtype=np.int64),
            group=group,
        )

    def of_each_sample(self) -> Iterator[IntArray]:
        """The places of each sample's turns, in order."""
        for sample in range(len(self.group.rewards_G)):
            yield np.flatnonzero(self.sample_M == sample)

    def is_last_M(self) -> BoolArray:
        """Whether a turn is the last of its sample."""
        return np.append(self.sample_M[1:] != self.sample_M[:-1], [True] * bool(len(self.sample_M)))


def shaped(rewards_T: FloatArray, potentials_T: FloatArray, gamma: float) -> FloatArray:
    """r_t + γ Φ_{t+1} − Φ_t, with Φ = 0 after the last turn."""
    return (
        rewards_T + np.float32(gamma) * np.append(potentials_T[1:], np.float32(0))[: len(potentials_T)] - potentials_T
    )


# On the turns of one sample.


@has(Trait.TOKENS | Trait.TURNS)
def turn_returns(sequence: SequenceRewards, *, gamma: TurnGamma = 1.0) -> FloatArray:
    """G_k = Σ_{j ≥ k} γ^{j − k} r_j over turns: no baseline but the potential."""
    return returns(_shaped(sequence, gamma), gamma=gamma)


@has(Trait.TOKENS | Trait.TURNS | Trait.VALUES)
def turn_gae(sequence: SequenceRewards, *, gamma: TurnGamma = 1.0, gae_lambda: Lambda = 1.0) -> FloatArray:
    """A_k = δ_k + γ λ A_{k+1}, δ_k = r_k + γ V_{k+1} − V_k over turns, V_k the value before the turn's first token."""
    return gae(_shaped(sequence, gamma), gamma=gamma, gae_lambda=gae_lambda)


def _shaped(sequence: SequenceRewards, gamma: float) -> SequenceRewards:
    assert sequence.potentials_T is not None
    return replace(sequence, rewards_T=shaped(sequence.rewards_T, sequence.potentials_T, gamma))


# On the turns of a group.


@has(Trait.PEERS | Trait.TURNS)
def turn_centred(turns: GroupTurns, *, gamma: TurnGamma = 1.0) -> FloatArray:
    """G_k − mean of G_k over the group's samples that have a k-th turn; 0 for the only one."""
    return narrow(_relative(_returns(turns, gamma), turns.number_M, scaled=False, epsilon=0.0))


@has(Trait.PEERS | Trait.TURNS)
def gigpo(
    turns: GroupTurns,
    *,
    omega: Omega = 1.0,
    gamma: TurnGamma = 0.95,
    scaled: Scaled = True,
    epsilon: Epsilon = 1e-6,
) -> FloatArray:
    """A_episode + ω A_step: R in the group, and G_k among turns from an equal state; 0 for a state without a second."""
    whole_G = _relative(turns.group.rewards_G.astype(np.float64), np.zeros(len(turns.group.rewards_G)), scaled, epsilon)
    step_M = _relative(_returns(turns, gamma), turns.state_M, scaled, epsilon)
    return narrow(whole_G[turns.sample_M] + omega * step_M)


@has(Trait.PEERS | Trait.TURNS)
def mt_grpo(turns: GroupTurns, *, turn_coef: TurnCoef = 1.0, epsilon: Epsilon = 1e-6) -> FloatArray:
    """z(reward of the last turn) + turn_coef × z(r_k among the group's k-th turns); a last turn has the first alone."""
    last_M = turns.is_last_M()
    outcome_G = np.zeros(len(turns.group.rewards_G), dtype=np.float32)
    outcome_G[turns.sample_M[last_M]] = turns.rewards_M[last_M]
    found_M = group_zscore(replace(turns.group, rewards_G=outcome_G), epsilon=epsilon)[turns.sample_M]
    own_M = turns.rewards_M.copy()
    for places in turns.of_each_sample():
        own_M[places] = shaped(own_M[places], turns.potentials_M[places], 1.0)
    step_M = np.zeros(len(own_M))
    step_M[~last_M] = _relative(own_M[~last_M].astype(np.float64), turns.number_M[~last_M], True, epsilon)
    return narrow(found_M + turn_coef * step_M)


def _returns(turns: GroupTurns, gamma: float) -> Wide:
    found_M = np.zeros(len(turns.rewards_M))
    for places in turns.of_each_sample():
        own = SequenceRewards(turns.rewards_M[places], potentials_T=turns.potentials_M[places])
        found_M[places] = turn_returns(own, gamma=gamma)
    return found_M


def _relative(values: Wide, among: IntArray | Wide, scaled: bool, epsilon: float) -> Wide:
    """Values less the mean of those of the same kind, over their deviation; exactly 0 where they are equal or alone."""
    found = np.zeros_like(values)
    for kind in np.unique(among):
        own = among == kind
        if has_variance(values[own]):
            spread = values[own].std(ddof=1) + epsilon if scaled else 1.0
            found[own] = (values[own] - values[own].mean()) / spread
    return found


TURN_ADVANTAGES: Mapping[str, Callable[..., FloatArray]] = {
    "turn-returns": turn_returns,
    "turn-gae": turn_gae,
    "turn-centred": turn_centred,
    "gigpo": gigpo,
    "mt-grpo": mt_grpo,
}
