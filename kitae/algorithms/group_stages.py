"""The stages on groups, which the driver computes in numpy: S1 shaping → S2 filter → S3 advantage, and S7 aggregation.

What they give travels with the samples: advantages, and the weight of each token in everything that one optimizer step
trains on. S4 to S6 and S8 are in `loss`.

Clip-Cov takes the covariance of log-prob and advantage, token by token: cov_t = (log μ_t − mean) (A_t − mean), both
means over all loss tokens of the optimizer step. It is computed once for the step, of the log-probs that the engine
recorded, and travels with the samples: a mean over a micro-batch would make the gradient depend on how the step is cut.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kitae.algorithms.advantages import GroupRewards, SequenceRewards, moving_means, whiten
from kitae.algorithms.config import AlgorithmConfig
from kitae.algorithms.functions import Functions, numbers
from kitae.algorithms.requirements import Trait
from kitae.algorithms.reward_shaping import Moments, StepRewards
from kitae.algorithms.turn_advantages import GroupTurns, Turns
from kitae.data.packing import NO_RECORD
from kitae.errors import VerifierError
from kitae.kept_sets import joined_sets
from kitae.types import ROLE, BoolArray, Chain, ExpertArray, FloatArray, Group, IntArray, Rollout, Sample, spliced

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A judged rollout on its way to the trainer, with a sample for each of its chains.

    `Candidate((Sample(…),), score=1.0, reward=0.8, baseline=None, kept=True)`
    score: raw; reward: shaped; baseline: the shaped reward of the greedy response, where one was made; kept: whether it
    is trained on, or only counts in the statistics of its group. components: the parts of the score. Columns are those
    of the loss tokens of all chains. turns: those of all chains; none stands for a single one. role: of an episode with
    several roles there is a candidate for each, with the chains and the reward of that role.
    """

    samples: tuple[Sample, ...]
    score: float
    reward: float
    baseline: float | None
    kept: bool
    components: Mapping[str, float] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    role: str = ""

    @property
    def group(self) -> int:
        return self.samples[0].group

    @property
    def key(self) -> tuple[int, int, str]:
        return self.group, self.index, self.role

    @property
    def index(self) -> int:
        return self.samples[0].index

    @property
    def loss_tokens(self) -> int:
        return sum(s.loss_tokens for s in self.samples)

    def column(self, name: str) -> FloatArray:
        return np.concatenate([s.loss(name) for s in self.samples])

    def with_column(self, name: str, values_N: FloatArray) -> "Candidate":
        cuts = np.cumsum([s.loss_tokens for s in self.samples])[:-1]
        parts = zip(self.samples, np.split(values_N, cuts), strict=True)
        return replace(self, samples=tuple(s.with_columns(**{name: s.spread(part)}) for s, part in parts))


@dataclass(frozen=True, slots=True)
class RolePart:
    """What one role said in a judged rollout, and its reward: `RolePart(rollout, "white", 1.0, {0: Chain(…)})`; in most
    episodes, all of it. chains: by their numbers in the rollout."""

    rollout: Rollout
    role: str
    score: float
    chains: Mapping[int, Chain]

    @property
    def group(self) -> int:
        return self.rollout.group

    @property
    def finish(self) -> str:
        return self.rollout.finish

    @property
    def response_length(self) -> int:
        return sum(len(s.tokens) for chain in self.chains.values() for s in chain.segments if s.source == "model")


def parts_of(rollout: Rollout) -> list[RolePart]:
    """The roles of a judged rollout, in the order in which they spoke. A role without a reward has the episode's."""
    assert rollout.score is not None
    value, parts = rollout.score.value, rollout.score.components
    chains: dict[str, dict[int, Chain]] = {}
    for number, chain in enumerate(rollout.chains):
        chains.setdefault(chain.role, {})[number] = chain
    return [RolePart(rollout, role, parts.get(f"{ROLE}{role}", value), own) for role, own in chains.items()]


