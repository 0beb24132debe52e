"""Could the weights that an engine claims have sampled these tokens? A random share of the rollouts is computed again.

For tokens of its own version, the log-probs that the trainer computes must equal those that the engine returned, up to
rounding. Tokens of older versions are compared as well, with a wide margin, because the weights have changed since.

What it finds: tokens of another model, invented log-probs, and weights that are older than the engine claims, as far as
the difference exceeds rounding (0.005 nats on average in fp32; 0.25 in bf16, or where the engine keeps weights or its
cache in 8 bits) or, for older tokens, the margin of 1 nat. What it does not find: weights that are a few small steps
old, and an engine that has the right weights and log-probs, but draws its tokens in another way.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from kitae.algorithms.group_stages import sample_of
from kitae.config.root import RLConfig
from kitae.engines.base import Accountable, Engine
from kitae.errors import EngineError
from kitae.trainer.base import Column, Trainer
from kitae.trainer.learner import Learner
from kitae.types import Group, Rollout, Sample, Score

_OLD_MARGIN = 1.0  # nats, on average, that log-probs may have moved since an older version
_USUAL = 0.05  # share
_MEAN = 0.5  # of what the probe allows for its worst token
_ROUNDED = 0.5  # what it allows in bfloat16: also what 8 bits in the engine, which no probe sees, may do in fp32
_STREAM = 0x5907  # of random numbers


class SpotCheck:
    """share: of the rollouts that are checked, at least one of each step. tolerance: nats, on average over a rollout,
    that rounding explains. tell: is called with a sentence for each engine that is refused, and for each rollout whose
    engine is not known. label: what the ids of requests for training begin with."""

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        tell: Callable[[str], Awaitable[None]],
        *,
        share: float,
        tolerance: float,
        seed: int,
        label: str = "train",
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._tell = tell
        self._share = share
        self._tolerance = tolerance
        self._seed = seed
        self._label = label
        self._refused: set[str] = set()  # engines

    @classmethod
    def of(
        cls,
        config: RLConfig,
        learner: Learner,
        engine: Engine,
        probe_tolerance: float,
        tell: Callable[[str], Awaitable[None]],
    ) -> "SpotCheck | None":
        """By the settings; None: no check is wanted. Servers that others run (`engine.urls`) are checked by default."""
        share = config.engine.spot_check
        if share is None:
            share = _USUAL if config.engine.urls else 0.0
        if not share:
            return None
        tolerance = _MEAN * max(probe_tolerance, _ROUNDED if config.engine.rounding else 0.0)
        return cls(learner.trainer, engine, tell, share=share, tolerance=tolerance, seed=config.run.seed)

    async def examine(self, step: int, version: int, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """The groups of a step, before they are trained on, and metrics. version: the one that the trainer is at.

        Rollouts that must not be trained on become errors; a group without any other is left out. An engine that
        returned what it cannot have sampled is refused, together with all other rollouts of the step that it answered.
        `EngineError` where the run has a single engine, which cannot be done without.
        """
        rollouts = [r for group in groups for r in group.valid]
        chosen = self._choose(step, rollouts)
        gaps = await self._gaps(version, chosen)
        wrong = {r.id: why for r, why in zip(chosen, map(self._problem, gaps), strict=True) if why}
        sentences = [await self._blame(r, wrong[r.id]) for r in chosen if r.id in wrong]
        for sentence in sentences:
            await self._tell(sentence)
        for r in rollouts:
            if r.id not in wrong and self._sources(r) & self._refused:
                wrong[r.id] = "its engine was refused"
        numbers = {
            "spot_checked": float(len(chosen)),
            "spot_gap": max((fresh for fresh, _, _ in gaps), default=0.0),
            "spot_refused": float(len(wrong)),
        }
        return _without(groups, wrong), numbers

    def _choose(self, step: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
        count = min(len(rollouts), math.ceil(self._share * len(rollouts)))
        picked = np.random.default_rng((self._seed, step, _STREAM)).choice(len(rollouts), count, replace=False)
        return [rollouts[i] for i in sorted(picked)]

    async def _gaps(self, version: int, rollouts: Sequence[Rollout]) -> list[tuple[float, float, int]]:
        """Of each: the mean difference of tokens of this version, of older ones, and the newest version it claims."""
        samples = [sample_of(r, number, chain) for r in rollouts for number, chain in enumerate(r.chains)]
        if not samples:
            return []
        found = await self._trainer.annotate(samples, [Column.OLD])
        return [_gap([s for s in found if (s.group, s.index) == (r.group, r.index)], version) for r in rollouts]

    def _problem(self, gap: tuple[float, float, int]) -> str:
        fresh, old, ahead = gap
        if ahead > 0:
            return f"it claims weights that are {ahead} versions newer than the trainer's"
        if not fresh <= self._tolerance:
            return f"its log-probs must be within {self._tolerance:g} of the trainer's on average, got {fresh:.3g}"
        if not old <= _OLD_MARGIN:
            return f"its log-probs must be within {_OLD_MARGIN:g} of weights that came later, got {old:.3g}"
        return ""

    def _sources(self, rollout: Rollout) -> frozenset[str]:
        if not isinstance(self._engine, Accountable):
            return frozenset()
        return self._engine.sources(f"{self._label}/{rollout.id}")

    async def _blame(self, rollout: Rollout, why: str) -> str:
        if not isinstance(self._engine, Accountable):
            raise EngineError(f"the engine cannot have sampled rollout {rollout.id} with the weights it says: {why}")
        sources = self._sources(rollout)
        if len(sources) != 1:
            return f"rollout {rollout.id} is refused, of {', '.join(sorted(sources)) or 'an unknown engine'}: {why}"
        (source,) = sources
        if source not in self._refused:
            self._refused.add(source)
            await self._engine.refuse(source, f"rollout {rollout.id} is not of the weights it says: {why}")
        return f"engine {source} is refused over rollout {rollout.id}: {why}"


def _gap(samples: Sequence[Sample], version: int) -> tuple[float, float, int]:
    differ_N = np.concatenate([np.abs(s.loss(Column.OLD.value) - s.loss("logp_mu")) for s in samples])
    versions_N = np.concatenate([s.loss("version") for s in samples])
    fresh_N = versions_N >= version
    newest = int(versions_N.max()) if len(versions_N) else version
    return _mean(differ_N[fresh_N]), _mean(differ_N[~fresh_N]), newest - version


def _mean(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> float:
    return float(values.mean()) if len(values) else 0.0


def _without(groups: Sequence[Group], wrong: dict[str, str]) -> list[Group]:
    """The rollouts that are wrong become errors."""

    def judged(r: Rollout) -> Rollout:
        return replace(r, score=Score.error(f"spot check: {wrong[r.id]}")) if r.id in wrong else r

    made = [replace(group, rollouts=tuple(map(judged, group.rollouts))) for group in groups]
    return [group for group in made if group.valid]