class GroupStages:
    """`GroupStages(config, max_tokens=64)`; `reward_moments` and `moving` are all that moves from step to step."""

    def __init__(self, config: AlgorithmConfig, max_tokens: int) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self._functions = Functions(config, max_tokens)
        self.reward_moments = Moments()
        self.moving: dict[str, float] = {}  # by role

    # What the functions ask of the rest of a run.

    @property
    def wants_greedy(self) -> bool:
        return Trait.GREEDY in self._functions.traits

    @property
    def wants_values(self) -> bool:
        return Trait.VALUES in self._functions.traits

    @property
    def wants_moving(self) -> bool:
        return Trait.MOVING in self._functions.traits

    @property
    def wants_reference(self) -> bool:
        """Where a function needs one and the settings name none, it is the frozen one."""
        return self.config.reference.name not in (None, "none") or Trait.REFERENCE in self._functions.traits

    @property
    def wants_teacher(self) -> bool:
        """Whether log-probs of a teacher are read."""
        return Trait.TEACHER in self._functions.traits

    @property
    def kl_in_reward(self) -> bool:
        return self.wants_reference and bool(self.config.kl.coef) and self.config.kl.into == "reward"

    @property
    def wants_old(self) -> bool:
        """Whether advantages read log-probs of π_old, beside those of the reference or of a teacher."""
        return self.kl_in_reward or bool((Trait.REFERENCE | Trait.TEACHER) & self._functions.of("advantage"))

    # S1 to S3.

    def drop_reason(self, group: Group) -> str | None:
        """Why a group is not trained on, or None if it is."""
        valid = self._judged(group)
        if not valid or (self.wants_greedy and not _judged(group.greedy)):
            judged = bool(group.valid) and not valid  # all that were judged were truncated, and are left out
            return "truncated" if judged else "errors"
        verdicts = [self._filter(parts) for parts in self._by_role(valid).values()]
        if any(keep_G.any() for keep_G, _ in verdicts):
            return None
        return verdicts[0][1] if verdicts else "no role to train"

    def candidates(self, groups: Sequence[Group], dropped: Sequence[Group] = ()) -> list[Candidate]:
        """S1 and S2 on the groups of a step. Rollouts whose verifier failed are left out.

        The groups that were dropped are part of the statistics that rewards are normalised by, and of nothing else.
        """
        of_roles = [parts for group in groups for parts in self._by_role(self._judged(group)).values()]
        rows = [part for parts in of_roles for part in parts]
        found = [group.greedy for group in groups if group.greedy is not None] if self.wants_greedy else []
        greedy = [part for parts in self._by_role(found).values() for part in parts]
        others = [p for group in dropped for parts in self._by_role(self._judged(group)).values() for p in parts]
        rewards_B = self._shape(rows, greedy, others)
        baselines = {(p.group, p.role): float(b) for p, b in zip(greedy, rewards_B[len(rows) :], strict=False)}
        kept_B = [keep for parts in of_roles for keep in self._filter(parts)[0]]
        return [
            self._candidate(
                part, reward=float(reward), baseline=baselines.get((part.group, part.role)), kept=bool(kept)
            )
            for part, reward, kept in zip(rows, rewards_B[: len(rows)], kept_B, strict=True)
        ]

    def _by_role(self, rollouts: Sequence[Rollout]) -> dict[str, list[RolePart]]:
        """The parts of rollouts that may be trained on, by role."""
        found: dict[str, list[RolePart]] = {}
        for rollout in rollouts:
            for part in parts_of(rollout):
                if not self.config.roles or part.role in self.config.roles:
                    found.setdefault(part.role, []).append(part)
        return found

    def _candidate(self, part: RolePart, *, reward: float, baseline: float | None, kept: bool) -> Candidate:
        samples = tuple(sample_of(part.rollout, number, chain, part.score) for number, chain in part.chains.items())
        if self.config.experts.routing == "engine":
            pairs = zip(samples, part.chains.values(), strict=True)
            samples = tuple(replace(s, experts=experts_of(chain)) for s, chain in pairs)
        trained = kept and any(s.mask_T.any() for s in samples)
        assert part.rollout.score is not None
        components, turns = (
            part.rollout.score.components,
            Turns.of(tuple(part.chains.values()), part.rollout.score.components),
        )
        return Candidate(samples, part.score, reward, baseline, trained, components, turns, part.role)

    def advantages(self, candidates: Sequence[Candidate], kl_coef: float = 0.0) -> list[Candidate]:
        """S3: those that are kept, with their advantages, and returns where there is a critic.

        Where the KL penalty is part of the reward, or values are wanted, they must carry π_old, π_ref and values.
        """
        kept = [c for c in candidates if c.kept]
        if Trait.TOKENS in self._functions.of("advantage"):
            found = {c.key: self._token_advantages(c, kl_coef) for c in kept}
        else:
            found = self._group_advantages(candidates, kl_coef)
        if self.wants_values:
            kept = [c.with_column("return", found[c.key] + self._values(c)) for c in kept]
        white = whiten(
            [found[c.key] for c in kept],
            self.config.advantage.whiten,
            epsilon=self.config.advantage.whiten_epsilon or 0.0,
            rewards=[c.reward for c in kept],
        )
        return [c.with_column("advantage", a_N) for c, a_N in zip(kept, white, strict=True)]

    def group_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Groups of a step whose advantages are 0 because one sample is no baseline."""
        compares = Trait.PEERS in self._functions.of("advantage")
        short = sum(len(self._judged(g)) < 2 for g in groups) if compares else 0
        return {"groups_too_small": float(short)}

    def _judged(self, group: Group) -> list[Rollout]:
        drops = self.config.truncation == "drop"
        return [r for r in group.valid if not (drops and r.finish == "length")]

    def _filter(self, judged: "Sequence[RolePart]") -> tuple[BoolArray, str]:
        """S2: which samples of a group are trained on, and what left none of them, where that is so."""
        scores_G = _scores(judged)
        keep_G = np.ones(len(judged), dtype=bool)
        for name, function in self._functions.several("filter").items():
            keep_G &= numbers("filter", function(scores_G), len(scores_G)) != 0
            if not keep_G.any():
                return keep_G, name
        if self.config.truncation == "mask":
            keep_G &= np.array([r.finish != "length" for r in judged], dtype=bool)
        return keep_G, "truncated"

    def _shape(
        self, rollouts: Sequence[RolePart], greedy: Sequence[RolePart], others: Sequence[RolePart]
    ) -> FloatArray:
        """S1. Greedy responses are shaped like the others, but are no part of the statistics."""
        rows = [*rollouts, *greedy, *others]
        if self.config.shaping.name is None:  # the advantage reads no rewards
            return _scores(rows)
        truncated_B = np.array([r.finish == "length" for r in rows], dtype=bool)
        scores_B = _scores(rows)
        if not isinstance(self.config.truncation, str):
            scores_B = np.where(truncated_B, np.float32(self.config.truncation), scores_B)
        step = StepRewards(
            scores_B=scores_B,
            lengths_B=np.array([r.response_length for r in rows], dtype=np.int64),
            truncated_B=truncated_B,
            groups_B=np.array([r.group for r in rows], dtype=np.int64),
            max_tokens=self.max_tokens,
        )
        rewards_B = numbers("shaping", self._functions.one("shaping")(step), len(rows))
        if self.config.shaping.norm == "none":
            return rewards_B
        sampled = np.concatenate([rewards_B[: len(rollouts)], rewards_B[len(rollouts) + len(greedy) :]])
        if self.config.shaping.norm == "batch":
            ddof, epsilon = self.config.shaping.norm_ddof or 0, self.config.shaping.norm_epsilon or 0.0
            return Moments().add(sampled).normalise(rewards_B, ddof, epsilon)
        self.reward_moments = self.reward_moments.add(sampled)
        return self.reward_moments.normalise(rewards_B)

    def _group_advantages(
        self, candidates: Sequence[Candidate], kl_coef: float
    ) -> dict[tuple[int, int, str], FloatArray]:
        groups: dict[tuple[int, str], list[Candidate]] = {}
        for c in candidates:
            groups.setdefault((c.group, c.role), []).append(c)
        found = {}
        traits = self._functions.of("advantage")
        for (_, role), members in groups.items():
            rewards = [c.reward - (float(_penalty(c, kl_coef).sum()) if self.kl_in_reward else 0.0) for c in members]
            group = GroupRewards(
                rewards_G=np.array(rewards, dtype=np.float32),
                scores_G=np.array([c.score for c in members], dtype=np.float32),
                lengths_G=np.array([c.loss_tokens for c in members], dtype=np.int64),
                greedy=members[0].baseline,
                components=_components(members),
                moving=self.moving.get(role, 0.0),
            )
            if Trait.TURNS in traits:
                turns = GroupTurns.of([_turns_of(c, _penalties(c, kl_coef, self.kl_in_reward)) for c in members], group)
                advantages_M = self._advantage(turns, len(turns.rewards_M))
                each = [advantages_M[places] for places in turns.of_each_sample()]
            else:
                each = list(self._advantage(group, len(members))[:, None])
            for c, own in zip(members, each, strict=True):
                found[c.key] = _spread(c, own)
            if Trait.MOVING in traits:
                decay = self.config.advantage.setting("decay")
                self.moving[role] = float(moving_means(group.moving, group.rewards_G, decay)[-1])
        return found

    def _advantage(self, given: GroupRewards | GroupTurns | SequenceRewards, count: int) -> FloatArray:
        return numbers("advantage", self._functions.one("advantage")(given), count)

    def _token_advantages(self, c: Candidate, kl_coef: float) -> FloatArray:
        wants, penalty_N = self._functions.of("advantage"), _penalties(c, kl_coef, self.kl_in_reward)
        if Trait.TURNS in wants:
            turns = _turns_of(c, penalty_N)
            values_T = self._values(c)[_starts(turns)] if self.wants_values else None
            rewards_T = turns.rewards_for(c.reward - float(penalty_N.sum())).astype(np.float32)
            potentials_T = np.array(turns.potentials, dtype=np.float32)
            by_turns = SequenceRewards(rewards_T, values_T, c.baseline, potentials_T=potentials_T)
            return _spread(c, self._advantage(by_turns, len(turns.lengths)))
        turns, rewards_N = _turns_of(c), np.zeros(c.loss_tokens, dtype=np.float32)
        rewards_N[np.cumsum(turns.lengths, dtype=np.int64) - 1] = turns.rewards_for(c.reward)
        sequence = SequenceRewards(
            rewards_N - penalty_N,
            c.column("value") if self.wants_values else None,
            c.baseline,
            logp_old_T=c.column("logp_old") if (Trait.REFERENCE | Trait.TEACHER) & wants else None,
            logp_ref_T=c.column("logp_ref") if Trait.REFERENCE in wants else None,
            logp_teacher_T=c.column("logp_teacher") if Trait.TEACHER in wants else None,
        )
        return self._advantage(sequence, c.loss_tokens)

    def _values(self, c: Candidate) -> FloatArray:
        """The critic's value of each token; where advantages are of turns, that before the turn's first token."""
        values_N = c.column("value")
        return (
            _spread(c, values_N[_starts(_turns_of(c))]) if Trait.TURNS in self._functions.of("advantage") else values_N
        )

    # S7, on what one optimizer step trains on.

    def weighted(self, candidates: Sequence[Candidate]) -> tuple[Sample, ...]:
        """The samples of an optimizer step. A rollout counts once, whatever number of chains it has."""
        lengths_B = np.array([c.loss_tokens for c in candidates], dtype=np.int64)
        groups_B = np.array([c.group for c in candidates], dtype=np.int64)
        aggregate = self._functions.one("aggregation")
        weights_B = numbers("aggregation", aggregate(lengths_B, groups_B), len(candidates))
        if Trait.COVARIANCE in self._functions.traits:
            ranks = covariance_ranks(
                [c.column("logp_mu") for c in candidates], [c.column("advantage") for c in candidates]
            )
            candidates = [c.with_column("cov_rank", r_N) for c, r_N in zip(candidates, ranks, strict=True)]
        return tuple(
            replace(s, weight_T=s.spread(np.float32(w)))
            for c, w in zip(candidates, weights_B, strict=True)
            for s in c.samples
            if s.loss_tokens
        )

    def state(self) -> dict[str, Any]:
        return {"reward_moments": asdict(self.reward_moments), "moving": dict(self.moving)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.reward_moments, self.moving = Moments(**state["reward_moments"]), dict(state["moving"])


def replace_samples(candidates: Iterable[Candidate], samples: Iterable[Sample]) -> list[Candidate]:
    """The candidates with samples that know more, by their keys; what is not given stays as it was."""
    by_key = {s.key: s for s in samples}
    return [replace(c, samples=tuple(by_key.get(s.key, s) for s in c.samples)) for c in candidates]


def _components(members: Sequence[Candidate]) -> dict[str, FloatArray]:
    """The components of the scores of a group, NaN where a response has none of that name."""
    names = sorted({name for c in members for name in c.components})
    return {n: np.array([c.components.get(n, np.nan) for c in members], dtype=np.float32) for n in names}


def _turns_of(c: Candidate, penalty_N: FloatArray | None = None) -> Turns:
    """The turns of a candidate, one at least where it said something; their rewards are less the penalty of theirs."""
    turns = c.turns if c.turns.lengths or not c.loss_tokens else Turns((c.loss_tokens,), (0.0,), (0,), (0.0,))
    if penalty_N is None or not penalty_N.any():
        return turns
    lost = np.add.reduceat(penalty_N, _starts(turns)).tolist()
    return replace(turns, rewards=tuple(r - x for r, x in zip(turns.rewards, lost, strict=True)))


def _starts(turns: Turns) -> IntArray:
    """The place of each turn's first token among the loss tokens."""
    return np.cumsum((0, *turns.lengths), dtype=np.int64)[: len(turns.lengths)]


def _spread(c: Candidate, each: FloatArray) -> FloatArray:
    """One number for all loss tokens, or one for each turn, as one for each loss token."""
    lengths = (c.loss_tokens,) if len(each) == 1 else c.turns.lengths
    return np.repeat(each, lengths).astype(np.float32) if len(each) else np.zeros(0, dtype=np.float32)


def _penalties(c: Candidate, kl_coef: float, in_reward: bool) -> FloatArray:
    return _penalty(c, kl_coef) if in_reward else np.zeros(c.loss_tokens, dtype=np.float32)


def _penalty(c: Candidate, kl_coef: float) -> FloatArray:
    """β k1 of each loss token, with π_old: it is part of the reward, not differentiated."""
    old_N, ref_N = c.column("logp_old"), c.column("logp_ref")
    with np.errstate(invalid="ignore"):  # of two infinities
        d_N = np.where((old_N == ref_N) & np.isinf(old_N), np.float32(0), old_N - ref_N)
    return np.float32(kl_coef) * d_N


def _judged(rollout: Rollout | None) -> bool:
    return rollout is not None and rollout.score is not None and rollout.score.valid


def _scores(parts: Sequence[RolePart]) -> FloatArray:
    scores = [part.score for part in parts]
    if too_large := [x for x in scores if abs(x) > _LARGEST]:
        raise VerifierError(f"a score must be a number within ± {_LARGEST:.2g}, got {too_large[0]:g}")
    return np.array(scores, dtype=np.float32)


def sample_of(rollout: Rollout, number: int, chain: Chain, score: float | None = None) -> Sample:
    """One chain of a judged rollout, with what the engine said of its tokens. score: of its role, if it has its own."""
    assert rollout.score is not None
    score = rollout.score.value if score is None else score
    prompt = np.array(chain.prompt_tokens, dtype=np.int64)
    blank, own = np.zeros(len(prompt)), chain.segments
    mask_T = np.concatenate([blank, *(np.full(len(s.tokens), s.source == "model") for s in own)]) > 0
    versions_T = spliced([blank, *(s.versions for s in own)], np.float32)
    return Sample(
        group=rollout.group,
        index=rollout.index,
        chain=number,
        tokens_T=spliced([prompt, *(s.tokens for s in own)], np.int64),
        prompt_length=len(prompt),
        mask_T=mask_T,
        weight_T=np.zeros(len(mask_T), dtype=np.float32),
        columns={
            "logp_mu": spliced(
                [blank, *(s.logprobs if s.source == "model" else (0.0,) * len(s.tokens) for s in own)], np.float32
            ),
            "version": np.where(mask_T, versions_T, np.float32(0)),
            "score": np.where(mask_T, np.float32(score), np.float32(0)),
        },
        kept=joined_sets([(None, len(prompt)), *((s.kept, len(s.tokens)) for s in own)]),
    )


def experts_of(chain: Chain) -> ExpertArray | None:
    """Those that the engine told of all positions but the last; of one that was told twice, those of the pass that its
    next token was drawn from. None: it told nothing."""
    known = list(chain.routed)
    if not known:
        return None
    if len(known[0][1]) == chain.length - 1:
        return known[0][1]
    experts_TLK = np.full((chain.length - 1, *known[0][1].shape[1:]), NO_RECORD, dtype=np.int16)
    for start, own in reversed(known):
        experts_TLK[start : start + len(own)] = own
    return experts_TLK


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
